#!/bin/bash
# Expected: what was stored under the key ("llama", "llama") is found under any equal tuple of two strings. diskcache's documentation says
#   that other keys than strings and numbers are compared by their pickled bytes; equal tuples of equal strings have equal bytes.
# Happens: pickle writes a string that occurs twice in a tuple only once if it is one object, and twice if it is two equal ones. So the key
#   is missed if one of the strings came from elsewhere, here from a JSON text, and storing makes a second entry. Known:
#   grantjenks/python-diskcache issue 272, open.
# Versions: diskcache 5.6.3, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install diskcache==5.6.3
cd "$folder"
venv/bin/python - <<'PYTHON'
import json
import sys

import diskcache

print("diskcache", diskcache.__version__)
cache = diskcache.Cache("cache")
model = "llama"
written = model, model  # the target model and the draft model
read = model, json.loads('["llama"]')[0]
cache[written] = "blocks"
found = cache.get(written), cache.get(read)
cache[read] = "blocks"
print("keys are equal:", written == read, "found:", *found, "entries after both were stored:", len(cache))
is_so = written == read and found == ("blocks", None) and len(cache) == 2
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
