"""BERT for generation: BERT without token types and pooler, used as a decoder with an output matrix or as a bare
encoder.
"""

from __future__ import annotations

from dataclasses import replace

from megalith.bridge.families.encoders import POST_NORMS, SETTINGS, SHARED_TENSORS, BertFamily, Tokentypes
from megalith.bridge.rows import replace_prefix, same
from megalith.bridge.settings import FixedSettings, RequiredKeys

# fmt: off
HEAD = {
    "vocabulary.bias":
        same("lm_head.bias"),
    "output_layer.weight":
        same("lm_head.decoder.weight"),
}
# fmt: on
COMMON = [row for row in SETTINGS if not isinstance(row, Tokentypes | RequiredKeys)]
POST_NORM = FixedSettings(apply_residual_connection_post_layernorm=True)


DECODER = BertFamily(
    architecture="BertGenerationDecoder",
    model_type="bert-generation",
    tensors=SHARED_TENSORS | POST_NORMS | HEAD,
    settings=(
        *COMMON,
        RequiredKeys({"is_decoder": False}, is_decoder=True, add_cross_attention=False),
        POST_NORM,
        FixedSettings(position_embedding_type="learned_absolute", add_output_bias=True),
    ),
    tied="lm_head.decoder.weight",
    ignored=(
        r"^(bert\.)?embeddings\.position_ids$",
        r"^lm_head\.(decoder\.)?bias$",  # the one that the output matrix does not use
    ),
    prefix="bert.",
)
ENCODER = replace(
    DECODER,
    architecture="BertGenerationEncoder",
    tensors=replace_prefix(DECODER.tensors, "bert."),
    settings=(
        *COMMON,
        RequiredKeys(is_decoder=False, add_cross_attention=False),
        POST_NORM,
        FixedSettings(
            model_type="bert", num_tokentypes=0, add_lm_head=False, bert_binary_head=False, add_pooler=False
        ),
    ),
    ignored=(r"^(bert\.)?embeddings\.position_ids$", r"^lm_head\."),
    prefix="",
    prefix_with_head="bert.",
)

FAMILIES = (DECODER, ENCODER)
