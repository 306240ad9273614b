#!/bin/bash
# Expected: ai-tokenizer, which counts and encodes prompts as tiktoken does, encodes the whole text, and `decode` gives it back. The byte
#   order mark U+FEFF, with which many source files begin, is a character, and a token of cl100k_base and o200k_base. js-tiktoken encodes
#   it.
# Happens: at the text's beginning the mark is left out if a letter follows: "U+FEFF using System;" has the tokens of "using System;", so
#   that two different prompts have the same tokens, and a count is too low. Before other characters and inside a text it is encoded, and
#   `decode` drops it.
# Versions: ai-tokenizer 1.0.6, js-tiktoken 1.0.21 (npm), Node.js 20. Needs npm.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --no-audit --no-fund --ignore-scripts ai-tokenizer@1.0.6 js-tiktoken@1.0.21
cat >encode.mjs <<'JAVASCRIPT'
import { readFileSync } from "fs";

import { Tokenizer } from "ai-tokenizer";
import { Tiktoken } from "js-tiktoken/lite";

console.log("ai-tokenizer", JSON.parse(readFileSync("node_modules/ai-tokenizer/package.json")).version);
let isSo = true;
for (const name of ["cl100k_base", "o200k_base"]) {
  const { default: ranks } = await import(`js-tiktoken/ranks/${name}`);
  const ai = new Tokenizer(await import(`ai-tokenizer/encoding/${name}`));
  const js = new Tiktoken(ranks);
  const [mark] = js.encode("\ufeff");
  const [without, , inside] = ["using System;", "\ufeffusing System;", "a\ufeff"].map((text) => {
    const tokens = ai.encode(text);
    console.log(`${name} ${JSON.stringify(text).replace("\ufeff", "\\ufeff")}: ${tokens}, ${ai.count(text)} tokens, js-tiktoken ${js.encode(text)}`);
    return tokens.join();
  });
  const texts = ["\ufeffusing System;", "\ufeffabc", "\ufeffSELECT 1"];
  const hasTokensOfTheRest = (tokenizer, text) => tokenizer.encode(text).join() === tokenizer.encode(text.slice(1)).join();
  const isLeftOut = texts.every((text) => hasTokensOfTheRest(ai, text) && !hasTokensOfTheRest(js, text));
  if (!isLeftOut || without !== js.encode("using System;").join() || inside !== [js.encode("a"), mark].join()) isSo = false;
  if (ai.decode(ai.encode("a\ufeff")) !== "a") isSo = false;
}
console.log(isSo ? "as described" : "no longer as described");
process.exit(isSo ? 0 : 1);
JAVASCRIPT
node encode.mjs
