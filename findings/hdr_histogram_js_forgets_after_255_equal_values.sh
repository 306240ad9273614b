#!/bin/bash
# Expected: hdr-histogram-js lets the user choose how many bits a bucket has, 8, 16, 32, 64 or "packed", to save memory. A bucket that is full
#   stays full, or is an error, as with the histograms of shorts and ints in Java.
# Happens: a bucket of 8 bits begins at 0 again. After 256 observations of 5 and one of 100, those of 5 are gone: the median is 0,
#   although the total count is right, and `mean` throws "Index Out Of Bounds Exception". With 16 bits it takes 65,536.
#   Known: HdrHistogram/HdrHistogramJS pull request 26, open.
# Versions: hdr-histogram-js 3.0.1 (npm), Node.js 20. Needs npm.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --no-audit --no-fund --ignore-scripts hdr-histogram-js@3.0.1
cat >histogram.cjs <<'JAVASCRIPT'
const hdr = require("hdr-histogram-js");

const mean = (histogram) => {
  try {
    return histogram.mean.toFixed(2);
  } catch (error) {
    return error.message;
  }
};

console.log("hdr-histogram-js", require("hdr-histogram-js/package.json").version);
const seen = {};
for (const [bits, number] of [[8, 255], [8, 256], [16, 256], [16, 65536], [32, 65536], ["packed", 65536]]) {
  const histogram = hdr.build({ bitBucketSize: bits });
  for (let i = 0; i < number; i++) histogram.recordValue(5);
  histogram.recordValue(100);
  seen[`${bits} ${number}`] = `${histogram.totalCount} ${histogram.getValueAtPercentile(50)} ${mean(histogram)}`;
  console.log(`bucket size ${bits}: ${number} times 5 and once 100: total, median and mean are ${seen[`${bits} ${number}`]}`);
}
const isSo =
  seen["8 255"] === "256 5 5.37" && seen["8 256"] === "257 0 Index Out Of Bounds Exception" &&
  seen["16 256"] === "257 5 5.37" && seen["16 65536"] === "65537 0 Index Out Of Bounds Exception" &&
  seen["32 65536"] === "65537 5 5.00" && seen["packed 65536"] === "65537 5 5.00";
console.log(isSo ? "as described" : "no longer as described");
process.exit(isSo ? 0 : 1);
JAVASCRIPT
node histogram.cjs
