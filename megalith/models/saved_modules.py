"""Modules that a run with adapters trains in full: `lora.modules_to_save`, PEFT's name for them.

A module is named by its path in the model with `*` for the index of a layer, such as layers.*.input_layernorm, or by
the last parts of that path, such as input_layernorm. Embeddings, output matrix, norms, routers and the score of a
reward model can be trained; the matrices of layers get adapters instead.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from torch import nn

from megalith.errors import ConfigError, nearest_of

TRAINABLE = (
    *(
        "word_embeddings",
        "position_embeddings",
        "tokentype_embeddings",
        "output_layer",
        "vocabulary",
        "score",
    ),
    *("router", "shared_expert_gate"),
)
"""Last parts of the paths of modules that can be trained in full, in addition to norms."""


def path_of(name: str) -> str:
    """Return the module path of a parameter or buffer: layers.*.mlp.router for layers.3.mlp.router.weight."""
    return re.sub(r"(?<=\blayers\.)\d+(?=\.)", "*", name.rpartition(".")[0])


def can_be_saved(path: str) -> bool:
    """Return True if the module at this path can be trained in full."""
    module = path.rpartition(".")[2]
    return module in TRAINABLE or module.endswith("norm")


def saved_names(model: nn.Module, modules: Iterable[str], may_lack: bool = False) -> frozenset[str]:
    """Return the names of the parameters and buffers of the modules in `lora.modules_to_save`.

    Args:
        model: the model, before adapters are added.
        modules: `lora.modules_to_save`.
        may_lack: True if the model has only some of its layers, so that modules may be missing.

    Raises:
        ConfigError: a module is missing, or cannot be trained in full.
    """
    paths = {name: path_of(name) for name in model.state_dict()}
    names: set[str] = set()
    for module in modules:
        named = paths_named(module, paths.values())
        of_module = {name for name, path in paths.items() if path in named}
        if not of_module and not may_lack:
            raise lacks_module(module, paths.values())
        check_can_be_saved(module, map(paths.__getitem__, of_module))
        names |= of_module
    return frozenset(names)


def saved_names_of(chunks: Iterable[nn.Module]) -> frozenset[str]:
    """Return `saved_names` of the full model, from its chunks on a rank with their adapters."""
    return frozenset().union(*(getattr(chunk, "saved_names", ()) for chunk in chunks))


def paths_named(module: str, paths: Collection[str]) -> set[str]:
    """Return the paths that `module` selects: itself if it is a path, otherwise the paths that end with it."""
    return {module} if module in paths else {path for path in paths if path.endswith(f".{module}")}


def check_can_be_saved(module: str, paths: Iterable[str]) -> None:
    """Raise ConfigError if one of the paths that `module`, an entry of `lora.modules_to_save`, selects cannot be
    trained in full."""
    if refused := sorted(path for path in set(paths) if not can_be_saved(path)):
        raise ConfigError(
            f"lora.modules_to_save has {module}, which selects {refused[0]}, but only embeddings, the output matrix, "
            "norms and routers can be trained in full; put matrices of layers in lora.targets"
        )


def lacks_module(module: str, paths: Collection[str]) -> ConfigError:
    """Return the error for a module that the model lacks. `paths` lists the model's modules."""
    names = sorted({path.rpartition(".")[2] for path in paths if can_be_saved(path)} - {"score"})
    return ConfigError(
        f"lora.modules_to_save has {module!r}, which this model does not have{nearest_of(module, names)}"
    )
