"""DistilBERT: BERT without token types and pooler. Its names and keys are its own.

transformers has no dropout after its attention. Megalith trains with `hidden_dropout` there too, as in BERT.
"""

from __future__ import annotations

from dataclasses import replace

from megalith.bridge.families.encoders import POST_NORM
from megalith.bridge.families.layernorm_decoders import activation
from megalith.bridge.families.llama import TIED
from megalith.bridge.family import Family
from megalith.bridge.rows import qkv, replace_prefix, same
from megalith.bridge.settings import Field, FixedSettings

LAYER = "distilbert.transformer.layer."
ENCODER = FixedSettings(layernorm_epsilon=1e-12, num_tokentypes=0, bert_binary_head=False, add_pooler=False)
# fmt: off
DISTILBERT = Family(
    architecture="DistilBertForMaskedLM",
    model_type="distilbert",
    tensors={
        "embedding.word_embeddings.weight":
            same("distilbert.embeddings.word_embeddings.weight"),
        "embedding.position_embeddings.weight":
            same("distilbert.embeddings.position_embeddings.weight"),
        "layers.0.input_layernorm.weight":
            same("distilbert.embeddings.LayerNorm.weight"),
        "layers.0.input_layernorm.bias":
            same("distilbert.embeddings.LayerNorm.bias"),
        "layers.{layer}.input_layernorm.weight":
            same(LAYER + "{before}.output_layer_norm.weight"),
        "layers.{layer}.input_layernorm.bias":
            same(LAYER + "{before}.output_layer_norm.bias"),
        "layers.{layer}.self_attention.linear_qkv.weight":
            qkv(*(LAYER + "{layer}.attention." + name + "_lin.weight" for name in "qkv")),
        "layers.{layer}.self_attention.linear_qkv.bias":
            qkv(*(LAYER + "{layer}.attention." + name + "_lin.bias" for name in "qkv")),
        "layers.{layer}.self_attention.linear_proj.weight":
            same(LAYER + "{layer}.attention.out_lin.weight"),
        "layers.{layer}.self_attention.linear_proj.bias":
            same(LAYER + "{layer}.attention.out_lin.bias"),
        "layers.{layer}.pre_mlp_layernorm.weight":
            same(LAYER + "{layer}.sa_layer_norm.weight"),
        "layers.{layer}.pre_mlp_layernorm.bias":
            same(LAYER + "{layer}.sa_layer_norm.bias"),
        "layers.{layer}.mlp.linear_fc1.weight":
            same(LAYER + "{layer}.ffn.lin1.weight"),
        "layers.{layer}.mlp.linear_fc1.bias":
            same(LAYER + "{layer}.ffn.lin1.bias"),
        "layers.{layer}.mlp.linear_fc2.weight":
            same(LAYER + "{layer}.ffn.lin2.weight"),
        "layers.{layer}.mlp.linear_fc2.bias":
            same(LAYER + "{layer}.ffn.lin2.bias"),
        "final_layernorm.weight":
            same(LAYER + "{last}.output_layer_norm.weight"),
        "final_layernorm.bias":
            same(LAYER + "{last}.output_layer_norm.bias"),
        "lm_head.dense.weight":
            same("vocab_transform.weight"),
        "lm_head.dense.bias":
            same("vocab_transform.bias"),
        "lm_head.layernorm.weight":
            same("vocab_layer_norm.weight"),
        "lm_head.layernorm.bias":
            same("vocab_layer_norm.bias"),
        "lm_head.vocabulary.bias":
            same("vocab_projector.bias"),
        "output_layer.weight":
            same("vocab_projector.weight"),
    },
    settings=(
        Field("num_layers", "n_layers"),
        Field("hidden_size", "dim"),
        Field("ffn_hidden_size", "hidden_dim"),
        Field("num_attention_heads", "n_heads"),
        Field("vocab_size", "vocab_size"),
        Field("max_position_embeddings", "max_position_embeddings", default=512),
        activation("activation", "gelu"),
        Field("hidden_dropout", "dropout", default=0.1),
        Field("attention_dropout", "attention_dropout", default=0.1),
        Field("init_method_std", "initializer_range", default=0.02),
        TIED,
        POST_NORM,
        ENCODER,
        FixedSettings(add_lm_head=True),
    ),
    tied="vocab_projector.weight",
    aliases={"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
    ignored=(r"^(distilbert\.)?embeddings\.position_ids$",),
    prefix="distilbert.",
)
# fmt: on
HEADS = (r"^vocab_(transform|layer_norm|projector)\.",)  # in files of the model with the head
DISTILBERT_MODEL = replace(
    DISTILBERT,
    architecture="DistilBertModel",
    tensors=replace_prefix(DISTILBERT.tensors, "distilbert."),
    settings=(*DISTILBERT.settings[:-1], FixedSettings(add_lm_head=False)),
    ignored=(*DISTILBERT.ignored, *HEADS),
    prefix="",
    prefix_with_head="distilbert.",
)

FAMILIES = (DISTILBERT, DISTILBERT_MODEL)
