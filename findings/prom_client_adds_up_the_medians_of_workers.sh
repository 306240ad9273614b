#!/bin/bash
# Expected: prom-client joins the metrics of a cluster's workers, by sum if nothing else is said. Of percentiles its README says only that
#   the event loop's are averaged, which is not quite accurate. A median over all workers lies between their medians.
# Happens: a Summary's percentiles are added up too. Three workers whose requests all took 1 second report a median of 3 seconds and a
#   99th percentile of 3. `sum` and `count` are right. Known: prometheus/client_js issue 225, open, whose answer
#   is that a summary's parts are summed like counters.
# Versions: prom-client 15.1.3 (npm), Node.js 20. Needs npm.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --no-audit --no-fund --ignore-scripts prom-client@15.1.3
cat > workers.cjs <<'JAVASCRIPT'
const { AggregatorRegistry, Registry, Summary } = require("prom-client");

async function worker() {
  const registry = new Registry();
  const seconds = new Summary({ name: "seconds", help: "Seconds.", percentiles: [0.5, 0.99], registers: [registry] });
  for (let request = 0; request < 100; request++) seconds.observe(1);
  return registry.getMetricsAsJSON();
}

(async () => {
  console.log("prom-client", require("prom-client/package.json").version);
  const registry = AggregatorRegistry.aggregate([await worker(), await worker(), await worker()]);
  const samples = (await registry.metrics()).split("\n").filter((line) => line.startsWith("seconds"));
  console.log(samples.join("\n"));
  const isSo = samples.join() === 'seconds{quantile="0.5"} 3,seconds{quantile="0.99"} 3,seconds_sum 300,seconds_count 300';
  console.log(isSo ? "as described" : "no longer as described");
  process.exit(isSo ? 0 : 1);
})();
JAVASCRIPT
node workers.cjs
