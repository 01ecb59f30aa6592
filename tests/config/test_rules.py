"""Settings that cannot stand together are refused with their values, the rule and the way out."""

import pytest

from megalith.config import RunConfig
from megalith.config.rules.parallel_rules import check_context
from megalith.config.rules.run_rules import check_training
from megalith.errors import ConfigError

COMPLETE = {
    "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100},
    "data": {"mock": True, "seq_length": 32},
    "train": {"train_iters": 10, "micro_batch_size": 2, "global_batch_size": 8},
    "optim": {"lr": 1e-3},
}  # fmt: skip

MOE = {"num_experts": 4, "add_bias_linear": False}
DELTA = {"experimental_attention_variant": "gated_delta_net"}
ROPE = {"position_embedding_type": "rope"}
IMPOSSIBLE = [
    ({"model": {"num_layers": None}}, "model.num_layers is not set; set it, or choose a model.preset: tiny-gpt"),
    ({"model": {"vocab_size": None}}, r"model\.vocab_size is not set, and there is no tokenizer"),
    ({"model": {"hidden_size": 65}}, "hidden_size 65 is not divisible by model.num_attention_heads 4.*kv_channels"),
    ({"model": {"num_query_groups": 3}}, "num_attention_heads 4 is not divisible by model.num_query_groups 3"),
    ({"model": {"num_query_groups": 8}}, "num_attention_heads 4 is not divisible by model.num_query_groups 8"),
    ({"model": {**MOE, "parallel_attn_mlp": True}}, "num_experts is 4, but experts in parallel .*need one norm"),
    ({"model": {"norm_placement": "post", "parallel_attn_mlp": True}}, "attn_mlp is True, but it requires .*pre"),
    (
        {"model": {"add_proj_bias": True, "proj_bias_in_last_layer_only": True, "multi_latent_attention": True}},
        "multi_latent_attention is True, but only decoders with ordinary attention",
    ),
    ({"model": {"add_first_input_layernorm": False}}, "requires model.embedding_layernorm .* or model.apply_residual_"),
    ({"model": {"shared_layernorm": True}}, "shared_layernorm is True, but it requires model.parallel_attn_mlp"),
    ({"model": {**ROPE, "kv_channels": 15}}, "15 of a head's 15 are rotary"),
    ({"model": {**ROPE, "rotary_percent": 0.2}}, "3 of a head's 16 are rotary .*rotary_percent 0.2.*number is even"),
    ({"model": {"rotary_percent": 0.5}}, "rotary_percent is 0.5, but it requires model.position_embedding_type rope"),
    ({"model": {**ROPE, "no_rope_freq": [1]}}, "no_rope_freq has 1 numbers, but model.num_layers is 2"),
    ({"model": {**ROPE, "rotary_base_local": 1e4}}, "base_local is 10000.0, but it requires model.window_size"),
    ({"model": {**ROPE, "rope_scaling": {"type": "longrope", "short_factor": [1.0]}}}, "short_factor has 1 .*8 pairs"),
    ({"model": {"window_size": [7, 1]}}, r"lets a query attend to 1 later tokens.*set model.window_size to \[7, 0\]"),
    ({"model": {"window_size": [7, 0], "window_attn_skip_freq": [1]}}, "has 1 numbers, but model.num_layers is 2"),
    ({"model": {"window_attn_skip_freq": 2}}, r"is 2, but it requires model\.window_size, which is not set; meet the"),
    ({"model": {"glu_linear_offset": 1.0}}, "glu_linear_offset is 1.0, but the MLP has no gate; set model.gated_lin"),
    ({"model": {"swiglu": True, "activation": "relu"}}, "activation is relu, but model.swiglu gates the MLP by silu"),
    ({"model": {"qk_layernorm": True, "qk_l2_norm": True}}, "it requires model.qk_layernorm false, which is True"),
    ({"model": {"query_pre_attn_scalar": 5, "softmax_scale": 0.5}}, "query_pre_attn_scalar left out, which is 5"),
    ({"model": {"softmax_type": "learnable"}}, "with model.attention_dropout 0.1; set model.attention_dropout to 0.0"),
    ({"model": {**DELTA, "linear_attention_freq": [1]}}, "linear_attention_freq has 1 numbers, but model.num_l"),
    ({"model": {**DELTA, "linear_num_key_heads": 5}}, "linear_num_value_heads 32 is not divisible by .*key_heads 5"),
    ({"model": {**DELTA, "model_type": "bert"}}, "model_type is bert, which a gated delta .*model.model_type to gpt"),
    ({"model": {**DELTA, "linear_norm_placement": "pre", "parallel_attn_mlp": True}},
     "linear_norm_placement is pre, but it requires model.parallel_attn_mlp false"),
    ({"model": {"experimental_attention_variant": "kimi_delta_attention", "linear_num_value_heads": 16,
                "linear_allow_neg_eigval": True}},
     "linear_allow_neg_eigval is True, but it requires .*gated_delta_net"),
    ({"model": {"linear_key_head_dim": 64}},
     "requires model.experimental_attention_variant gated_delta_net or kimi_delta_attention, "),
    ({"model": {"num_experts": 4}, "lora": {"rank": 2, "dropout": 0.1}}, "not supported with adapters on experts"),
    ({"model": {"num_experts": 4}, "lora": {"rank": 2, "targets": ["router"]}}, "has router, but routers"),
    ({"lora": {"rank": 2, "dropout": 0.1, "use_dora": True}}, "use_dora with lora.dropout 0.1 is not supported"),
    ({"model": {"num_experts": 4}, "lora": {"rank": 2, "use_dora": True}}, "use_dora with adapters on experts is not"),
    ({"lora": {"rank": 2, "targets": ["experts"]}}, "has experts, which this model does not have; use"),
    ({"lora": {"rank": 2, "layers_to_transform": [99]}}, "layers_to_transform has 99, but the layers are numbered"),
    ({"model": {"qk_layernorm_full_width": True}}, "requires model.qk_layernorm true, which is False"),
    ({"model": {"rope_scaling": {"factor": 2}}}, "it requires model.position_embedding_type rope, which is learned"),
    ({"model": {**ROPE, "rope_scaling": {"low_freq_factor": 5}}}, "low_freq_factor 5.0 is above .*high_freq"),
    ({"model": {**ROPE, "rope_scaling": {"type": "yarn", "beta_fast": 0.5}}}, "1.0 is above .*beta_fast 0.5"),
    ({"lora": {"rank": 2, "targets": ["q_pro"]}}, "lora.targets has 'q_pro', which is not .*; did you mean 'q_proj'"),
    ({"lora": {"rank": 2, "targets": ["gate_proj"]}}, "has gate_proj, but the MLP has no gate"),
    ({"lora": {"rank": 2, "targets": ["c_attn", "q_proj"]}}, "names both the fused matrix linear_qkv and parts of it"),
    ({"lora": {"alpha": 2}}, (r"lora\.alpha is 2\.0, but it requires lora\.rank, which is not set; meet the "
"requirement, or leave lora.alpha out")),
    ({"checkpoint": {"export_hf": True, "save_at_end": False}}, "requires checkpoint.save_at_end true, which is False"),
    ({"lora": {"rank": 2}, "checkpoint": {"export_hf": True}}, "export_hf writes a full model, but with lora.rank 2"),
    ({"model": {"max_position_embeddings": 16}}, "seq_length 32 is longer than model.max_position_embeddings 16"),
    ({"data": {"mock": False}}, "there is nothing to train on; set data.data_path"),
    ({"data": {"data_path": "a"}}, "data.mock and data.data_path are set, but .* leave out all but one"),
    ({"data": {"mock": False, "data_path": "a", "train_data_path": "b"}}, "data_path and data.train_data_path are set"),
    ({"data": {"mock": False, "valid_data_path": "b"}}, r"valid_data_path is set, but data\.train_data_path is not"),
    ({"train": {"train_iters": None}}, "train.train_iters is None and train.train_samples is None; set exactly one"),
    ({"train": {"train_samples": 80}}, "train.train_iters is 10 and train.train_samples is 80; set exactly one"),
    ({"train": {"global_batch_size": None}}, r"global_batch_size is not set.*micro_batch_size \(2\) × data parallel"),
    ({"train": {"global_batch_size": 7}}, r"\(7\) is not a multiple of micro_batch_size \(2\) × data parallel \(1\) ="),
    ({"train": {"rampup_batch_size": [3, 1, 50]}}, r"the start of train.rampup_batch_size \(3\) is not a multiple"),
    ({"train": {"rampup_batch_size": [16, 2, 50]}}, r"\[16, 2, 50\] starts above train.global_batch_size \(8\)"),
    ({"train": {"rampup_batch_size": [2, 4, 50]}}, "8 − 2 = 6 is not divisible by the increment 4"),
    ({"optim": {"lr": None}}, r"optim\.lr is not set.*the peak learning rate,"),
    ({"log": {"profile": True, "profile_step_end": 3}}, "profile_step_end 3 is not after log.profile_step_start 10"),
    ({"parallel": {"recompute_method": "block"}}, "method is block, but it requires .*full, which is not set"),
    ({"parallel": {"recompute_method": "block", "recompute_granularity": "selective"}}, "full, which is selective"),
    ({"parallel": {"distribute_saved_activations": True}}, "requires .*granularity full, which is not set"),
    ({"parallel": {"distribute_saved_activations": True, "recompute_granularity": "full"}}, "parallel_size 1 and"),
    ({"parallel": {"recompute_granularity": "full", "recompute_saves_attention": True}}, "used with .*dropout 0.1"),
    ({"parallel": {"sequence_parallel": True}}, "requires parallel.tensor_model_parallel_size above 1, which is 1"),
    ({"parallel": {"hierarchical_context_parallel_sizes": [2, 2]}}, r"requires parallel.cp_comm_type a2a\+p2p"),
    ({"model": {"mtp_num_layers": 1}}, "mtp_num_layers is 1, but it requires model.position_embedding_type rope"),
    ({"data": {"tokenizer_model": "x"}}, "tokenizer_model is x, but it requires data.tokenizer_type, which is not set"),
    ({"parallel": {"tensor_model_parallel_size": 2}}, r"world size 1 .*tensor \(2\)"),
    ({"parallel": {"pipeline_model_parallel_size": 2, "context_parallel_size": 2}}, r"pipeline \(2\) × context \(2\)"),
]  # fmt: skip


def tree_with(changes):
    return {s: {**COMPLETE.get(s, {}), **changes.get(s, {})} for s in COMPLETE.keys() | changes.keys()}


def test_the_complete_run_that_each_case_changes_is_possible():
    check_training(RunConfig.from_tree(COMPLETE))


@pytest.mark.parametrize(("changes", "sentence"), IMPOSSIBLE, ids=[str(c)[:60] for c, _ in IMPOSSIBLE])
def test_an_impossible_combination_is_refused_with_its_values(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_training(RunConfig.from_tree(tree_with(changes)))


def test_windows_on_both_sides_need_an_all_to_all() -> None:
    model = {"model_type": "bert", "window_size": [4, 4]}
    for kind in ("p2p", "all_gather", "a2a"):
        parallel = {"context_parallel_size": 2, "cp_comm_type": kind}
        config = RunConfig.from_tree(tree_with({"model": model, "parallel": parallel}))
        if kind == "a2a":
            check_context(config.model, config.parallel, 32)
            continue
        with pytest.raises(
            ConfigError, match=f"is {kind}, but windows on both sides of a token .* only with a2a"
        ):
            check_context(config.model, config.parallel, 32)


ENCODER = {"model_type": "bert", "position_embedding_type": "learned_absolute"}
IMPOSSIBLE_FOR_AN_ENCODER = [
    (
        {"window_size": [7, 0]},
        {},
        r"window_size \[7, 0\] lets a query attend only to earlier tokens, but with model.model_type bert",
    ),
    (
        {"position_embedding_type": "alibi"},
        {},
        "alibi, which requires causal attention, .* to learned_absolute or sinusoidal or rope",
    ),
    (
        {"add_pooler": False},
        {},
        "bert_binary_head reads the pooler's output, but model.add_pooler is false",
    ),
    ({"add_lm_head": False}, {}, r"model\.add_lm_head is false, but predicting masked tokens"),
    ({}, {"data": {"mask_prob": 0.03}}, "mask_prob 0.03 × .data.seq_length .* no token would ever be masked"),
    ({}, {"data": {"reset_attention_mask": True}}, (r"data\.reset_attention_mask requires a "
"decoder-only model,")),
    (
        {},
        {"sft": {"enabled": True}, "data": {"mock": False, "data_path": "a"}},
        (r"sft\.enabled requires a decoder-only model, "
r"but model\.model_type is bert"),
    ),
    ({"model_type": "t5", "window_size": [7, 7]}, {}, r"window_size is \[7, 7\], but encoder-decoders"),
    (
        {"model_type": "gpt", "bert_binary_head": True, "window_size": [7, 1]},
        {},
        r"attend to 1 later tokens, but .* gpt are causal; set model\.window_size to \[7, 0\]",
    ),
    (
        {"model_type": "gpt", "add_lm_head": False},
        {},
        "add_lm_head is False, but it requires model.model_type bert",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("model", "others", "sentence"), IMPOSSIBLE_FOR_AN_ENCODER)
def test_what_an_encoder_cannot_have_is_refused(model, others, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_training(RunConfig.from_tree(tree_with({"model": ENCODER | model, **others})))


def test_an_encoder_decoder_masks_no_words_so_its_sequences_may_be_short():
    model = {
        "model_type": "t5",
        "num_layers": 2,
        "encoder_num_layers": 1,
        "position_embedding_type": "relative",
    }
    check_training(RunConfig.from_tree(tree_with({"model": model, "data": {"seq_length": 8}})))


IMPOSSIBLE_WITH_EXPERTS = [  # of the model, of parallel, the number of processes
    ({"moe_router_topk": 5}, {}, 1, "moe_router_topk 5 is more than model.num_experts 4"),
    ({"moe_layer_freq": [1]}, {}, 1, "has 1 entries, 1 of them 1, and model.num_layers is 2"),
    ({"moe_layer_freq": [0, 0]}, {}, 1, "with at least one 1"),
    ({"moe_pad_expert_input_to_capacity": True}, {}, 1, "requires model.moe_expert_capacity_factor, which is not set"),
    ({"moe_shared_expert_gate": True}, {}, 1, "requires model.moe_shared_expert_intermediate_size, which is not set"),
    ({"activation": "xielu"}, {}, 1, "xielu do not support; set model.num_experts to null"),
    ({"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.1}, {}, 1, "is sinkhorn and .*0.1, but"),
    ({"moe_router_score_function": "sparsemixer", "moe_router_pre_softmax": True}, {}, 1, "is sparsemixer and .*True"),
    ({"moe_router_num_groups": 2}, {}, 1, "num_groups is 2 and model.moe_router_group_topk None"),
    ({"moe_router_num_groups": 3, "moe_router_group_topk": 1}, {}, 1, "groups must divide the number of experts"),
    ({"moe_router_num_groups": 4, "moe_router_group_topk": 1}, {}, 1, "topk 1 × 1 experts per group = 1, fewer than"),
    ({}, {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}, 2, "a pipeline stage has 1 rank "),
    ({}, {"expert_model_parallel_size": 2}, 3, r"a pipeline stage has 3 ranks .*expert \(2\)"),
    ({"num_experts": 6}, {"expert_model_parallel_size": 4}, 4, "6 is not divisible by .*size 4.*among 1, 2, 3, 6"),
    ({"moe_ffn_hidden_size": 33}, {"expert_tensor_parallel_size": 2}, 2, "moe_ffn_hidden_size 33 is not divisible"),
    ({"num_experts": None}, {"expert_model_parallel_size": 2}, 2, "is 2, but it requires model.num_experts"),
    ({"num_experts": None}, {"expert_tensor_parallel_size": 2}, 2, "is 2, but it requires model.num_experts"),
    ({"hidden_size": 33, "num_attention_heads": 3}, {"expert_model_parallel_size": 2}, 2, "hidden_size 33 is odd"),
]  # fmt: skip
POSSIBLE_WITH_EXPERTS = [
    ({"moe_layer_freq": [0, 1]}, {}, 1),
    ({"moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": 1.0}, {}, 1),
    ({"moe_shared_expert_gate": True, "moe_shared_expert_intermediate_size": 8}, {}, 1),
    ({"moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_topk": 2}, {}, 1),
    ({}, {"expert_model_parallel_size": 2}, 2),
    ({}, {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 4),
    ({"hidden_size": 62, "num_attention_heads": 1}, {"expert_model_parallel_size": 2}, 2),
    ({"hidden_size": 33, "num_attention_heads": 3}, {}, 1),
]


def run_with_experts(model, parallel):
    model = {"model": {**MOE, **model}, "parallel": parallel, "train": {"global_batch_size": 24}}
    return RunConfig.from_tree(tree_with(model))


@pytest.mark.parametrize(("model", "parallel", "size", "sentence"), IMPOSSIBLE_WITH_EXPERTS)
def test_experts_that_cannot_be_are_refused_with_their_values(model, parallel, size, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_training(run_with_experts(model, parallel), size)


@pytest.mark.parametrize(("model", "parallel", "size"), POSSIBLE_WITH_EXPERTS)
def test_experts_that_can_be_are_taken(model, parallel, size):
    check_training(run_with_experts(model, parallel), size)


@pytest.mark.parametrize("copies", [2, 3])
def test_copies_of_shards_need_shards(copies):
    config = RunConfig.from_tree(tree_with({"parallel": {"num_distributed_optimizer_instances": copies}}))
    with pytest.raises(ConfigError, match=f"instances is {copies}, but .*which is no_shard"):
        check_training(config)
