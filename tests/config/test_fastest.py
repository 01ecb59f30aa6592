"""What `auto` stands for on which machine; and that what it chooses would be accepted where it stands in a run file."""

import itertools
from dataclasses import replace

import pytest
from gpt2_runs import run

from megalith.config import RunConfig
from megalith.config.rules.auto_settings import Machine, auto_note, resolve_auto
from megalith.config.rules.run_rules import check_training
from megalith.errors import ConfigError

ANY = {"least_work": 0.0}  # these models are too small for halves
NODE = Machine(ranks_per_host=8, compiled=True, nvlink=True, **ANY)
TP2, CP2, CP4 = {"tensor_model_parallel_size": 2}, {"context_parallel_size": 2}, {"context_parallel_size": 4}
EXACT = {"train.batch_invariant": True}
CHOSEN = "cp_comm_type", "hierarchical_context_parallel_sizes", "tp_comm_overlap", "symmetric_memory_groups"


def chosen(config: RunConfig, machine: Machine) -> list:
    found, _ = resolve_auto(config, machine)
    assert found.parallel.tp_comm_overlap != "auto"
    return [getattr(found.parallel, name) for name in CHOSEN]


@pytest.mark.parametrize(
    "config, machine, expected",
    [
        (run(TP2), NODE, ["auto", None, True, ["tp"]]),
        (run(TP2), Machine(2, compiled=True, **ANY), ["auto", None, True, []]),  # no NVLink
        (run(TP2), Machine(1, True, True, **ANY), ["auto", None, True, []]),  # over two hosts
        (run(TP2), Machine(8), ["auto", None, False, []]),  # CPUs
        (run(TP2, 1), NODE, ["auto", None, False, []]),  # no halves
        (run(TP2, num_experts=2), NODE, ["auto", None, False, []]),
        (run(CP2), NODE, ["a2a", None, True, ["cp"]]),
        (run(CP2, 1), NODE, ["a2a", None, False, ["cp"]]),
        (run(CP2), Machine(1, True, True, **ANY), ["p2p", None, False, []]),
        (run(CP4), Machine(2, True, True, **ANY), ["a2a+p2p", [2, 2], True, ["cp"]]),
        (run(CP2, num_attention_heads=3), NODE, ["p2p", None, False, []]),
        (run(CP4, num_attention_heads=6), NODE, ["a2a+p2p", [2, 2], True, ["cp"]]),
        (run(TP2 | CP4), Machine(4, True, True, **ANY), ["a2a+p2p", [2, 2], True, ["tp", "cp"]]),
        (run({}), NODE, ["auto", None, False, []]),
        (run(CP4, 1, num_attention_heads=8).with_settings(EXACT), NODE, ["a2a", None, False, ["cp"]]),
        (run(CP4, 1, num_attention_heads=6).with_settings(EXACT), NODE, ["all_gather", None, False, []]),
    ],
)  # fmt: skip
def test_what_the_machine_has_is_used(config, machine, expected):
    assert chosen(config, machine) == expected


@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
@pytest.mark.parametrize("ranks, precision", [(8, "bf16"), (16, "bf16"), (8, "fp32")])
def test_gradients_go_in_the_compute_dtype_inside_of_a_host(strategy, ranks, precision):
    config = run({"data_parallel_sharding_strategy": strategy}).with_settings({"train.precision": precision})
    found, choices = resolve_auto(config, Machine(8, True, True, ranks=ranks))
    assert found.parallel.uses_fp32_reduce_scatter == (
        strategy != "optim" and ranks == 8 and precision == "bf16"
    )
    assert len(choices) == (strategy != "optim" and precision == "bf16")
    alone = config.with_settings({"parallel.num_distributed_optimizer_instances": ranks})
    _, choices = resolve_auto(alone, Machine(8, True, True, ranks=ranks))
    assert not any("reduce_scatter" in each for each in choices)  # no shards to reduce over


def test_halves_that_fp8_cannot_take_are_not_made():
    blocks = {"train.fp8_format": "e4m3", "train.fp8_recipe": "blockwise", "data.seq_length": 128}
    for sequence_parallel, halves in ((False, True), (True, False)):  # 128 tokens, and on a rank 64
        config = run(TP2, hidden_size=768).with_settings(blocks)
        config = config.with_settings({"parallel.sequence_parallel": sequence_parallel})
        assert chosen(config, NODE)[2] is halves


@pytest.mark.parametrize("axis", [TP2, CP2])
@pytest.mark.parametrize("fp8", [{}, {"train.fp8_format": "hybrid"}])
def test_halves_are_not_made_of_less_than_the_host_launches_in_time(axis, fp8):
    node = Machine(8, compiled=True, nvlink=True)
    layer = 12 * 768**2  # weights
    enough = node.least_work * 2 * (2 if fp8 else 1) / (6 * layer * 1024)  # sequences
    for micro, halves in ((2 * int(enough / 2), False), (2 * int(enough / 2) + 2, True)):
        config = run(axis, micro).with_settings(
            {"data.seq_length": 1024, "train.global_batch_size": micro, **fp8}
        )
        found, choices = resolve_auto(config, node)
        assert found.parallel.tp_comm_overlap is halves
        assert halves or "tp_comm_overlap false (the GPU finishes a layer's 3.5 TFLOP before" in "".join(
            choices
        )


def test_what_is_set_by_hand_stays():
    by_hand = {"cp_comm_type": "p2p", "tp_comm_overlap": False, "symmetric_memory_groups": []}
    config = run(TP2 | CP2 | by_hand)
    assert resolve_auto(config, NODE) == (config, [])


def test_attention_is_saved_where_heads_are_exchanged_and_refused_over_a_ring():
    config = run(
        CP2 | {"recompute_granularity": "full", "recompute_saves_attention": True}, attention_dropout=0.0
    )
    found, _ = resolve_auto(config, NODE)
    assert (found.parallel.cp_comm_type, found.parallel.recompute_saves_attention) == ("a2a", True)
    with pytest.raises(ConfigError, match=r"used with parallel\.cp_comm_type p2p"):
        resolve_auto(config, Machine(1, True, True, **ANY))
    with pytest.raises(ConfigError, match=r"used with model\.attention_dropout"):  # whatever it chooses
        check_training(config.with_settings({"model.attention_dropout": 0.1}), 2)


def test_a_line_says_what_was_chosen_and_why():
    _, choices = resolve_auto(run(TP2 | CP2, 1), NODE)
    assert auto_note(choices) == [
        "chosen by auto: parallel.cp_comm_type a2a (the 6 heads of a tensor-parallel rank over ranks of one host); "
        "parallel.tp_comm_overlap false (train.micro_batch_size 1 is odd); "
        "parallel.symmetric_memory_groups [cp] (NVLink)"
    ]
    assert auto_note([]) == []


@pytest.mark.parametrize(
    "config, machine, reason",
    [
        (run(TP2), Machine(2, True, no_nvlink="one GPU is seen alone"), "groups [] (one GPU is seen alone)"),
        (run(TP2, 4), Machine(2, memory=10**11), "tp_comm_overlap false (layers are not compiled)"),
        (run(CP2), Machine(1), "p2p (no two of its ranks share a host)"),
        (run({"context_parallel_size": 3}), Machine(8), "p2p (CP 3 × TP 1 does not divide over hosts of 8 ranks)"),
        (
            run(CP4, num_attention_heads=3),
            Machine(8),
            "p2p (the heads of a tensor-parallel rank, 3, do not divide over 2 or 4 ranks of one host)",
        ),
    ],
)  # fmt: skip
def test_the_reason_that_is_given_is_the_true_one(config, machine, reason):
    _, choices = resolve_auto(config, replace(machine, **ANY))
    assert any(each.endswith(reason) for each in choices)


def test_every_choice_would_be_accepted_from_a_run_file():
    axes = itertools.product((1, 2), (1, 2, 4), (1, 2), (None, 2), ("1f1b", "zero_bubble"))
    for (tensor, context, pipeline, experts, schedule), per_host, micro in itertools.product(
        axes, (1, 2, 4, 8), (1, 2)
    ):
        if schedule == "zero_bubble" and pipeline == 1:
            continue
        sizes = dict(
            tensor_model_parallel_size=tensor, context_parallel_size=context, pipeline_schedule=schedule
        )
        config = run(sizes | {"pipeline_model_parallel_size": pipeline}, micro, num_experts=experts)
        found, _ = resolve_auto(config, Machine(per_host, True, True, **ANY))
        check_training(found, world_size=tensor * context * pipeline)
