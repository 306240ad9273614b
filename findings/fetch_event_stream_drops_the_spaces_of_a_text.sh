#!/bin/bash
# Expected: in a stream of server-sent events, one space behind the colon is left out, and no more: "data:  world" is the text " world". The
#   HTML standard says so, and eventsource-parser does it. A server that streams a model's answer as plain text sends the words with their
#   spaces.
# Happens: fetch-event-stream leaves out all spaces and tabs behind the colon. The pieces "Hello", " world" become "Helloworld", and code
#   loses its indentation. Spaces at the end stay. Two empty lines of data, which are a line break, become an empty text.
# Versions: fetch-event-stream 0.1.6, eventsource-parser 4.1.3 (npm), Node.js 20. Needs npm.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --no-audit --no-fund --ignore-scripts fetch-event-stream@0.1.6 eventsource-parser@4.1.3
cat >spaces.mjs <<'JAVASCRIPT'
import { readFileSync } from "fs";

import { createParser } from "eventsource-parser";
import { events } from "fetch-event-stream";

console.log("fetch-event-stream", JSON.parse(readFileSync("node_modules/fetch-event-stream/package.json")).version);
const seen = {};
let isSo = true;
for (const pieces of [["Hello", ", ", "world"], ["Hello", " world"], ["if ready:", "\n", "    load()"], ["a", "\tb"]]) {
  const stream = pieces.map((piece) => piece.split("\n").map((line) => `data: ${line}\n`).join("") + "\n").join("");
  let [here, other] = ["", ""];
  for await (const event of events(new Response(stream))) here += event.data;
  createParser({ onEvent: (event) => (other += event.data) }).feed(stream);
  const text = pieces.join("");
  console.log(`${JSON.stringify(text)}: fetch-event-stream ${JSON.stringify(here)}, eventsource-parser ${JSON.stringify(other)}`);
  seen[text] = here;
  if (other !== text) isSo = false;
}
const expected = { "Hello, world": "Hello, world", "Hello world": "Helloworld", "if ready:\n    load()": "if ready:load()", "a\tb": "ab" };
if (JSON.stringify(seen) !== JSON.stringify(expected)) isSo = false;
console.log(isSo ? "as described" : "no longer as described");
process.exit(isSo ? 0 : 1);
JAVASCRIPT
node spaces.mjs
