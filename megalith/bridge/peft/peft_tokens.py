"""Matrices in `lora.trainable_token_indices` and the Hugging Face modules that correspond to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megalith.bridge.family import Family
from megalith.bridge.peft.peft_modules import EMBEDDING, is_tied, resolve_saved_modules, transformers_names
from megalith.config import ModelConfig
from megalith.config.lora import OUTPUT_LAYER
from megalith.errors import ConfigError

SETTING = "lora.trainable_token_indices"


def resolve_tokens(
    tokens: Sequence[int] | Mapping[str, Sequence[int]], family: Family, model: ModelConfig
) -> dict[str, list[int]]:
    """Return the tokens by Megalith's names of the matrices.

    Raises:
        ConfigError: a name belongs to another module, or the tokens of tied matrices differ.
    """
    if not isinstance(tokens, Mapping):
        tokens = {EMBEDDING: tokens}
    tied, resolved = is_tied(model), {}
    if tied and tokens.keys() == {"lm_head"}:
        raise ConfigError(
            f"{SETTING} has only lm_head, which is tied to the embedding in this model, and PEFT would then train "
            "the output matrix apart from the embedding; list embed_tokens instead, which trains both"
        )
    for name, each in tokens.items():
        paths = [name] if name in (EMBEDDING, OUTPUT_LAYER) else _paths(name, family, model)
        if len(paths) != 1 or paths[0] not in (EMBEDDING, OUTPUT_LAYER) or (tied and name == OUTPUT_LAYER):
            names = "embed_tokens" if tied or model.score_head else "embed_tokens and lm_head"
            raise ConfigError(
                f"{SETTING} has {name}, but only rows of an embedding or an output matrix of its own can be trained; "
                f"list {names}"
            )
        if model.add_output_bias and (tied or paths[0] == OUTPUT_LAYER):
            raise ConfigError(
                f"{SETTING} has {name}, but the output has a bias, which PEFT does not store with trained rows; "
                f"train rows of an embedding that is not the output matrix, or leave {name} out"
            )
        if resolved.get(paths[0], each) != each:
            raise ConfigError(
                f"{SETTING} has different tokens for the embedding and for the output matrix, which are one matrix "
                "in this model; list the same tokens for both, or list only embed_tokens"
            )
        resolved[paths[0]] = list(each)
    return resolved


def _paths(name: str, family: Family, model: ModelConfig) -> list[str]:
    """Return the paths of the modules that a transformers name refers to, without the path of an output bias."""
    paths = resolve_saved_modules([name], family, model) or []
    return [path for path in paths if path != "vocabulary"]


def token_modules(tokens: Mapping[str, Sequence[int]], family: Family, model: ModelConfig) -> dict[str, str]:
    """Return the names of the Hugging Face modules with these matrices, by Megalith's names."""
    groups = {group.name: group for group in family.groups(model)}
    return {
        path: transformers_names(family, groups[f"{path}.weight"])[0].rpartition(".")[0] for path in tokens
    }
