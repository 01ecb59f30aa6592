"""Every family that can be read and written. To add one: its tables in a file here, and a line below.

Where no family is asked for, an export takes the first that can say the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.encoders import (
    BERT,
    BERT_MASKED_LM,
    BERT_MODEL,
    MEGATRON_BERT,
    MEGATRON_BERT_MASKED_LM,
    MEGATRON_BERT_MODEL,
    T5,
)
from megalith.bridge.families.experts import (
    DEEPSEEK_MOE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3_MOE,
)
from megalith.bridge.families.gpt_oss import GPT_OSS
from megalith.bridge.families.hybrids import QWEN3_NEXT
from megalith.bridge.families.layernorm_decoders import BLOOM, FALCON, GPT2, GPT_NEOX
from megalith.bridge.families.llama import (
    GEMMA,
    GEMMA2,
    GEMMA3,
    LLAMA,
    MISTRAL,
    OLMO2,
    PHI3,
    QWEN2,
    QWEN3,
    SMOLLM3,
)
from megalith.bridge.families.scaled import COHERE, COHERE2, GRANITE, GRANITE_MOE
from megalith.bridge.families.separate_qkv import GPT_J, OPT, PHI, STABLELM, STARCODER2
from megalith.bridge.family import Family, check_kinds
from megalith.config import ModelConfig
from megalith.errors import ConfigError, nearest_of

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        GPT2,
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        GEMMA,
        GEMMA2,
        GEMMA3,
        OLMO2,
        PHI3,
        GPT_NEOX,
        FALCON,
        SMOLLM3,
        STARCODER2,
        STABLELM,
        PHI,
        GPT_J,
        OPT,
        GRANITE,
        COHERE,
        COHERE2,
        MIXTRAL,
        GRANITE_MOE,
        QWEN2_MOE,
        QWEN3_MOE,
        QWEN3_NEXT,
        GPT_OSS,
        OLMOE,
        DEEPSEEK_MOE,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        BLOOM,
        BERT,
        BERT_MASKED_LM,
        BERT_MODEL,
        MEGATRON_BERT,
        MEGATRON_BERT_MASKED_LM,
        MEGATRON_BERT_MODEL,
        T5,
    )
}


def family_of(theirs: Mapping[str, Any], where: str) -> Family:
    """The family of a config.json, by its `architectures`, else its `model_type`. Raises ConfigError."""
    check_kinds({key: theirs.get(key) for key in ("architectures", "model_type")}, f"{where}'s config.json")
    names = theirs.get("architectures") or [
        family.architecture for family in FAMILIES.values() if family.model_type == theirs.get("model_type")
    ]
    name = names[0] if names else str(theirs.get("model_type"))
    if all(name not in (family.architecture, family.model_type) for family in FAMILIES.values()):
        raise ConfigError(  # no suggestion: a name that is spelled nearly alike is another model
            f"{where} names the architecture {name}, which cannot be built here; known: {', '.join(FAMILIES)}"
        )
    return family_named(name, where)


def family_named(name: str, where: str) -> Family:
    """The family with this architecture or model type. `where` names, in the error, what asked for it."""
    for family in FAMILIES.values():
        if name in (family.architecture, family.model_type):
            return family
    raise ConfigError(
        f"{where} names the architecture {name}, which is not known{nearest_of(name, FAMILIES)}"
    )


NEAREST = 3  # families that a refusal names


def family_for(model: ModelConfig) -> Family:
    """The first family that can say this model. Raises ConfigError where none can, with what the nearest lack."""
    reasons = []
    for family in FAMILIES.values():
        try:
            family.write_config(model)
        except ConfigError as error:
            reasons.append(f"{family.architecture}: {error}")
        else:
            return family
    nearest = sorted(reasons, key=lambda reason: reason.count(", not ") or math.inf)[:NEAREST]
    raise ConfigError(
        f"no family of transformers can say this model, so it has no Hugging Face form; the nearest of {len(reasons)}: "
        f"{'; '.join(nearest)}; --family NAME tells what another lacks"
    )
