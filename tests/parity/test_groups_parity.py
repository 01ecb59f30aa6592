"""Layers compiled two at a time, in the layouts that make something of it: one process's run, under the same names."""

import functools
from unittest import mock

import pytest
import torch
from parity_cases import run_config
from test_resume_in_another_layout import SAVED_AFTER, go_on, save, uninterrupted
from torch import nn
from torch._dynamo.utils import counters

from megalith.config import RunConfig
from megalith.parity.compare import compare
from megalith.parity.job import Outcome, run_job

SHORT = {"train": {"train_iters": 2}}
RUN = "gpt2 dropout"
KEEPING_LESS = {"recompute_granularity": "full", "recompute_num_layers": 2, "cpu_offloading_num_layers": 2}


@functools.cache
def alone() -> Outcome:
    return run_job(run_config(RUN, None, "", **SHORT))


def run_traced(config: RunConfig) -> tuple[Outcome, int]:
    """The outcome with layers traced, their gradients too, but not translated; and how many graphs were made."""
    compile = nn.Module.compile
    torch._dynamo.reset()
    counters.clear()
    with mock.patch.object(
        nn.Module, "compile", lambda self, fullgraph: compile(self, fullgraph=fullgraph, backend="aot_eager")
    ):
        outcome = run_job(config)
    return outcome, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    "layout, graphs",
    [  # by rank: of training, and of evaluation, without dropout
        (None, [2]),
        ("dp2-zero1", [2, 2]),
        ("dp2-zero3", [2, 2]),
        ("pp2-uneven", [4, 2]),  # of 3 layers, two and one; of one
    ],
)
def test_compiled_two_at_a_time(pool, layout, graphs):
    config = run_config(RUN, layout, "", **SHORT, runtime={"compile": True, "layers_per_graph": 2})
    ranks = pool.run(run_traced, config, size=len(graphs))
    errors = compare([outcome for outcome, _ in ranks], alone())
    assert errors.within(), errors
    assert [made for _, made in ranks] == graphs


@pytest.mark.parametrize("layout", [None, "dp2-zero3", "tp2-sp-overlap"])
def test_recomputed_and_offloaded_two_at_a_time(pool, layout):
    config = run_config(RUN, layout, "", **SHORT, parallel=KEEPING_LESS, runtime={"layers_per_graph": 2})
    errors = compare(pool.run(run_job, config, size=2 if layout else 1), alone())
    assert errors.within(), errors


def test_a_run_goes_on_with_other_groups_to_the_bit(tmp_path):
    def saving(layers_per_graph: int, **checkpoint: str) -> RunConfig:
        runtime = {"layers_per_graph": layers_per_graph}
        return run_config(
            RUN, None, "", train={"output_dir": str(tmp_path)}, checkpoint=checkpoint, runtime=runtime
        )

    saved = save(saving(2))
    loaded, losses = go_on(saving(3, load=str(tmp_path)))
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in saved.items())
    assert losses == uninterrupted(RUN)[SAVED_AFTER:]
