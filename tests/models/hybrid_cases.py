"""Cases of reference.py for families with other mixers than attention: Mamba-2, short convolutions, delta nets."""

from collections.abc import Callable

import transformers
from models.tiny import LINEAR_ROPE, LLAMA, OUR_EXPERTS, OURS, VOCAB

CONVOLVED = ["linear_attention", "full_attention", "linear_attention"]
MAMBA = dict(mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=12, mamba_expand=2)
OUR_MAMBA_SIZES = dict(mamba_num_heads=8, mamba_head_dim=16, mamba_num_groups=2, mamba_state_dim=12)
OUR_MAMBA = dict(OUR_MAMBA_SIZES, experimental_attention_variant="mamba2", linear_attention_freq=[1, 0, 1])
NEMOTRON = {key: value for key, value in LLAMA.items() if key != "num_hidden_layers"} | dict(
    head_dim=16, mamba_num_heads=8, mamba_head_dim=16, n_groups=2, ssm_state_size=12, pad_token_id=None
)
OUR_NEMOTRON = {key: value for key, value in OURS.items() if key != "swiglu"} | dict(
    OUR_MAMBA_SIZES, activation="squared_relu", position_embedding_type="none", layernorm_epsilon=1e-5
)
LFM2 = {key: value for key, value in LLAMA.items() if key != "attention_dropout"} | dict(pad_token_id=None)
OUR_LFM2 = dict(
    OURS, layernorm_epsilon=1e-5, rotary_base=1e6, untie_embeddings_and_output_weights=False, qk_layernorm=True,
    experimental_attention_variant="short_conv", linear_attention_freq=[1, 0, 1], linear_conv_kernel_dim=3,
)  # fmt: skip

KIMI = {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "attention_dropout")} | dict(
    kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, linear_num_heads=4, linear_head_dim=12,
    num_experts=8, num_experts_per_token=3, moe_intermediate_size=40, num_shared_experts=1, pad_token_id=None,
    num_key_value_heads=LLAMA["num_attention_heads"], rms_norm_eps=1e-6,  # of latents in transformers, whatever it is
)  # fmt: skip
OUR_KIMI = {key: value for key, value in OURS.items() if key not in ("num_query_groups", "rotary_base")} | dict(
    OUR_EXPERTS, multi_latent_attention=True, position_embedding_type="none", kv_lora_rank=24,
    qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=12, moe_ffn_hidden_size=40, moe_layer_freq=[0, 1, 1],
    moe_shared_expert_intermediate_size=40, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
    moe_router_topk_scaling_factor=2.446, experimental_attention_variant="kimi_delta_attention",
    linear_attention_freq=[1, 0, 1], linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=12,
    linear_value_head_dim=12,
)  # fmt: skip

OLMO_HYBRID = dict(LLAMA, layer_types=CONVOLVED, linear_key_head_dim=12, linear_value_head_dim=12, pad_token_id=None,
                   eos_token_id=None)  # fmt: skip
OUR_OLMO_HYBRID = dict(
    OURS, norm_placement="post", qk_layernorm=True, qk_layernorm_full_width=True, linear_norm_placement="pre",
    linear_norm_epsilon=1e-5, linear_allow_neg_eigval=True, experimental_attention_variant="gated_delta_net",
    linear_attention_freq=[1, 0, 1], linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=12,
    linear_value_head_dim=12,
)  # fmt: skip

HYBRID_CASES: dict[str, tuple[Callable, dict]] = {
    "bamba": (
        lambda: transformers.BambaConfig(**LLAMA, **MAMBA, attn_layer_indices=[1], pad_token_id=None),
        dict(OURS, **OUR_MAMBA, rotary_percent=0.5, layernorm_epsilon=1e-5),
    ),
    "bamba, biases, limits, one group": (
        lambda: transformers.BambaConfig(**LLAMA, **{**MAMBA, "mamba_n_groups": 1}, attn_layer_indices=[1],
                                         mamba_proj_bias=True, mamba_conv_bias=False, attention_bias=True,
                                         mlp_bias=True, time_step_limit=(0.3, 0.9), mamba_d_conv=3, pad_token_id=None),
        dict(OURS, **{**OUR_MAMBA, "mamba_num_groups": 1}, rotary_percent=0.5, layernorm_epsilon=1e-5,
             mamba_proj_bias=True, mamba_out_bias=True, mamba_conv_bias=False, add_qkv_bias=True, add_proj_bias=True,
             add_mlp_bias=True, mamba_dt_limit=[0.3, 0.9], linear_conv_kernel_dim=3),
    ),
    "granite-moe-hybrid": (
        lambda: transformers.GraniteMoeHybridConfig(
            **LLAMA, **MAMBA, num_local_experts=6, num_experts_per_tok=2, shared_intermediate_size=48,
            layer_types=CONVOLVED, embedding_multiplier=6.0, residual_multiplier=0.4, attention_multiplier=0.2,
            logits_scaling=4.0),
        dict(OURS, **OUR_MAMBA, position_embedding_type="none", num_experts=6, moe_router_topk=2,
             moe_shared_expert_intermediate_size=48, embedding_multiplier=6.0, residual_multiplier=0.4,
             softmax_scale=0.2, logits_scaling=4.0),
    ),
    "granite-moe-hybrid, MLPs, RoPE": (
        lambda: transformers.GraniteMoeHybridConfig(
            **LLAMA, **MAMBA, num_local_experts=0, shared_intermediate_size=112, layer_types=CONVOLVED,
            position_embedding_type="rope", tie_word_embeddings=True),
        dict(OURS, **OUR_MAMBA, softmax_scale=1.0, untie_embeddings_and_output_weights=False),
    ),
    "falcon-h1": (
        lambda: transformers.FalconH1Config(
            **LLAMA, **MAMBA, mamba_d_ssm=128, pad_token_id=None, embedding_multiplier=3.0, lm_head_multiplier=0.5,
            key_multiplier=0.7, attention_in_multiplier=1.3, attention_out_multiplier=0.8, ssm_in_multiplier=1.4,
            ssm_out_multiplier=0.6, ssm_multipliers=[0.5, 0.7, 1.1, 1.3, 0.9], mlp_multipliers=[0.8, 1.2]),
        dict(OURS, **{**OUR_MAMBA, "linear_attention_freq": [1, 1, 1]}, layernorm_epsilon=1e-5, parallel_mixers=True,
             mamba_rms_norm=False, mamba_norm_before_gate=True, embedding_multiplier=3.0, logits_scaling=2.0,
             key_multiplier=0.7, attention_in_multiplier=1.3, attention_out_multiplier=0.8, ssm_in_multiplier=1.4,
             ssm_out_multiplier=0.6, ssm_multipliers=[0.5, 0.7, 1.1, 1.3, 0.9], mlp_multipliers=[0.8, 1.2]),
    ),
    "falcon-h1, norm before the gate": (
        lambda: transformers.FalconH1Config(**LLAMA, **MAMBA, mamba_d_ssm=128, pad_token_id=None, mamba_rms_norm=True,
                                            projectors_bias=True),
        dict(OURS, **{**OUR_MAMBA, "linear_attention_freq": [1, 1, 1]}, layernorm_epsilon=1e-5, parallel_mixers=True,
             mamba_norm_before_gate=True, mamba_out_bias=True),
    ),
    "nemotron-h": (
        lambda: transformers.NemotronHConfig(
            **NEMOTRON, layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"]),
        dict(OUR_NEMOTRON, num_layers=4, hybrid_layer_pattern="M-*M"),
    ),
    "nemotron-h, experts": (
        lambda: transformers.NemotronHConfig(
            **NEMOTRON, layers_block_type=["linear_attention", "moe", "full_attention", "moe"], n_routed_experts=6,
            num_experts_per_tok=2, moe_intermediate_size=40, moe_shared_expert_intermediate_size=56,
            routed_scaling_factor=2.5),
        dict(OUR_NEMOTRON, num_layers=4, hybrid_layer_pattern="ME*E", num_experts=6, moe_router_topk=2,
             moe_ffn_hidden_size=40, moe_shared_expert_intermediate_size=56, moe_router_topk_scaling_factor=2.5,
             moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True),
    ),
    "mamba2": (
        lambda: transformers.Mamba2Config(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=3, num_heads=8,
                                          head_dim=16, n_groups=2, state_size=12, bos_token_id=None,
                                          eos_token_id=None, pad_token_id=None),
        dict(vocab_size=VOCAB, hidden_size=64, num_layers=3, num_attention_heads=1, position_embedding_type="none",
             normalization="RMSNorm", add_bias_linear=False, untie_embeddings_and_output_weights=True,
             hybrid_layer_pattern="MMM", max_position_embeddings=2**20, **OUR_MAMBA_SIZES),
    ),
    "lfm2": (
        lambda: transformers.Lfm2Config(**LFM2, layer_types=["conv", "full_attention", "conv"],
                                        block_auto_adjust_ff_dim=False),
        OUR_LFM2,
    ),
    "lfm2, biases": (
        lambda: transformers.Lfm2Config(**LFM2, layer_types=["conv", "full_attention", "conv"], conv_bias=True,
                                        block_auto_adjust_ff_dim=False, tie_word_embeddings=False),
        dict(OUR_LFM2, short_conv_bias=True, untie_embeddings_and_output_weights=True),
    ),
    "lfm2-moe": (
        lambda: transformers.Lfm2MoeConfig(**LFM2, layer_types=["conv", "full_attention", "conv"], num_experts=8,
                                           num_experts_per_tok=3, moe_intermediate_size=40, num_dense_layers=1),
        dict(OUR_LFM2, **OUR_EXPERTS, moe_layer_freq=[0, 1, 1], moe_ffn_hidden_size=40,
             moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True),
    ),
    "kimi-linear": (
        lambda: transformers.KimiLinearConfig(**KIMI, layer_types=CONVOLVED),
        OUR_KIMI,
    ),
    "kimi-linear, a latent for queries, an MLP last": (
        lambda: transformers.KimiLinearConfig(
            **KIMI, layer_types=["full_attention", "linear_attention", "linear_attention"], q_lora_rank=20,
            mlp_layer_types=["sparse", "sparse", "dense"], linear_conv_kernel_dim=2, norm_topk_prob=True,
            routed_scaling_factor=1.3),
        dict(OUR_KIMI, linear_attention_freq=[0, 1, 1], q_lora_rank=20, moe_layer_freq=[1, 1, 0],
             linear_conv_kernel_dim=2, moe_router_topk_scaling_factor=1.3),
    ),
    "olmo-hybrid": (
        lambda: transformers.OlmoHybridConfig(**OLMO_HYBRID, rope_parameters=dict(rope_theta=None)),
        dict(OUR_OLMO_HYBRID, position_embedding_type="none"),
    ),
    "olmo-hybrid, RoPE, shared keys, larger epsilon": (
        lambda: transformers.OlmoHybridConfig(
            **{**OLMO_HYBRID, "layer_types": ["full_attention", "linear_attention", "linear_attention"],
               "linear_value_head_dim": 20}, linear_num_key_heads=2, linear_num_value_heads=6,
            linear_allow_neg_eigval=False, linear_conv_kernel_dim=3, rms_norm_eps=0.3, tie_word_embeddings=True,
            rope_parameters=LINEAR_ROPE),
        dict(OUR_OLMO_HYBRID, linear_attention_freq=[0, 1, 1], linear_num_key_heads=2, linear_num_value_heads=6,
             linear_value_head_dim=20, linear_allow_neg_eigval=False, linear_conv_kernel_dim=3, layernorm_epsilon=0.3,
             untie_embeddings_and_output_weights=False, rope_scaling=dict(type="linear", factor=2.0)),
    ),
    "qwen3.5": (
        lambda: transformers.Qwen3_5TextConfig(
            **LLAMA, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
            linear_value_head_dim=24, layer_types=CONVOLVED),
        dict(OURS, kv_channels=32, qk_layernorm=True, rotary_percent=0.25, attention_output_gate=True,
             layernorm_zero_centered_gamma=True, experimental_attention_variant="gated_delta_net",
             linear_attention_freq=[1, 0, 1], linear_num_key_heads=2, linear_num_value_heads=4,
             linear_key_head_dim=16, linear_value_head_dim=24),
    ),
    "qwen3.5-moe": (
        lambda: transformers.Qwen3_5MoeTextConfig(
            **{key: value for key, value in LLAMA.items() if key != "intermediate_size"}, head_dim=32, num_experts=8,
            num_experts_per_tok=3, moe_intermediate_size=40, shared_expert_intermediate_size=56,
            linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=24,
            layer_types=CONVOLVED),
        dict({key: value for key, value in OURS.items() if key != "ffn_hidden_size"}, **OUR_EXPERTS, kv_channels=32,
             qk_layernorm=True, rotary_percent=0.25, moe_ffn_hidden_size=40, moe_shared_expert_intermediate_size=56,
             moe_shared_expert_gate=True, attention_output_gate=True, layernorm_zero_centered_gamma=True,
             experimental_attention_variant="gated_delta_net", linear_attention_freq=[1, 0, 1],
             linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=24),
    ),
}  # fmt: skip
