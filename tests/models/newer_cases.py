"""Cases of reference.py for the families of 2024 and later that need no operator of their own."""

from collections.abc import Callable

import transformers
from models.tiny import (
    DEEPSEEK,
    DEEPSEEK_ROPE,
    GEMMA,
    LINEAR_ROPE,
    LLAMA,
    LLAMA3_ROPE,
    NEOX,
    OUR_DEEPSEEK,
    OUR_EXPERTS,
    OUR_GEMMA,
    OUR_NEOX,
    OUR_OPT,
    OUR_PHI,
    OURS,
    VOCAB,
    YARN_ROPE,
)

MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
OUR_MIXED = dict(window_size=[10, 0], window_attn_skip_freq=[1, 0, 1])
ROUTED = dict(n_routed_experts=8, num_experts_per_tok=4, moe_intermediate_size=24)
OUR_ROUTED = dict(OURS, num_experts=8, moe_router_topk=4, moe_ffn_hidden_size=24,
                  moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
                  moe_shared_expert_intermediate_size=48, moe_router_num_groups=4, moe_router_group_topk=2)  # fmt: skip
FULL_YARN = dict(YARN_ROPE, beta_fast=32.0, beta_slow=1.0)
LITE = {key: value for key, value in DEEPSEEK.items() if key != "first_k_dense_replace"}

HEADS = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
HEADS_OF_NEOX = {key: value for key, value in NEOX.items() if key != "intermediate_size"}
WITHOUT_DROPOUT = {key: value for key, value in LLAMA.items() if key != "attention_dropout"}
PLAIN = {key: value for key, value in OURS.items() if key not in ("swiglu", "add_bias_linear")}
LAYER_NORM = dict(PLAIN, normalization="LayerNorm", activation="squared_relu", layernorm_epsilon=1e-5)
SPARSE = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24)
OUR_SPARSE = dict(OURS, num_experts=8, moe_router_topk=3, moe_ffn_hidden_size=24, qk_layernorm=True)
OUR_YARN = dict(type="yarn", factor=4.0, original_max_position_embeddings=64)

FACTORS = dict(
    embedding_multiplier=6.0, residual_multiplier=0.4, attention_multiplier=0.2, logits_scaling=4.0
)
OUR_FACTORS = dict(embedding_multiplier=6.0, residual_multiplier=0.4, softmax_scale=0.2, logits_scaling=4.0)
OUR_LLAMA4 = dict(OURS, kv_channels=24, ffn_hidden_size=80, moe_ffn_hidden_size=112, num_experts=6, moe_router_topk=1,
                  moe_shared_expert_intermediate_size=112, moe_router_score_function="sigmoid",
                  moe_apply_probs_on_input=True, no_rope_freq=[0, 1, 0], rotary_interleaved=True, qk_l2_norm=True,
                  qk_l2_norm_rope_only=True, query_scaling_beta=0.4, query_scaling_length=7,
                  query_scaling_layers="no_rope", layernorm_epsilon=1e-5)  # fmt: skip
LATENTS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")

NEWER_CASES: dict[str, tuple[Callable, dict]] = {
    "gpt1": (
        lambda: transformers.OpenAIGPTConfig(vocab_size=VOCAB, n_embd=64, n_layer=3, n_head=4, n_positions=64,
                                             attn_pdrop=0.2),
        dict(vocab_size=VOCAB, hidden_size=64, num_layers=3, num_attention_heads=4, max_position_embeddings=64,
             attention_dropout=0.2, apply_residual_connection_post_layernorm=True, add_first_input_layernorm=False),
    ),
    "bert-generation": (
        lambda: transformers.BertGenerationConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=3,
                                                  num_attention_heads=4, intermediate_size=112, is_decoder=True,
                                                  max_position_embeddings=64, attention_probs_dropout_prob=0.2),
        dict(vocab_size=VOCAB, hidden_size=64, num_layers=3, num_attention_heads=4, ffn_hidden_size=112,
             max_position_embeddings=64, attention_dropout=0.2, layernorm_epsilon=1e-12, activation="gelu",
             apply_residual_connection_post_layernorm=True, add_output_bias=True),
    ),
    "modernbert-decoder": (
        lambda: transformers.ModernBertDecoderConfig(
            vocab_size=VOCAB, hidden_size=64, intermediate_size=112, num_hidden_layers=3, num_attention_heads=4,
            max_position_embeddings=64, local_attention=22, attention_bias=True, classifier_bias=True,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            classifier_activation="gelu_new", **dict.fromkeys(TOKENS, VOCAB - 1)),
        dict(vocab_size=VOCAB, hidden_size=64, num_layers=3, num_attention_heads=4, ffn_hidden_size=112,
             max_position_embeddings=64, position_embedding_type="rope", rotary_base=160000.0,
             rotary_base_local=10000.0, window_size=[10, 0], window_attn_skip_freq=[0, 1, 0],
             add_norm_bias=False, embedding_layernorm=True, add_first_input_layernorm=False, activation="gelu",
             gated_linear_unit=True, add_bias_linear=False, add_qkv_bias=True, add_proj_bias=True,
             add_decoder_lm_head=True, lm_head_activation="gelu_tanh", add_output_bias=True, hidden_dropout=0.0,
             attention_dropout=0.0),
    ),
    "glm": (
        lambda: transformers.GlmConfig(**LLAMA, head_dim=24, pad_token_id=None),
        dict(OURS, kv_channels=24, rotary_percent=0.5, rotary_interleaved=True, layernorm_epsilon=1.5625e-07,
             add_qkv_bias=True),
    ),
    "glm4": (
        lambda: transformers.Glm4Config(**LLAMA, head_dim=16, pad_token_id=None, rms_norm_eps=1e-5,
                                        rope_parameters=dict(YARN_ROPE, partial_rotary_factor=0.25)),
        dict(OURS, kv_channels=16, rotary_percent=0.25, rotary_interleaved=True, layernorm_epsilon=1e-5,
             add_qkv_bias=True, norm_placement="sandwich",
             rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=64)),
    ),
    "glm4-moe": (
        lambda: transformers.Glm4MoeConfig(**LLAMA, **ROUTED, use_qk_norm=True, attention_bias=True, n_shared_experts=2,
                                           n_group=4, topk_group=2, routed_scaling_factor=1.7, num_mtp_layers=0),
        dict(OUR_ROUTED, rotary_percent=0.5, layernorm_epsilon=1e-5, qk_layernorm=True, add_qkv_bias=True,
             moe_layer_freq=[0, 1, 1], moe_router_topk_scaling_factor=1.7),
    ),
    "glm4-moe-lite": (
        lambda: transformers.Glm4MoeLiteConfig(**LITE, q_lora_rank=36, rms_norm_eps=1e-6, n_group=4, topk_group=2,
                                               mlp_layer_types=["sparse", "dense", "sparse"]),
        dict(OUR_DEEPSEEK, q_lora_rank=36, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
             moe_router_num_groups=4, moe_router_group_topk=2, moe_router_topk_scaling_factor=1.8,
             moe_layer_freq=[1, 0, 1]),
    ),
    "solar-open": (
        lambda: transformers.SolarOpenConfig(**LLAMA, **ROUTED, head_dim=24, attention_bias=True, n_shared_experts=2,
                                             n_group=4, topk_group=2),
        dict(OUR_ROUTED, kv_channels=24, rotary_base=1e6, layernorm_epsilon=1e-5, add_qkv_bias=True),
    ),
    "dots1": (
        lambda: transformers.Dots1Config(**LLAMA, **ROUTED, norm_topk_prob=True, n_shared_experts=2, n_group=4,
                                         topk_group=2, first_k_dense_replace=1, sliding_window=11,
                                         attention_bias=True, layer_types=MIXED[1:] + MIXED[:1]),
        dict(OUR_ROUTED, qk_layernorm=True, add_qkv_bias=True, add_proj_bias=True, moe_layer_freq=[0, 1, 1],
             window_size=[10, 0], window_attn_skip_freq=[0, 1, 1]),
    ),
    "olmo3": (
        lambda: transformers.Olmo3Config(**LLAMA, pad_token_id=None, sliding_window=11, layer_types=MIXED,
                                         rope_parameters=dict(full_attention=FULL_YARN, sliding_attention=dict(
                                             rope_type="default", rope_theta=5e4))),
        dict(OURS, **OUR_MIXED, norm_placement="post", qk_layernorm=True, qk_layernorm_full_width=True,
             layernorm_epsilon=1e-5, rotary_base=10000.0, rotary_base_local=5e4,
             rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=64)),
    ),
    "flex-olmo": (
        lambda: transformers.FlexOlmoConfig(**LLAMA, pad_token_id=None, num_experts=8, num_experts_per_tok=3),
        dict(OURS, **OUR_EXPERTS, norm_placement="post", qk_layernorm=True, qk_layernorm_full_width=True,
             moe_router_pre_softmax=True, rotary_base=500000.0),
    ),
    "exaone4": (
        lambda: transformers.Exaone4Config(**LLAMA, sliding_window=11, layer_types=MIXED),
        dict(OURS, **OUR_MIXED, no_rope_freq=[0, 1, 0], norm_placement="post", qk_layernorm=True,
             layernorm_epsilon=1e-5),
    ),
    "exaone-moe": (
        lambda: transformers.ExaoneMoeConfig(**LLAMA, pad_token_id=None, num_experts=8, num_experts_per_tok=4,
                                             moe_intermediate_size=24, n_group=4, topk_group=2, num_shared_experts=2,
                                             sliding_window=11, layer_types=MIXED),
        dict(OUR_ROUTED, **OUR_MIXED, no_rope_freq=[0, 1, 0], qk_layernorm=True, layernorm_epsilon=1e-5,
             moe_layer_freq=[0, 1, 1], moe_router_topk_scaling_factor=2.5),
    ),
    "olmo": (
        lambda: transformers.OlmoConfig(**LLAMA, pad_token_id=None, clip_qkv=0.7, attention_bias=True,
                                        rope_parameters=LINEAR_ROPE),
        dict(OURS, normalization="LayerNorm", add_norm_weight=False, add_norm_bias=False, layernorm_epsilon=1e-5,
             clip_qkv=0.7, add_qkv_bias=True, add_proj_bias=True, rope_scaling=dict(type="linear", factor=2.0)),
    ),
    "nanochat": (
        lambda: transformers.NanoChatConfig(**LLAMA, attention_bias=True, rms_norm_eps=1e-5,
                                            final_logit_softcapping=3.0),
        dict(PLAIN, add_bias_linear=False, activation="squared_relu", add_norm_weight=False, embedding_layernorm=True,
             qk_l2_norm=True, layernorm_epsilon=1e-5, final_logit_softcapping=3.0, add_qkv_bias=True,
             add_proj_bias=True),
    ),
    "apertus": (
        lambda: transformers.ApertusConfig(**LLAMA, rope_parameters=LLAMA3_ROPE, attention_bias=True),
        dict(PLAIN, add_bias_linear=False, activation="xielu", layernorm_epsilon=1e-5, qk_layernorm=True,
             add_qkv_bias=True, add_proj_bias=True, rotary_base=5000.0,
             rope_scaling=dict(type="llama3", factor=4.0, original_max_position_embeddings=64)),
    ),
    "apertus 1.5": (
        lambda: transformers.Apertus1p5TextConfig(**LLAMA, tie_word_embeddings=True,
                                                  rope_parameters=dict(rope_type="default", rope_theta=10000.0)),
        dict(PLAIN, add_bias_linear=False, activation="xielu", layernorm_epsilon=1e-5, qk_layernorm=True,
             untie_embeddings_and_output_weights=False),
    ),
    "arcee": (
        lambda: transformers.ArceeConfig(**LLAMA, attention_bias=True, mlp_bias=True, rope_parameters=FULL_YARN),
        dict(PLAIN, activation="squared_relu", layernorm_epsilon=1e-5, rope_scaling=OUR_YARN),
    ),
    "jais2": (
        lambda: transformers.Jais2Config(**LLAMA, head_dim=24),
        dict(LAYER_NORM, kv_channels=24),
    ),
    "nemotron": (
        lambda: transformers.NemotronConfig(**LLAMA, head_dim=24),
        dict(LAYER_NORM, kv_channels=24, layernorm_zero_centered_gamma=True, rotary_percent=0.5, add_bias_linear=False),
    ),
    "persimmon": (
        lambda: transformers.PersimmonConfig(**HEADS),
        dict(LAYER_NORM, num_query_groups=4, rotary_percent=0.5, qk_layernorm=True),
    ),
    "ministral": (
        lambda: transformers.MinistralConfig(**LLAMA, head_dim=24, sliding_window=11, layer_types=MIXED),
        dict(OURS, **OUR_MIXED, kv_channels=24),
    ),
    "ministral3": (
        lambda: transformers.Ministral3Config(
            **LLAMA, head_dim=24, pad_token_id=None, rope_parameters=dict(
                YARN_ROPE, original_max_position_embeddings=8, mscale=1.0, mscale_all_dim=1.0,
                llama_4_scaling_beta=0.3)),
        dict(OURS, kv_channels=24, layernorm_epsilon=1e-5, query_scaling_beta=0.3, query_scaling_length=8,
             rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=8,
                               attention_factor=1.0)),
    ),
    "ministral3, window": (
        lambda: transformers.Ministral3Config(
            **LLAMA, head_dim=16, pad_token_id=None, sliding_window=11, rope_parameters=dict(
                rope_type="default", rope_theta=5e3, original_max_position_embeddings=16, llama_4_scaling_beta=0.5)),
        dict(OURS, kv_channels=16, layernorm_epsilon=1e-5, rotary_base=5e3, query_scaling_beta=0.5,
             query_scaling_length=16, window_size=[10, 0]),
    ),
    "llama4": (
        lambda: transformers.Llama4TextConfig(
            **LLAMA, head_dim=24, intermediate_size_mlp=80, num_local_experts=6, no_rope_layers=[1, 0, 1],
            attention_chunk_size=9, floor_scale=7, attn_scale=0.4, moe_layers=[1],
            rope_parameters=LLAMA3_ROPE),
        dict(OUR_LLAMA4, rotary_base=5e3, attention_chunk_size=9, moe_layer_freq=[0, 1, 0],
             rope_scaling=dict(type="llama3", factor=4.0, original_max_position_embeddings=64)),
    ),
    "llama4, no norms, no chunks": (
        lambda: transformers.Llama4TextConfig(
            **LLAMA, head_dim=24, intermediate_size_mlp=80, num_local_experts=6, no_rope_layers=[1, 0, 1],
            attention_chunk_size=None, floor_scale=7, attn_scale=0.4, use_qk_norm=False, attention_bias=True,
            num_experts_per_tok=3),
        dict(OUR_LLAMA4, rotary_base=5e5, qk_l2_norm=False, qk_l2_norm_rope_only=False, add_qkv_bias=True,
             add_proj_bias=True, moe_router_topk=3, moe_router_norm_topk_prob=False),
    ),
    "ernie4.5-moe": (
        lambda: transformers.Ernie4_5_MoeConfig(
            **WITHOUT_DROPOUT, head_dim=24, moe_num_experts=8, moe_k=3, moe_intermediate_size=24,
            moe_num_shared_experts=2),
        dict(OURS, kv_channels=24, num_experts=8, moe_router_topk=3, moe_ffn_hidden_size=24, moe_layer_freq=[0, 1, 1],
             moe_shared_expert_intermediate_size=48, moe_router_enable_expert_bias=True, rotary_interleaved=True,
             rotary_base=5e5, layernorm_epsilon=1e-5, untie_embeddings_and_output_weights=False),
    ),
    "ernie4.5-moe, some layers, nothing shared": (
        lambda: transformers.Ernie4_5_MoeConfig(
            **WITHOUT_DROPOUT, moe_num_experts=8, moe_k=1, moe_intermediate_size=24, moe_num_shared_experts=0,
            moe_layer_interval=2, tie_word_embeddings=False),
        dict(OURS, num_experts=8, moe_router_topk=1, moe_ffn_hidden_size=24, moe_layer_freq=[0, 1, 0],
             moe_router_enable_expert_bias=True, rotary_interleaved=True, rotary_base=5e5, layernorm_epsilon=1e-5),
    ),
    "hunyuan": (
        lambda: transformers.HunYuanDenseV1Config(**LLAMA, head_dim=24, attention_bias=True, pad_token_id=None),
        dict(OURS, kv_channels=24, qk_layernorm=True, qk_layernorm_after_rope=True, layernorm_epsilon=1e-5,
             add_qkv_bias=True, add_proj_bias=True),
    ),
    "hunyuan-moe": (
        lambda: transformers.HunYuanMoEV1Config(**LLAMA, head_dim=16, num_experts=8, moe_topk=3, pad_token_id=None),
        dict(OURS, **OUR_EXPERTS, kv_channels=16, qk_layernorm=True, qk_layernorm_after_rope=True,
             layernorm_epsilon=1e-5, moe_shared_expert_intermediate_size=112),
    ),
    "cwm": (
        lambda: transformers.CwmConfig(**LLAMA, head_dim=24, sliding_window=11, layer_types=MIXED, mlp_bias=True,
                                       pad_token_id=None),
        dict(OURS, **OUR_MIXED, kv_channels=24, add_mlp_bias=True, layernorm_epsilon=1e-5, rotary_base=1e6,
             rope_scaling=dict(type="llama3", factor=16.0, original_max_position_embeddings=8192)),
    ),
    "helium": (
        lambda: transformers.HeliumConfig(**LLAMA, head_dim=16, attention_bias=True, mlp_bias=True),
        dict(OURS, kv_channels=16, add_qkv_bias=True, add_mlp_bias=True, rotary_interleaved=True, rotary_base=1e5,
             layernorm_epsilon=1e-8),
    ),
    "ernie4.5": (
        lambda: transformers.Ernie4_5Config(**WITHOUT_DROPOUT, head_dim=24, use_bias=True),
        dict(OURS, kv_channels=24, add_bias_linear=True, rotary_interleaved=True, rotary_base=5e5,
             layernorm_epsilon=1e-5, untie_embeddings_and_output_weights=False),
    ),
    "vaultgemma": (
        lambda: transformers.VaultGemmaConfig(**GEMMA, attn_logit_softcapping=20.0, final_logit_softcapping=30.0),
        dict(OUR_GEMMA, norm_placement="pre", window_attn_skip_freq=2, attn_logit_softcapping=20.0,
             final_logit_softcapping=30.0),
    ),
    "hyperclova-x": (
        lambda: transformers.HyperCLOVAXConfig(**LLAMA, head_dim=24, embedding_multiplier=3.0, residual_multiplier=0.4,
                                               attention_multiplier=0.2, logits_scaling=0.25, pad_token_id=None),
        dict(OURS, kv_channels=24, embedding_multiplier=3.0, residual_multiplier=0.4, softmax_scale=0.2,
             logits_scaling=4.0, norm_placement="sandwich"),
    ),
    "minimax-m2": (
        lambda: transformers.MiniMaxM2Config(**LLAMA, head_dim=16, num_local_experts=6, num_experts_per_tok=3,
                                             rotary_dim=8),
        dict(OURS, kv_channels=16, num_experts=6, moe_router_topk=3, rotary_percent=0.5, rotary_base=5e6,
             qk_layernorm=True, qk_layernorm_full_width=True, moe_router_score_function="sigmoid",
             moe_router_enable_expert_bias=True),
    ),
    "hy-v3": (
        lambda: transformers.HYV3Config(**LLAMA, **SPARSE, head_dim=24, num_shared_experts=2),
        dict(OUR_SPARSE, kv_channels=24, rotary_base=11158840.0, layernorm_epsilon=1e-5, moe_layer_freq=[0, 1, 1],
             moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
             moe_router_topk_scaling_factor=2.826, moe_shared_expert_intermediate_size=48),
    ),
    "afmoe": (
        lambda: transformers.AfmoeConfig(**LLAMA, **SPARSE, head_dim=24, mup_enabled=True, sliding_window=11,
                                         layer_types=MIXED, route_scale=2.0),
        dict(OUR_SPARSE, **OUR_MIXED, kv_channels=24, no_rope_freq=[0, 1, 0], scale_embeddings=True,
             norm_placement="sandwich", attention_output_gate=True, layernorm_epsilon=1e-5, moe_layer_freq=[0, 1, 1],
             moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
             moe_router_topk_scaling_factor=2.0, moe_shared_expert_intermediate_size=48),
    ),
    "flint": (
        lambda: transformers.FlintConfig(**LLAMA, **SPARSE, head_dim=24, shared_expert_intermediate_size=32,
                                         sliding_window=11, layer_types=MIXED, mlp_only_layers=[0]),
        dict(OUR_SPARSE, **OUR_MIXED, kv_channels=24, no_rope_freq=[0, 1, 0], softmax_type="learnable",
             moe_layer_freq=[0, 1, 1], moe_router_score_function="sigmoid", moe_shared_expert_intermediate_size=32),
    ),
    "mellum": (
        lambda: transformers.MellumConfig(**LLAMA, **SPARSE, head_dim=24, sliding_window=11, layer_types=MIXED,
                                          mlp_layer_types=["dense", "sparse", "sparse"],
                                          rope_parameters=dict(full_attention=FULL_YARN, sliding_attention=dict(
                                              rope_type="default", rope_theta=2e3))),
        dict(OUR_SPARSE, **OUR_MIXED, kv_channels=24, rotary_base=10000.0, rotary_base_local=2e3,
             rope_scaling=OUR_YARN, moe_layer_freq=[0, 1, 1]),
    ),
    "granite-moe-shared": (
        lambda: transformers.GraniteMoeSharedConfig(**LLAMA, **FACTORS, num_local_experts=6, num_experts_per_tok=2,
                                                    shared_intermediate_size=40),
        dict(OURS, **OUR_FACTORS, num_experts=6, moe_router_topk=2, moe_shared_expert_intermediate_size=40),
    ),
    "granite-swa": (
        lambda: transformers.GraniteSWAConfig(**LLAMA, **FACTORS, sliding_window=11, layer_types=MIXED,
                                              layer_rope_theta=[5e3, 0, 5e3],
                                              rope_parameters=dict(rope_type="default", rope_theta=5e3)),
        dict(OURS, **OUR_FACTORS, **OUR_MIXED, no_rope_freq=[0, 1, 0], rotary_base=5e3, softmax_type="learnable",
             layernorm_epsilon=1e-5, untie_embeddings_and_output_weights=False),
    ),
    "granite-moe-swa": (
        lambda: transformers.GraniteMoeSWAConfig(**LLAMA, **FACTORS, num_local_experts=6, num_experts_per_tok=2,
                                                 shared_intermediate_size=40, sliding_window=11, layer_types=MIXED,
                                                 layer_rope_theta=[2e3, 1e4, 2e3]),
        dict(OURS, **OUR_FACTORS, **OUR_MIXED, num_experts=6, moe_router_topk=2, softmax_type="learnable",
             moe_shared_expert_intermediate_size=40, rotary_base_local=2e3),
    ),
    "youtu": (
        lambda: transformers.YoutuConfig(**{**LLAMA, "num_key_value_heads": 4}, q_lora_rank=36, pad_token_id=None,
                                         **{key: DEEPSEEK[key] for key in LATENTS}),
        dict({**OURS, "num_query_groups": 0}, multi_latent_attention=True, q_lora_rank=36, kv_lora_rank=20,
             qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=12, untie_embeddings_and_output_weights=False),
    ),
    "gpt-neo": (
        lambda: transformers.GPTNeoConfig(vocab_size=VOCAB, hidden_size=64, num_layers=3, num_heads=4,
                                          intermediate_size=96, max_position_embeddings=64, window_size=11,
                                          attention_types=[[["local", "global", "local"], 1]]),
        dict(OUR_MIXED, vocab_size=VOCAB, hidden_size=64, num_layers=3, num_attention_heads=4, ffn_hidden_size=96,
             max_position_embeddings=64, softmax_scale=1.0, add_bias_linear=False, add_proj_bias=True,
             add_mlp_bias=True),
    ),
    "exaone, biases": (
        lambda: transformers.ExaoneConfig(**LLAMA, attention_bias=True, mlp_bias=True, head_dim=24,
                                          tie_word_embeddings=True, rope_parameters=FULL_YARN),
        dict(OURS, add_bias_linear=True, kv_channels=24, layernorm_epsilon=1e-5, rope_scaling=OUR_YARN,
             untie_embeddings_and_output_weights=False),
    ),
    "internlm3": (
        lambda: transformers.InternLM3Config(**LLAMA, head_dim=24, attention_bias=True, mlp_bias=True),
        dict(OURS, kv_channels=24, add_bias_linear=True, layernorm_epsilon=1e-5),
    ),
    "iquest-coder": (
        lambda: transformers.IQuestCoderConfig(**LLAMA, head_dim=24, rope_parameters=LINEAR_ROPE),
        dict(OURS, kv_channels=24, layernorm_epsilon=1e-5, rope_scaling=dict(type="linear", factor=2.0)),
    ),
    "sarvam-moe": (
        lambda: transformers.SarvamMoEConfig(**LLAMA, **ROUTED, head_dim=24, n_shared_experts=2, n_group=4,
                                             topk_group=2, attention_bias=True, pad_token_id=None),
        dict(OUR_ROUTED, kv_channels=24, rotary_base=8e6, qk_layernorm=True, add_qkv_bias=True,
             moe_layer_freq=[0, 1, 1], moe_router_topk_scaling_factor=2.5),
    ),
    "sarvam-mla": (
        lambda: transformers.SarvamMLAConfig(**DEEPSEEK, rope_parameters=DEEPSEEK_ROPE),
        dict(OUR_DEEPSEEK, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
             moe_router_topk_scaling_factor=2.5, rope_scaling=dict(OUR_YARN, mscale=0.7, mscale_all_dim=0.9)),
    ),
    "kimi-k2": (  # bounds of YaRN that are equal, no groups
        lambda: transformers.DeepseekV3Config(
            **DEEPSEEK, q_lora_rank=36, n_group=1, topk_group=1, routed_scaling_factor=2.827, num_mtp_layers=0,
            rope_parameters=dict(YARN_ROPE, rope_theta=5e4, beta_fast=1.0, beta_slow=1.0, mscale=1.0,
                                 mscale_all_dim=1.0)),
        dict(OUR_DEEPSEEK, q_lora_rank=36, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
             moe_router_topk_scaling_factor=2.827, rotary_base=5e4,
             rope_scaling=dict(OUR_YARN, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)),
    ),
    "minicpm3": (
        lambda: transformers.MiniCPM3Config(**{**LLAMA, "num_key_value_heads": 4}, q_lora_rank=36, rms_norm_eps=1e-6,
                                            scale_emb=3.0, scale_depth=0.7, dim_model_base=32, mlp_bias=True,
                                            **{key: DEEPSEEK[key] for key in LATENTS}),
        dict({**OURS, "num_query_groups": 0}, multi_latent_attention=True, q_lora_rank=36, kv_lora_rank=20,
             qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=12, untie_embeddings_and_output_weights=False,
             embedding_multiplier=3.0, residual_multiplier=0.7 / 3**0.5, logits_scaling=2.0, add_mlp_bias=True),
    ),
    "mpt": (  # of heads that are no power of two
        lambda: transformers.MptConfig(vocab_size=VOCAB, d_model=48, n_heads=6, n_layers=3, max_seq_len=64,
                                       attn_config=dict(softmax_scale=0.3)),
        dict(vocab_size=VOCAB, hidden_size=48, num_layers=3, num_attention_heads=6, max_position_embeddings=64,
             position_embedding_type="alibi", add_norm_bias=False, activation="gelu", add_bias_linear=False,
             softmax_scale=0.3, hidden_dropout=0.0, attention_dropout=0.0),
    ),
    "codegen": (
        lambda: transformers.CodeGenConfig(vocab_size=VOCAB, n_embd=96, n_layer=3, n_head=8, n_positions=64,
                                           rotary_dim=8, n_inner=112),
        dict(OUR_PHI, hidden_size=96, num_attention_heads=8, max_position_embeddings=64, rotary_percent=2 / 3,
             add_bias_linear=False, add_mlp_bias=True),
    ),
    "xglm": (
        lambda: transformers.XGLMConfig(vocab_size=VOCAB, d_model=64, ffn_dim=112, num_layers=3, attention_heads=4,
                                        max_position_embeddings=64, dropout=0.2, attention_dropout=0.3),
        dict(vocab_size=VOCAB, hidden_size=64, ffn_hidden_size=112, num_layers=3, num_attention_heads=4,
             max_position_embeddings=64, position_embedding_type="sinusoidal", sinusoidal_spacing="inclusive",
             sinusoidal_first_position=2, scale_embeddings=True, activation="gelu", hidden_dropout=0.2,
             attention_dropout=0.3),
    ),
    "xglm, untied, unscaled": (
        lambda: transformers.XGLMConfig(vocab_size=VOCAB, d_model=64, ffn_dim=96, num_layers=3, attention_heads=2,
                                        max_position_embeddings=64, scale_embedding=False,
                                        activation_function="relu", tie_word_embeddings=False),
        dict(vocab_size=VOCAB, hidden_size=64, ffn_hidden_size=96, num_layers=3, num_attention_heads=2,
             max_position_embeddings=64, position_embedding_type="sinusoidal", sinusoidal_spacing="inclusive",
             sinusoidal_first_position=2, activation="relu", untie_embeddings_and_output_weights=True),
    ),
    "ctrl": (
        lambda: transformers.CTRLConfig(vocab_size=VOCAB, n_embd=64, dff=112, n_layer=3, n_head=4, n_positions=64),
        dict(vocab_size=VOCAB, hidden_size=64, ffn_hidden_size=112, num_layers=3, num_attention_heads=4,
             max_position_embeddings=64, position_embedding_type="sinusoidal", scale_embeddings=True,
             activation="relu", attention_dropout=0.0, add_output_bias=True, layernorm_epsilon=1e-6),
    ),
    "biogpt": (
        lambda: transformers.BioGptConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=112,
                                          num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=64),
        dict(OUR_OPT, activation="gelu", scale_embeddings=True, positions_skip_padding=False),
    ),
    "aria": (
        lambda: transformers.AriaTextConfig(**LLAMA, head_dim=24, moe_num_experts=6, attention_bias=True,
                                            pad_token_id=None),
        dict(OURS, kv_channels=24, num_experts=6, moe_router_topk=2, add_qkv_bias=True, add_proj_bias=True,
             moe_shared_expert_intermediate_size=224),
    ),
    "cohere-compass": (
        lambda: transformers.CohereCompassTextConfig(
            **LLAMA, sliding_window=11, layer_types=MIXED, logit_scale=0.25, pad_token_id=None,
            rope_parameters=dict(full_attention=None, sliding_attention=dict(
                rope_type="default", rope_theta=5e4))),
        dict(OURS, **OUR_MIXED, normalization="LayerNorm", add_norm_bias=False, parallel_attn_mlp=True,
             shared_layernorm=True, logits_scaling=4.0, layernorm_epsilon=1e-5, no_rope_freq=[0, 1, 0],
             rotary_base=1e4, rotary_base_local=5e4, untie_embeddings_and_output_weights=False),
    ),
    "gpt-neox-japanese": (
        lambda: transformers.GPTNeoXJapaneseConfig(
            **HEADS_OF_NEOX, intermediate_multiple_size=2, attention_dropout=0.2,
            rope_parameters=dict(rope_type="default", rope_theta=5e3, partial_rotary_factor=0.5)),
        dict(OUR_NEOX, ffn_hidden_size=128, parallel_attn_mlp=False, activation="gelu", rotary_percent=0.5,
             rotary_base=5e3, add_bias_linear=False, add_proj_bias=True, proj_bias_in_last_layer_only=True,
             untie_embeddings_and_output_weights=False, attention_dropout=0.2, hidden_dropout=0.0),
    ),
    "gpt-bigcode": (
        lambda: transformers.GPTBigCodeConfig(vocab_size=VOCAB, n_embd=64, n_layer=3, n_head=4, n_positions=64),
        dict(vocab_size=VOCAB, hidden_size=64, num_layers=3, num_attention_heads=4, num_query_groups=1,
             max_position_embeddings=64),
    ),
}  # fmt: skip
