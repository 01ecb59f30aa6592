"""Modules in `lora.modules_to_save` and the Hugging Face modules that correspond to them.

PEFT matches a name with the end of a module's name, without regard to dots: `norm` also means `input_layernorm`. A tied
embedding and output matrix are trained as one matrix, as PEFT does with `ensure_weight_tying`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megalith.bridge.family import Family, Group
from megalith.config import ModelConfig
from megalith.config.lora import WORD_EMBEDDINGS
from megalith.errors import ConfigError
from megalith.models.saved_modules import (
    can_be_saved,
    check_can_be_saved,
    lacks_module,
    path_of,
    paths_named,
)
from megalith.models.score_model import SCORE

OF_PEFT = (
    "base_layer",
    "lora_A.default",
    "lora_B.default",
    "lora_dropout.default",
    "lora_magnitude_vector.default",
)
"""Modules that PEFT adds before it looks for those to save."""

EMBEDDING = WORD_EMBEDDINGS
"""Path of the embedding, and of an output matrix that is tied to it."""


def resolve_saved_modules(names: Iterable[str], family: Family, model: ModelConfig) -> list[str] | None:
    """Return the module paths (as in models/saved_modules.py) that the entries of `lora.modules_to_save` refer to.

    A name is first compared with transformers' modules, then with Megalith's. Returns None if the only module among
    them is the score of a reward model, which is trained in any case.

    Raises:
        ConfigError: a module is missing, or cannot be trained in full.
    """
    groups = family.groups(model)
    theirs = _modules_by_path(family, groups)
    named: set[str] = set()
    for name in names:
        paths = {path for path, modules in theirs.items() if any(each.endswith(name) for each in modules)}
        paths = paths or paths_named(name, theirs)
        if not paths:
            raise lacks_module(name, theirs)
        check_can_be_saved(name, paths)
        named |= paths
    renamed = [
        g for g in groups if path_of(g.name) in named and any(".router.layer." in each for each in g.names())
    ]
    if renamed:
        raise ConfigError(
            f"lora.modules_to_save has the router, which is {renamed[0].names()[0]} in this family's files but has "
            "another name in newer versions of transformers, where PEFT would not find it; leave routers out"
        )
    if EMBEDDING in named and is_tied(model) and model.add_output_bias:
        raise ConfigError(
            "PEFT cannot store a tied embedding whose output has a bias; remove embedding and output matrix from "
            "lora.modules_to_save"
        )
    return [path for path in theirs if path in named and path != path_of(SCORE)] or None


def _modules_by_path(family: Family, groups: Iterable[Group]) -> dict[str, set[str]]:
    """Return, for each module path, the Hugging Face modules with that module's parameters, and all modules that
    contain these.
    """
    by_path: dict[str, set[str]] = {}
    for group in groups:
        modules = by_path.setdefault(path_of(group.name), set())
        for name in transformers_names(family, group):
            module = name.rpartition(".")[0]
            while module:
                modules.add(module)
                module = module.rpartition(".")[0]
    return by_path


def transformers_names(family: Family, group: Group) -> list[str]:
    """Return the names under which transformers has the tensors of a group, including the name of a tied output
    matrix.
    """
    names = group.names(0 if group.experts is not None else None)
    if path_of(group.name) == EMBEDDING and is_tied(group.model):
        names = [*names, family.tied]
    return [_transformers_name(name, group) for name in names]


def is_tied(model: ModelConfig) -> bool:
    """Return True if the output matrix is tied to the embedding."""
    return not (model.untie_embeddings_and_output_weights or model.score_head)


def _transformers_name(name: str, group: Group) -> str:
    """Return the name in transformers 5, whose files keep older names of blocks with a tensor per expert."""
    per_expert = group.model.num_experts and not name.endswith((".layer.weight", ".expert_bias"))
    return name.replace(".block_sparse_moe.gate.", ".mlp.gate.") if per_expert else name


def saved_groups(groups: Iterable[Group], saved: Iterable[str]) -> dict[str, Group]:
    """Return the groups of the parameters in `saved` (`Transformer.saved_names`), by name."""
    names = set(saved)
    return {group.name: group for group in groups if group.name in names}


def saved_tensor_names(family: Family, groups: Mapping[str, Group]) -> dict[str, list[str]]:
    """Return the names of the tensors that PEFT writes for these groups, by Megalith's name.

    A buffer is among them only if transformers has it in a module with a saved parameter.
    """
    names = {name: transformers_names(family, group) for name, group in groups.items()}
    modules = {
        each.rpartition(".")[0]
        for name, theirs in names.items()
        if not name.endswith(".expert_bias")
        for each in theirs
    }
    return {
        name: theirs
        for name, theirs in names.items()
        if all(each.rpartition(".")[0] in modules for each in theirs)
    }


def modules_to_save(family: Family, groups: Iterable[Group], saved: Iterable[str]) -> list[str]:
    """Return PEFT's `modules_to_save`: the shortest name suffixes that match the saved modules and no others."""
    groups = list(groups)
    names = saved_tensor_names(family, saved_groups(groups, saved))
    chosen = {each.rpartition(".")[0] for theirs in names.values() for each in theirs}
    tied = family.tied.rpartition(".")[0]
    if any(path_of(name) == EMBEDDING and len(theirs) > 1 for name, theirs in names.items()):
        chosen -= {tied}  # PEFT adds it, because of ensure_weight_tying
    every = set(OF_PEFT).union(*_modules_by_path(family, groups).values())
    ends: set[str] = set()
    for module in chosen:
        parts = module.split(".")
        shorter = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        ends.add(next(end for end in shorter if {each for each in every if each.endswith(end)} <= chosen))
    return sorted(ends)


def can_group_be_saved(group: Group) -> bool:
    """Return True if a tensor can be trained in full in addition to adapters."""
    return can_be_saved(path_of(group.name)) and group.name != SCORE
