"""BLOOM: ALiBi, a norm behind the embedding, and queries, keys and values by head as here."""

from __future__ import annotations

from megalith.bridge.family import Family
from megalith.bridge.rows import same
from megalith.bridge.settings import Field, Ours, Theirs

# fmt: off
TENSORS = {
    "embedding.word_embeddings.weight":
        same("transformer.word_embeddings.weight"),
    "embedding.layernorm.weight":
        same("transformer.word_embeddings_layernorm.weight"),
    "embedding.layernorm.bias":
        same("transformer.word_embeddings_layernorm.bias"),
    "layers.{layer}.input_layernorm.weight":
        same("transformer.h.{layer}.input_layernorm.weight"),
    "layers.{layer}.input_layernorm.bias":
        same("transformer.h.{layer}.input_layernorm.bias"),
    "layers.{layer}.self_attention.linear_qkv.weight":
        same("transformer.h.{layer}.self_attention.query_key_value.weight"),
    "layers.{layer}.self_attention.linear_qkv.bias":
        same("transformer.h.{layer}.self_attention.query_key_value.bias"),
    "layers.{layer}.self_attention.linear_proj.weight":
        same("transformer.h.{layer}.self_attention.dense.weight"),
    "layers.{layer}.self_attention.linear_proj.bias":
        same("transformer.h.{layer}.self_attention.dense.bias"),
    "layers.{layer}.pre_mlp_layernorm.weight":
        same("transformer.h.{layer}.post_attention_layernorm.weight"),
    "layers.{layer}.pre_mlp_layernorm.bias":
        same("transformer.h.{layer}.post_attention_layernorm.bias"),
    "layers.{layer}.mlp.linear_fc1.weight":
        same("transformer.h.{layer}.mlp.dense_h_to_4h.weight"),
    "layers.{layer}.mlp.linear_fc1.bias":
        same("transformer.h.{layer}.mlp.dense_h_to_4h.bias"),
    "layers.{layer}.mlp.linear_fc2.weight":
        same("transformer.h.{layer}.mlp.dense_4h_to_h.weight"),
    "layers.{layer}.mlp.linear_fc2.bias":
        same("transformer.h.{layer}.mlp.dense_4h_to_h.bias"),
    "final_layernorm.weight":
        same("transformer.ln_f.weight"),
    "final_layernorm.bias":
        same("transformer.ln_f.bias"),
    "output_layer.weight":
        same("lm_head.weight"),
}

BLOOM = Family(
    architecture="BloomForCausalLM",
    model_type="bloom",
    tensors=TENSORS,
    settings=(
        Field("num_layers", "n_layer", other="num_hidden_layers"),
        Field("hidden_size", "hidden_size", other="n_embed"),
        Field("num_attention_heads", "n_head", other="num_attention_heads"),
        Field("vocab_size", "vocab_size"),
        Field("max_position_embeddings", "seq_length", default=None),
        Field("layernorm_epsilon", "layer_norm_epsilon", default=1e-5),
        Field("hidden_dropout", "hidden_dropout", default=0.0),
        Field("attention_dropout", "attention_dropout", default=0.0),
        Field("init_method_std", "initializer_range", default=0.02),
        Field("untie_embeddings_and_output_weights", "tie_word_embeddings", default=True,
              values={True: False, False: True}),
        Ours(position_embedding_type="alibi", embedding_layernorm=True, activation="gelu_tanh"),
        Theirs(apply_residual_connection_post_layernorm=False),
    ),
    tied="lm_head.weight",
    prefix="transformer.",
)
# fmt: on
