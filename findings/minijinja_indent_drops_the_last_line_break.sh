#!/bin/bash
# Expected: minijinja's filter `indent` puts spaces before the lines of a text and leaves the text itself, as jinja2's does. A chat template
#   that indents a tool's description has the same prompt with minijinja, which servers in Rust use, as with jinja2.
# Happens: the last line break of the text is gone, so that what follows stands on the text's last line, with another prompt and other
#   tokens. jinja2 keeps it, with and without an indented first line and empty lines. Of two line breaks at the end one is left.
# Versions: minijinja 3.1.0, jinja2 3.1.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install minijinja==3.1.0 jinja2==3.1.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

import jinja2
import minijinja

print("minijinja", version("minijinja"), "jinja2", version("jinja2"))
TEXTS = ["one line\n", "two\nlines\n", "two\nlines\n\n", "two\nlines"]
is_so = True
for text in TEXTS:
    for arguments in ("2", "2, true", "2, true, true"):
        template = f"{{{{ text | indent({arguments}) }}}}</tool>"
        theirs = jinja2.Environment().from_string(template).render(text=text)
        ours = minijinja.Environment().render_str(template, text=text)
        if arguments == "2":
            print(f"{text!r}: {theirs!r} with jinja2, {ours!r} with minijinja")
        is_so &= theirs.count("\n") == text.count("\n") and ours.count("\n") == text.removesuffix("\n").count("\n")
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
