"""The multimodal model that an exported language model is written back into.

The vision tower, the projector and the processor's files are copied unchanged from the folder of the original model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megalith.bridge.family import Family
from megalith.bridge.folder import (
    CONFIG,
    GENERATION,
    list_weights,
    read_json,
    resolve_folder,
    tokenizer_files,
)
from megalith.bridge.fused_experts import split_fused_experts
from megalith.bridge.model_differences import differences
from megalith.bridge.multimodal import (
    WRAPPERS,
    language_config,
    language_name,
    thinker_of,
    with_text_config,
    wrapper_of,
)
from megalith.bridge.settings import Tree
from megalith.checkpoint.files import DTYPES, Layout
from megalith.config import ModelConfig
from megalith.errors import CheckpointError, ConfigError, shorten

MTP = "mtp."
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


class WrapperFolder:
    """The folder of a multimodal model. An export replaces its language model."""

    def __init__(self, path: str | Path):
        """Open a folder or hub name.

        Raises:
            CheckpointError: files are missing or damaged.
            ConfigError: it is not a multimodal model that can be read.
        """
        self.path = resolve_folder(path)
        self.config = read_json(self.path / CONFIG)
        if wrapper_of(self.config) is None:
            raise ConfigError(
                f"{self.path} holds {self.config.get('architectures')}, which has no language model to "
                f"replace; pass the folder of one of {', '.join(WRAPPERS)}"
            )
        self._tensors = list_weights(self.path)
        self._list_names()

    def _list_names(self) -> None:
        names = {name: language_name(name) for name in self._tensors}
        self._names = {plain: name for name, plain in names.items() if plain is not None}
        self._outside = [name for name, plain in names.items() if plain is None]

    @property
    def language_config(self) -> dict[str, Any]:
        """The config.json of the language model."""
        return language_config(self.config)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the language model's tensors."""
        return {plain: tuple(self._tensors[name].shape) for plain, name in self._names.items()}

    def rename(self, tensors: Layout, tied: str) -> Layout:
        """Extend the layout of the language model's tensors to the tensors of the whole model. The tensor `tied` may be
        missing in `tensors`.

        Raises CheckpointError if the folder has another language model.
        """
        if any(name.endswith(".experts.0.gate_proj.weight") for name in tensors):
            self._tensors = split_fused_experts(self._tensors)
            self._list_names()
        # Of a checkpoint without the layer for multi-token prediction, the export keeps the folder's.
        kept = [name for name in self._names if name.startswith(MTP) and name not in tensors]
        self._outside += [self._names.pop(name) for name in kept]
        missing = [name for name in tensors if name not in self._names]
        extra = [name for name in self._names if name not in tensors and name != tied]
        others = [
            name
            for name, (_, shape) in tensors.items()
            if name in self._names and tuple(self._tensors[self._names[name]].shape) != tuple(shape)
        ]
        if unequal := [*missing, *extra, *others]:
            raise CheckpointError(
                f"{self.path} does not have the checkpoint's language model: {shorten(unequal)} differ; pass "
                "the folder that the model was imported from"
            )
        renamed = {self._names[name]: entry for name, entry in tensors.items()}
        return renamed | {
            name: (DTYPES[self._tensors[name].dtype], tuple(self._tensors[name].shape))
            for name in self._outside
        }

    def name(self, plain: str) -> str:
        """Return this folder's name for a tensor of the language model.

        Args:
            plain: the name of the tensor in a folder of only the language model.
        """
        return self._names[plain]

    def outside(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value of each tensor outside the language model."""
        for name in self._outside:
            yield name, self._tensors[name].read()

    def with_language_model(self, family: Family, model: ModelConfig, tree: Mapping[str, Any]) -> Tree:
        """Return the multimodal config.json with its language model's config.json replaced by `tree`.

        The multimodal config.json is returned unchanged if its text_config already describes the language model.
        """
        if not differences(family.read_config(self.language_config), model):
            return self.config
        inner = thinker_of(self.config)
        text = {**inner["text_config"], **family.write_config(model)}
        text.pop("rope_parameters", None)
        top = {key: tree[key] for key in ("tie_word_embeddings",) if key in inner and key in tree}
        return with_text_config(self.config, {**text, "model_type": family.model_type}, **top)

    def files(self) -> list[Path]:
        """Return the small files of the tokenizer and of the processor."""
        others = [self.path / name for name in (GENERATION, *PROCESSOR_FILES)]
        return [*tokenizer_files(self.path), *(file for file in others if file.exists())]
