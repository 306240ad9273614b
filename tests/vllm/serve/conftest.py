"""Imports the dashboards' checks from the checkout, because the wheel does not contain them.

The checkout comes after the wheel's packages on the path.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[3])
if ROOT not in sys.path:
    sys.path.append(ROOT)
