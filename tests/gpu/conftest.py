"""Markers for the number of GPUs, the GPUs of each worker of pytest-xdist, and the log that run.py reads."""

import json
import os
from pathlib import Path

# Before torch is imported: each worker sees one of the groups of GPUs that run.py gives its session. Workers of a group
# see them in different orders, because tests of a single process take the first.
if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and (groups := os.environ.get("MEGALITH_TEST_GPUS")):
    groups_of_session = [group.split(",") for group in groups.split(";")]
    turn, group = divmod(int(worker.removeprefix("gw")), len(groups_of_session))
    seen = groups_of_session[group]
    first = turn % len(seen)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(seen[first:] + seen[:first])

import pytest
import torch

from megalith.launch.pool import Pool

NEEDED = {"two_gpus": 2, "four_gpus": 4}


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(config, items):
    """Mark every test of this folder as one for a CUDA device, and skip those that need more GPUs than there are.

    A resumed run leaves out the tests that have run.
    """
    if path := os.environ.get("MEGALITH_TEST_DONE"):
        done = set(Path(path).read_text().splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
        items[:] = [item for item in items if item.nodeid not in done]
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
