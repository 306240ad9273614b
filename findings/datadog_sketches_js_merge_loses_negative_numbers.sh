#!/bin/bash
# Expected: Datadog's sketches are mergeable: the sketch that comes of two has the quantiles of all their numbers, with a relative error of
#   1%. "Both positive and negative numbers are supported", says the README.
# Happens: `merge` in JavaScript takes the other sketch's negative numbers into the count, the sum and the minimum, and not into the bins.
#   So ranks are counted in bins that lack them: merged with -7, -6, -5 and 100, the median of 1, 2, 3 is 100, which is the greatest number,
#   and not 1. Merging into an empty sketch is right, and so is Datadog's sketch for Python. Differences of two times, such as a load's
#   gain, have both signs. Known: DataDog/sketches-js issue 22, open.
# Versions: @datadog/sketches-js 2.1.1 (npm), Node.js 20. Needs npm.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --no-audit --no-fund --ignore-scripts @datadog/sketches-js@2.1.1
cat >merge.cjs <<'JAVASCRIPT'
const { DDSketch } = require("@datadog/sketches-js");

const QUANTILES = [0, 0.25, 0.5, 0.75, 1];
const sketchOf = (numbers) => {
  const sketch = new DDSketch({ relativeAccuracy: 0.01 });
  for (const number of numbers) sketch.accept(number);
  return sketch;
};
const isNear = (value, number) => Math.abs(value - number) <= 0.0101 * Math.abs(number);
const [FIRST, SECOND] = [[1, 2, 3], [-7, -6, -5, 100]];
const sorted = [...FIRST, ...SECOND].sort((one, other) => one - other);
const right = QUANTILES.map((quantile) => sorted[Math.floor(quantile * (sorted.length - 1))]);

console.log("@datadog/sketches-js", require("@datadog/sketches-js/package.json").version);
const sketches = { "one sketch": sketchOf([...FIRST, ...SECOND]), "merged": sketchOf(FIRST), "merged into an empty one": sketchOf([]) };
sketches.merged.merge(sketchOf(SECOND));
sketches["merged into an empty one"].merge(sketchOf([...FIRST, ...SECOND]));
console.log("quantiles", QUANTILES.join(", "), "of the numbers:", right.join(", "));
const seen = {};
for (const [name, sketch] of Object.entries(sketches)) {
  const values = QUANTILES.map((quantile) => sketch.getValueAtQuantile(quantile));
  seen[name] = values.every((value, index) => isNear(value, right[index]));
  console.log(`${name}: count ${sketch.count}, minimum ${sketch.min}, quantiles ${values.map((value) => value.toFixed(2)).join(", ")}`);
}
const isSo = seen["one sketch"] && seen["merged into an empty one"] && !seen.merged && isNear(sketches.merged.getValueAtQuantile(0.5), 100);
console.log(isSo ? "as described" : "no longer as described");
process.exit(isSo ? 0 : 1);
JAVASCRIPT
node merge.cjs
