"""Markers for the number of GPUs, a GPU for each worker of pytest-xdist, and the log that run.py reads."""

import json
import os

# Before torch is imported: each worker has one of the GPUs that run.py gives its session.
if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and (shared := os.environ.get("MEGALITH_TEST_GPUS")):
    gpus_of_session = shared.split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus_of_session[
        int(worker.removeprefix("gw")) % len(gpus_of_session)
    ]

import pytest
import torch

from megalith.launch.pool import Pool

NEEDED = {"two_gpus": 2, "four_gpus": 4}


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(items):
    """Mark every test of this folder as one for a CUDA device, and skip those that need more GPUs than there are."""
    available = torch.cuda.device_count()
    for item in items:
        if "gpu" not in item.path.parts:
            continue
        item.add_marker(pytest.mark.gpu)
        if "gpus" in item.fixturenames:
            item.add_marker(pytest.mark.two_gpus)
        needed = max([1, *(count for name, count in NEEDED.items() if item.get_closest_marker(name))])
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif available < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs"))


def log_for_run(entry: dict) -> None:
    if (path := os.environ.get("MEGALITH_TEST_LOG")) and not worker:
        with open(path, "a") as log:
            log.write(json.dumps(entry) + "\n")


def pytest_collection_finish(session):
    log_for_run({"collected": [item.nodeid for item in session.items]})


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(ids):
    log_for_run({"collected": list(ids)})


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        outcome = "failed" if report.failed else report.outcome
        log_for_run({"test": report.nodeid, "outcome": outcome, "seconds": round(report.duration, 2)})


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Compiled code of one test does not count against the next one's limit."""
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def gpus():
    """Two processes with a GPU each."""
    pool = Pool(2, timeout=300.0, device_type="cuda")
    yield pool
    pool.close()
