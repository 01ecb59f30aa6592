"""A pool for the layouts that take eight processes."""

from collections.abc import Iterator

import pytest

from megalith.runtime.pool import Pool


@pytest.fixture(scope="session")
def pool_of_eight() -> Iterator[Pool]:
    pool = Pool(8, timeout=200)
    yield pool
    pool.close()
