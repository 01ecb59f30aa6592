"""Settings that change nothing in a run are told, and those that do, or are as they were, are not."""

import pytest

from megalith.config import RunConfig
from megalith.config.idle import DEPENDENTS, idle_notes
from megalith.config.presets import PRESETS


@pytest.mark.parametrize(
    ("alone", "beside", "note"),
    [
        (
            "parallel.recompute_modules=[mlp]",
            "parallel.recompute_granularity=selective",
            "parallel.recompute_modules ['mlp'] changes nothing: it takes parallel.recompute_granularity selective",
        ),
        (
            "optim.optimizer_offload_fraction=0.5",
            "optim.optimizer_cpu_offload=true",
            "optim.optimizer_offload_fraction 0.5 changes nothing: it takes optim.optimizer_cpu_offload true",
        ),
        (
            "train.fp8_amax_history_len=1024",
            "train.fp8_format=hybrid",
            "train.fp8_amax_history_len 1024 changes nothing: it takes train.fp8_format",
        ),
        (
            "model.moe_router_topk=8",
            "model.num_experts=64",
            "model.moe_router_topk 8 changes nothing: it takes model.num_experts",
        ),
        (
            "optim.initial_loss_scale=1024",
            "train.fp16=true",
            "optim.initial_loss_scale 1024.0 changes nothing: it takes train.precision fp16",
        ),
    ],
)
def test_a_setting_is_told_until_what_it_belongs_to_is_set(alone, beside, note):
    assert idle_notes(RunConfig.load(None, [alone])) == [note]
    assert idle_notes(RunConfig.load(None, [alone, beside])) == []


@pytest.mark.parametrize("preset", PRESETS)
def test_nothing_of_a_preset_is_idle(preset):
    assert idle_notes(RunConfig.load(None, [f"model.preset={preset}"])) == []


def test_every_setting_of_the_table_exists():
    for group in DEPENDENTS:
        assert set(group.names) <= set(RunConfig.model_fields[group.section].annotation.model_fields)
