#!/bin/bash
# Expected: `add_tokens` gives a new token an id that no other token has. A vocabulary may have holes, as one from which
#   tokens were removed and whose ids were kept because the model's embeddings are in their order.
# Happens: the new token gets the number of entries as its id. In a vocabulary with one hole this is the last token's id, so
#   two words have the same id, prompts with the one and the other have the same ids (and the same cached KV), and decoding
#   returns the new word for both. Known: huggingface/tokenizers issue 523.
# Versions: tokenizers 0.23.3, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install tokenizers==0.23.3
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys

import tokenizers
from tokenizers import Tokenizer, models, pre_tokenizers

tokenizer = Tokenizer(models.WordLevel({"yes": 0, "no": 1, "stop": 3}, unk_token="no"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
before = tokenizer.encode("yes stop").ids
added = tokenizer.add_tokens(["search"])
stop, search = tokenizer.encode("yes stop").ids, tokenizer.encode("yes search").ids
text = tokenizer.decode(stop)

print("tokenizers", tokenizers.__version__)
print("'yes stop' before:", before)
print("tokens added:", added, "vocabulary:", dict(sorted(tokenizer.get_vocab().items())))
print(f"'yes stop': {stop}, decoded {text!r}; 'yes search': {search}")
is_so = added == 1 and before == stop == search == [0, 3] and text == "yes search"
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
