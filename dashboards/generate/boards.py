"""All dashboards, in the order in which an operator needs them."""

from dashboards.generate.disk import DISK
from dashboards.generate.overview import OVERVIEW
from dashboards.generate.remote import REMOTE
from dashboards.generate.transfers import TRANSFERS
from dashboards.generate.why import WHY

BOARDS = (OVERVIEW, WHY, TRANSFERS, DISK, REMOTE)
