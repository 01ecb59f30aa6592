"""The same run in every layout: first loss, every gradient, norms, losses, evaluation and generation of one process."""

import functools

import pytest
from parity_cases import BY_DEFAULT, PARTS_OF_OTHERS, RUNS, SHOWN_WITH, layers, run_config, samples
from test_memory_parity import CASES as WITH_MEMORY
from test_moments_parity import BY_DEFAULT as WITH_MOMENTS

from megalith.errors import ConfigError
from megalith.launch.pool import RankFailed
from megalith.parity.check import LAYOUTS
from megalith.parity.differences import compare
from megalith.parity.job import Outcome, run_job
from megalith.training.build import prepare

# The gradients of the first step decide. Those after it show the optimizer, the ramp of the batch, and that evaluating
# and generating in between changes nothing.
STEPS = 2


def by_default(layout: str):
    return pytest.param(layout, marks=() if layout in BY_DEFAULT else pytest.mark.full)


@functools.cache
def alone(run: str, num_layers: int, samples: int, corpus: str) -> Outcome:
    return run_job(run_config(run, None, corpus, **sizes(num_layers, samples)), STEPS)


def sizes(num_layers: int, samples: int) -> dict:
    return {"model": {"num_layers": num_layers}, "train": {"global_batch_size": samples}}


@pytest.fixture
def assert_equal(pool, pool_of_eight, corpus):
    def check(layout: str, run: str) -> None:
        size = layers(layout), 8 if "ramp-up" in run else samples(layout)
        config = run_config(run, layout, corpus, **sizes(*size))
        processes = LAYOUTS[layout].processes
        ranks = (pool if processes <= pool.size else pool_of_eight).run(
            run_job, config, STEPS, size=processes
        )
        errors = compare(ranks, alone(run, *size, corpus))
        assert errors.within(), errors

    return check


@pytest.mark.parametrize("layout", [by_default(layout) for layout in LAYOUTS])
def test_layout_equals_one_process(assert_equal, layout):
    assert_equal(layout, SHOWN_WITH[layout])


def possible(layout: str, run: str) -> bool:
    try:
        prepare(run_config(run, layout, "no corpus is needed"), LAYOUTS[layout].processes)
    except ConfigError:
        return False
    return True


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_with_every_feature(assert_equal, layout):
    failures = {}
    for run in RUNS:
        if run != SHOWN_WITH[layout] and possible(layout, run):
            try:
                assert_equal(layout, run)
            except (AssertionError, RankFailed) as error:
                failures[run] = str(error)
    assert not failures


def test_every_feature_is_shown_by_default():
    assert SHOWN_WITH.keys() == LAYOUTS.keys() > set(BY_DEFAULT)
    shown = {SHOWN_WITH[layout] for layout in (*BY_DEFAULT, *WITH_MOMENTS)}
    shown |= {run for _, run, _ in WITH_MEMORY}
    assert shown | PARTS_OF_OTHERS == RUNS.keys()
    assert all(possible(layout, run) for layout, run in SHOWN_WITH.items())


def test_clipping_is_active_and_the_loss_falls(corpus):
    for run in ("gpt2 dropout", "llama tied, documents"):
        one = run_job(run_config(run, None, corpus, model={"num_layers": 2}))
        assert min(one.norms) > 0.5
        assert one.losses[-1] < one.losses[0] - 0.1
