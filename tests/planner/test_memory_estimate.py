"""The memory estimate: exact bytes a parameter, and activations near what was measured."""

import pytest

from megalith.config import ParallelConfig, RunConfig
from megalith.config.model import ModelConfig
from megalith.config.presets import PRESETS
from megalith.ops.loss_chunks import loss_chunk_tokens
from megalith.planner.counts import MetaModel, count_parameters
from megalith.planner.layout import build_layout
from megalith.planner.saved_activations import saved_activations

ONE_LAYER = dict(
    num_layers=10, hidden_size=64, num_attention_heads=4, vocab_size=100, max_position_embeddings=1024
)
LARGE = PRESETS["gpt2-large"]


def expected(model, batch=1, seq=1024, devices=1, micro_batches=2, stage=0, **sections):
    """The memory of a device of a stage, in bf16."""
    train = dict(train_iters=1, micro_batch_size=batch, precision="bf16") | sections.pop("train", {})
    parallel = sections.pop("parallel", {})
    replicas = devices
    for size in ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size"):
        replicas //= parallel.get(size, 1)
    train["global_batch_size"] = batch * replicas * micro_batches
    data = dict(mock=True, seq_length=seq) | sections.pop("data", {})
    tree = {"model": dict(model), "train": train, "data": data, "parallel": parallel, **sections}
    return build_layout(RunConfig.from_tree(tree), devices).stages[stage].memory


def total(model):
    return count_parameters(ModelConfig(**model)).total


def in_layers(model):
    meta = MetaModel(ModelConfig(**model))
    return meta.in_layers(meta.layer_numbers)


def _activations(**parallel):
    devices = parallel.get("tensor_model_parallel_size", 1)
    memory = expected(ONE_LAYER, devices=devices, parallel=parallel)
    return (memory.activations // (2 * 1024) - 3 * 64) / 64  # widths a token in the layers


def test_mixed_precision_with_adam_takes_18_bytes_a_parameter():
    memory = expected(LARGE)
    state = memory.total - memory.activations - memory.loss
    assert state == pytest.approx(18 * total(LARGE), rel=1e-3)


def test_fp32_keeps_no_second_copy_and_sgd_one_moment():
    memory = expected(LARGE, train=dict(precision="fp32"), optim=dict(optimizer="sgd"))
    assert memory.compute_copy == 0
    assert memory.total - memory.activations - memory.loss == 12 * total(LARGE)


def test_batch_invariant_training_holds_a_gradient_per_level_of_its_tree():
    model = LARGE | dict(hidden_dropout=0.0, attention_dropout=0.0)
    invariant = dict(batch_invariant=True, precision="fp32")
    for batch, devices, micro_batches, gradients in ((1, 1, 1, 1), (8, 1, 1, 4), (2, 4, 3, 4), (2, 1, 4, 4)):
        memory = expected(model, batch, 64, devices, micro_batches, train=invariant)
        if gradients > 1:
            assert memory.gradients == gradients * 4 * total(model)
        assert expected(model, batch, 64, devices, 2, train=dict(precision="fp32")).gradients == 4 * total(
            model
        )
    sharded = dict(data_parallel_sharding_strategy="optim_grads")
    memory = expected(model, 2, 64, 4, 2, train=invariant, parallel=sharded)
    assert memory.gradients < 4 * total(model)
    for stage in (0, 1):
        zero_bubble, ordinary = (
            expected(
                model | dict(untie_embeddings_and_output_weights=True),
                1,
                64,
                2,
                4,
                stage,
                train=invariant,
                parallel=dict(pipeline_model_parallel_size=2, pipeline_schedule=schedule),
            )
            for schedule in ("zero_bubble", "1f1b")
        )
        head = model["vocab_size"] * model["hidden_size"] if stage == 1 else 0
        assert zero_bubble.gradients == pytest.approx(ordinary.gradients + 4 * head, rel=1e-3)


# Widths a token that a layer keeps, counted from the tensors that it saves: docs/parallelism/memory.md.
GPT = MetaModel(ModelConfig(**ONE_LAYER))
LLAMA = MetaModel(ModelConfig(**ONE_LAYER, ffn_hidden_size=192, swiglu=True, position_embedding_type="rope"))
SAVED = [
    # recomputed           GPT compiled, not; Llama compiled
    ([], 16, 16, 17),
    (["core_attn"], 15, 16, 16),
    (["layernorm"], 14, 16, 15),
    (["mlp"], 8, 8, 8),
    (["mlp_act"], 12, 16, 14),
    (["layernorm", "mlp_act"], 10, 16, 12),
    (["layernorm", "mlp"], 6, 8, 6),
]


@pytest.mark.parametrize("recomputed, gpt, eager, llama", SAVED)
def test_layer_keeps_what_its_saved_tensors_hold(recomputed, gpt, eager, llama):
    assert saved_activations(GPT, recomputed=recomputed) == gpt * 64
    assert saved_activations(GPT, compiled=False, recomputed=recomputed) == eager * 64
    assert saved_activations(LLAMA, recomputed=recomputed) == llama * 64


def test_tensor_parallelism_cuts_heads_and_mlp_and_with_sequence_parallelism_the_norms_too():
    cut = GPT.on_rank(ParallelConfig(tensor_model_parallel_size=4))
    with_sp = GPT.on_rank(ParallelConfig(tensor_model_parallel_size=4, sequence_parallel=True))
    assert saved_activations(cut) == (4 + 12 / 4) * 64
    assert saved_activations(with_sp, compiled=False) == 16 / 4 * 64
    assert saved_activations(with_sp) == (2 + 14 / 4) * 64  # gathered tokens are kept
    shards = ParallelConfig(tensor_model_parallel_size=4, sequence_parallel=True, save_gathered_inputs=False)
    assert saved_activations(GPT.on_rank(shards)) == 16 / 4 * 64


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


def _mask_bytes(documents=True, layers=2, sequences=1, seq=8192, parallel=None, devices=1, width=2, **model):
    """What documents or a window add."""
    fields = dict(PRESETS["llama3-8b"], num_layers=layers) | model

    def activations(fields, documents):
        data, train = dict(reset_attention_mask=documents), dict(precision={2: "bf16", 4: "fp32"}[width])
        return expected(
            fields, sequences, seq, devices, micro_batches=1, parallel=parallel or {}, data=data, train=train
        ).activations

    return activations(fields, documents) - activations(dict(fields, window_size=None), False)


def test_documents_and_windows_take_nothing_where_the_kernel_has_them():
    assert _mask_bytes() == _mask_bytes(False, window_size=[99, 0]) == 0
    for way in ("a2a", "p2p"):
        shards = dict(context_parallel_size=4, cp_comm_type=way)
        assert _mask_bytes(parallel=shards, devices=4, window_size=[99, 0]) == 0


def test_a_mask_takes_bytes_of_its_scores_and_repeated_heads_in_one_layer_at_a_time():
    scores, repeated = 8192**2, 2 * 8192 * 4096
    assert _mask_bytes(documents=False, width=4) == 0
    assert _mask_bytes(width=4) == (2 + 4) * scores + 2 * 4 * repeated
    assert _mask_bytes(layers=30, width=4) == _mask_bytes(width=4)
    assert _mask_bytes(num_query_groups=32, width=4) == 6 * scores
    assert _mask_bytes(sequences=3, width=4) == 3 * _mask_bytes(width=4)
    assert _mask_bytes(False, window_size=[99, 0], sequences=3, width=4) == 6 * scores + 2 * 4 * 3 * repeated
    assert _mask_bytes(False, window_size=[8191, 0], width=4) == 0
    dropping = [_mask_bytes(attention_dropout=0.1, layers=n) for n in (1, 30)]
    assert dropping[0] == 4 * scores + 2 * 2 * repeated
    assert dropping[1] == dropping[0] + 29 * 2 * (scores + repeated)  # whose bias and heads every layer keeps


def test_a_mask_of_a_part_of_the_heads_or_of_the_sequence_takes_its_part():
    scores, repeated = 8192**2, 2 * 8192 * 4096
    assert (
        _mask_bytes(parallel=dict(tensor_model_parallel_size=4), devices=4, width=4)
        == 6 * scores + 2 * repeated
    )
    exchanged = dict(context_parallel_size=4, cp_comm_type="a2a")
    assert _mask_bytes(parallel=exchanged, devices=4, width=4) == 6 * scores + 2 * repeated
    ring = dict(context_parallel_size=4, cp_comm_type="p2p")
    assert _mask_bytes(parallel=ring, devices=4, width=4) == 6 * scores // 16 + 2 * repeated
    dropping = _mask_bytes(
        False, layers=1, parallel=ring, devices=4, window_size=[99, 0], attention_dropout=0.1
    )
    assert dropping == 4 * scores // 16 + repeated


def test_activations_that_wait_in_host_memory_leave_one_layer_on_the_device():
    assert _activations(cpu_offloading_num_layers=4) == (6 + 1) * 16
    assert _activations(cpu_offloading_num_layers=10, recompute_granularity="full") == 1 + 16


@pytest.mark.parametrize(
    "strategy, bytes_a_parameter",
    [("no_shard", 18), ("optim", 6 + 12 / 8), ("optim_grads", 2 + 16 / 8), ("optim_grads_params", 16 / 8)],
)
def test_sharding_takes_the_bytes_of_its_page(strategy, bytes_a_parameter):
    model = dict(
        num_layers=100, hidden_size=1024, num_attention_heads=8, vocab_size=128, max_position_embeddings=128
    )
    memory = expected(model, 1, 128, 8, parallel=dict(data_parallel_sharding_strategy=strategy))
    state = memory.total - memory.activations - memory.loss
    assert state / total(model) == pytest.approx(bytes_a_parameter, abs=0.12)  # and a layer or two


def test_of_whole_experts_one_layer_is_cast_at_a_time():
    model = PRESETS["qwen3-30b-a3b"]
    cast, plain = (
        expected(model, 1, 4096, train=dict(precision=precision)).compute_copy
        for precision in ("bf16", "fp32")
    )
    parts = in_layers(model)
    dense = parts.total() - parts["experts"] + count_parameters(ModelConfig(**model)).head
    assert plain == 0
    assert cast == 2 * (parts["experts"] // model["num_layers"] + dense)


def test_experts_that_are_cast_once_a_step_stay_while_gradients_come():
    model = dict(PRESETS["qwen3-30b-a3b"], num_layers=8)
    once, each = (
        expected(model, 1, 1024, micro_batches=1, train=dict(moe_cache_weights=cached))
        for cached in (True, False)
    )
    assert once.total - each.total > 0.8 * 2 * in_layers(model)["experts"]


def test_offloaded_optimizer_state_is_not_on_the_device():
    optim = dict(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
    assert expected(LARGE, optim=optim).optimizer == expected(LARGE).optimizer // 2


def test_weights_of_mlps_that_are_recomputed_are_cast_again_and_not_kept():
    kept, again, norms = (
        expected(
            LARGE, parallel=dict(recompute_granularity="selective", recompute_modules=modules)
        ).compute_copy
        for modules in (["mlp_act"], ["mlp"], ["layernorm", "mlp"])
    )
    mlp = 2 * 1280 * 5120 + 5120 + 1280
    assert kept - again == 2 * 35 * mlp and norms == again  # one layer's is there while it is recomputed


def test_gradients_of_the_only_micro_batch_come_as_activations_go():
    """One micro-batch of many activations has no gradients at its fullest moment; of few, those beyond them."""
    alone, more = (expected(LARGE, 32, micro_batches=count) for count in (1, 2))
    assert alone.gradients == 0 and more.gradients == 4 * total(LARGE)
    few, others = (expected(LARGE, 1, 64, micro_batches=count) for count in (1, 2))
    assert few.gradients == others.gradients - few.activations - few.loss - few.compute_copy > 0


def test_logits_count_in_full_for_a_small_batch_and_a_chunk_of_them_for_a_large_one():
    def logits(micro_batch_size):
        return expected(LARGE, micro_batch_size).loss - 4 * 50304 * 1280

    assert logits(1) == 2 * 1024 * 50304  # in bf16; their gradient takes their place
    assert logits(4) == logits(32) == 2 * loss_chunk_tokens(50304) * 50304 < 2 * 5 * 2**25
    llama = expected(LARGE | dict(vocab_size=128256), 32).loss - 4 * 128256 * 1280
    assert llama == 2 * 4096 * 128256  # a large vocabulary has larger chunks


def test_a_last_unit_of_recomputed_layers_that_is_not_full_keeps_its_input_too():
    units = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=3)
    assert _activations(**units) == 4 + 3 * 16  # of 10 layers


def test_sharded_gradients_take_a_shard_and_the_layer_that_is_being_reduced():
    parallel = dict(data_parallel_sharding_strategy="optim_grads")
    gradients = expected(ONE_LAYER, devices=4, parallel=parallel).gradients
    assert gradients == total(ONE_LAYER) + (2 + 4) * in_layers(ONE_LAYER).total() // 10


@pytest.mark.parametrize(("layers", "stay", "gathered"), [(1, 0, 1), (10, 0, 2), (10, 3, 5), (10, 9, 10)])
def test_two_layers_are_gathered_at_a_time_beside_those_that_stay(layers, stay, gathered):
    model = ONE_LAYER | dict(num_layers=layers)
    parallel = dict(data_parallel_sharding_strategy="optim_grads_params", fsdp_unsharded_layers=stay)
    all_layers = in_layers(model).total()
    copies = 2 * gathered * all_layers // layers + 4 * (total(model) - all_layers) + 2 * 128 * 64
    assert expected(model, devices=4, parallel=parallel).compute_copy == copies


def test_ranks_that_an_expert_is_cut_over_gather_each_others_tokens():
    model = MetaModel(ModelConfig(**ONE_LAYER, num_experts=4, moe_router_topk=2, swiglu=True))
    whole, cut = (
        model.on_rank(
            ParallelConfig(
                tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=etp
            )
        )
        for etp in (1, 2)
    )
    more = saved_activations(cut) - saved_activations(whole)
    assert more == 2 * 64 / 2  # of each pair of a token and an expert the row, which is as wide on both


def test_fp8_saves_a_byte_of_what_matrices_take_and_of_weights():
    model = ONE_LAYER | dict(ffn_hidden_size=192, swiglu=True, position_embedding_type="rope")
    hybrid = dict(fp8_format="hybrid")
    plain, fp8 = expected(model), expected(model, train=hybrid)
    # both norms' outputs and fc2's input take a byte less, proj's input one more than attention's output alone
    layer = 2 * 64 + 192 - 64
    assert plain.activations - fp8.activations == 10 * 1024 * layer
    assert fp8.compute_copy - plain.compute_copy == -in_layers(model).total()
    ends = hybrid | dict(first_last_layers_bf16=True, num_layers_at_end_in_bf16=4)
    assert plain.activations - expected(model, train=ends).activations == 5 * 1024 * layer
    kept = expected(model, train=hybrid | dict(fp8_wgrad=False))
    assert kept.activations == plain.activations
    wide = expected(model, train=hybrid | dict(precision="fp32"))
    assert wide.compute_copy == in_layers(model).total()
    sharded = dict(data_parallel_sharding_strategy="optim_grads_params")
    assert (
        expected(model, devices=2, parallel=sharded, train=hybrid).compute_copy
        == expected(model, devices=2, parallel=sharded).compute_copy
    )


def test_codes_of_a_step_take_two_bytes_of_a_weight_in_place_of_what_is_gathered():
    model = ONE_LAYER | dict(ffn_hidden_size=192, swiglu=True, position_embedding_type="rope")
    weights = in_layers(model).total()

    def more(counted: int = 0, precision: str = "bf16", **parallel) -> int:
        train, log = dict(fp8_format="hybrid", precision=precision), dict(log_fp8_interval=counted)
        once, at_use = (
            expected(
                model, devices=2, parallel=parallel, train=train | dict(fp8_cache_weights=value), log=log
            )
            for value in (True, False)
        )
        return once.compute_copy - at_use.compute_copy

    assert more(data_parallel_sharding_strategy="no_shard") == 2 * weights - weights
    for strategy in ("optim", "optim_grads"):  # cast at use a byte is saved to the backward pass
        sharded = dict(data_parallel_sharding_strategy=strategy)
        assert more(**sharded) == (2 - 2) * weights - weights
        assert more(**sharded, precision="fp32") == (2 - 4) * weights - weights
        assert more(**sharded, counted=10) == 2 * weights - weights  # what is counted stays
    for stay in (0, 3, 10):
        sharded = dict(data_parallel_sharding_strategy="optim_grads_params", fsdp_unsharded_layers=stay)
        assert more(**sharded) == 0
        assert more(**sharded, counted=10) == 2 * weights * stay // 10


def test_pairs_of_preferences_are_two_rows_and_their_reference_a_second_model():
    data = dict(mock=False, data_path="x")

    def found(**sections):
        return expected(ONE_LAYER | dict(attention_dropout=0.0), data=data, **sections)

    plain, pairs = found(), found(dpo=dict(enabled=True))
    assert (pairs.activations, pairs.weights) == (2 * plain.activations, 2 * plain.weights)
    adapted = found(dpo=dict(enabled=True), lora=dict(rank=4))
    assert adapted.weights == found(lora=dict(rank=4)).weights
    rollouts = found(rl=dict(rollouts="x", beta=0.1))
    assert (rollouts.activations, rollouts.weights) == (plain.activations, 2 * plain.weights)
    assert found(rl=dict(rollouts="x")) == plain


def test_a_frozen_base_is_stored_in_bf16_and_what_fsdp_gathers_comes_on_top():
    def found(rank=4, **sections):
        return expected(LARGE, lora=dict(rank=rank), **sections)

    adapters = 2 * (found().weights - found(2).weights)  # bytes, of rank 4
    whole = total(LARGE)
    assert (found().weights, found().compute_copy) == (2 * whole + adapters, 0)
    assert found().gradients == adapters  # none of the base
    wide = found(train=dict(precision="fp32"))
    assert (wide.weights, wide.compute_copy) == (4 * whole + adapters, 0)
    zero = found(devices=2, parallel=dict(data_parallel_sharding_strategy="optim"))
    assert zero.weights == (2 * whole + adapters) // 2 and zero.compute_copy > 0
