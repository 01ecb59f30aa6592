"""Cases of reference.py for families with experts whose settings or layers no other family has."""

from collections.abc import Callable

import transformers
from models.tiny import DEEPSEEK, LINEAR_ROPE, LLAMA, OUR_DEEPSEEK, OURS, VOCAB

OUR_COHERE_MOE = dict(OURS, kv_channels=24, parallel_attn_mlp=True, shared_layernorm=True, rotary_interleaved=True,
                      layernorm_epsilon=1e-5, logits_scaling=4.0,
                      untie_embeddings_and_output_weights=False)  # fmt: skip
DBRX = dict(vocab_size=VOCAB, d_model=64, n_heads=4, n_layers=3, max_seq_len=256)
OUR_DBRX = dict(OURS, ffn_hidden_size=40, normalization="LayerNorm", add_norm_bias=False, layernorm_epsilon=1e-5,
                hidden_dropout=0.0)  # fmt: skip
OUR_SPARSEMIXER = dict(OURS, normalization="LayerNorm", layernorm_epsilon=1e-5, num_experts=6, moe_router_topk=2,
                       moe_router_score_function="sparsemixer")  # fmt: skip
EIGHT_FACTORS = dict(short_factor=[1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5],
                     long_factor=[1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 8.0, 9.0],
                     original_max_position_embeddings=64)  # fmt: skip

EXPERT_CASES: dict[str, tuple[Callable, dict]] = {
    "phimoe": (
        lambda: transformers.PhimoeConfig(**LLAMA, num_local_experts=6, router_jitter_noise=0.2, attention_bias=True,
                                          lm_head_bias=True, sliding_window=11),
        dict(OUR_SPARSEMIXER, moe_sparsemixer_jitter_eps=0.2, rotary_base=1e6, window_size=[10, 0], add_qkv_bias=True,
             add_proj_bias=True, add_output_bias=True),
    ),
    "phimoe, longrope": (
        lambda: transformers.PhimoeConfig(
            **LLAMA, num_local_experts=6, tie_word_embeddings=True, rope_parameters=dict(
                EIGHT_FACTORS, rope_type="longrope", rope_theta=1e4, short_mscale=1.243, long_mscale=1.243)),
        dict(OUR_SPARSEMIXER, rotary_base=1e4, untie_embeddings_and_output_weights=False,
             rope_scaling=dict(EIGHT_FACTORS, type="longrope", factor=4.0, attention_factor=1.243)),
    ),
    "axk1": (
        lambda: transformers.AXK1Config(**{k: v for k, v in DEEPSEEK.items() if k != "first_k_dense_replace"},
                                        mlp_layer_types=["sparse", "dense", "sparse"], q_lora_rank=36, n_group=4,
                                        topk_group=2, pad_token_id=None),
        dict(OUR_DEEPSEEK, q_lora_rank=36, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
             moe_router_num_groups=4, moe_router_group_topk=2, moe_router_topk_scaling_factor=2.5,
             moe_layer_freq=[1, 0, 1], moe_post_layernorm=True, layernorm_epsilon=1e-6),
    ),
    "cohere2-moe": (
        lambda: transformers.Cohere2MoeConfig(
            **LLAMA, head_dim=24, num_experts=6, num_experts_per_tok=3, num_shared_experts=2, sliding_window=11,
            layer_types=["full_attention", "sliding_attention", "full_attention"], prefix_dense_intermediate_size=80,
            mlp_layer_types=["dense", "sparse", "sparse"], expert_selection_fn="sigmoid", logit_scale=0.25),
        dict(OUR_COHERE_MOE, num_experts=6, moe_router_topk=3, ffn_hidden_size=80, moe_ffn_hidden_size=112,
             window_size=[10, 0], window_attn_skip_freq=[0, 1, 0], no_rope_freq=[0, 0, 1], moe_layer_freq=[0, 1, 1],
             moe_router_score_function="sigmoid", moe_shared_expert_intermediate_size=224,
             moe_average_shared_expert=True, normalization="LayerNorm", add_norm_bias=False),
    ),
    "cohere2-moe, RMSNorm, softmax": (
        lambda: transformers.Cohere2MoeConfig(
            **LLAMA, head_dim=24, num_experts=4, num_experts_per_tok=2, num_shared_experts=1, sliding_window=11,
            shared_expert_combination_strategy="sum", first_k_dense_replace=2,
            prefix_dense_sliding_window_pattern=2, rms_norm_eps=1e-5, attention_bias=True, logit_scale=0.25,
            tie_word_embeddings=False),
        dict(OUR_COHERE_MOE, num_experts=4, moe_router_topk=2, ffn_hidden_size=112, moe_ffn_hidden_size=112,
             window_size=[10, 0], window_attn_skip_freq=[1, 0, 1], no_rope_freq=[0, 1, 0], moe_layer_freq=[0, 0, 1],
             moe_shared_expert_intermediate_size=112, add_qkv_bias=True, add_proj_bias=True,
             untie_embeddings_and_output_weights=True),
    ),
    "dbrx": (
        lambda: transformers.DbrxConfig(**DBRX, attn_config=dict(kv_n_heads=2, clip_qkv=0.4, rope_theta=1e4),
                                        ffn_config=dict(ffn_hidden_size=40, moe_num_experts=6, moe_top_k=3)),
        dict(OUR_DBRX, num_query_groups=2, clip_qkv=0.4, num_experts=6, moe_router_topk=3),
    ),
    "dbrx, one head of keys, weights of a sum below 1": (
        lambda: transformers.DbrxConfig(**DBRX, resid_pdrop=0.1, emb_pdrop=0.1, rope_parameters=LINEAR_ROPE,
                                        attn_config=dict(kv_n_heads=1, clip_qkv=0.7, attn_pdrop=0.2, rope_theta=1e4),
                                        ffn_config=dict(ffn_hidden_size=40, moe_num_experts=4, moe_top_k=2,
                                                        moe_normalize_expert_weights=None)),
        dict(OUR_DBRX, num_query_groups=1, num_experts=4, moe_router_topk=2, moe_router_pre_softmax=True,
             clip_qkv=0.7, hidden_dropout=0.1, attention_dropout=0.2, rope_scaling=dict(type="linear", factor=2.0)),
    ),
}  # fmt: skip
