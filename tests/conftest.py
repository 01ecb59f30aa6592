"""Fixtures of the whole suite."""

from collections.abc import Iterator

import pytest
from parity.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four processes shared by every test; `pool.run(function, *args, size=2)` takes the first two."""
    pool = Pool(4)
    yield pool
    pool.close()
