"""GPT-2, whose matrices are stored [in, out] and whose queries, keys and values are one tensor, one after the other."""

from __future__ import annotations

from megalith.bridge.family import Family
from megalith.bridge.rows import qkv, same, transposed
from megalith.bridge.settings import Field, Ours, Theirs

# fmt: off
TENSORS = {
    "embedding.word_embeddings.weight":
        same("transformer.wte.weight"),
    "embedding.position_embeddings.weight":
        same("transformer.wpe.weight"),
    "layers.{layer}.input_layernorm.weight":
        same("transformer.h.{layer}.ln_1.weight"),
    "layers.{layer}.input_layernorm.bias":
        same("transformer.h.{layer}.ln_1.bias"),
    "layers.{layer}.self_attention.linear_qkv.weight":
        qkv("transformer.h.{layer}.attn.c_attn.weight", transposed=True),
    "layers.{layer}.self_attention.linear_qkv.bias":
        qkv("transformer.h.{layer}.attn.c_attn.bias"),
    "layers.{layer}.self_attention.linear_proj.weight":
        transposed("transformer.h.{layer}.attn.c_proj.weight"),
    "layers.{layer}.self_attention.linear_proj.bias":
        same("transformer.h.{layer}.attn.c_proj.bias"),
    "layers.{layer}.pre_mlp_layernorm.weight":
        same("transformer.h.{layer}.ln_2.weight"),
    "layers.{layer}.pre_mlp_layernorm.bias":
        same("transformer.h.{layer}.ln_2.bias"),
    "layers.{layer}.mlp.linear_fc1.weight":
        transposed("transformer.h.{layer}.mlp.c_fc.weight"),
    "layers.{layer}.mlp.linear_fc1.bias":
        same("transformer.h.{layer}.mlp.c_fc.bias"),
    "layers.{layer}.mlp.linear_fc2.weight":
        transposed("transformer.h.{layer}.mlp.c_proj.weight"),
    "layers.{layer}.mlp.linear_fc2.bias":
        same("transformer.h.{layer}.mlp.c_proj.bias"),
    "final_layernorm.weight":
        same("transformer.ln_f.weight"),
    "final_layernorm.bias":
        same("transformer.ln_f.bias"),
    "output_layer.weight":
        same("lm_head.weight"),
}

GPT2 = Family(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    tensors=TENSORS,
    settings=(
        Field("num_layers", "n_layer"),
        Field("hidden_size", "n_embd"),
        Field("ffn_hidden_size", "n_inner", default=None),
        Field("num_attention_heads", "n_head"),
        Field("vocab_size", "vocab_size"),
        Field("max_position_embeddings", "n_positions"),
        Field("layernorm_epsilon", "layer_norm_epsilon", default=1e-5),
        Field("activation", "activation_function", default="gelu_new",
              values={"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu",
                      "relu": "relu", "silu": "silu"}),
        Field("hidden_dropout", "resid_pdrop", default=0.1),
        Field("hidden_dropout", "embd_pdrop", default=0.1),
        Field("attention_dropout", "attn_pdrop", default=0.1),
        Field("init_method_std", "initializer_range", default=0.02),
        Field("untie_embeddings_and_output_weights", "tie_word_embeddings", default=True,
              values={True: False, False: True}),
        Ours(position_embedding_type="learned_absolute"),
        Theirs(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False),
    ),
    tied="lm_head.weight",
    ignored=(r"\.attn\.(masked_)?bias$",),
    prefix="transformer.",
)
# fmt: on
