from collections.abc import Iterator

import pytest

from tests.one_thread import one_thread
from tests.reference.rig import Engines

__all__ = ["one_thread"]


@pytest.fixture
def engines() -> Iterator[Engines]:
    made = Engines()
    yield made
    made.stop_all()
