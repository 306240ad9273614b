#!/bin/bash
# Expected: parse-prometheus-text-format gives one entry for each set of labels of a histogram or summary, with the labels, count and sum,
#   as prom2json does, with which its output "aims to be compatible", and as it does itself for counters and gauges. vLLM and SGLang
#   label all their histograms with the model's name.
# Happens: as soon as a histogram or summary has a label, there is one entry only. It has the buckets of the last set of labels, and
#   no label, no sum and no count. What the other engines or models counted is gone, without an error.
# Versions: parse-prometheus-text-format 1.1.1 (npm), Node.js 20. Needs npm.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --no-audit --no-fund --ignore-scripts parse-prometheus-text-format@1.1.1
cat > parse.cjs <<'JAVASCRIPT'
const parse = require("parse-prometheus-text-format");
console.log("parse-prometheus-text-format", require("./node_modules/parse-prometheus-text-format/package.json").version);
const histogram = (engine, number) => `load_bucket${engine("1")} ${number}
load_bucket${engine("+Inf")} ${2 * number}
load_sum${engine()} ${3 * number}
load_count${engine()} ${2 * number}
`;
const braces = (...labels) => (labels.length ? `{${labels.join(",")}}` : "");
const plain = (le) => braces(...(le ? [`le="${le}"`] : []));
const labelled = (name) => (le) => braces(`engine="${name}"`, ...(le ? [`le="${le}"`] : []));
const head = "# TYPE load histogram\n";
const texts = { plain: histogram(plain, 7), "two engines": histogram(labelled("0"), 7) + histogram(labelled("1"), 900) };
const seen = {};
for (const [name, text] of Object.entries(texts)) {
  seen[name] = parse(head + text)[0].metrics;
  console.log(`${name}: ${JSON.stringify(seen[name])}`);
}
const counters = parse('# TYPE hits counter\nhits{engine="0"} 7\nhits{engine="1"} 900\n')[0].metrics;
console.log(`two counters: ${JSON.stringify(counters)}`);
const [entry, ...others] = seen["two engines"];
const isSo = seen.plain[0].count === "14" && counters.length === 2 && others.length === 0
  && entry.buckets["+Inf"] === "1800" && !("labels" in entry) && !("count" in entry) && !("sum" in entry);
console.log(isSo ? "as described" : "no longer as described");
process.exit(isSo ? 0 : 1);
JAVASCRIPT
node parse.cjs
