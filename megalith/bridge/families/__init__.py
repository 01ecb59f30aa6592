"""The model families of transformers that Megalith imports and exports.

Each file in this folder lists its families in `FAMILIES`; a new file needs no other registration.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any

from megalith.bridge.family import Family, check_types
from megalith.bridge.unsupported import reasons
from megalith.config import ModelConfig
from megalith.errors import ConfigError, nearest_of

# An export without an origin takes the first family that can express the model. These files come first, in this order,
# then all others by name.
PREFERRED = (
    "layernorm_decoders",
    "llama",
    "experts",
    "encoders",
    "gpt_oss",
    "hybrids",
    "scaled",
    "seed_oss",
    "separate_qkv",
)
LAST = (
    "sequence_classification",
)  # after the decoders of the same model_type, whose names these families share


def _families() -> Iterator[Family]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    others = (name for name in names if name not in (*PREFERRED, *LAST))
    for name in (*PREFERRED, *others, *LAST):
        yield from importlib.import_module(f"{__name__}.{name}").FAMILIES


FAMILIES: dict[str, Family] = {family.architecture: family for family in _families()}
NEAREST = 3
"""Number of families that an error names if none can express a model."""


def family_of(hf_config: Mapping[str, Any], where: str) -> Family:
    """Return the family of a config.json, by its `architectures`, else by its `model_type`.

    Several families share a class of transformers, such as LlamaForCausalLM. Then `model_type` decides.

    Args:
        hf_config: contents of config.json.
        where: the source of the file; errors begin with it.

    Raises:
        ConfigError: no family has this name.
    """
    check_types(
        {key: hf_config.get(key) for key in ("architectures", "model_type")}, f"{where}'s config.json"
    )
    names = hf_config.get("architectures") or [
        family.architecture
        for family in FAMILIES.values()
        if hf_config.get("model_type") in (family.model_type, *family.other_model_types)
    ]
    name = names[0] if names else str(hf_config.get("model_type"))
    for family in FAMILIES.values():
        if family.transformers_class == name and family.model_type == hf_config.get("model_type"):
            return family
    if all(name not in _names(family) for family in FAMILIES.values()):
        kind = hf_config.get("model_type")
        reason = f": model_type {kind} {reasons()[kind]}" if kind in reasons() else ""
        raise ConfigError(  # no suggestion: a similar name is a different model
            f"{where} names the architecture {name}, which is not supported{reason}; supported: "
            f"{', '.join(sorted(FAMILIES))}"
        )
    return family_named(name, where)


def _names(family: Family) -> tuple[str, ...]:
    return (family.architecture, family.model_type, *family.other_model_types)


def family_named(name: str, where: str) -> Family:
    """Return the family with this architecture or model type. Errors quote `where`, the place of the name."""
    for family in FAMILIES.values():
        if name in _names(family):
            return family
    raise ConfigError(
        f"{where} names the architecture {name}, which is not known{nearest_of(name, FAMILIES)}"
    )


def family_for(model: ModelConfig) -> Family:
    """Return the first family that can express a model. Raises ConfigError, with the nearest families, if none can."""
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
        "no model family of transformers can represent this model, so it cannot be exported; the "
        f"nearest of {len(reasons)}: {'; '.join(nearest)}; --family NAME shows why another one "
        "cannot"
    )
