#!/bin/bash
# Expected: "Three nodes A, B and C with weights 1, 2 and 3 will each handle 1/6, 1/3 and 1/2 of the resources, respectively", says the README of
#   consistent-hash, a hash ring for JavaScript. So a worker with three times the memory gets three times the keys.
# Happens: a weight is a number of points at random places of the ring, and the shares are as random. With the README's weights, A gets less than
#   half or more than one and a half of its sixth in two rings of three, and more than C in one ring of ten. Each ring is another one: two
#   routers do not agree. hashring has more points, at places that the nodes' names give, and its shares are close to the weights.
# Versions: consistent-hash 1.2.2, hashring 3.2.0 (npm), Node.js 20. Needs npm.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --no-audit --no-fund --ignore-scripts consistent-hash@1.2.2 hashring@3.2.0
cat >ring.cjs <<'JAVASCRIPT'
const ConsistentHash = require("consistent-hash");
const HashRing = require("hashring");

const WEIGHTS = { A: 1, B: 2, C: 3 };
const KEYS = [...Array(3000).keys()].map((number) => `block-${number}`);

const shares = (ring) => {
  const counts = { A: 0, B: 0, C: 0 };
  for (const key of KEYS) counts[ring.get(key)]++;
  return Object.fromEntries(Object.entries(counts).map(([node, count]) => [node, count / KEYS.length]));
};
const makers = {
  "consistent-hash": () => Object.entries(WEIGHTS).reduce((ring, node) => ring.add(...node), new ConsistentHash()),
  hashring: () => new HashRing(WEIGHTS),
};
const isFar = ({ A }) => A < 1 / 12 || A > 1 / 4;
const far = {};
const reversed = {};
for (const [name, make] of Object.entries(makers)) {
  console.log(name, require(`${name}/package.json`).version);
  const rings = [...Array(300)].map(() => shares(make()));
  far[name] = rings.filter(isFar).length / rings.length;
  reversed[name] = rings.filter(({ A, C }) => A > C).length / rings.length;
  console.log(`${name}: A, which has the weight 1 of 6, gets less than 1/12 or more than 1/4 in ${Math.round(100 * far[name])}% of the rings,`);
  console.log(`  and more than C, which has the weight 3, in ${Math.round(100 * reversed[name])}%`);
}
const isSo = far["consistent-hash"] > 0.4 && reversed["consistent-hash"] > 0.02 && far.hashring === 0 && reversed.hashring === 0;
console.log(isSo ? "as described" : "no longer as described");
process.exit(isSo ? 0 : 1);
JAVASCRIPT
node ring.cjs
