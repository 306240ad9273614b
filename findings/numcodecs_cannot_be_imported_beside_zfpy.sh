#!/bin/bash
# Expected: `numcodecs[zfpy]` installs zfpy 1.0.0 or later, and numcodecs then has the codec ZFPY besides its others. Should the two not fit,
#   numcodecs warns and leaves the codec out, as it does for old versions of zfpy.
# Happens: `import numcodecs` raises a ValueError, "invalid literal for int() with base 10: 'post0'": it takes zfpy's version for numbers, and the
#   latest one is 1.0.1.post0. So does `import zarr`, which needs numcodecs. It is enough that some other package has installed zfpy.
# Versions: numcodecs 0.16.6, zfpy 1.0.1.post0, zarr 3.1.6, numpy 2.4.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install numcodecs==0.16.6 zarr==3.1.6 numpy==2.4.6
cd "$folder"
imported() {
  venv/bin/python -c "import $1" 2>&1 | tail -1
}
without="$(imported numcodecs)$(imported zarr)"
venv/bin/pip --quiet install "numcodecs[zfpy]==0.16.6" zfpy==1.0.1.post0
of_numcodecs=$(imported numcodecs)
of_zarr=$(imported zarr)
echo "without zfpy: ${without:-both can be imported}"
echo "with zfpy, import numcodecs: $of_numcodecs"
echo "with zfpy, import zarr: $of_zarr"
error="ValueError: invalid literal for int() with base 10: 'post0'"
if [[ -z $without && $of_numcodecs == "$error" && $of_zarr == "$error" ]]; then
  echo "as described"
else
  echo "no longer as described"
  exit 1
fi
