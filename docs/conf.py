"""Sphinx's settings. The source folder is the repository's root, so each document has one home and its links work there too.

Build: `make site`, which is `sphinx-build -W -c docs . .venv/site`.
"""

import os
import sys
from importlib.metadata import version as installed

# The page "Commands" runs this environment's commands and shows their output, in lines that fit the page.
os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
os.environ["COLUMNS"] = "100"

project = "kvoffload"
author = "The kvoffload authors"
copyright = author
version = release = installed("kvoffload")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxcontrib.programoutput"]
source_suffix = {".md": "markdown"}
root_doc = "docs/index"
include_patterns = [
    *(
        "*.md",
        "docs/*.md",
        "dashboards/*.md",
        "kvoffload/*.md",
        "kvoffload/**/*.md",
        "plugins/**/*.md",
        "tests/*.md",
        "tests/bench/*.md",
        "tests/faults/*.md",
    ),
]
exclude_patterns = [".venv", ".git"]

nitpicky = True  # report a link without a target
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a README may begin below the first level
default_role = "code"  # docstrings quote with single backticks

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
# Types that appear in signatures but have no documentation of their own.
nitpick_ignore_regex = [("py:.*", r"(?!kvoffload\.engine\.plugin\.).*")]

html_theme = "furo"
html_title = f"kvoffload {version}"
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False
templates_path = ["templates"]
html_static_path = ["static"]
html_css_files = ["wide.css"]
html_additional_pages = {"index": "to_first_page.html"}
