"""Experts' weights cast once per step (moe_cache_weights): only the number of casts changes."""

import pytest
import torch
from default_cases import by_default
from fp8_job import expert_config
from parity_cases import run_config, train

from megalith.config.rules.auto_settings import Machine
from megalith.models import moe
from megalith.models.moe import GroupedLinear
from megalith.parallel.step_casts import step_cast_tensors
from megalith.parity.job import start, state_by_name
from megalith.planner.layout import fullest
from megalith.planner.memory_choices import with_auto

RECOMPUTED = {
    "parallel.recompute_granularity": "full",
    "parallel.recompute_method": "block",  # which takes the last layer too
    "parallel.recompute_num_layers": 9,
}


def experts(run):
    return [m for chunk in run.model.chunks for m in chunk.modules() if isinstance(m, GroupedLinear)]


@pytest.mark.parametrize("kind", by_default(["bf16", "recomputed", "fp8"], "fp8"))
def test_experts_are_cast_once_a_step_and_nothing_else_changes(kind, monkeypatch):
    """Two steps of two micro-batches, whose passes take the same cast, bit for bit as they take their own."""
    config = expert_config(None) if kind == "fp8" else run_config("moe", None, "")
    config = config.with_settings({"train.precision": "bf16"})
    config = config.with_settings(
        {"train.global_batch_size": 4} | (RECOMPUTED if kind == "recomputed" else {})
    )
    made, stays = [], []
    prepare_weight = moe.prepare_weight

    def watched(weight, cast, stays_there):
        made.append(cast.data_ptr())
        stays.append(stays_there)
        return prepare_weight(weight, cast, stays_there)

    monkeypatch.setattr(moe, "prepare_weight", watched)
    found = {}
    for once in (True, False):
        made.clear(), stays.clear()
        run = start(config.with_settings({"train.moe_cache_weights": once}))
        losses = train(run, 2)
        assert set(stays) == {once}
        passes = len(stays) // len(experts(run)) // 2
        assert passes == (4 if kind == "recomputed" else 2)
        if once:  # each weight's cast of a step serves all passes of it
            half = len(made) // 2
            assert [len(set(part)) for part in (made[:half], made[half:])] == [len(experts(run))] * 2
        assert all(module.step_cast is None for module in experts(run))
        found[once] = losses, state_by_name(run)
    assert found[True][0] == found[False][0]
    assert all(torch.equal(value, found[False][1][name]) for name, value in found[True][1].items())


def test_casts_of_a_step_are_gone_when_one_fails(monkeypatch):
    config = run_config("moe", None, "", train={"precision": "bf16", "moe_cache_weights": True})
    run = start(config)
    with run.model.step_casts:
        assert len(step_cast_tensors(run.model.chunks[0])) == len(experts(run))  # which have no biases
    assert not step_cast_tensors(run.model.chunks[0])

    def fails(dtype):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(experts(run)[-1], "cast", fails)
    with pytest.raises(torch.OutOfMemoryError), run.model.step_casts:
        pass
    assert not step_cast_tensors(run.model.chunks[0])


def test_auto_casts_experts_once_where_memory_suffices_and_fsdp_gathers_none():
    config = run_config("moe", None, "", train={"precision": "bf16", "moe_cache_weights": "auto"})
    sharded = {"parallel.data_parallel_sharding_strategy": "optim"}
    for settings, world, memory, cached in (
        ({}, 1, 80 * 10**9, True),
        ({}, 1, 10**5, False),
        ({}, 1, 0, False),
        ({"train.precision": "fp32"}, 1, 80 * 10**9, False),
        ({"lora.rank": 4, "lora.targets": ["linear_qkv"]}, 1, 80 * 10**9, False),
        (sharded, 2, 80 * 10**9, False),
        (sharded | {"parallel.expert_model_parallel_size": 2}, 2, 80 * 10**9, True),
    ):
        asked = config.with_settings(settings | {"train.global_batch_size": 2 * world})
        found, notes = with_auto(asked, world, Machine(memory=memory))
        assert found.train.moe_cache_weights is cached, settings
        assert cached == any("moe_cache_weights true" in line for line in notes)
    both = (config.with_settings({"train.moe_cache_weights": value}) for value in (True, False))
    more, less = (fullest(each, 1) for each in both)
    assert more > less
