#!/bin/bash
# Expected: `size` of mnemonist's BitVector is the number of its bits that are set, as `rank` of the whole length counts them, and
#   `pop` removes the last bit.
# Happens: `pop` makes the vector shorter and leaves `size` and the bit as they are. After 1, 0, 1, 1 and two pops there are two bits, one of
#   them set, and `size` is 3. A 0 that is pushed next reads as 1, because the old bit is still there.
# Versions: mnemonist 0.40.8. Needs npm.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --no-audit --no-fund --ignore-scripts mnemonist@0.40.8
cat > pop.cjs <<'JAVASCRIPT'
const { BitVector } = require("mnemonist");
console.log("mnemonist", require("./node_modules/mnemonist/package.json").version);
const vector = new BitVector();
const seen = [];
function look(when) {
  seen.push([[...vector], vector.size, vector.rank(vector.length)]);
  const [bits, size, rank] = seen[seen.length - 1];
  console.log(`${when}: bits ${bits}, size ${size}, rank ${rank}`);
}
for (const bit of [1, 0, 1, 1]) vector.push(bit);
look("1, 0, 1, 1 pushed");
const popped = [vector.pop(), vector.pop()];
look(`${popped} popped`);
vector.push(0);
look("0 pushed");
const expected = [[[1, 0, 1, 1], 3, 3], [[1, 0], 3, 1], [[1, 0, 1], 3, 2]];
const isSo = JSON.stringify(seen) === JSON.stringify(expected) && JSON.stringify(popped) === "[1,1]";
console.log(isSo ? "as described" : "no longer as described");
process.exit(isSo ? 0 : 1);
JAVASCRIPT
node pop.cjs
