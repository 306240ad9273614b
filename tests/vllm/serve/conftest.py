"""Makes the dashboards' checks importable from the checkout, because the wheel does not include them.

The wheel's packages come first on the path.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[3])
if ROOT not in sys.path:
    sys.path.append(ROOT)
