"""RoBERTa and similar models: BERT without next-sentence head. Position ids start after the padding token's id.

XLM-RoBERTa, CamemBERT and Data2Vec (text) are RoBERTa. XLM-RoBERTa XL and RoBERTa-PreLayerNorm are pre-LN, the latter
with a norm of the embedding as well. In all of them position 0 is row 2 of the table, and the head has the exact GELU.

ERNIE is BERT under other names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megalith.bridge.families.encoders import (
    BARE,
    BERT,
    BERT_MASKED_LM,
    BERT_MODEL,
    POST_NORM,
    POST_NORMS,
    PRE_NORM,
    SETTINGS,
    SHARED_TENSORS,
    BertFamily,
)
from megalith.bridge.families.separate_qkv import PADDING_POSITIONS, PaddedPositions
from megalith.bridge.family import Family
from megalith.bridge.rows import Rule, first_last, replace_prefix, same
from megalith.bridge.settings import FixedSettings, RequiredKeys

# fmt: off
HEAD = {
    "embedding.position_embeddings.weight":
        first_last("bert.embeddings.position_embeddings.weight", PADDING_POSITIONS),
    "lm_head.dense.weight":
        same("lm_head.dense.weight"),
    "lm_head.dense.bias":
        same("lm_head.dense.bias"),
    "lm_head.layernorm.weight":
        same("lm_head.layer_norm.weight"),
    "lm_head.layernorm.bias":
        same("lm_head.layer_norm.bias"),
    "lm_head.vocabulary.bias":
        same("lm_head.bias"),
    "output_layer.weight":
        same("lm_head.decoder.weight"),
}
XL_NORMS = {
    "layers.{layer}.input_layernorm.weight":
        same("bert.encoder.layer.{layer}.attention.self_attn_layer_norm.weight"),
    "layers.{layer}.input_layernorm.bias":
        same("bert.encoder.layer.{layer}.attention.self_attn_layer_norm.bias"),
    "layers.{layer}.pre_mlp_layernorm.weight":
        same("bert.encoder.layer.{layer}.LayerNorm.weight"),
    "layers.{layer}.pre_mlp_layernorm.bias":
        same("bert.encoder.layer.{layer}.LayerNorm.bias"),
    "final_layernorm.weight":
        same("bert.encoder.LayerNorm.weight"),
    "final_layernorm.bias":
        same("bert.encoder.LayerNorm.bias"),
}
PRE_LAYER_NORMS = {
    "embedding.layernorm.weight":
        same("bert.embeddings.LayerNorm.weight"),
    "embedding.layernorm.bias":
        same("bert.embeddings.LayerNorm.bias"),
    "layers.{layer}.input_layernorm.weight":
        same("bert.encoder.layer.{layer}.attention.LayerNorm.weight"),
    "layers.{layer}.input_layernorm.bias":
        same("bert.encoder.layer.{layer}.attention.LayerNorm.bias"),
    "layers.{layer}.pre_mlp_layernorm.weight":
        same("bert.encoder.layer.{layer}.intermediate.LayerNorm.weight"),
    "layers.{layer}.pre_mlp_layernorm.bias":
        same("bert.encoder.layer.{layer}.intermediate.LayerNorm.bias"),
    "final_layernorm.weight":
        same("bert.LayerNorm.weight"),
    "final_layernorm.bias":
        same("bert.LayerNorm.bias"),
}
# fmt: on
HEADS = (
    r"^(\w+\.)?pooler\.",
    r"^lm_head\.",
)  # heads in files of other models with the same encoder, ignored by models without them
OLD_COPIES = (
    r"^(\w+\.)?embeddings\.position_ids$",
    r"^lm_head\.(decoder\.)?bias$",  # the one that the output matrix does not use
)
MASKED_LM = FixedSettings(
    add_lm_head=True, lm_head_activation="gelu", bert_binary_head=False, add_pooler=False
)
PADDING_TOKEN = RequiredKeys(pad_token_id=1)
WITHOUT_POSITIONS = [row for row in SETTINGS if getattr(row, "setting", "") != "max_position_embeddings"]


def two_shapes(
    name: str,
    model_type: str,
    norms: Mapping[str, Rule] = POST_NORMS,
    order: FixedSettings = POST_NORM,
    prefix: str = "roberta.",
    defaults: Mapping[str, float] = {},
) -> tuple[Family, Family]:
    """Return the families of a kind of RoBERTa with its masked-LM head and of the bare model with a pooler.

    Args:
        name: common part of both classes' names.
        model_type: config.json's `model_type`.
        norms: the table of norms.
        order: the settings of the norms' positions.
        prefix: prefix of the encoder's names.
        defaults: values of keys that config.json omits, if they differ from RoBERTa's.
    """
    settings = (
        *WITHOUT_POSITIONS,
        PaddedPositions(512, counted=True),
        FixedSettings(positions_skip_padding=True),
        PADDING_TOKEN,
        order,
    )
    masked_lm = BertFamily(
        architecture=f"{name}ForMaskedLM",
        model_type=model_type,
        defaults=defaults,
        tensors=replace_prefix({**SHARED_TENSORS, **HEAD, **norms}, "bert.", prefix),
        settings=(*settings, MASKED_LM),
        tied="lm_head.decoder.weight",
        ignored=(*OLD_COPIES, HEADS[0]),
        prefix=prefix,
    )
    bare = replace(
        masked_lm,
        architecture=f"{name}Model",
        tensors=replace_prefix({**SHARED_TENSORS, **HEAD, **norms}, "bert."),
        settings=(*settings, BARE),
        ignored=(*OLD_COPIES, *HEADS),
        prefix="",
        prefix_with_head=prefix,
    )
    return masked_lm, bare


XL_DEFAULTS = {"layer_norm_eps": 1e-5, "max_position_embeddings": 514, "type_vocab_size": 1}
PRE_NORM_AFTER_EMBEDDING = FixedSettings(model_type="bert", embedding_layernorm=True)
WITHOUT_TASKS = RequiredKeys(use_task_id=False)
ERNIES = tuple(
    replace(
        family,
        architecture=family.architecture.replace("Bert", "Ernie"),
        model_type="ernie",
        tensors=replace_prefix(family.tensors, "bert.", "ernie."),
        settings=(*family.settings, WITHOUT_TASKS),
        ignored=tuple(pattern.replace("bert", "ernie") for pattern in family.ignored),
        prefix=family.prefix and "ernie.",
        prefix_with_head=family.prefix_with_head and "ernie.",
    )
    for family in (BERT, BERT_MASKED_LM, BERT_MODEL)
)

FAMILIES = (
    *two_shapes("Roberta", "roberta"),
    *two_shapes("XLMRoberta", "xlm-roberta"),
    *two_shapes("Camembert", "camembert"),
    *two_shapes("Data2VecText", "data2vec-text", prefix="data2vec_text."),
    *two_shapes("XLMRobertaXL", "xlm-roberta-xl", XL_NORMS, PRE_NORM, defaults=XL_DEFAULTS),
    *two_shapes(
        "RobertaPreLayerNorm",
        "roberta-prelayernorm",
        PRE_LAYER_NORMS,
        PRE_NORM_AFTER_EMBEDDING,
        "roberta_prelayernorm.",
    ),
    *ERNIES,
)
