"""Moments in bf16 and in 8 bits: every layout rounds as one process, and goes on from another's checkpoint."""

import functools

import parity_cases
import pytest
import torch
from parity_cases import RUNS, SHOWN_WITH, layers, run_config, samples, train

from megalith.config import RunConfig
from megalith.optim.moments import Moment
from megalith.parity.check import LAYOUTS
from megalith.parity.differences import compare
from megalith.parity.job import Outcome, run_job, start, state_by_name

STEPS = 3
BY_DEFAULT = {  # the axes that cut rows, columns, layers and experts, with every way of sharding state
    "dp4-zero3-hybrid": "bf16",
    "tp2-sp-etp2-ep2": "fp8",
}
MORE = (
    "tp2-dp2-zero2", "tp2-sp-pp2-dp2-zero3", "ep2-dp4-zero3", "pp4-interleaved", "pp4-uneven", "tp2-sp-pp2",
    "tp2-sp-pp2-zero_bubble", "cp2-a2a-pp2-interleaved", "pp2-interleaved-dp2-zero2", "cp2-a2a-overlap", "pp2-ep2",
)  # fmt: skip
CASES = [*BY_DEFAULT.items()] + [
    pytest.param(layout, dtype, marks=pytest.mark.full)
    for layout in (*BY_DEFAULT, *MORE, *parity_cases.BY_DEFAULT)
    for dtype in ("bf16", "fp8")
    if BY_DEFAULT.get(layout) != dtype
]


def reduced(run: str, layout: str | None, corpus: str, dtype: str, **changes) -> RunConfig:
    """The run, wide enough for blocks."""
    wide = {"hidden_size": 64, "ffn_hidden_size": 128}
    if "num_experts" in RUNS[run]["model"]:
        wide["moe_ffn_hidden_size"] = 64
    return run_config(
        run,
        layout,
        corpus,
        **{
            "model": wide | changes.pop("model", {}),
            "optim": {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype, **changes.pop("optim", {})},
            **changes,
        },
    )


@functools.cache
def alone(run: str, dtype: str, num_layers: int, batch: int, corpus: str) -> Outcome:
    return run_job(reduced(run, None, corpus, dtype, **sizes(num_layers, batch)), STEPS)


def sizes(num_layers: int, batch: int) -> dict:
    return {"model": {"num_layers": num_layers}, "train": {"global_batch_size": batch}}


@pytest.mark.parametrize("layout, dtype", CASES)
def test_a_layout_equals_one_process(pool, pool_of_eight, corpus, layout, dtype):
    run, processes = SHOWN_WITH[layout], LAYOUTS[layout].processes
    size = layers(layout), 8 if "ramp-up" in run else samples(layout)
    one = alone(run, dtype, *size, corpus)
    config = reduced(run, layout, corpus, dtype, **sizes(*size))
    ranks = (pool if processes <= pool.size else pool_of_eight).run(run_job, config, STEPS, size=processes)
    errors = compare(ranks, one)
    assert errors.within(), errors


def saved(config: RunConfig) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train one step and save it; return what the checkpoint holds, and the state two steps later."""
    job = start(config)
    train(job, 1)
    job.save()
    assert job.saver.completed_saves(wait=True)[0].error is None
    assert any(
        isinstance(value, Moment) for state in job.optimizer.state.values() for value in state.values()
    )
    stored = state_by_name(job)
    train(job, 2)
    return stored, state_by_name(job)


def gone_on(config: RunConfig) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What the checkpoint gave, and what there is two steps later."""
    job = start(config)
    loaded = state_by_name(job)
    train(job, 2)
    return loaded, state_by_name(job)


@pytest.mark.parametrize("dtype", [pytest.param("bf16", marks=pytest.mark.full), "fp8"])
def test_a_run_goes_on_bitwise_and_with_other_dtypes_and_layouts(pool, tmp_path, dtype):
    run, layout = "llama tied, documents", "tp2-sp-dp2-zero3"
    common = {"model": {"num_layers": 2}, "train": {"output_dir": str(tmp_path), "train_iters": 3}}
    config = reduced(run, layout, "", dtype, checkpoint={"async_save": True}, **common)
    stored, whole = pool.run(saved, config)[0]
    common |= {"checkpoint": {"load": str(tmp_path)}}
    here, later = pool.run(gone_on, reduced(run, layout, "", dtype, **common))[0]
    assert stored.keys() == here.keys() and all(torch.equal(stored[name], here[name]) for name in stored)
    with_fp32, _ = gone_on(reduced(run, None, "", "fp32", **common))
    assert all(torch.equal(stored[name], with_fp32[name]) for name in stored)
    assert all(torch.equal(later[name], whole[name]) for name in whole)
