"""What layers_per_graph asks of a run, each refusal with its numbers and the way out."""

import pytest

from megalith.config import RunConfig
from megalith.config.graphs import graph_notes
from megalith.config.rules import check_training
from megalith.errors import ConfigError

FULL = {"recompute_granularity": "full"}


def run(layers_per_graph: int = 2, experts: int | None = None, **parallel) -> RunConfig:
    return RunConfig.from_tree(
        {
            "model": {"preset": "gpt2", "num_experts": experts, "add_bias_linear": experts is None},
            "parallel": parallel,
            "data": {"mock": True, "seq_length": 64},
            "optim": {"lr": 1e-3},
            "train": {"micro_batch_size": 2, "global_batch_size": 24, "train_iters": 1},
            "runtime": {"layers_per_graph": layers_per_graph},
        }
    )


@pytest.mark.parametrize(
    "config",
    [
        run(),
        run(4, tensor_model_parallel_size=2, sequence_parallel=True, tp_comm_overlap=True),
        run(pipeline_model_parallel_size=2, data_parallel_sharding_strategy="optim_grads_params"),
        run(**FULL, recompute_num_layers=4),
        run(recompute_granularity="selective", cpu_offloading_num_layers=3),
    ],
)
def test_what_stands_around_layers_or_inside_goes_with_it(config):
    check_training(config, world_size=4)


@pytest.mark.parametrize(
    "config, sentence",
    [
        (run(experts=4), "model.num_experts 4 experts"),
        (run(pipeline_model_parallel_size=2, pipeline_schedule="zero_bubble"), "choose another schedule"),
        (run(**FULL, recompute_method="block"), "recompute_method block .* choose uniform"),
        (run(**FULL), "recompute_num_layers 1 is not a multiple of .* 2, .* set recompute_num_layers to 2,"),
        (run(4, **FULL, recompute_num_layers=6), "set recompute_num_layers to 8"),
    ],
)
def test_what_has_to_happen_between_layers_is_refused(config, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_training(config, world_size=4)


def test_without_compilation_a_note_says_what_is_left_of_it():
    assert graph_notes(run(), compiled=True) == graph_notes(run(1), compiled=False) == []
    (note,) = graph_notes(run(3), compiled=False)
    assert "FSDP gathers 3 layers at a time" in note
