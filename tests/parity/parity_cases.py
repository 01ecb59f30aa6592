"""What is trained: the features that a layout could get wrong, and which of them each layout shows by default."""

from __future__ import annotations

from typing import Any

from megalith.config import RunConfig
from megalith.parity.check import LAYOUTS
from megalith.training.run_state import Run

SEQUENCE = 32

GPT2 = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 131,
    "make_vocab_size_divisible_by": 10,  # 140 rows, 9 of them padding
    "max_position_embeddings": SEQUENCE,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
LLAMA = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 40,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "kv_channels": 6,
    "qk_layernorm": True,
    "vocab_size": 131,
    "make_vocab_size_divisible_by": 1,  # 131 rows: uneven over 2 and over 4
    "max_position_embeddings": SEQUENCE,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
BLOOM = GPT2 | {
    "position_embedding_type": "alibi",
    "embedding_layernorm": True,
    "num_attention_heads": 12,  # no power of two
    "kv_channels": 4,
}
BERT = GPT2 | {"model_type": "bert"}
MEGATRON_T5 = GPT2 | {"model_type": "t5"}
T5 = MEGATRON_T5 | {
    "position_embedding_type": "relative",
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 9,  # less than a sequence
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "query_pre_attn_scalar": 1,
    "scale_decoder_outputs": True,
}
POST_LN = {"apply_residual_connection_post_layernorm": True}
GEMMA = LLAMA | {
    "layernorm_epsilon": 1e-3,  # all that a norm divides by where a token's whole attention was dropped
    "untie_embeddings_and_output_weights": False,
    "window_size": [10, 0],
    "window_attn_skip_freq": 2,
    "rotary_base_local": 500.0,
    "query_pre_attn_scalar": 5,
    "qk_layernorm": False,
    "qk_l2_norm": True,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "output_z_loss_coeff": 0.05,
    "norm_placement": "sandwich",
    "layernorm_zero_centered_gamma": True,
    "scale_embeddings": True,
    "swiglu": False,
    "gated_linear_unit": True,
}
OLMO = LLAMA | {
    "norm_placement": "post",
    "qk_layernorm_full_width": True,
    "add_proj_bias": True,
    "add_mlp_bias": True,
    "rotary_percent": 0.7,  # 4 of 6 dimensions
    "rotary_interleaved": True,
    "no_rope_freq": 2,
    "rope_scaling": {
        "type": "longrope",
        "original_max_position_embeddings": SEQUENCE // 2
        + 1,  # longer than a rank's part, shorter than the whole
        "short_factor": [1.0, 2.0],
        "long_factor": [1.5, 4.0],
    },
}
NEOX = GPT2 | {"position_embedding_type": "rope", "rotary_percent": 0.25, "parallel_attn_mlp": True}
FALCON = NEOX | {
    "rotary_percent": 1.0,
    "num_query_groups": 2,
    "shared_layernorm": True,
    "add_bias_linear": False,
    "activation": "gelu",
    "add_output_bias": True,
    "add_norm_bias": False,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "softmax_scale": 0.3,
}
MOE = LLAMA | {
    "num_experts": 8,
    "moe_ffn_hidden_size": 24,
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
    "init_method_std": 0.06,  # so that no token's choice hangs on the last bit
}
LLAMA4 = MOE | {
    "moe_layer_freq": 2,
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_norm_topk_prob": False,
    "moe_apply_probs_on_input": True,
    "moe_shared_expert_intermediate_size": 24,
    "qk_layernorm": False,
    "qk_l2_norm": True,
    "qk_l2_norm_rope_only": True,
    "no_rope_freq": 3,
    "rotary_interleaved": True,
    "attention_chunk_size": 5,  # of documents, most of which are longer
    "query_scaling_beta": 0.5,
    "query_scaling_length": 4,
    "query_scaling_layers": "no_rope",
}
NANOCHAT = LLAMA | {
    "qk_layernorm": False,
    "qk_l2_norm": True,
    "add_norm_weight": False,
    "embedding_layernorm": True,
    "clip_qkv": 0.1,  # so low that some are clamped
    "swiglu": False,
    "activation": "xielu",
}
GPT_OSS = MOE | {
    "qk_layernorm": False,
    "softmax_type": "learnable",
    "window_size": [10, 0],
    "window_attn_skip_freq": 2,
    "swiglu": False,
    "gated_linear_unit": True,
    "activation": "quick_gelu",
    "activation_func_clamp_value": 0.05,  # so low that some are cut
    "glu_linear_offset": 1.0,
    "add_qkv_bias": True,
    "add_proj_bias": True,
    "add_mlp_bias": True,
    "add_router_bias": True,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "truncate": False,
    },
}
HYBRID = MOE | {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 6,
    "attention_output_gate": True,
    "layernorm_zero_centered_gamma": True,
    "num_query_groups": 2,
    "rotary_percent": 0.7,
    "moe_shared_expert_intermediate_size": 16,
    "moe_shared_expert_gate": True,
}
LATENT = {
    "multi_latent_attention": True,
    "num_query_groups": 0,
    "kv_channels": None,
    "qk_layernorm": False,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_head_dim": 5,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
}
DROPPING = {"moe_expert_capacity_factor": 0.75}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
TIED = {"untie_embeddings_and_output_weights": False}
UNTIED = {"untie_embeddings_and_output_weights": True}
# NullTokenizer's last token ends a document. The masked tokens lie unevenly over samples and over their halves.
DOCUMENTS = {
    "tokenizer_type": "NullTokenizer",
    "reset_position_ids": True,
    "reset_attention_mask": True,
    "eod_mask_loss": True,
}
CORPUS = "the prefix of an indexed dataset"  # replaced by the fixture's

# Sections over those of BASE. Every run clips but one, and accumulates gradients but for 4 data-parallel ranks.
RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "gpt2": {"model": GPT2},
    "gpt2 dropout": {"model": GPT2 | DROPOUT},
    "gpt2 untied, documents, dropout": {"model": GPT2 | UNTIED | DROPOUT, "data": DOCUMENTS},
    "gpt2 documents, recompute all": {
        "model": GPT2 | DROPOUT,
        "data": DOCUMENTS,
        "parallel": {"recompute_granularity": "full", "recompute_method": "uniform"},
    },
    "bloom documents, dropout": {"model": BLOOM | DROPOUT, "data": DOCUMENTS},
    "bert post-LN, dropout": {
        "model": BERT | POST_LN | DROPOUT,
        "train": {"calculate_per_token_loss": False},
    },
    "bert untied, recompute all": {
        "model": BERT
        | UNTIED
        | {
            "embedding_layernorm": True,
            "add_first_input_layernorm": False,
            "add_lm_head_dense_bias": False,
            "num_tokentypes": 3,
            "position_embedding_type": "rope",
            "rotary_base_local": 500.0,
            "window_size": [5, 3],
            "window_attn_skip_freq": 2,
        },
        "data": {"mask_prob": 0.4},
        "parallel": {"recompute_granularity": "full", "recompute_method": "uniform"},
    },
    "t5 dropout": {"model": T5 | DROPOUT, "data": {"decoder_seq_length": 24}},
    "t5 learned positions, untied, recompute all": {
        "model": MEGATRON_T5 | UNTIED | {"gated_linear_unit": True, "add_output_bias": True},
        "data": {"decoder_seq_length": 16},
        "parallel": {"recompute_granularity": "full", "recompute_method": "uniform"},
    },
    "gpt2 single sequences, ramp-up": {
        "model": GPT2,
        "train": {"micro_batch_size": 1, "rampup_batch_size": [4, 4, 4]},
    },
    "llama": {"model": LLAMA},
    "llama tied, documents": {"model": LLAMA | TIED, "data": DOCUMENTS},
    "llama dropout": {"model": LLAMA | DROPOUT},
    "llama one group, biases, no clipping": {
        "model": LLAMA | {"num_query_groups": 1, "add_bias_linear": True},
        "optim": {"clip_grad": 0.0},
    },
    "llama recompute some": {
        "model": LLAMA,
        "parallel": {
            "recompute_granularity": "selective",
            "recompute_modules": ["core_attn", "layernorm", "mlp"],
        },
    },
    "gemma documents, dropout": {"model": GEMMA | DROPOUT, "data": DOCUMENTS},
    "olmo recompute some": {
        "model": OLMO,
        "parallel": {
            "recompute_granularity": "selective",
            "recompute_modules": ["core_attn", "layernorm", "mlp"],
        },
    },
    "neox recompute some, dropout": {
        "model": NEOX | UNTIED | DROPOUT,
        "parallel": {
            "recompute_granularity": "selective",
            "recompute_modules": ["core_attn", "layernorm", "mlp"],
        },
    },
    "falcon documents": {"model": FALCON, "data": DOCUMENTS},
    "nanochat documents, dropout": {"model": NANOCHAT | DROPOUT, "data": DOCUMENTS},
    "moe": {"model": MOE},
    "deepseek documents": {
        "model": MOE
        | LATENT
        | {
            "moe_layer_freq": 2,
            "moe_router_topk": 4,
            "moe_router_score_function": "sigmoid",
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 2,
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.01,
            "moe_router_topk_scaling_factor": 2.0,
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_shared_expert_intermediate_size": 16,
            "moe_shared_expert_gate": True,
            "add_mlp_bias": True,
        },
        "data": DOCUMENTS,
    },
    "latent attention without norms, learned positions": {
        "model": GPT2
        | UNTIED
        | LATENT
        | {"position_embedding_type": "rope", "latent_layernorm": False, "add_position_embedding": True},
    },
    "moe dropping, dropout": {"model": MOE | DROPPING | DROPOUT | {"add_bias_linear": True}},
    "moe dropping by position, filled up": {
        "model": MOE
        | DROPPING
        | {
            "moe_token_drop_policy": "position",
            "moe_pad_expert_input_to_capacity": True,
            "add_mlp_bias": True,
        }
    },
    "gpt-oss documents": {"model": GPT_OSS, "data": DOCUMENTS},
    "llama4 documents, dropout": {"model": LLAMA4 | DROPOUT, "data": DOCUMENTS},
    "qwen3-next documents, dropout": {"model": HYBRID | DROPOUT, "data": DOCUMENTS},
    "multi-token prediction": {
        # 0.6: at 0.5 two experts' scores for one token came within 4e-7 of each other, and rounding chose
        "model": MOE | {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.6, "num_experts": 4} | DROPOUT,
        "data": DOCUMENTS,
    },
    "moe sinkhorn": {
        "model": MOE
        | {
            "moe_router_load_balancing_type": "sinkhorn",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_pre_softmax": True,
        }
    },
    "moe recompute all": {
        "model": MOE
        | {
            "moe_router_pre_softmax": True,
            "swiglu": False,
            "add_mlp_bias": True,
            "parallel_attn_mlp": True,
            "shared_layernorm": True,
            "moe_shared_expert_intermediate_size": 24,
            "moe_average_shared_expert": True,
        }
        | TIED,
        "parallel": {"recompute_granularity": "full", "recompute_method": "uniform"},
    },
    "llama lora, dropout": {
        "model": LLAMA | TIED | DROPOUT,
        "lora": {"rank": 3, "alpha": 7.0, "dropout": 0.2},
    },
    "gpt2 lora on some rows": {
        "model": GPT2,
        "lora": {"rank": 2, "targets": ["c_attn", "c_fc", "linear_proj"]},
    },
    "llama lora on some rows, one group": {
        "model": LLAMA | {"num_query_groups": 1},
        "lora": {"rank": 2, "targets": ["q_proj", "v_proj", "up_proj"]},
    },
    "llama text": {
        "model": LLAMA | {"vocab_size": None},
        "data": {
            "mock": False,
            "data_path": CORPUS,
            "split": "80,20,0",
            "tokenizer_type": "ByteTokenizer",
            "eod_mask_loss": True,
        },
    },
}
BASE: dict[str, dict[str, Any]] = {
    "data": {"mock": True, "seq_length": SEQUENCE, "num_workers": 0},
    "optim": {"lr": 3e-3, "clip_grad": 0.5},
    "train": {
        "train_iters": 10,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "eval_iters": 1,
        "seed": 171,  # no two ranks of a first batch with documents have as many masked tokens
    },
    "runtime": {"device": "cpu", "compile": False},
}

# The run that each layout is shown with by default: all features on each axis in turn.
SHOWN_WITH = {
    "tp2": "olmo recompute some",
    "tp4": "llama lora on some rows, one group",
    "tp2-sp": "gemma documents, dropout",
    "tp4-sp": "gpt2 untied, documents, dropout",
    "cp2": "llama4 documents, dropout",
    "cp2-all_gather": "gpt2 documents, recompute all",
    "cp2-a2a": "gpt2 untied, documents, dropout",
    "cp2-auto": "t5 dropout",
    "cp4": "gpt2 untied, documents, dropout",
    "cp4-all_gather": "llama tied, documents",
    "cp4-a2a": "llama one group, biases, no clipping",
    "cp4-a2a+p2p": "bert post-LN, dropout",
    "pp2": "gpt2 untied, documents, dropout",
    "pp4": "gpt2 dropout",
    "pp2-interleaved": "neox recompute some, dropout",
    "pp4-interleaved": "llama recompute some",
    "pp2-zero_bubble": "falcon documents",
    "pp4-zero_bubble": "gpt2 untied, documents, dropout",
    "pp2-uneven": "gpt2 documents, recompute all",
    "pp3-counted": "gpt2 single sequences, ramp-up",
    "pp4-uneven": "gpt2 dropout",
    "dp2": "llama text",
    "dp4": "gpt2 single sequences, ramp-up",
    "dp2-zero1": "gpt2 untied, documents, dropout",
    "dp4-zero1": "llama tied, documents",
    "dp2-zero2": "llama recompute some",
    "dp4-zero2": "gpt2 dropout",
    "dp2-zero3": "gpt2 documents, recompute all",
    "dp4-zero3": "llama one group, biases, no clipping",
    "dp4-zero1-hybrid": "gpt2 single sequences, ramp-up",
    "dp4-zero2-hybrid": "llama dropout",
    "dp4-zero3-hybrid": "gpt2",
    "tp2-cp2": "gpt2 untied, documents, dropout",
    "tp2-sp-cp2": "latent attention without norms, learned positions",
    "tp2-cp2-all_gather": "nanochat documents, dropout",
    "tp2-sp-cp2-a2a": "t5 learned positions, untied, recompute all",
    "tp2-pp2": "bert untied, recompute all",
    "tp2-sp-pp2": "gpt2 lora on some rows",
    "tp2-pp2-interleaved": "gpt2 single sequences, ramp-up",
    "tp2-sp-pp2-zero_bubble": "llama",
    "tp2-dp2": "gpt2 documents, recompute all",
    "tp2-sp-dp2-zero1": "llama text",
    "tp2-dp2-zero2": "llama one group, biases, no clipping",
    "tp2-sp-dp2-zero3": "bloom documents, dropout",
    "cp2-pp2": "falcon documents",
    "cp2-a2a-pp2-interleaved": "gpt2 dropout",
    "cp2-all_gather-pp2-zero_bubble": "gemma documents, dropout",
    "cp2-dp2": "gpt2 documents, recompute all",
    "cp2-a2a-dp2-zero1": "llama text",
    "cp2-dp2-zero2": "llama recompute some",
    "cp2-dp2-zero3": "olmo recompute some",
    "cp2-dp2-zero3-hybrid": "llama tied, documents",
    "pp2-dp2": "gpt2 untied, documents, dropout",
    "pp2-dp2-zero1": "llama tied, documents",
    "pp2-dp2-zero2": "gpt2",
    "pp2-dp2-zero3": "llama one group, biases, no clipping",
    "pp2-interleaved-dp2-zero2": "llama dropout",
    "pp2-zero_bubble-dp2-zero1": "llama lora, dropout",
    "tp2-pp2-dp2": "gpt2 dropout",
    "tp2-sp-pp2-dp2-zero1": "llama tied, documents",
    "tp2-pp2-interleaved-dp2-zero2": "llama recompute some",
    "tp2-sp-pp2-dp2-zero3": "gpt2 documents, recompute all",
    "tp2-sp-pp2-zero_bubble-dp2": "gpt2 untied, documents, dropout",
    "tp2-cp2-dp2": "llama text",
    "tp2-sp-cp2-a2a-dp2-zero1": "gpt2 documents, recompute all",
    "tp2-sp-cp2-dp2-zero2-hybrid": "llama tied, documents",
    "tp2-sp-cp2-all_gather-dp2-zero3": "gpt2 dropout",
    "tp2-cp2-pp2": "llama dropout",
    "tp2-sp-cp2-a2a-pp2-interleaved": "llama tied, documents",
    "tp2-sp-cp2-pp2-zero_bubble": "gpt2 untied, documents, dropout",
    "cp2-pp2-dp2": "gpt2 documents, recompute all",
    "cp2-a2a-pp2-interleaved-dp2-zero1": "gpt2 untied, documents, dropout",
    "cp2-all_gather-pp2-zero_bubble-dp2-zero1": "llama tied, documents",
    "cp2-pp2-dp2-zero3": "llama text",
    "tp4-sp-pp2": "gpt2 dropout",
    "cp4-a2a+p2p-dp2-zero2": "llama one group, biases, no clipping",
    "pp4-dp2-zero3": "llama tied, documents",
    "tp2-overlap": "olmo recompute some",
    "tp2-sp-overlap": "falcon documents",
    "tp4-sp-overlap": "gpt2 untied, documents, dropout",
    "cp2-a2a-overlap": "gpt2 untied, documents, dropout",
    "tp2-sp-cp2-a2a-overlap": "llama one group, biases, no clipping",
    "tp2-sp-cp2-overlap": "llama lora, dropout",
    "tp2-sp-pp2-overlap": "gpt2 dropout",
    "tp2-sp-dp2-zero3-overlap": "gpt2 documents, recompute all",
    "ep2": "moe recompute all",
    "ep4": "multi-token prediction",
    "ep2-allgather": "moe dropping by position, filled up",
    "ep2-static": "moe dropping, dropout",
    "ep4-zero3-static": "moe recompute all",
    "tp2-sp-etp2-ep2-static": "gpt-oss documents",
    "pp2-ep2-allgather-static": "deepseek documents",
    "ep2-dp4": "moe dropping, dropout",
    "ep2-dp4-zero1": "moe recompute all",
    "ep2-dp4-zero2-hybrid": "deepseek documents",
    "ep2-dp4-zero3": "moe dropping by position, filled up",
    "ep4-zero3": "moe sinkhorn",
    "tp2-ep2": "deepseek documents",
    "tp2-sp-ep2": "qwen3-next documents, dropout",
    "tp2-etp2": "moe dropping by position, filled up",
    "tp2-sp-etp2-ep2": "deepseek documents",
    "tp2-sp-etp2-ep2-allgather": "multi-token prediction",
    "cp2-ep2": "gpt-oss documents",
    "tp2-sp-cp2-a2a-ep4": "deepseek documents",
    "pp2-ep2": "moe",
    "pp2-interleaved-ep2-zero2": "multi-token prediction",
    "pp2-zero_bubble-tp2-sp-ep2": "moe dropping, dropout",
    "tp2-sp-ep8-zero1": "moe sinkhorn",
    "tp2-sp-pp2-dp2-ep4-zero1": "deepseek documents",
    "tp2-cp2-dp2-ep2-etp2-zero3": "moe dropping, dropout",
    "tp2-sp-cp2-pp2-ep2-etp2": "moe",
}

# Layouts that `make test` tries; `make test-all` tries the rest. They cover every axis, pipeline schedule, way of
# context parallelism, sharding strategy and dispatch of tokens, and every pair of axes. Of what is left out,
# test_moments_parity.py shows the hybrid, the triple and expert tensor parallelism, test_memory_parity.py uneven
# stages, experts with multi-token prediction and with dropped tokens, parallel/test_losses.py interleaved stages with
# all-to-all, parallel/test_pipeline.py four stages.
BY_DEFAULT = (
    "tp4", "cp2", "cp4-a2a+p2p", "pp2-interleaved", "pp3-counted", "cp2-auto",
    "tp2-sp-cp2", "tp2-pp2", "tp2-sp-dp2-zero3", "pp2-dp2-zero3", "cp2-all_gather-pp2-zero_bubble",
    "cp2-dp2-zero3", "pp2-zero_bubble-dp2-zero1", "tp2-sp-overlap", "tp2-cp2-all_gather",
    "ep2", "ep2-allgather", "tp2-sp-ep2", "cp2-ep2", "ep4-zero3",
)  # fmt: skip
# Runs whose features other runs of BY_DEFAULT have together: `make test-all` trains them too.
PARTS_OF_OTHERS = {
    "gpt2", "gpt2 dropout", "llama", "llama dropout", "moe", "llama recompute some", "gpt2 lora on some rows",
    "gpt2 documents, recompute all", "t5 learned positions, untied, recompute all", "llama tied, documents",
    "llama text",
}  # fmt: skip


def run_config(run: str, layout: str | None, corpus: str, **changes: dict[str, Any]) -> RunConfig:
    """The run in a layout, None being one process, with `changes` of single settings by section."""
    parallel = LAYOUTS[layout].parallel if layout else {}
    tree: dict[str, dict[str, Any]] = {section: {} for section in RunConfig.model_fields}
    for part in (BASE, RUNS[run], {"parallel": parallel}, changes):
        for section, settings in part.items():
            tree[section] |= settings
    if tree["data"].get("data_path") == CORPUS:
        tree["data"]["data_path"] = corpus
    return RunConfig.from_tree(tree)


def layers(layout: str) -> int:
    """How many layers the model has in this layout: 2, to be quick, where its stages can be made of them, else 4."""
    parallel = LAYOUTS[layout].parallel
    cut_finely = {
        "virtual_pipeline_model_parallel_size",
        "decoder_first_pipeline_num_layers",
        "pipeline_model_parallel_layout",
    }
    return 4 if parallel.get("pipeline_model_parallel_size", 1) > 2 or cut_finely & parallel.keys() else 2


def samples(layout: str) -> int:
    """In a global batch: two micro-batches where neither stages nor data-parallel ranks share them, else four."""
    parallel = LAYOUTS[layout].parallel
    ranks = parallel.get("tensor_model_parallel_size", 1) * parallel.get("context_parallel_size", 1)
    return 4 if LAYOUTS[layout].processes == ranks else 8


def train(job: Run, steps: int) -> list[float]:
    """The losses of so many steps."""
    with job.data.train_loader(job.step, job.consumed_samples, job.device) as batches:
        return [job.train_step(batches).loss.item() for _ in range(steps)]
