"""Whether a folder's tensors are those of its config.json: all that the model needs, in their shapes, and no others."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megalith.bridge.family import VOCABULARY, Family, Group
from megalith.bridge.folder import SourceFolder
from megalith.bridge.transfer import to_ours
from megalith.checkpoint.files import DTYPE_CODES, DTYPES
from megalith.config import ModelConfig
from megalith.errors import CheckpointError, shorten
from megalith.models.init import initial_value

WEIGHT_CODES = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class Match:
    """A folder's tensors as the groups of a model, and what did not fit and was allowed."""

    source: SourceFolder
    groups: list[Group]
    missing: list[str]
    """Theirs: the tensors of ours that need one of them keep their initial values."""
    extra: list[str]
    """Theirs, that nothing here has a use for."""

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The type of each tensor that is used."""
        return {
            name: DTYPES[self.source.tensors[name].dtype]
            for group in self.groups
            for name in group.sources
            if name not in self.missing
        }

    def bytes(self, group: Group) -> int:
        """What a group takes in the folder's files."""
        return sum(
            torch.Size(shape).numel() * self.dtypes[name].itemsize
            for name, shape in group.sources.items()
            if name not in self.missing
        )

    def ours(
        self, group: Group, seed: int, offset: tuple | None = None, shape: tuple | None = None
    ) -> Tensor:
        """Our tensor of a group in float32, or a box of it; the initial one of `seed` where theirs are missing."""
        if not set(self.missing) & set(group.sources):
            read = self.source.read_per_expert if group.rule.stacked else self.source.read
            return to_ours(group, read, offset, shape)
        return initial_value(group.name, torch.Size(group.shape), group.model, seed, shape, offset)


def match(source: SourceFolder, family: Family, model: ModelConfig, allow: bool = False) -> Match:
    """The folder's tensors as the groups of `model`.

    Raises CheckpointError naming tensors of another shape or type than config.json says; and those that are missing
    or extra, unless `allow`.
    """
    source.normalize_names(family)
    _check_counts(source, model)
    if family.trusts_stored_head and not model.untie_embeddings_and_output_weights:
        model = _as_stored(source, family, model)
    groups = family.groups(model)
    wanted = {name: shape for group in groups for name, shape in group.sources.items()}
    found = {
        name: stored
        for name, stored in source.tensors.items()
        if name in wanted or not any(re.search(pattern, name) for pattern in family.ignored)
    }
    if not model.untie_embeddings_and_output_weights and found.pop(family.tied, None):
        _check_tied(source, family, groups)
    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted]
    problems = {
        "missing": missing,
        "not of this model": extra,
        "of another type than config.json says": _wrong_types(source, wanted),
    }
    told = [f"{what}: {shorten(names)}" for what, names in problems.items() if names]
    if told and not allow:
        raise CheckpointError(
            f"{source.path} is not what its {source.settings_name} says; {'; '.join(told)}; fetch it again, or allow "
            "it with --allow: missing tensors are then initialized, others ignored, dtypes preserved"
        )
    _check_shapes(source, wanted)
    return Match(source, groups, missing, extra)


def _check_counts(source: SourceFolder, model: ModelConfig) -> None:
    """Before anything is made for each layer or expert of a model: as many tensors have to be there."""
    for name, count in (("layers", model.num_layers), ("experts", model.num_experts or 0)):
        if count > len(source.tensors):
            raise CheckpointError(
                f"{source.path} has {len(source.tensors)} tensors, but its {source.settings_name} says {count:,} "
                f"{name}; correct that, or fetch it again"
            )


def _wrong_types(source: SourceFolder, wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    if source.dtype is None:
        return []
    code = DTYPE_CODES[source.dtype]
    return [
        f"{name} ({source.tensors[name].dtype}, not {code})"
        for name in wanted
        if name in source.tensors and source.tensors[name].dtype != code
    ]


def _check_shapes(source: SourceFolder, wanted: Mapping[str, tuple[int, ...]]) -> None:
    held = {name: source.tensors[name] for name in wanted if name in source.tensors}
    shapes = [
        f"{name} (stored {list(stored.shape)}, needed {list(wanted[name])})"
        for name, stored in held.items()
        if stored.shape != wanted[name]
    ]
    if shapes:
        raise CheckpointError(
            f"{source.path} has tensors of another shape than its {source.settings_name} says: {shorten(shapes)}; "
            "correct that, or fetch it again"
        )
    types = [f"{name} ({stored.dtype})" for name, stored in held.items() if stored.dtype not in WEIGHT_CODES]
    if types:
        raise CheckpointError(
            f"{source.path} has weights of a type that is not one of {', '.join(WEIGHT_CODES)}: {shorten(types)}; "
            "quantized models cannot be read: take the original"
        )


def _check_tied(source: SourceFolder, family: Family, groups: list[Group]) -> None:
    embedding = _embedding(groups)
    if _differs(source, family.tied, embedding):
        raise CheckpointError(
            f"{source.path}: config.json has tie_word_embeddings, but {family.tied} is not {embedding}; if it is to "
            "have a matrix of its own, set tie_word_embeddings to false"
        )


def _as_stored(source: SourceFolder, family: Family, model: ModelConfig) -> ModelConfig:
    """`model`, which config.json says is tied, with an output matrix of its own where the files have one."""
    embedding = _embedding(family.groups(model))
    if not _differs(source, family.tied, embedding):
        return model
    warnings.warn(
        f"{source.path}: config.json has tie_word_embeddings, but {family.tied} is not {embedding}: the model gets a "
        "matrix of its own",
        stacklevel=2,
    )
    return model.model_copy(update={"untie_embeddings_and_output_weights": True})


def _embedding(groups: list[Group]) -> str:
    """Their name of the word embedding."""
    return next(group for group in groups if group.name == VOCABULARY[0]).names()[0]


def _differs(source: SourceFolder, output: str, embedding: str) -> bool:
    """Whether both matrices are there, of types that are read, and not alike."""
    both = [source.tensors.get(name) for name in (output, embedding)]
    if any(stored is None or stored.dtype not in WEIGHT_CODES for stored in both):
        return False  # other types are refused with all others of such a type
    return not torch.equal(source.read(output), source.read(embedding))
