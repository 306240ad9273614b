"""The dashboards' checks are not in the wheel, so they are imported from the checkout, after the wheel's packages."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[3])
if ROOT not in sys.path:
    sys.path.append(ROOT)
