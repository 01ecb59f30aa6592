"""The mesh stands as its docstring says, and sizes that do not divide are refused with the arithmetic."""

from dataclasses import asdict

import pytest
import torch.distributed as dist

from megalith.config import ModelConfig, ParallelConfig
from megalith.config.rules.parallel_rules import check_tensor, data_parallel_size
from megalith.errors import ConfigError
from megalith.parallel.mesh import build_mesh

AXES = ("pp", "dp", "cp", "tp", "dp_cp", "tied")


def layout(tp: int = 1, pp: int = 1, cp: int = 1, strategy: str = "optim") -> ParallelConfig:
    return ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        data_parallel_sharding_strategy=strategy,
    )


def members(parallel: ParallelConfig, shard_size: int | None) -> dict:
    """The global ranks along each axis of this rank, its place among them, and its coordinates."""
    mesh = build_mesh(parallel, dist.get_world_size(), "cpu", shard_size)
    me = dist.get_rank()
    seen = {}
    for name in AXES:
        axis = getattr(mesh, name)
        seen[name] = dist.get_process_group_ranks(axis.group) if axis.group else [me]
        assert len(seen[name]) == axis.size and seen[name][axis.rank] == me
    place = asdict(mesh.describe(me))
    assert place == {name: getattr(mesh, name).rank for name in place}
    return seen | {"fsdp": mesh.fsdp and mesh.fsdp.mesh.tolist(), "world": mesh.world.size}


def test_tensor_is_fastest_and_data_and_context_make_one_axis(pool):
    ranks = pool.run(members, layout(tp=2, cp=2), None)
    assert [rank["tp"] for rank in ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [rank["cp"] for rank in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [rank["fsdp"] for rank in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [rank["dp"] for rank in ranks] == [[0], [1], [2], [3]]
    assert ranks[0]["world"] == 4


def test_pipeline_is_slowest(pool):
    ranks = pool.run(members, layout(pp=2), None)
    assert [rank["pp"] for rank in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [rank["dp"] for rank in ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [rank["tied"] for rank in ranks] == [rank["pp"] for rank in ranks]


def test_a_tied_embedding_joins_the_first_and_the_last_stage(pool):
    ranks = pool.run(members, layout(pp=4), None)
    assert [rank["tied"] for rank in ranks] == [[0, 3], [1], [2], [0, 3]]


def test_without_sharding_every_rank_holds_a_copy(pool):
    ranks = pool.run(members, layout(strategy="no_shard"), None)
    assert ranks[0]["fsdp"] is None
    assert ranks[1]["dp_cp"] == [0, 1, 2, 3]


def test_hybrid_sharding_shards_inside_and_copies_across(pool):
    ranks = pool.run(members, layout(cp=2), 2)
    assert ranks[3]["fsdp"] == [[0, 1], [2, 3]]
    assert ranks[3]["dp_cp"] == [0, 1, 2, 3]


def group_names(parallel: ParallelConfig) -> dict[str, str]:
    mesh = build_mesh(parallel, dist.get_world_size(), "cpu", has_experts=True)
    return {name: getattr(mesh, name).group.group_name for name in ("dp_cp", "ep") if getattr(mesh, name).group} | {
        "cp": mesh.cp.group.group_name if mesh.cp.group else None, "world": mesh.world.group.group_name
    }  # fmt: skip


def test_tokens_are_not_exchanged_in_the_group_of_the_gradients(pool):
    """Where both have all ranks: NCCL would run their collectives one after the other."""
    for names in pool.run(group_names, layout().model_copy(update={"expert_model_parallel_size": 4})):
        assert names["ep"] not in (names["dp_cp"], names["world"])
    for names in pool.run(group_names, layout(cp=4)):
        assert names["cp"] not in (names["dp_cp"], names["world"])


def test_one_process_needs_no_process_group():
    mesh = build_mesh(layout(), 1, "cpu")
    assert mesh.fsdp is None and all(getattr(mesh, name).size == 1 for name in AXES)


def test_a_world_that_does_not_divide_is_refused_with_the_arithmetic_and_a_way_out():
    assert data_parallel_size(layout(tp=2, pp=2, cp=2), 16) == 2
    with pytest.raises(ConfigError) as refusal:
        build_mesh(layout(tp=8, pp=4), 16, "cpu")
    assert str(refusal.value) == (
        "world size 16 is not divisible by tensor (8) × pipeline (4) × context (1) = 32; lower "
        "pipeline_model_parallel_size to 2, or start 32 processes"
    )
    with pytest.raises(ConfigError, match="lower context_parallel_size to 1, or start 4 processes"):
        data_parallel_size(layout(tp=2, cp=2), 2)
    with pytest.raises(ConfigError, match=r"= 64; start 64 processes"):
        data_parallel_size(layout(tp=4, pp=4, cp=4), 2)


MODEL = ModelConfig(
    num_layers=2,
    hidden_size=48,
    num_attention_heads=6,
    num_query_groups=3,
    vocab_size=151,
    ffn_hidden_size=96,
)


@pytest.mark.parametrize(
    "model, parallel, seq_length, sentence",
    [
        (
            {},
            {"tensor_model_parallel_size": 4},
            32,
            "num_attention_heads 6 is not divisible .* among 1, 2, 3, 6",
        ),
        (
            {"ffn_hidden_size": 97},
            {"tensor_model_parallel_size": 3},
            32,
            "ffn_hidden_size 97 is not divisible",
        ),
        (
            {},
            {"tensor_model_parallel_size": 2},
            32,
            "num_query_groups 3 and .* 2: one must divide the other",
        ),
        (
            {"make_vocab_size_divisible_by": 1, "vocab_size": 4},
            {"tensor_model_parallel_size": 3},
            32,
            "none are left for the last of 3",
        ),
        ({}, {"tensor_model_parallel_size": 3, "sequence_parallel": True}, 32, "shards the 32 tokens"),
        (
            {"attention_output_gate": True, "num_query_groups": 1},
            {"tensor_model_parallel_size": 2},
            32,
            "requires complete groups of query heads on each rank, but .*size 2 does not divide the 1",
        ),
        (
            {"experimental_attention_variant": "gated_delta_net", "linear_num_key_heads": 4},
            {"tensor_model_parallel_size": 3},
            32,
            "linear_num_key_heads 4 is not divisible by .*size 3, but .*among 1, 2, 4",
        ),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(model, parallel, seq_length, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_tensor(MODEL.model_copy(update=model), ParallelConfig(**parallel), seq_length)
