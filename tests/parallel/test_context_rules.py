"""What context parallelism cannot cut is refused with the values, the rule and a way out that works."""

import re

import pytest

from megalith.config import ModelConfig, ParallelConfig, RunConfig
from megalith.config.rules.auto_settings import Machine, resolve_auto
from megalith.config.rules.parallel_rules import check_context
from megalith.config.rules.run_rules import check_training
from megalith.errors import ConfigError

MODEL = ModelConfig(num_layers=1, hidden_size=48, num_attention_heads=12, num_query_groups=2)


def refusal(seq_length: int = 64, **parallel) -> str:
    with pytest.raises(ConfigError) as refused:
        check_context(MODEL, ParallelConfig(**parallel), seq_length)
    return str(refused.value)


@pytest.mark.parametrize("kind", ["p2p", "all_gather", "a2a"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_divides_is_taken(kind, size):
    check_context(MODEL, ParallelConfig(context_parallel_size=size, cp_comm_type=kind), 64)


@pytest.mark.parametrize("kind", ["p2p", "a2a", "a2a+p2p"])
def test_one_rank_takes_any_length(kind):
    check_context(MODEL, ParallelConfig(cp_comm_type=kind), 37)


@pytest.mark.parametrize("seq_length, size", [(1000, 8), (100, 6), (6, 8), (37, 2)])
def test_every_way_out_of_a_length_that_cannot_be_cut_works(seq_length, size):
    message = refusal(seq_length, context_parallel_size=size)
    assert f"seq_length {seq_length}" in message and f"= {2 * size} equal" in message
    lengths, lower = re.search(r"a length of ([\d or]+), or a context size of (\d+)", message).groups()
    for length in lengths.split(" or "):
        check_context(MODEL, ParallelConfig(context_parallel_size=size), int(length))
    check_context(MODEL, ParallelConfig(context_parallel_size=int(lower)), seq_length)


@pytest.mark.parametrize("kind", ["p2p", "all_gather"])
def test_what_exchanges_no_heads_takes_any_number_of_them(kind):
    model = MODEL.model_copy(update={"num_attention_heads": 3, "num_query_groups": 3})
    check_context(model, ParallelConfig(context_parallel_size=2, cp_comm_type=kind), 64)


def test_heads_that_cannot_be_exchanged():
    message = refusal(context_parallel_size=8, cp_comm_type="a2a")
    assert "among 8 ranks" in message and "1, 2, 3, 4, 6, 12" in message
    message = refusal(context_parallel_size=4, cp_comm_type="a2a", tensor_model_parallel_size=2)
    assert "divide the 6 heads" in message and "tensor_model_parallel_size 2" in message


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"parallel.cp_comm_type": "p2p"},
            "cp_comm_type p2p supports only sequences that .* set parallel.cp_comm_type to a2a",
        ),
        (
            {"data.decoder_seq_length": 10},
            "decoder_seq_length 10 cannot be split .* 8 or 12, or a context size of 1",
        ),
        ({"model.num_attention_heads": 3}, r"does not divide the 3 heads .* choose among 1, 3$"),
        ({}, ""),
        ({"parallel.cp_comm_type": "a2a"}, ""),
    ],
)
def test_an_encoder_decoder_exchanges_heads_and_both_of_its_sequences_are_cut(settings, words):
    model = dict(model_type="t5", num_layers=2, hidden_size=48, num_attention_heads=4, vocab_size=50)
    tree = {"model": model, "data": {"mock": True, "seq_length": 16, "decoder_seq_length": 12},
            "train": {"train_iters": 1, "micro_batch_size": 1, "global_batch_size": 1}, "optim": {"lr": 1e-3},
            "parallel": {"context_parallel_size": 2}}  # fmt: skip
    config = RunConfig.from_tree(tree).with_settings(settings)
    if words:
        with pytest.raises(ConfigError, match=words):
            check_training(config, 2)
    else:
        check_training(config, 2)
        assert resolve_auto(config, Machine(ranks_per_host=1))[0].parallel.cp_comm_type == "a2a"


@pytest.mark.parametrize("sizes", [None, [2, 2], [8, 2]])
def test_the_sizes_of_both_levels_have_to_multiply_to_the_context_size(sizes):
    arguments = dict(context_parallel_size=8, cp_comm_type="a2a+p2p")
    message = refusal(**arguments, hierarchical_context_parallel_sizes=sizes)
    assert str(sizes) in message
    example = [int(size) for size in re.search(r"example to \[(\d+), (\d+)\]", message).groups()]
    check_context(MODEL, ParallelConfig(**arguments, hierarchical_context_parallel_sizes=example), 64)


def test_chunks_shorter_than_a_convolution_are_refused():
    model = MODEL.model_copy(
        update={"experimental_attention_variant": "gated_delta_net", "linear_conv_kernel_dim": 6}
    )
    check_context(model, ParallelConfig(context_parallel_size=2), 64)
    with pytest.raises(
        ConfigError, match=r"size 8 gives each rank chunks of 4 tokens, but a convolution reads 5 earlier"
    ):
        check_context(model, ParallelConfig(context_parallel_size=8), 64)
