"""Published shapes of models with other mixers than attention: Nemotron-H, Nemotron Nano 2 and 3, Kimi-Linear.

Sources: Megatron-Bridge's model providers (Nemotron) and its tests (Kimi-Linear), which quote the published files.
"""

from __future__ import annotations

from typing import Any

# fmt: off
_NEMOTRON = dict(
    position_embedding_type="none", normalization="RMSNorm", activation="squared_relu", add_bias_linear=False,
    untie_embeddings_and_output_weights=True, hidden_dropout=0.0, attention_dropout=0.0, vocab_size=131072,
    num_query_groups=8, kv_channels=128, mamba_state_dim=128, mamba_num_groups=8,
)
_NANO2 = dict(_NEMOTRON, num_attention_heads=40, mamba_num_heads=128, mamba_head_dim=80, max_position_embeddings=131072)
HYBRID_PRESETS: dict[str, dict[str, Any]] = {
    "nemotron-h-8b": dict(_NEMOTRON, num_layers=52, hidden_size=4096, ffn_hidden_size=21504, num_attention_heads=32,
                          mamba_num_heads=128, mamba_head_dim=64, max_position_embeddings=8192,
                          hybrid_layer_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"),
    "nemotron-nano2-9b": dict(_NANO2, num_layers=56, hidden_size=4480, ffn_hidden_size=15680,
                              hybrid_layer_pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"),
    "nemotron-nano2-12b": dict(_NANO2, num_layers=62, hidden_size=5120, ffn_hidden_size=20480,
                               hybrid_layer_pattern="M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-"),
    "nemotron3-nano-30b-a3b": dict(
        {**_NEMOTRON, "num_query_groups": 2}, num_layers=52, hidden_size=2688, ffn_hidden_size=1856,
        num_attention_heads=32, mamba_num_heads=64, mamba_head_dim=64, max_position_embeddings=262144,
        hybrid_layer_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", num_experts=128,
        moe_ffn_hidden_size=1856, moe_shared_expert_intermediate_size=3712, moe_router_topk=6,
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_topk_scaling_factor=2.5),
    "kimi-linear-48b-a3b": dict(
        num_layers=27, hidden_size=2304, ffn_hidden_size=9216, num_attention_heads=32, vocab_size=163840,
        max_position_embeddings=1048576, position_embedding_type="none", normalization="RMSNorm", swiglu=True,
        add_bias_linear=False, untie_embeddings_and_output_weights=True, hidden_dropout=0.0, attention_dropout=0.0,
        multi_latent_attention=True, experimental_attention_variant="kimi_delta_attention",
        linear_attention_freq=[1, 1, 1, 0] * 6 + [1, 1, 0], linear_num_key_heads=32, num_experts=256,
        moe_layer_freq=[0] + [1] * 26, moe_ffn_hidden_size=1024, moe_shared_expert_intermediate_size=1024,
        moe_router_topk=8, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=2.446),
}
# fmt: on
