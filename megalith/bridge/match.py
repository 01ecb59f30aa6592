"""Check of a folder's tensors against its config.json: names, shapes and dtypes."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megalith.bridge.family import Family, Group
from megalith.bridge.folder import SourceFolder
from megalith.bridge.transfer import to_ours
from megalith.checkpoint.files import DTYPE_CODES, DTYPES
from megalith.config import ModelConfig
from megalith.errors import CheckpointError, shorten
from megalith.models.init import initial_value
from megalith.models.vocabulary import VOCABULARY

WEIGHT_CODES = ("F32", "BF16", "F16")
ROUNDING = 5e-2  # of 1e-6 in fp16
TABLE_ROUNDING = 4e-3  # of 1 in bf16


@dataclass(frozen=True)
class Match:
    """A folder's tensors, matched with the groups of a model, and the allowed mismatches."""

    source: SourceFolder
    groups: list[Group]
    missing: list[str]
    """Source tensors that are missing. Tensors that need one keep their initial values."""
    extra: list[str]
    """Source tensors that the model does not use."""

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtypes of the source tensors that are used."""
        return {
            name: DTYPES[self.source.tensors[name].dtype]
            for group in self.groups
            for name in group.sources
            if name not in self.missing
        }

    def dtype(self, group: Group) -> torch.dtype | None:
        """Return a dtype that represents every value of a group exactly, or None if none is known.

        Import only rearranges values, so the common dtype of the sources does.
        """
        dtypes = {self.dtypes.get(name) for name in group.sources}
        return dtypes.pop() if len(dtypes) == 1 else None

    def bytes(self, group: Group) -> int:
        """Return the size of a group in the folder's files, in bytes."""
        return sum(
            torch.Size(shape).numel() * self.dtypes[name].itemsize
            for name, shape in group.sources.items()
            if name not in self.missing
        )

    def read(
        self, group: Group, seed: int, offset: tuple | None = None, shape: tuple | None = None
    ) -> Tensor:
        """Return a group's tensor, or a box of it, in float32. A missing source is initialized with `seed`."""
        if not set(self.missing) & set(group.sources):
            read = self.source.read_per_expert if group.rule.stacked else self.source.read
            return to_ours(group, read, offset, shape)
        return initial_value(group.name, torch.Size(group.shape), group.model, seed, shape, offset)


def match(source: SourceFolder, family: Family, model: ModelConfig, allow: bool = False) -> Match:
    """Match a folder's tensors with the groups of a model.

    Args:
        source: opened Hugging Face folder.
        family: the folder's family.
        model: the model that config.json describes.
        allow: accept missing and extra tensors and other dtypes.

    Raises:
        CheckpointError: the shape of a tensor differs from config.json; or, without `allow`, a tensor is missing or
            extra, or its dtype differs.
    """
    source.normalize_names(family)
    family = family.stored_as({name: stored.shape for name, stored in source.tensors.items()})
    _check_counts(source, model)
    if family.trusts_stored_head and not model.untie_embeddings_and_output_weights:
        model = _untied_if_stored(source, family, model)
    if not model.mtp_num_layers and family.stores_mtp(source.config, source.tensors):
        model = model.model_copy(update={"mtp_num_layers": 1})
    elif model.mtp_num_layers:
        model = _with_stored_mtp(source, family, model)
    model = family.stored_model(model, source.tensors)
    copies, constants, tables = (
        family.copies(model),
        family.stored_constants(model),
        family.stored_tables(model),
    )
    groups = family.groups(model)
    expected = {name: shape for group in groups for name, shape in group.sources.items()}
    present = {
        name: stored
        for name, stored in source.tensors.items()
        if name in expected
        or not (
            name in copies
            or name in constants
            or name in tables
            or name in family.embedding_copies
            or any(re.search(pattern, name) for pattern in family.ignored)
        )
    }
    _warn_of_unread_mtp(source, {*present, *copies}, model)
    _check_constants(source, constants)
    _check_tables(source, tables)
    for copy, original in copies.items():
        if _differs(source, copy, original):
            raise CheckpointError(
                f"{source.path}: {copy} differs from {original}, but Megalith's MTP layers share it with the "
                "model; models in which they differ are not supported"
            )
    for copy in family.embedding_copies:
        if _differs(source, copy, embedding := _embedding(groups)):
            raise CheckpointError(
                f"{source.path}: {copy} differs from {embedding}, but in Megalith encoder and decoder share "
                "the embedding; models in which they differ are not supported"
            )
    if not model.untie_embeddings_and_output_weights and present.pop(family.tied, None):
        _check_tied(source, family, groups)
    missing = [name for name in expected if name not in present]
    extra = [name for name in present if name not in expected]
    problems = {
        "missing": missing,
        "not of this model": extra,
        "whose type differs from config.json": _wrong_types(source, expected),
    }
    messages = [f"{what}: {shorten(names)}" for what, names in problems.items() if names]
    if messages and not allow:
        raise CheckpointError(
            f"{source.path} does not match its {source.settings_name}; {'; '.join(messages)}; "
            "download it again, or pass --allow to initialize missing tensors, ignore extra ones and accept the "
            "stored dtypes"
        )
    _check_shapes(source, expected)
    return Match(source, groups, missing, extra)


def _check_constants(source: SourceFolder, constants: Mapping[str, float]) -> None:
    """Raise CheckpointError for a stored scalar that differs from the constant used here by more than rounding."""
    for name, value in constants.items():
        stored = source.tensors.get(name)
        if stored is None:
            continue
        if stored.dtype not in WEIGHT_CODES or math.prod(stored.shape) != 1:
            raise CheckpointError(
                f"{source.path} has {name} of type {stored.dtype} and shape {list(stored.shape)}, but it must be a "
                "floating-point scalar; fetch it again"
            )
        if not math.isclose(number := source.read(name).item(), value, rel_tol=ROUNDING):
            raise CheckpointError(
                f"{source.path} has {name} {number:g}, but only {value:g} is supported; use a model with this value"
            )


def _check_tables(source: SourceFolder, tables: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError for a stored table that differs from the computed one by more than rounding."""
    for name, table in tables.items():
        stored = source.tensors.get(name)
        if stored is None:
            continue
        if stored.dtype not in WEIGHT_CODES or stored.shape != tuple(table.shape):
            raise CheckpointError(
                f"{source.path} has {name} of type {stored.dtype} and shape {list(stored.shape)}, but it must be a "
                f"floating-point tensor of shape {list(table.shape)}; fetch it again"
            )
        difference = (source.read(name).float() - table).abs().max().item()
        if not difference <= TABLE_ROUNDING:
            raise CheckpointError(
                f"{source.path} has {name} that differs by {difference:.2g} from the sinusoids that are computed here; "
                "tables with other values are not supported, use a model without them"
            )


def _check_counts(source: SourceFolder, model: ModelConfig) -> None:
    """Raise CheckpointError if config.json gives more layers, experts or heads than the folder's tensors can hold.

    Runs before anything is allocated per layer, expert or row.
    """
    for name, count in (("layers", model.num_layers), ("experts", model.num_experts or 0)):
        if count > len(source.tensors):
            raise CheckpointError(
                f"{source.path} has {len(source.tensors)} tensors, but its {source.settings_name} says {count:,} "
                f"{name}; correct {source.settings_name}, or fetch the folder again"
            )
    longest = max((size for stored in source.tensors.values() for size in stored.shape), default=0)
    counts = {"attention heads": model.num_attention_heads}
    if model.multi_latent_attention:
        counts["rotary rows of a head"] = model.qk_pos_emb_head_dim
    if {"gated_delta_net", "kimi_delta_attention"} & set(model.recurrent_mixers):
        counts["heads of linear attention"] = model.linear_num_value_heads
    for name, count in counts.items():
        if count > longest:
            raise CheckpointError(
                f"{source.path} has no tensor of more than {longest:,} rows or columns, but its "
                f"{source.settings_name} says {count:,} {name}; correct {source.settings_name}, or fetch the folder "
                "again"
            )


def _wrong_types(source: SourceFolder, expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    if source.dtype is None:
        return []
    code = DTYPE_CODES[source.dtype]
    return [
        f"{name} ({source.tensors[name].dtype}, not {code})"
        for name in expected
        if name in source.tensors and source.tensors[name].dtype != code
    ]


def _check_shapes(source: SourceFolder, expected: Mapping[str, tuple[int, ...]]) -> None:
    stored_tensors = {name: source.tensors[name] for name in expected if name in source.tensors}
    shapes = [
        f"{name} (stored {list(stored.shape)}, needed {list(expected[name])})"
        for name, stored in stored_tensors.items()
        if stored.shape != expected[name]
    ]
    if shapes:
        raise CheckpointError(
            f"{source.path} has tensors whose shapes do not match its {source.settings_name}: {shorten(shapes)}; "
            f"correct {source.settings_name}, or fetch the folder again"
        )
    types = [
        f"{name} ({stored.dtype})"
        for name, stored in stored_tensors.items()
        if stored.dtype not in WEIGHT_CODES
    ]
    if types:
        raise CheckpointError(
            f"{source.path} has weights of a type that is not one of {', '.join(WEIGHT_CODES)}: {shorten(types)}; "
            "if they are quantized, the format is not supported: use the original weights"
        )


def _check_tied(source: SourceFolder, family: Family, groups: list[Group]) -> None:
    embedding = _embedding(groups)
    if _differs(source, family.tied, embedding):
        raise CheckpointError(
            f"{source.path}: config.json has tie_word_embeddings, but {family.tied} is not {embedding}; if the output "
            "matrix is separate, set tie_word_embeddings to false"
        )


def _untied_if_stored(source: SourceFolder, family: Family, model: ModelConfig) -> ModelConfig:
    """Return a model with tied embeddings untied if the files contain a different output matrix."""
    embedding = _embedding(family.groups(model))
    if not _differs(source, family.tied, embedding):
        return model
    warnings.warn(
        f"{source.path}: config.json has tie_word_embeddings, but {family.tied} is not {embedding}, so the model "
        "gets a separate output matrix",
        stacklevel=2,
    )
    return model.model_copy(update={"untie_embeddings_and_output_weights": True})


def _with_stored_mtp(source: SourceFolder, family: Family, model: ModelConfig) -> ModelConfig:
    """Return `model` without multi-token prediction if config.json has it but the files do not.

    transformers does not save the layers for multi-token prediction.
    """
    layers = {str(number) for number in model.mtp_layers}
    names = [name for group in family.groups(model) if group.layer in layers for name in group.names()]
    if any(name in source.tensors for name in names):
        return model
    warnings.warn(
        f"{source.path}: config.json has {model.mtp_num_layers} MTP layers, but the weights have none; the model is "
        "built without them",
        stacklevel=2,
    )
    return model.model_copy(update={"mtp_num_layers": None})


MTP_NAME = re.compile(r"(?:^|\.)mtp(?:_[a-z]+)?\.|^model\.layers\.(\d+)\.")


def _warn_of_unread_mtp(source: SourceFolder, read: Collection[str], model: ModelConfig) -> None:
    """Warn of multi-token prediction tensors that no mapping rule uses."""
    unread = [
        name
        for name in source.tensors
        if name not in read
        and (number := MTP_NAME.search(name))
        and (number[1] is None or int(number[1]) >= model.num_layers)
    ]
    if unread:
        warnings.warn(
            f"{source.path}: the MTP layers are ignored ({shorten(unread)}); an export will not have them",
            stacklevel=2,
        )


def _embedding(groups: list[Group]) -> str:
    """Return the source name of the word embedding."""
    return next(group for group in groups if group.name == VOCABULARY[0]).names()[0]


def _differs(source: SourceFolder, output: str, embedding: str) -> bool:
    """Return True if both matrices exist, in a supported dtype, with different values."""
    both = [source.tensors.get(name) for name in (output, embedding)]
    if any(stored is None or stored.dtype not in WEIGHT_CODES for stored in both):
        return False  # _check_shapes rejects other dtypes
    return not torch.equal(source.read(output), source.read(embedding))
