#!/bin/bash
# Expected: notepack.io packs an ArrayBuffer, or a view of one, as bytes: a Float32Array of two numbers is eight bytes, as @msgpack/msgpack
#   packs it. A type that it does not have is an error.
# Happens: it writes as many bytes as there are elements, and as each byte the element's own number modulo 256: the Float32Array 1.5, 300
#   becomes 01 2c. A vector of numbers is gone, and nothing says so. A Uint8Array and the ArrayBuffer itself are right.
# Versions: notepack.io 3.0.1, @msgpack/msgpack 3.1.3 (npm), Node.js 20. Needs npm.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --no-audit --no-fund --ignore-scripts notepack.io@3.0.1 @msgpack/msgpack@3.1.3
cat >arrays.cjs <<'JAVASCRIPT'
const msgpack = require("@msgpack/msgpack");
const notepack = require("notepack.io");

console.log("notepack.io", require("notepack.io/package.json").version);
const hex = (bytes) => Buffer.from(bytes).toString("hex");
const wrong = {};
let othersAreRight = true;
for (const array of [new Uint8Array([1, 200]), new Float32Array([1.5, 300]), new Uint16Array([300, 2]), new Float64Array([0.25])]) {
  const bytes = hex(new Uint8Array(array.buffer));
  const others = [msgpack.decode(msgpack.encode(array)), notepack.decode(notepack.encode(array.buffer))].map(hex);
  const here = hex(notepack.decode(notepack.encode(array)));
  console.log(`${array.constructor.name} ${array}: bytes ${bytes}, notepack.io ${here}, others ${others.join(" ")}`);
  if (here !== bytes) wrong[array.constructor.name] = here;
  if (others.some((other) => other !== bytes)) othersAreRight = false;
}
const isSo = othersAreRight && JSON.stringify(wrong) === JSON.stringify({ Float32Array: "012c", Uint16Array: "2c02", Float64Array: "00" });
console.log(isSo ? "as described" : "no longer as described");
process.exit(isSo ? 0 : 1);
JAVASCRIPT
node arrays.cjs
