#!/bin/bash
# Expected: promql-parser reads a PromQL query and writes it again, with `str` on one line and with `prettify` on many. What it writes is
#   the same query. A subquery without a step, `metric[5m:]`, evaluates the metric at the default interval, while `metric[5m]` has its
#   samples as they came.
# Happens: `str` leaves out the colon. `rate(metric[5m:])` becomes `rate(metric{}[5m])`, another query with other results, and
#   `max_over_time(rate(m[1m])[5m:])`, as dashboards have it, becomes a text that PromQL refuses. `prettify` keeps the colon, and a subquery
#   with a step is right.
# Versions: promql-parser 0.11.0, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install promql-parser==0.11.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

import promql_parser


def kind(query):
    """Return the kind of the argument of a query's function, or that PromQL refuses the query."""
    try:
        return type(promql_parser.parse(query).args[0]).__name__
    except ValueError:
        return "refused"


print("promql-parser", version("promql-parser"))
seen = []
for query in ("rate(metric[5m])", "rate(metric[5m:1m])", "rate(metric[5m:])", "max_over_time(rate(metric[1m])[5m:])"):
    tree = promql_parser.parse(query)
    seen.append([kind(query), kind(str(tree)), kind(tree.prettify())])
    print(f"{query}: str {tree}, prettify {' '.join(tree.prettify().split())}; the arguments are {', '.join(seen[-1])}")
is_so = seen == [
    ["MatrixSelector"] * 3,
    ["SubqueryExpr"] * 3,
    ["SubqueryExpr", "MatrixSelector", "SubqueryExpr"],
    ["SubqueryExpr", "refused", "SubqueryExpr"],
]
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
