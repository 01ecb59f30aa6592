"""Published model shapes by name. Each is a set of ModelConfig fields; fields set by the user override them.

Sources: GPT-2, Radford et al. 2019; GPT-3, Brown et al. 2020, table 2.1 (13B width 5120 instead of 5140, and 1.3B
with 16 heads instead of 24, as its parameter counts imply); gpt3-345m and gpt3-857m, Megatron-LM's example (they have
fewer parameters than their names say); gpt3-39b, Narayanan et al. 2021; Llama 2, Touvron et al. 2023; Llama 3,
Grattafiori et al. 2024; the published configurations of Llama 3.2 and 3.3, Mistral, Mixtral, Qwen2.5, Qwen3, the text
models of Gemma 2 and 3, OLMo 2, OLMoE, BLOOM, Phi-3, GPT-NeoX-20B, Falcon, DeepSeek-V2-Lite and V3 (with its MTP
layer); Megatron-Bridge's model providers (Mistral Small 3, Ministral 3 14B, DeepSeek-V2), NeMo's configurations (Gemma
2 27B) and torchtune's builders (Phi-4), which quote the published files.
"""

from __future__ import annotations

from typing import Any

from megalith.config.expert_presets import EXPERT_PRESETS
from megalith.config.hybrid_presets import HYBRID_PRESETS
from megalith.config.llama_preset import LLAMA

_GPT2 = dict(vocab_size=50257, max_position_embeddings=1024)
_GPT3 = dict(vocab_size=50257, max_position_embeddings=2048)
_NEOX = dict(
    position_embedding_type="rope",
    parallel_attn_mlp=True,
    max_position_embeddings=2048,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
_FALCON = dict(_NEOX, activation="gelu", add_bias_linear=False, vocab_size=65024)
_T5 = dict(  # before 1.1
    model_type="t5",
    position_embedding_type="relative",
    normalization="RMSNorm",
    layernorm_epsilon=1e-6,
    add_bias_linear=False,
    activation="relu",
    query_pre_attn_scalar=1,
    scale_decoder_outputs=True,
    vocab_size=32128,
    max_position_embeddings=512,
)
_BERT = dict(
    model_type="bert",
    apply_residual_connection_post_layernorm=True,
    layernorm_epsilon=1e-12,
    activation="gelu",
    vocab_size=30522,
    max_position_embeddings=512,
)
_MODERNBERT = dict(
    model_type="bert",
    bert_binary_head=False,
    position_embedding_type="rope",
    rotary_base=160000.0,
    rotary_base_local=10000.0,
    window_size=[64, 64],
    embedding_layernorm=True,
    add_first_input_layernorm=False,
    add_norm_bias=False,
    add_bias_linear=False,
    add_lm_head_dense_bias=False,
    gated_linear_unit=True,
    activation="gelu",
    hidden_dropout=0.0,
    attention_dropout=0.0,
    vocab_size=50368,
    max_position_embeddings=8192,
)
_BLOOM = dict(
    position_embedding_type="alibi",
    embedding_layernorm=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    vocab_size=250880,
    max_position_embeddings=2048,
)
_LLAMA2 = dict(LLAMA, vocab_size=32000, max_position_embeddings=4096)
_LLAMA3 = dict(
    LLAMA, num_query_groups=8, vocab_size=128256, rotary_base=500000.0, max_position_embeddings=8192
)
_LLAMA31 = dict(_LLAMA3, max_position_embeddings=131072, rope_scaling=dict(type="llama3", factor=8.0))
_LLAMA32 = dict(
    _LLAMA31,
    rope_scaling=dict(type="llama3", factor=32.0),
    untie_embeddings_and_output_weights=False,
)
_QWEN25 = dict(
    LLAMA,
    add_qkv_bias=True,
    layernorm_epsilon=1e-6,
    rotary_base=1000000.0,
    vocab_size=152064,
    max_position_embeddings=131072,
)
_QWEN25_SMALL = dict(
    _QWEN25,
    num_query_groups=2,
    vocab_size=151936,
    max_position_embeddings=32768,
    untie_embeddings_and_output_weights=False,
)
_QWEN3 = dict(
    LLAMA,
    num_query_groups=8,
    kv_channels=128,
    qk_layernorm=True,
    layernorm_epsilon=1e-6,
    rotary_base=1000000.0,
    vocab_size=151936,
    max_position_embeddings=40960,
)
_GEMMA = dict(
    LLAMA,
    kv_channels=256,
    query_pre_attn_scalar=256,
    layernorm_epsilon=1e-6,
    layernorm_zero_centered_gamma=True,
    norm_placement="sandwich",
    scale_embeddings=True,
    activation="gelu_tanh",
    gated_linear_unit=True,
    swiglu=False,
    untie_embeddings_and_output_weights=False,
)
_GEMMA2 = dict(
    _GEMMA,
    vocab_size=256000,
    max_position_embeddings=8192,
    window_size=[4095, 0],
    window_attn_skip_freq=2,
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
)
_GEMMA3 = dict(
    _GEMMA,
    vocab_size=262144,
    max_position_embeddings=32768,
    qk_layernorm=True,
    rotary_base=1000000.0,
    rotary_base_local=10000.0,
    window_size=[511, 0],
    window_attn_skip_freq=6,
)
_GEMMA3_LONG = dict(
    _GEMMA3,
    vocab_size=262208,
    max_position_embeddings=131072,
    rope_scaling=dict(type="linear", factor=8.0),
    window_size=[1023, 0],
)
_OLMO2 = dict(
    LLAMA,
    layernorm_epsilon=1e-6,
    norm_placement="post",
    qk_layernorm=True,
    qk_layernorm_full_width=True,
    rotary_base=500000.0,
    vocab_size=100352,
    max_position_embeddings=4096,
)

_MIXTRAL = dict(LLAMA, moe_router_topk=2, moe_aux_loss_coeff=0.02)
_QWEN3_MOE = dict({**_QWEN3, **LLAMA}, num_query_groups=4, moe_router_topk=8, moe_aux_loss_coeff=0.001)
_DEEPSEEK = dict(
    LLAMA,
    layernorm_epsilon=1e-6,
    multi_latent_attention=True,
    moe_router_load_balancing_type="seq_aux_loss",
    moe_aux_loss_coeff=0.001,
)
_MINISTRAL3 = dict(
    LLAMA,
    num_attention_heads=32,
    num_query_groups=8,
    kv_channels=128,
    vocab_size=131072,
    max_position_embeddings=262144,
    rotary_base=1000000.0,
    rope_scaling=dict(type="yarn", factor=16.0, original_max_position_embeddings=16384, attention_factor=1.0),
    query_scaling_beta=0.1,
    query_scaling_length=16384,
)

# fmt: off
PRESETS: dict[str, dict[str, Any]] = {
    # for tests and first steps; the vocabulary is the tokenizer's
    "tiny-gpt":     dict(num_layers=2, hidden_size=64, num_attention_heads=4),
    "tiny-llama":   dict(LLAMA, num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2),
    "tiny-qwen":    dict(LLAMA, num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2,
                         kv_channels=32, qk_layernorm=True, untie_embeddings_and_output_weights=False),

    "tiny-mixtral": dict(_MIXTRAL, num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2,
                         num_experts=4),
    "tiny-deepseek": dict(_DEEPSEEK, num_layers=2, hidden_size=64, ffn_hidden_size=192, num_attention_heads=4,
                          kv_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=16, num_experts=8,
                          moe_layer_freq=[0, 1], moe_router_topk=3, moe_router_pre_softmax=True,
                          moe_ffn_hidden_size=48, moe_shared_expert_intermediate_size=96),

    "gpt2":         dict(_GPT2, num_layers=12, hidden_size=768, num_attention_heads=12),
    "gpt2-medium":  dict(_GPT2, num_layers=24, hidden_size=1024, num_attention_heads=16),
    "gpt2-large":   dict(_GPT2, num_layers=36, hidden_size=1280, num_attention_heads=20),
    "gpt2-xl":      dict(_GPT2, num_layers=48, hidden_size=1600, num_attention_heads=25),

    "gpt3-345m":    dict(_GPT2, num_layers=12, hidden_size=512, num_attention_heads=8),
    "gpt3-857m":    dict(_GPT3, num_layers=24, hidden_size=1024, num_attention_heads=16),
    "gpt3-1.3b":    dict(_GPT3, num_layers=24, hidden_size=2048, num_attention_heads=16),
    "gpt3-2.7b":    dict(_GPT3, num_layers=32, hidden_size=2560, num_attention_heads=32),
    "gpt3-6.7b":    dict(_GPT3, num_layers=32, hidden_size=4096, num_attention_heads=32),
    "gpt3-13b":     dict(_GPT3, num_layers=40, hidden_size=5120, num_attention_heads=40),
    "gpt3-39b":     dict(_GPT3, num_layers=48, hidden_size=8192, num_attention_heads=64),
    "gpt3-175b":    dict(_GPT3, num_layers=96, hidden_size=12288, num_attention_heads=96),

    "gpt-neox-20b": dict(_NEOX, num_layers=44, hidden_size=6144, num_attention_heads=64, rotary_percent=0.25,
                         vocab_size=50432, untie_embeddings_and_output_weights=True),
    "falcon-7b":    dict(_FALCON, num_layers=32, hidden_size=4544, num_attention_heads=71, num_query_groups=1,
                         shared_layernorm=True),
    "falcon-40b":   dict(_FALCON, num_layers=60, hidden_size=8192, num_attention_heads=128, num_query_groups=8),

    "llama2-7b":    dict(_LLAMA2, num_layers=32, hidden_size=4096, ffn_hidden_size=11008, num_attention_heads=32),
    "llama2-13b":   dict(_LLAMA2, num_layers=40, hidden_size=5120, ffn_hidden_size=13824, num_attention_heads=40),
    "llama2-70b":   dict(_LLAMA2, num_layers=80, hidden_size=8192, ffn_hidden_size=28672, num_attention_heads=64,
                         num_query_groups=8),
    "llama3-8b":    dict(_LLAMA3, num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32),
    "llama3-70b":   dict(_LLAMA3, num_layers=80, hidden_size=8192, ffn_hidden_size=28672, num_attention_heads=64),
    "llama3.1-8b":  dict(_LLAMA31, num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32),
    "llama3.1-70b": dict(_LLAMA31, num_layers=80, hidden_size=8192, ffn_hidden_size=28672, num_attention_heads=64),
    "llama3-405b":  dict(_LLAMA31, num_layers=126, hidden_size=16384, ffn_hidden_size=53248,
                         num_attention_heads=128),
    "llama3.2-1b":  dict(_LLAMA32, num_layers=16, hidden_size=2048, ffn_hidden_size=8192, num_attention_heads=32),
    "llama3.2-3b":  dict(_LLAMA32, num_layers=28, hidden_size=3072, ffn_hidden_size=8192, num_attention_heads=24),
    "llama3.3-70b": dict(_LLAMA31, num_layers=80, hidden_size=8192, ffn_hidden_size=28672, num_attention_heads=64),
    "mistral-7b":   dict(LLAMA, num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32,
                         num_query_groups=8, vocab_size=32000, max_position_embeddings=32768, window_size=[4095, 0]),

    "qwen2.5-0.5b": dict(_QWEN25_SMALL, num_layers=24, hidden_size=896, ffn_hidden_size=4864, num_attention_heads=14),
    "qwen2.5-1.5b": dict(_QWEN25_SMALL, num_layers=28, hidden_size=1536, ffn_hidden_size=8960, num_attention_heads=12),
    "qwen2.5-3b":   dict(_QWEN25_SMALL, num_layers=36, hidden_size=2048, ffn_hidden_size=11008, num_attention_heads=16),
    "qwen2.5-7b":   dict(_QWEN25, num_layers=28, hidden_size=3584, ffn_hidden_size=18944, num_attention_heads=28,
                         num_query_groups=4),
    "qwen2.5-14b":  dict(_QWEN25, num_layers=48, hidden_size=5120, ffn_hidden_size=13824, num_attention_heads=40,
                         num_query_groups=8, layernorm_epsilon=1e-5),
    "qwen2.5-32b":  dict(_QWEN25, num_layers=64, hidden_size=5120, ffn_hidden_size=27648, num_attention_heads=40,
                         num_query_groups=8, layernorm_epsilon=1e-5),
    "qwen2.5-72b":  dict(_QWEN25, num_layers=80, hidden_size=8192, ffn_hidden_size=29568, num_attention_heads=64,
                         num_query_groups=8, layernorm_epsilon=1e-5),
    "qwen3-0.6b":   dict(_QWEN3, num_layers=28, hidden_size=1024, ffn_hidden_size=3072, num_attention_heads=16,
                         untie_embeddings_and_output_weights=False),
    "qwen3-1.7b":   dict(_QWEN3, num_layers=28, hidden_size=2048, ffn_hidden_size=6144, num_attention_heads=16,
                         untie_embeddings_and_output_weights=False),
    "qwen3-4b":     dict(_QWEN3, num_layers=36, hidden_size=2560, ffn_hidden_size=9728, num_attention_heads=32,
                         untie_embeddings_and_output_weights=False),
    "qwen3-8b":     dict(_QWEN3, num_layers=36, hidden_size=4096, ffn_hidden_size=12288, num_attention_heads=32),
    "qwen3-14b":    dict(_QWEN3, num_layers=40, hidden_size=5120, ffn_hidden_size=17408, num_attention_heads=40),
    "qwen3-32b":    dict(_QWEN3, num_layers=64, hidden_size=5120, ffn_hidden_size=25600, num_attention_heads=64),

    "t5-base":      dict(_T5, num_layers=24, hidden_size=768, ffn_hidden_size=3072, num_attention_heads=12),
    "t5-3b":        dict(_T5, num_layers=48, hidden_size=1024, ffn_hidden_size=16384, num_attention_heads=32,
                         kv_channels=128),
    "bert-base":    dict(_BERT, num_layers=12, hidden_size=768, num_attention_heads=12),
    "bert-large":   dict(_BERT, num_layers=24, hidden_size=1024, num_attention_heads=16),
    "modernbert-base": dict(_MODERNBERT, num_layers=22, hidden_size=768, num_attention_heads=12, ffn_hidden_size=1152,
                            window_attn_skip_freq=[int(n % 3 > 0) for n in range(22)]),
    "modernbert-large": dict(_MODERNBERT, num_layers=28, hidden_size=1024, num_attention_heads=16, ffn_hidden_size=2624,
                             window_attn_skip_freq=[int(n % 3 > 0) for n in range(28)]),
    "bloom-560m":   dict(_BLOOM, num_layers=24, hidden_size=1024, num_attention_heads=16),
    "bloom-7b1":    dict(_BLOOM, num_layers=30, hidden_size=4096, num_attention_heads=32),
    "bloom-176b":   dict(_BLOOM, num_layers=70, hidden_size=14336, num_attention_heads=112),
    "gemma2-2b":    dict(_GEMMA2, num_layers=26, hidden_size=2304, ffn_hidden_size=9216, num_attention_heads=8,
                         num_query_groups=4),
    "gemma2-9b":    dict(_GEMMA2, num_layers=42, hidden_size=3584, ffn_hidden_size=14336, num_attention_heads=16,
                         num_query_groups=8),
    "gemma2-27b":   dict({**_GEMMA2, "kv_channels": 128, "query_pre_attn_scalar": 144}, num_layers=46, hidden_size=4608,
                         ffn_hidden_size=36864, num_attention_heads=32, num_query_groups=16),
    "gemma3-270m":  dict(_GEMMA3, num_layers=18, hidden_size=640, ffn_hidden_size=2048, num_attention_heads=4,
                         num_query_groups=1),
    "gemma3-1b":    dict(_GEMMA3, num_layers=26, hidden_size=1152, ffn_hidden_size=6912, num_attention_heads=4,
                         num_query_groups=1),
    "gemma3-4b":    dict(_GEMMA3_LONG, num_layers=34, hidden_size=2560, ffn_hidden_size=10240, num_attention_heads=8,
                         num_query_groups=4),
    "gemma3-12b":   dict(_GEMMA3_LONG, num_layers=48, hidden_size=3840, ffn_hidden_size=15360, num_attention_heads=16,
                         num_query_groups=8),
    "gemma3-27b":   dict(_GEMMA3_LONG, num_layers=62, hidden_size=5376, ffn_hidden_size=21504, num_attention_heads=32,
                         num_query_groups=16, kv_channels=128, query_pre_attn_scalar=168),
    "olmo2-7b":     dict(_OLMO2, num_layers=32, hidden_size=4096, ffn_hidden_size=11008, num_attention_heads=32),
    "olmo3-7b":     dict({**_OLMO2, "vocab_size": 100278, "max_position_embeddings": 65536}, num_layers=32,
                         hidden_size=4096, ffn_hidden_size=11008, num_attention_heads=32, window_size=[4095, 0],
                         window_attn_skip_freq=4, rotary_base_local=500000.0,
                         rope_scaling=dict(type="yarn", factor=8.0, original_max_position_embeddings=8192)),
    "smollm3-3b":   dict(LLAMA, num_layers=36, hidden_size=2048, ffn_hidden_size=11008, num_attention_heads=16,
                         num_query_groups=4, vocab_size=128256, max_position_embeddings=65536, rotary_base=5000000.0,
                         layernorm_epsilon=1e-6, no_rope_freq=4, untie_embeddings_and_output_weights=False),
    "seed-oss-36b": dict(LLAMA, num_layers=64, hidden_size=5120, ffn_hidden_size=27648, num_attention_heads=80,
                         num_query_groups=8, kv_channels=128, add_qkv_bias=True, layernorm_epsilon=1e-6,
                         vocab_size=155136, max_position_embeddings=524288, rotary_base=10000000.0),
    "exaone4-32b":  dict(LLAMA, num_layers=64, hidden_size=5120, ffn_hidden_size=27392, num_attention_heads=40,
                         num_query_groups=8, norm_placement="post", qk_layernorm=True, window_size=[4095, 0],
                         window_attn_skip_freq=4, no_rope_freq=4, rotary_base=1000000.0,
                         rope_scaling=dict(type="llama3", factor=16.0), vocab_size=102400,
                         max_position_embeddings=131072),
    "glm4-9b":      dict(LLAMA, num_layers=40, hidden_size=4096, ffn_hidden_size=13696, num_attention_heads=32,
                         num_query_groups=2, add_qkv_bias=True, norm_placement="sandwich", rotary_percent=0.5,
                         rotary_interleaved=True, vocab_size=151552, max_position_embeddings=32768),
    "mistral-small-24b": dict(LLAMA, num_layers=40, hidden_size=5120, ffn_hidden_size=32768, num_attention_heads=32,
                              num_query_groups=8, kv_channels=128, rotary_base=100000000.0, vocab_size=131072,
                              max_position_embeddings=32768),
    "ministral3-14b": dict({**_MINISTRAL3, "rotary_base": 1000000000.0}, num_layers=40, hidden_size=5120,
                           ffn_hidden_size=16384),
    "ministral3-3b": dict(_MINISTRAL3, num_layers=26, hidden_size=3072, ffn_hidden_size=9216,
                          untie_embeddings_and_output_weights=False),
    "ministral3-8b": dict(_MINISTRAL3, num_layers=34, hidden_size=4096, ffn_hidden_size=14336),
    "phi4-14b":     dict(LLAMA, num_layers=40, hidden_size=5120, ffn_hidden_size=17920, num_attention_heads=40,
                         num_query_groups=10, rotary_base=250000.0, vocab_size=100352, max_position_embeddings=16384),
    "phi3-mini":    dict(LLAMA, num_layers=32, hidden_size=3072, ffn_hidden_size=8192, num_attention_heads=32,
                         vocab_size=32064, max_position_embeddings=4096, window_size=[2046, 0]),

    "mixtral-8x7b": dict(_MIXTRAL, num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32,
                         num_query_groups=8, vocab_size=32000, rotary_base=1000000.0, max_position_embeddings=32768,
                         num_experts=8),
    "mixtral-8x22b": dict(_MIXTRAL, num_layers=56, hidden_size=6144, ffn_hidden_size=16384, num_attention_heads=48,
                          num_query_groups=8, vocab_size=32000, rotary_base=1000000.0, max_position_embeddings=65536,
                          num_experts=8, moe_aux_loss_coeff=0.001),
    "qwen3-30b-a3b": dict(_QWEN3_MOE, num_layers=48, hidden_size=2048, ffn_hidden_size=6144, num_attention_heads=32,
                          num_experts=128, moe_ffn_hidden_size=768),
    "qwen3-235b-a22b": dict(_QWEN3_MOE, num_layers=94, hidden_size=4096, ffn_hidden_size=12288, num_attention_heads=64,
                            num_experts=128, moe_ffn_hidden_size=1536),
    "qwen3-next-80b-a3b": dict(_QWEN3_MOE, num_layers=48, hidden_size=2048, ffn_hidden_size=5120,
                               num_attention_heads=16, num_query_groups=2, kv_channels=256, rotary_percent=0.25,
                               rotary_base=10000000.0, max_position_embeddings=262144, num_experts=512,
                               moe_router_topk=10, moe_ffn_hidden_size=512, moe_shared_expert_intermediate_size=512,
                               moe_shared_expert_gate=True, layernorm_zero_centered_gamma=True,
                               attention_output_gate=True, experimental_attention_variant="gated_delta_net"),
    "deepseek-v2-lite": dict(_DEEPSEEK, num_layers=27, hidden_size=2048, ffn_hidden_size=10944,
                             num_attention_heads=16, vocab_size=102400, max_position_embeddings=163840,
                             rope_scaling=dict(type="yarn", factor=40.0, original_max_position_embeddings=4096,
                                               mscale=0.707, mscale_all_dim=0.707),
                             num_experts=64, moe_layer_freq=[0] + [1] * 26, moe_router_topk=6,
                             moe_router_pre_softmax=True, moe_ffn_hidden_size=1408,
                             moe_shared_expert_intermediate_size=2816),
    "deepseek-v2":  dict(_DEEPSEEK, num_layers=60, hidden_size=5120, ffn_hidden_size=12288, num_attention_heads=128,
                         q_lora_rank=1536, vocab_size=102400, max_position_embeddings=163840,
                         rope_scaling=dict(type="yarn", factor=40.0, original_max_position_embeddings=4096,
                                           mscale=0.707, mscale_all_dim=0.707),
                         num_experts=160, moe_layer_freq=[0] + [1] * 59, moe_router_topk=6,
                         moe_router_pre_softmax=True, moe_router_num_groups=8, moe_router_group_topk=3,
                         moe_router_topk_scaling_factor=16.0, moe_ffn_hidden_size=1536,
                         moe_shared_expert_intermediate_size=3072),
    "deepseek-v3":  dict(_DEEPSEEK, num_layers=61, hidden_size=7168, ffn_hidden_size=18432, num_attention_heads=128,
                         mtp_num_layers=1, q_lora_rank=1536, vocab_size=129280, max_position_embeddings=163840,
                         rope_scaling=dict(type="yarn", factor=40.0, original_max_position_embeddings=4096, mscale=1.0,
                                           mscale_all_dim=1.0),
                         num_experts=256, moe_layer_freq=[0] * 3 + [1] * 58, moe_router_topk=8,
                         moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
                         moe_router_num_groups=8, moe_router_group_topk=4, moe_router_topk_scaling_factor=2.5,
                         moe_ffn_hidden_size=2048, moe_shared_expert_intermediate_size=2048, moe_aux_loss_coeff=0.0001),
    **EXPERT_PRESETS,
    **HYBRID_PRESETS,
}
# fmt: on
