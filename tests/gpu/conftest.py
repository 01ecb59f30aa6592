import pytest
import torch

from megalith.launch.pool import Pool


def pytest_collection_modifyitems(items):
    """Every test of this folder needs a CUDA device."""
    for item in items:
        if "tests/gpu" in item.nodeid or "gpu" in item.path.parts:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Compiled code of one test does not count against the next one's limit."""
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def gpus():
    """Two processes with a GPU each."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    pool = Pool(2, timeout=300.0, device_type="cuda")
    yield pool
    pool.close()
