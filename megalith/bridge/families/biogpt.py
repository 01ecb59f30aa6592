"""BioGPT: OPT's layers and position embeddings, with GELU and a scaled word embedding.

Its norms have an epsilon of 1e-5; transformers does not read config.json's `layer_norm_eps`.
"""

from __future__ import annotations

from megalith.bridge.families.layernorm_decoders import SIZES, activation
from megalith.bridge.families.llama import TIED
from megalith.bridge.families.separate_qkv import OPT, PaddedPositions
from megalith.bridge.family import Family
from megalith.bridge.rows import Rule
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys


def _renamed(rule: Rule) -> Rule:
    """Return a mapping rule of OPT's with BioGPT's names."""
    names = (name.replace("model.decoder.", "biogpt.") for name in rule.names)
    names = (name.replace("biogpt.final_layer_norm", "biogpt.layer_norm") for name in names)
    return Rule(tuple(name.replace("lm_head", "output_projection") for name in names), rule.order)


# fmt: off
BIOGPT = Family(
    architecture="BioGptForCausalLM",
    model_type="biogpt",
    tensors={name: _renamed(rule) for name, rule in OPT.tensors.items()},
    settings=(
        *[row for row in SIZES if row.setting != "attention_dropout"],
        PaddedPositions(default=1024),
        Field("ffn_hidden_size", "intermediate_size"),
        activation("hidden_act", "gelu"),
        Field("hidden_dropout", "hidden_dropout_prob", default=0.1),
        Field("attention_dropout", "attention_probs_dropout_prob", default=0.1),
        Field("init_method_std", "initializer_range", default=0.02),
        Field("scale_embeddings", "scale_embedding", default=True),
        TIED,
        FixedSettings(position_embedding_type="learned_absolute", layernorm_epsilon=1e-5),
        RequiredKeys(layerdrop=0.0, activation_dropout=0.0),
    ),
    tied="output_projection.weight",
    prefix="biogpt.",
)
# fmt: on


FAMILIES = (BIOGPT,)
