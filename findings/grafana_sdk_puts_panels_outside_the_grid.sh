#!/bin/bash
# Expected: a dashboard is 24 columns wide. The builder of Grafana's SDK lays panels without a position out in rows, and begins
#   a new row for a panel that does not fit behind the others.
# Happens: it begins a new row only after a panel has reached the edge or crossed it. So of two panels with 16 columns each,
#   the second is put at column 16 and ends at column 32, beside the first one.
# Versions: grafana-foundation-sdk 1769699998!10.1.0, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install 'grafana-foundation-sdk==1769699998!10.1.0'
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.builders.timeseries import Panel

COLUMNS = 24


def laid_out(*widths):
    """Return each panel's first and last column, and its row."""
    dashboard = Dashboard("board")
    for width in widths:
        dashboard = dashboard.with_panel(Panel().title("panel").span(width).height(8))
    places = [panel.grid_pos for panel in dashboard.build().panels]
    return [(place.x, place.x + place.w, place.y) for place in places]


print("grafana-foundation-sdk", version("grafana-foundation-sdk"))
fitting, wide = laid_out(12, 12, 12), laid_out(16, 16, 16)
for name, places in (("12 columns each", fitting), ("16 columns each", wide)):
    print(name)
    for start, end, row in places:
        print(f"  row {row}: columns {start} to {end}", "(outside)" if end > COLUMNS else "")
is_so = fitting == [(0, 12, 0), (12, 24, 0), (0, 12, 8)] and wide == [(0, 16, 0), (16, 32, 0), (0, 16, 8)]
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
