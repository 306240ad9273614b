#!/bin/bash
# Expected: tokie, a "drop-in replacement" for HuggingFace's tokenizers, has the same tokens for the same tokenizer.json: "100%
#   token-accurate across all models", GPT-2 and Llama 3 among them. Their patterns take "'m", "'s" or "'ll" as one piece unless
#   a space stands right before it, so that after a tab the quoted word 'main' begins with the piece 'm.
# Happens: after a tab tokie takes the quote as a piece of its own. In a line that is indented with tabs, or in columns parted
#   by tabs, a quoted word that begins with m, s, t, d, ll, re or ve has other tokens, and other hashes of its blocks. At a
#   line's beginning and after a space they are the same.
# Versions: tokie 0.1.4, tokenizers 0.23.3, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install tokie==0.1.4 tokenizers==0.23.3
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

import tokie
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
PIECES = {
    "GPT-2": BYTES,
    "Llama 3": pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(LLAMA_3), "isolated", False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]),
}
LINES = ["\t'main',\n", "name\t'state'\n", "\t\t'data': 1\n", "\n'main'\n", " 'main'\n", "\t'other'\n"]
print("tokie", version("tokie"), "tokenizers", version("tokenizers"))
is_so = True
for name, pieces in PIECES.items():
    slow = Tokenizer(models.BPE())
    slow.pre_tokenizer, slow.decoder = pieces, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    slow.train_from_iterator(["The main state of the data and other names. "] * 10, trainer)
    slow.save("tokenizer.json")
    fast = tokie.Tokenizer.from_json("tokenizer.json")
    same = []
    for line in LINES:
        expected, seen = slow.encode(line).ids, list(fast.encode(line, add_special_tokens=False).ids)
        same.append(expected == seen)
        print(f"{name}, {line!r}: {[slow.decode([token]) for token in expected]} with tokenizers,"
              f" {'the same' if same[-1] else [slow.decode([token]) for token in seen]} with tokie")
    is_so &= same == [False, False, False, True, True, True]
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
