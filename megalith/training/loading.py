"""Load a trained model from its checkpoint for inference."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from megalith.bridge.adapters.merge_adapters import merge_into
from megalith.bridge.folder import is_model_folder
from megalith.bridge.importer import SEED, common_dtype, open_hf_folder
from megalith.bridge.load import check_base, config_of, load_initial_weights, load_source
from megalith.bridge.origin import check_vocabulary, saved_tokenizer, tokenizer_of
from megalith.bridge.quantize_base import round_base, taken_from
from megalith.checkpoint import Checkpoint, load_model, open_existing
from megalith.checkpoint.state import MODEL, base_fingerprint
from megalith.config import RunConfig
from megalith.data.tokenizers.open_tokenizer import Tokenizer
from megalith.errors import ConfigError
from megalith.models.adapters import adapters, add_adapters
from megalith.models.init import initialize
from megalith.models.model_types import make_model
from megalith.models.transformer import Transformer
from megalith.parallel.gather import ALONE
from megalith.remote import StorePath
from megalith.training.build import COMPUTE_DTYPES, vocabulary_rows


def load(path: str | Path | StorePath, device: str | torch.device = "cpu") -> Transformer:
    """Load the model of a run folder, a step folder or a Hugging Face folder, in evaluation mode.

    Args:
        path: folder or URL.
        device: device of the weights.

    Returns:
        A module. `model(input_ids)` maps int64 [batch, seq] to logits [batch, seq, vocab], in the run's precision or
        in the dtype of the folder's weights.

    Raises:
        CheckpointError: there is no complete checkpoint.
        ConfigError: the Hugging Face model is not supported.
    """
    return load_with_tokenizer(path, device)[0]


def load_with_adapter(
    path: str | Path | StorePath, adapter: str | Path | None, device: str | torch.device, show_progress: bool
) -> tuple[Transformer, Tokenizer | None]:
    """Load a model as `load_with_tokenizer` does, and merge the adapters of a run or a PEFT folder into it."""
    model, tokenizer = load_with_tokenizer(path, device, show_progress)
    if adapter is not None:
        if model.has_adapters:
            raise ConfigError(f"{path} already has adapters; pass its base model, and a single adapter")
        merge_into(model, adapter, path)
    return model, tokenizer


def load_with_tokenizer(
    path: str | Path | StorePath, device: str | torch.device = "cpu", show_progress: bool = False
) -> tuple[Transformer, Tokenizer | None]:
    """Load a model as `load` does, with the tokenizer stored with the checkpoint.

    The tokenizer is None if the run had none.
    """
    if is_model_folder(path):
        return _load_hugging_face(path, device, show_progress)
    checkpoint = open_existing(path, show_progress=show_progress)
    config = config_of(checkpoint)
    model = make_model(
        config.model,
        compute_dtype=COMPUTE_DTYPES[config.train.precision],
        seed=config.train.seed,
        device=device,
    )
    if config.lora.rank is not None:
        _add_adapters(model, checkpoint, config, device)
    load_model(checkpoint, model, vocabulary_rows(config), show_progress=show_progress)
    return model.eval(), saved_tokenizer(checkpoint.tokenizer_folder)


def _add_adapters(
    model: Transformer, checkpoint: Checkpoint, config: RunConfig, device: str | torch.device
) -> None:
    """Load the base weights into an empty model and add adapters without values."""
    base, seed = config.model.init_from, config.train.seed
    if base is None:
        initialize(model, config.model, seed)
    else:
        load_initial_weights(base, model, vocabulary_rows(config), seed, ALONE)
        check_base(checkpoint, base_fingerprint(model, vocabulary_rows(config)), base)
        if config.lora.has_quantized_base:
            round_base(config, model, taken_from(config, partial(checkpoint.read, MODEL)))
    add_adapters(model, config.lora)
    for _, adapter in adapters(model):
        adapter.to_empty(device=device)  # saved modules keep the base's values


def _load_hugging_face(
    path: str | Path | StorePath, device: str | torch.device, show_progress: bool
) -> tuple[Transformer, Tokenizer | None]:
    fit = open_hf_folder(path)
    shape, tokenizer = fit.groups[0].model, tokenizer_of(fit.source.path)
    check_vocabulary(fit.source, tokenizer, shape.vocab_size)
    model = make_model(shape, compute_dtype=common_dtype(fit), device=device)
    load_source(fit, model, SEED, show_progress)
    return model.eval(), tokenizer
