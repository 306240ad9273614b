#!/bin/bash
# Expected: a Date in CBOR has tag 1 and a number of seconds that may have a fraction (RFC 8949, 3.4.2). borc lists Date among the types
#   that it encodes and decodes, so that it comes back as it was; the packages cbor and cbor-x keep its milliseconds.
# Happens: borc rounds to whole seconds, up or down: 1,500,000,000,500 ms becomes 1,500,000,001,000, half a second later than the time that
#   was written. Events of the same second cannot be put in order, and a message may be from the future. borc reads the fraction that cbor
#   wrote.
# Versions: borc 3.0.0, cbor 10.0.12, cbor-x 1.6.8 (npm), Node.js 20. Needs npm.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --no-audit --no-fund --ignore-scripts borc@3.0.0 cbor@10.0.12 cbor-x@1.6.8
cat >dates.cjs <<'JAVASCRIPT'
const borc = require("borc");
const cbor = require("cbor");
const cborX = require("cbor-x");

console.log("borc", require("borc/package.json").version);
let isSo = true;
for (const time of [1500000000000, 1500000000123, 1500000000500, 1500000000999]) {
  const date = new Date(time);
  const here = borc.decode(borc.encode(date)).getTime();
  const read = [cbor.decodeFirstSync(cbor.encode(date)), cborX.decode(cborX.encode(date)), borc.decode(cbor.encode(date))];
  const others = read.map((other) => other.getTime());
  console.log(`${time} ms: borc ${here}, cbor, cbor-x and cbor read by borc ${others.join(", ")}`);
  if (here !== 1000 * Math.round(time / 1000) || others.some((other) => other !== time)) isSo = false;
}
console.log(isSo ? "as described" : "no longer as described");
process.exit(isSo ? 0 : 1);
JAVASCRIPT
node dates.cjs
