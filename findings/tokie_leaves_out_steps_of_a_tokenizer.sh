#!/bin/bash
# Expected: tokie reads HuggingFace's tokenizer.json, "works with any HuggingFace tokenizer" and is "100% token-accurate". A step that it
#   does not have is an error when the file is read.
# Happens: it reads the file without an error and leaves the step out: the normalizers Strip, Replace, Prepend and NFKC, the space
#   before the text (`add_prefix_space`), the processor of RoBERTa, and what a template adds after the text. Each of them is a kind of step
#   that tokenizers writes itself. Lowercase also removes accents, which it does not with tokenizers. So the prompt has other tokens
#   than on the server, or one fewer.
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
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

STEPS = {
    "none": ({}, "the main data", True),
    "Strip": ({"normalizer": normalizers.Strip()}, "  the main data  ", False),
    "Replace": ({"normalizer": normalizers.Replace(" ", "_")}, "the main data", False),
    "Prepend": ({"normalizer": normalizers.Prepend("_")}, "the main data", False),
    "NFKC": ({"normalizer": normalizers.NFKC()}, "\ufb01nd", False),
    "Lowercase": ({"normalizer": normalizers.Lowercase()}, "The CAF\u00c9", False),
    "add_prefix_space": ({"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)}, "the main data", False),
    "RobertaProcessing": ({"post_processor": processors.RobertaProcessing(("</s>", 1), ("<s>", 0))}, "the main data", False),
}
TEMPLATES = {"<s> $A": True, "<s> $A </s>": False}
for template, is_same in TEMPLATES.items():
    processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 0), ("</s>", 1)])
    STEPS[f"template {template}"] = {"post_processor": processor}, "the main data", is_same

print("tokie", version("tokie"), "tokenizers", version("tokenizers"))
is_so = True
for name, (steps, text, is_same) in STEPS.items():
    slow = Tokenizer(models.BPE())
    slow.pre_tokenizer, slow.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    for step, value in steps.items():
        setattr(slow, step, value)
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    slow.train_from_iterator(["the main data and other data. "] * 10, trainer)
    slow.save("tokenizer.json")
    expected, seen = slow.encode(text).ids, list(tokie.Tokenizer.from_json("tokenizer.json").encode(text).ids)
    texts = [slow.decode(tokens, skip_special_tokens=False) for tokens in (expected, seen)]
    print(f"{name}: {len(expected)} tokens, {ascii(texts[0])} with tokenizers; {len(seen)} tokens, {ascii(texts[1])} with tokie")
    is_so &= (expected == seen) == is_same
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
