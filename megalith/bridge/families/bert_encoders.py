"""BERT, with its norms behind the additions, and MegatronBert, with its norms before the layers' halves.

In BERT's post-LN each norm stands where the stream goes on, so that the norm behind a layer is what the next one begins
with: ours are named for the latter (`layers.{layer}.input_layernorm`), theirs for the former. Both come as the model
for pre-training, with the masked-LM head alone, and bare, with the pooler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalith.bridge.families.layernorm_decoders import activation
from megalith.bridge.families.llama import TIED
from megalith.bridge.family import Family
from megalith.bridge.rows import Rule, qkv, same
from megalith.bridge.settings import Field, Ours, Theirs, Tree
from megalith.config import ModelConfig
from megalith.errors import ConfigError

# fmt: off
EVERY = {
    "embedding.word_embeddings.weight":
        same("bert.embeddings.word_embeddings.weight"),
    "embedding.position_embeddings.weight":
        same("bert.embeddings.position_embeddings.weight"),
    "embedding.tokentype_embeddings.weight":
        same("bert.embeddings.token_type_embeddings.weight"),
    "layers.{layer}.self_attention.linear_qkv.weight":
        qkv("bert.encoder.layer.{layer}.attention.self.query.weight",
            "bert.encoder.layer.{layer}.attention.self.key.weight",
            "bert.encoder.layer.{layer}.attention.self.value.weight"),
    "layers.{layer}.self_attention.linear_qkv.bias":
        qkv("bert.encoder.layer.{layer}.attention.self.query.bias",
            "bert.encoder.layer.{layer}.attention.self.key.bias",
            "bert.encoder.layer.{layer}.attention.self.value.bias"),
    "layers.{layer}.self_attention.linear_proj.weight":
        same("bert.encoder.layer.{layer}.attention.output.dense.weight"),
    "layers.{layer}.self_attention.linear_proj.bias":
        same("bert.encoder.layer.{layer}.attention.output.dense.bias"),
    "layers.{layer}.mlp.linear_fc1.weight":
        same("bert.encoder.layer.{layer}.intermediate.dense.weight"),
    "layers.{layer}.mlp.linear_fc1.bias":
        same("bert.encoder.layer.{layer}.intermediate.dense.bias"),
    "layers.{layer}.mlp.linear_fc2.weight":
        same("bert.encoder.layer.{layer}.output.dense.weight"),
    "layers.{layer}.mlp.linear_fc2.bias":
        same("bert.encoder.layer.{layer}.output.dense.bias"),
    "lm_head.dense.weight":
        same("cls.predictions.transform.dense.weight"),
    "lm_head.dense.bias":
        same("cls.predictions.transform.dense.bias"),
    "lm_head.layernorm.weight":
        same("cls.predictions.transform.LayerNorm.weight"),
    "lm_head.layernorm.bias":
        same("cls.predictions.transform.LayerNorm.bias"),
    "lm_head.vocabulary.bias":
        same("cls.predictions.bias"),
    "output_layer.weight":
        same("cls.predictions.decoder.weight"),
    "pooler.weight":
        same("bert.pooler.dense.weight"),
    "pooler.bias":
        same("bert.pooler.dense.bias"),
    "binary_head.weight":
        same("cls.seq_relationship.weight"),
    "binary_head.bias":
        same("cls.seq_relationship.bias"),
}
POST_NORMS = {
    "layers.0.input_layernorm.weight":
        same("bert.embeddings.LayerNorm.weight"),
    "layers.0.input_layernorm.bias":
        same("bert.embeddings.LayerNorm.bias"),
    "layers.{layer}.input_layernorm.weight":
        same("bert.encoder.layer.{before}.output.LayerNorm.weight"),
    "layers.{layer}.input_layernorm.bias":
        same("bert.encoder.layer.{before}.output.LayerNorm.bias"),
    "layers.{layer}.pre_mlp_layernorm.weight":
        same("bert.encoder.layer.{layer}.attention.output.LayerNorm.weight"),
    "layers.{layer}.pre_mlp_layernorm.bias":
        same("bert.encoder.layer.{layer}.attention.output.LayerNorm.bias"),
    "final_layernorm.weight":
        same("bert.encoder.layer.{last}.output.LayerNorm.weight"),
    "final_layernorm.bias":
        same("bert.encoder.layer.{last}.output.LayerNorm.bias"),
}
PRE_NORMS = {
    "layers.{layer}.input_layernorm.weight":
        same("bert.encoder.layer.{layer}.attention.ln.weight"),
    "layers.{layer}.input_layernorm.bias":
        same("bert.encoder.layer.{layer}.attention.ln.bias"),
    "layers.{layer}.pre_mlp_layernorm.weight":
        same("bert.encoder.layer.{layer}.ln.weight"),
    "layers.{layer}.pre_mlp_layernorm.bias":
        same("bert.encoder.layer.{layer}.ln.bias"),
    "final_layernorm.weight":
        same("bert.encoder.ln.weight"),
    "final_layernorm.bias":
        same("bert.encoder.ln.bias"),
}
# fmt: on


class Tokentypes:
    """`type_vocab_size`: transformers has no model without."""

    def read(self, theirs: Mapping[str, Any]) -> Tree:
        return {"num_tokentypes": theirs.get("type_vocab_size", 2)}

    def write(self, model: ModelConfig) -> Tree:
        if not model.tokentypes:
            raise ConfigError("its tokens have no types (num_tokentypes 0)")
        return {"type_vocab_size": model.tokentypes}


# fmt: off
SETTINGS = (
    Field("num_layers", "num_hidden_layers"),
    Field("hidden_size", "hidden_size"),
    Field("ffn_hidden_size", "intermediate_size"),
    Field("num_attention_heads", "num_attention_heads"),
    Field("vocab_size", "vocab_size"),
    Field("max_position_embeddings", "max_position_embeddings", default=512),
    Field("layernorm_epsilon", "layer_norm_eps", default=1e-12),
    activation("hidden_act", "gelu"),
    Field("hidden_dropout", "hidden_dropout_prob", default=0.1),
    Field("attention_dropout", "attention_probs_dropout_prob", default=0.1),
    Field("init_method_std", "initializer_range", default=0.02),
    TIED,
    Tokentypes(),
    Theirs(is_decoder=False, add_cross_attention=False, position_embedding_type="absolute"),
)
# fmt: on
POST = Ours(model_type="bert", apply_residual_connection_post_layernorm=True)
PRE = Ours(model_type="bert")
FOR_PRE_TRAINING = Ours(add_lm_head=True, bert_binary_head=True, add_pooler=True)
MASKED_LM = Ours(add_lm_head=True, bert_binary_head=False, add_pooler=False)
BARE = Ours(add_lm_head=False, bert_binary_head=False, add_pooler=True)
HEADS = (
    r"^cls\.",
    r"^bert\.pooler\.",
)  # of the model for pre-training, whose files are read as smaller ones too
OLDER = (
    r"^(bert\.)?embeddings\.position_ids$",
    r"^cls\.predictions\.decoder\.bias$",
)  # copies of what is elsewhere


def bare(tensors: Mapping[str, Rule]) -> dict[str, Rule]:
    """Their names without what stands before them in a whole model."""
    return {
        ours: replace(rule, names=tuple(name.removeprefix("bert.") for name in rule.names))
        for ours, rule in tensors.items()
    }


BERT = Family(
    architecture="BertForPreTraining",
    model_type="bert",
    tensors=EVERY | POST_NORMS,
    settings=(*SETTINGS, POST, FOR_PRE_TRAINING),
    tied="cls.predictions.decoder.weight",
    ignored=OLDER,
    renamed={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    prefix="bert.",
)
BERT_MASKED_LM = replace(
    BERT, architecture="BertForMaskedLM", settings=(*SETTINGS, POST, MASKED_LM), ignored=(*OLDER, *HEADS)
)
BERT_MODEL = replace(
    BERT,
    architecture="BertModel",
    settings=(*SETTINGS, POST, BARE),
    tensors=bare(BERT.tensors),
    ignored=(*OLDER, *HEADS),
    prefix="",
)
MEGATRON_BERT = replace(
    BERT,
    architecture="MegatronBertForPreTraining",
    model_type="megatron-bert",
    tensors=EVERY | PRE_NORMS,
    settings=(*SETTINGS, PRE, FOR_PRE_TRAINING),
)
MEGATRON_BERT_MASKED_LM = replace(
    MEGATRON_BERT,
    architecture="MegatronBertForMaskedLM",
    settings=(*SETTINGS, PRE, MASKED_LM),
    ignored=(*OLDER, *HEADS),
)
MEGATRON_BERT_MODEL = replace(
    MEGATRON_BERT,
    architecture="MegatronBertModel",
    settings=(*SETTINGS, PRE, BARE),
    tensors=bare(MEGATRON_BERT.tensors),
    ignored=(*OLDER, *HEADS),
    prefix="",
)
