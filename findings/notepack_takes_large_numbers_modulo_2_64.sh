#!/bin/bash
# Expected: a number of JavaScript comes back from MessagePack as it was: one that fits no integer of the format is a float64, as
#   msgpack-lite and @msgpack/msgpack write it. Or it is an error.
# Happens: notepack.io takes each number without a fraction for an integer of 64 bits, and drops what is above: 2^64 comes back as 0, 1e300
#   as 0, and 1e21 as 3.9e18. Below -2^63 the sign is lost. Bytes or nanoseconds that were added up long enough get there. With a fraction
#   all is right. Known: darrachequesne/notepack issue 30, open.
# Versions: notepack.io 3.0.1 (npm), @msgpack/msgpack 3.1.3, Node.js 20. Needs npm.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --no-audit --no-fund --ignore-scripts notepack.io@3.0.1 @msgpack/msgpack@3.1.3
cat >numbers.cjs <<'JAVASCRIPT'
const msgpack = require("@msgpack/msgpack");
const notepack = require("notepack.io");

console.log("notepack.io", require("notepack.io/package.json").version);
let isSo = true;
for (const number of [2 ** 53, 2 ** 63, 0.5 + 2 ** 33, 2 ** 64, 1e21, 1e300, -(2 ** 63), -(2 ** 63) - 2048, -1e21]) {
  const here = notepack.decode(notepack.encode(number));
  if (msgpack.decode(msgpack.encode(number)) !== number) isSo = false;
  console.log(`${number} comes back as ${here}`);
  const fits = !Number.isInteger(number) || (-(2 ** 63) <= number && number < 2 ** 64);
  const cut = (number < 0 ? BigInt.asIntN : BigInt.asUintN)(64, Number.isInteger(number) ? BigInt(number) : 0n);
  if (here !== (fits ? number : Number(cut))) isSo = false;
}
console.log(isSo ? "as described" : "no longer as described");
process.exit(isSo ? 0 : 1);
JAVASCRIPT
node numbers.cjs
