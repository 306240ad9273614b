#!/bin/bash
# Expected: a Summary of prom-client gives percentiles of the observed values. If 990 of 1000 observations are 1 and 10 are 100, the median
#   and the 90th percentile are 1.
# Happens: they are 1.99 and 81.19. The t-digest underneath (tdigest 0.1.3) has one centroid for each different value and draws a line
#   between them, however many observations each has. With a millionth of noise on each value, both are right. `sum` and
#   `count` are right in either case.
# Versions: prom-client 15.1.3, tdigest 0.1.3 (npm), Node.js 20. Needs npm.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --no-audit --no-fund --ignore-scripts prom-client@15.1.3 tdigest@0.1.3
cat > summary.cjs <<'JAVASCRIPT'
const { Registry, Summary } = require("prom-client");

async function percentiles(noise) {
  const summary = new Summary({ name: "sizes", help: "Sizes.", percentiles: [0.5, 0.9], registers: [new Registry()] });
  for (let number = 0; number < 1000; number++) {
    const value = number % 100 === 99 ? 100 : 1;
    summary.observe(value + noise * number);
  }
  const { values } = await summary.get();
  return values.slice(0, 2).map(({ value }) => Number(value.toFixed(2)));
}

(async () => {
  console.log("prom-client", require("prom-client/package.json").version);
  const equal = await percentiles(0);
  const noisy = await percentiles(1e-9);
  console.log("median and 90th percentile:", ...equal, "with noise:", ...noisy);
  const isSo = equal[0] === 1.99 && equal[1] > 80 && noisy[0] === 1 && noisy[1] === 1;
  console.log(isSo ? "as described" : "no longer as described");
  process.exit(isSo ? 0 : 1);
})();
JAVASCRIPT
node summary.cjs
