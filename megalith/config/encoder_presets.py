"""Published shapes of encoders and encoder-decoders, as in presets.py.

Sources: the published configurations of T5, BERT and ModernBERT; for BART, bart_base and bart_large of fairseq.
"""

from __future__ import annotations

from typing import Any

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
_BART = dict(
    model_type="t5",
    separate_encoder_positions=True,
    embedding_layernorm=True,
    apply_residual_connection_post_layernorm=True,
    add_first_input_layernorm=False,
    padding_positions=2,
    activation="gelu",
    add_output_bias=True,
    train_output_bias=False,
    attention_dropout=0.0,
    vocab_size=50265,
    max_position_embeddings=1024,
    decoder_start_token_id=2,
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

# fmt: off
ENCODER_PRESETS: dict[str, dict[str, Any]] = {
    "t5-base":      dict(_T5, num_layers=24, hidden_size=768, ffn_hidden_size=3072, num_attention_heads=12),
    "t5-3b":        dict(_T5, num_layers=48, hidden_size=1024, ffn_hidden_size=16384, num_attention_heads=32,
                         kv_channels=128),
    "bart-base":    dict(_BART, num_layers=12, hidden_size=768, num_attention_heads=12),
    "bart-large":   dict(_BART, num_layers=24, hidden_size=1024, num_attention_heads=16),
    "bert-base":    dict(_BERT, num_layers=12, hidden_size=768, num_attention_heads=12),
    "bert-large":   dict(_BERT, num_layers=24, hidden_size=1024, num_attention_heads=16),
    "modernbert-base": dict(_MODERNBERT, num_layers=22, hidden_size=768, num_attention_heads=12, ffn_hidden_size=1152,
                            window_attn_skip_freq=[int(n % 3 > 0) for n in range(22)]),
    "modernbert-large": dict(_MODERNBERT, num_layers=28, hidden_size=1024, num_attention_heads=16, ffn_hidden_size=2624,
                             window_attn_skip_freq=[int(n % 3 > 0) for n in range(28)]),
}
# fmt: on
