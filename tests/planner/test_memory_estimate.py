"""The memory estimate: exact bytes a parameter, and activations near what was measured."""

import pytest
from torch.distributed.tensor import Shard

from megalith.config import ParallelConfig
from megalith.config.model import ModelConfig
from megalith.config.presets import PRESETS
from megalith.models.norm import HeadsNorm
from megalith.models.transformer import Transformer
from megalith.parallel.tensor.tensor_parallel import HEADS_NORM, ROLES, SHARED_QKV
from megalith.planner.flops import count_parameters
from megalith.planner.layer_sizes import layer_size
from megalith.planner.memory import (
    Cuts,
    Share,
    expected_memory,
    layer_activations,
    outside_parameters,
)

ONE_LAYER = dict(
    num_layers=10, hidden_size=64, num_attention_heads=4, vocab_size=100, max_position_embeddings=1024
)


def _gpt2_large():
    return ModelConfig(**PRESETS["gpt2-large"])


def _share(**parallel):
    return Share(parallel=ParallelConfig(**parallel))


def _activations(**parallel):
    memory = expected_memory(ModelConfig(**ONE_LAYER), 1, 1024, "bf16", share=_share(**parallel))
    return (memory.activations // (2 * 1024) - 3 * 64) / 64  # widths a token in the layers


def test_mixed_precision_with_adam_takes_18_bytes_a_parameter():
    memory = expected_memory(_gpt2_large(), 1, 1024, "bf16", "adamw")
    state = memory.total - memory.activations - memory.loss
    assert state == pytest.approx(18 * count_parameters(_gpt2_large()).total, rel=1e-3)


def test_fp32_keeps_no_second_copy_and_sgd_one_moment():
    memory = expected_memory(_gpt2_large(), 1, 1024, "fp32", "sgd")
    assert memory.compute_copy == 0
    assert memory.total - memory.activations - memory.loss == 12 * count_parameters(_gpt2_large()).total


@pytest.mark.parametrize("preset", ["gpt2-large", "llama3-8b", "qwen3-0.6b", "qwen3-8b"])
def test_layers_and_what_is_outside_make_up_the_model(preset):
    model = ModelConfig(**PRESETS[preset])
    whole = model.num_layers * layer_size(model, False).total + outside_parameters(model)
    assert whole == count_parameters(model).total


BIASED = {"add_mlp_bias": True, "add_qkv_bias": True, "add_proj_bias": True}
SHARED = {"moe_shared_expert_intermediate_size": 48, "moe_shared_expert_gate": True, "add_mlp_bias": True}
SHAPES = {
    "gpt": PRESETS["tiny-gpt"],
    "llama, biases": PRESETS["tiny-llama"] | BIASED,
    "norms over all heads": PRESETS["tiny-llama"] | {"qk_layernorm": True, "qk_layernorm_full_width": True},
    "mixtral, biases": PRESETS["tiny-mixtral"] | BIASED | SHARED,
    "deepseek, biases": PRESETS["tiny-deepseek"] | {"q_lora_rank": 24} | SHARED,
}


@pytest.mark.parametrize("tensor", [1, 2, 4])  # 4 ranks share the groups of some
@pytest.mark.parametrize("shape", SHAPES)
def test_a_rank_is_said_to_hold_what_its_cuts_leave_it(shape, tensor):
    model = ModelConfig(**{**SHAPES[shape], "vocab_size": 100, "max_position_embeddings": 64})
    for number, layer in Transformer(model, device="meta").layers.items():
        dense = experts = 0
        for name, parameter in layer.named_parameters():
            module, _, kind = name.rpartition(".")
            role = ROLES[module.rpartition(".")[2]]
            if module.endswith("linear_qkv") and model.query_groups < tensor:
                role = SHARED_QKV
            if isinstance(layer.get_submodule(module), HeadsNorm):
                role = HEADS_NORM
            if ".experts." in name:
                experts += parameter.numel() // 4
            else:
                dense += parameter.numel() // (tensor if isinstance(getattr(role, kind), Shard) else 1)
        size = layer_size(model, int(number) in model.expert_layers, tensor, 4)
        assert (size.dense, size.experts) == (dense, experts)


# Widths a token that a layer keeps, counted from the tensors that it saves: docs/parallelism/memory.md.
GPT = ModelConfig(**ONE_LAYER)
LLAMA = ModelConfig(**ONE_LAYER, ffn_hidden_size=192, swiglu=True, position_embedding_type="rope")
SAVED = [
    # recomputed           GPT compiled, not; Llama compiled
    ([], 16, 16, 19),
    (["core_attn"], 15, 16, 18),
    (["layernorm"], 14, 16, 17),
    (["mlp"], 8, 8, 10),
    (["layernorm", "mlp"], 7, 8, 9),
]


@pytest.mark.parametrize("recomputed, gpt, eager, llama", SAVED)
def test_layer_keeps_what_its_saved_tensors_hold(recomputed, gpt, eager, llama):
    assert layer_activations(GPT, recomputed=recomputed) == gpt * 64
    assert layer_activations(GPT, compiled=False, recomputed=recomputed) == eager * 64
    assert layer_activations(LLAMA, recomputed=recomputed) == llama * 64


def test_tensor_parallelism_cuts_heads_and_mlp_and_with_sequence_parallelism_the_norms_too():
    assert layer_activations(GPT, Cuts(tensor=4)) == (4 + 12 / 4) * 64
    assert layer_activations(GPT, Cuts(tensor=4, sequence=4), compiled=False) == 16 / 4 * 64
    assert layer_activations(GPT, Cuts(tensor=4, sequence=4)) == (2 + 14 / 4) * 64  # gathered tokens are kept


def test_recomputation_keeps_inputs_and_one_unit():
    assert _activations() == 10 * 16
    assert _activations(recompute_granularity="full") == 10 + 16
    assert _activations(recompute_granularity="full", recompute_num_layers=5) == 2 + 5 * 16
    block = dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=4)
    assert _activations(**block) == 4 + (6 + 1) * 16
    mlp = dict(recompute_granularity="selective", recompute_modules=["mlp"])
    assert _activations(**mlp) == 10 * 16 - 9 * 8
    full = dict(recompute_granularity="full", tensor_model_parallel_size=2)
    assert _activations(**full) - _activations(**full, distribute_saved_activations=True) == 10 / 2


def _mask_bytes(documents=True, layers=2, sequences=1, seq=8192, parallel=None, **model):
    """What a mask adds, in bf16."""
    fields = dict(PRESETS["llama3-8b"], num_layers=layers) | model
    parallel = ParallelConfig(**parallel or {})

    def activations(fields, **share):
        share = Share(parallel, **share)
        return expected_memory(ModelConfig(**fields), sequences, seq, share=share).activations

    return activations(fields, documents=documents) - activations(dict(fields, window_size=None))


def test_a_mask_takes_bytes_of_its_scores_and_repeated_heads_in_one_layer_at_a_time():
    scores, repeated = 8192**2, 2 * 8192 * 4096
    assert _mask_bytes(documents=False) == 0
    assert _mask_bytes() == (1 + 2 + 2) * scores + 2 * 2 * repeated
    assert _mask_bytes(layers=30) == _mask_bytes()
    assert _mask_bytes(num_query_groups=32) == 5 * scores
    assert _mask_bytes(sequences=3) == 3 * _mask_bytes()
    assert _mask_bytes(False, window_size=[99, 0], sequences=3) == 4 * scores + 2 * 2 * 3 * repeated
    assert _mask_bytes(False, window_size=[8191, 0]) == 0
    dropping = _mask_bytes(attention_dropout=0.1, layers=30)  # whose bias and heads every layer keeps
    assert dropping == _mask_bytes() + 29 * 2 * (scores + repeated)


def test_a_mask_of_a_part_of_the_heads_or_of_the_sequence_takes_its_part():
    scores, repeated = 8192**2, 2 * 8192 * 4096
    assert _mask_bytes(parallel=dict(tensor_model_parallel_size=4)) == 5 * scores + repeated
    exchanged = dict(context_parallel_size=4, cp_comm_type="a2a")
    assert _mask_bytes(parallel=exchanged) == 5 * scores + repeated
    ring = dict(context_parallel_size=4, cp_comm_type="p2p")
    assert _mask_bytes(parallel=ring) == 4 * scores // 16 + repeated


def test_activations_that_wait_in_host_memory_leave_one_layer_on_the_device():
    assert _activations(cpu_offloading_num_layers=4) == (6 + 1) * 16
    assert _activations(cpu_offloading_num_layers=10, recompute_granularity="full") == 1 + 16


@pytest.mark.parametrize(
    "strategy, bytes_a_parameter",
    [("no_shard", 18), ("optim", 6 + 12 / 8), ("optim_grads", 2 + 16 / 8), ("optim_grads_params", 16 / 8)],
)
def test_sharding_takes_the_bytes_of_its_page(strategy, bytes_a_parameter):
    model = ModelConfig(
        num_layers=100, hidden_size=1024, num_attention_heads=8, vocab_size=128, max_position_embeddings=128
    )
    parallel = ParallelConfig(data_parallel_sharding_strategy=strategy)
    sharded = strategy != "no_shard"
    share = Share(parallel=parallel, fsdp=sharded, shards=8 if sharded else 1)
    memory = expected_memory(model, 1, 128, "bf16", share=share)
    state = memory.total - memory.activations - memory.loss
    each = state / count_parameters(model).total
    assert each == pytest.approx(bytes_a_parameter, abs=0.12)  # and a layer or two


def test_of_whole_experts_one_layer_is_cast_at_a_time():
    model = ModelConfig(**PRESETS["qwen3-30b-a3b"])
    experts = layer_size(model, True).experts
    cast, plain = (expected_memory(model, 1, 4096, precision) for precision in ("bf16", "fp32"))
    head = model.padded_vocab_size * model.hidden_size
    dense = model.num_layers * layer_size(model, True).dense
    assert plain.compute_copy == 0
    assert cast.compute_copy == 2 * (experts + dense + head)


def test_offloaded_optimizer_state_is_not_on_the_device():
    half = expected_memory(_gpt2_large(), 1, 1024, share=Share(offloaded=0.5)).optimizer
    assert half == expected_memory(_gpt2_large(), 1, 1024).optimizer // 2


@pytest.mark.parametrize(
    "parallel, batch, data, gigabytes",
    [  # benchmarks/RESULTS.md: GPT-2-large with 16 heads, bf16, compiled, one micro-batch on H200
        ({}, 64, 1, 109.5),
        ({}, 32, 2, 60.7),
        (dict(data_parallel_sharding_strategy="optim_grads_params"), 32, 2, 54.8),
        (dict(tensor_model_parallel_size=2), 64, 1, 67.4),
        (dict(tensor_model_parallel_size=2, sequence_parallel=True), 64, 1, 61.3),
        (dict(context_parallel_size=2), 64, 2, 61.8),
    ],
)
def test_estimate_is_at_most_five_percent_above_what_gpus_measured(parallel, batch, data, gigabytes):
    model = ModelConfig(**{**PRESETS["gpt2-large"], "num_attention_heads": 16})
    shards = data if "data_parallel_sharding_strategy" in parallel else 1
    share = Share(ParallelConfig(**parallel), fsdp=shards > 1, shards=shards, accumulates=False)
    memory = expected_memory(model, batch, 1024, share=share)
    assert 1.0 <= memory.total / (gigabytes * 1e9) <= 1.05


def test_logits_count_in_full_for_a_small_batch_and_a_chunk_of_them_for_a_large_one():
    def logits(micro_batch_size):
        return expected_memory(_gpt2_large(), micro_batch_size, 1024, "bf16").loss - 4 * 50304 * 1280

    assert logits(1) == 8 * 1024 * 50304
    assert logits(2) == logits(32) == 8 * 2**26


def test_a_last_unit_of_recomputed_layers_that_is_not_full_keeps_its_input_too():
    units = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=3)
    assert _activations(**units) == 4 + 3 * 16  # of 10 layers


def test_sharded_gradients_take_a_shard_and_the_layer_that_is_being_reduced():
    share = Share(ParallelConfig(data_parallel_sharding_strategy="optim_grads"), fsdp=True, shards=4)
    gradients = expected_memory(GPT, 1, 1024, "bf16", share=share).gradients
    assert gradients == count_parameters(GPT).total + (2 + 4) * layer_size(GPT, False).total


@pytest.mark.parametrize(("layers", "gathered"), [(1, 1), (10, 2)])
def test_two_layers_are_gathered_at_a_time_where_there_are_two(layers, gathered):
    parallel = ParallelConfig(data_parallel_sharding_strategy="optim_grads_params")
    share = Share(parallel, layers=layers, fsdp=True, shards=4)
    head = GPT.padded_vocab_size * GPT.hidden_size
    expected = 2 * gathered * layer_size(GPT, False).total + 4 * outside_parameters(GPT) + 2 * head
    assert expected_memory(GPT, 1, 1024, "bf16", share=share).compute_copy == expected


def test_ranks_that_an_expert_is_cut_over_gather_each_others_tokens():
    model = ModelConfig(**ONE_LAYER, num_experts=4, moe_router_topk=2, swiglu=True)
    whole, cut = (Cuts(tensor=2, experts=2, expert_tensor=etp) for etp in (1, 2))
    more = layer_activations(model, cut, has_experts=True) - layer_activations(model, whole, has_experts=True)
    assert more == 2 * 64 / 2  # of each pair of a token and an expert the row, which is as wide on both
