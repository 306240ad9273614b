#!/bin/bash
# Expected: `select(r)` of a BitSet or a BitVector is the position of its r-th bit that is set, the inverse of `rank`, so that a pool that keeps
#   its free blocks as bits finds one. The bits are kept in words of 32.
# Happens: each word without a bit before the answer is left out of the position, so that it is 32 too low: with bits 40, 41 and 70 set
#   `select` says 8, 9 and 38, which are not set. It is right if each word before has a bit, as in a set with bits 1, 40 and 70.
#   The methods come from issue 59, which has nothing of it.
# Versions: mnemonist 0.40.8. Needs npm.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --no-audit --no-fund --ignore-scripts mnemonist@0.40.8
cat > select.cjs <<'JAVASCRIPT'
const { BitSet, BitVector } = require("mnemonist");
console.log("mnemonist", require("./node_modules/mnemonist/package.json").version);
const seen = [];
for (const kind of [BitSet, BitVector]) {
  for (const bits of [[40, 41, 70], [1, 40, 70]]) {
    const set = new kind(100);
    for (const bit of bits) set.set(bit);
    const selected = bits.map((_, index) => set.select(index + 1));
    console.log(`${kind.name} with ${bits}: bits 1 to 3 are at ${selected}, set there: ${selected.map((bit) => set.test(bit))}`);
    seen.push(selected);
  }
}
const isSo = JSON.stringify(seen) === JSON.stringify([[8, 9, 38], [1, 40, 70], [8, 9, 38], [1, 40, 70]]);
console.log(isSo ? "as described" : "no longer as described");
process.exit(isSo ? 0 : 1);
JAVASCRIPT
node select.cjs
