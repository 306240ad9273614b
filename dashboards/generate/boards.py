"""All dashboards, in the order in which an operator needs them."""

from dashboards.generate.overview import OVERVIEW
from dashboards.generate.tiers import LOWER_TIERS
from dashboards.generate.transfers import TRANSFERS
from dashboards.generate.why import WHY

BOARDS = (OVERVIEW, WHY, TRANSFERS, LOWER_TIERS)
