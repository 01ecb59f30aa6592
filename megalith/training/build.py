"""Build a run's tokenizer, model and datasets from its configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from megalith.bridge.adapters.adapter_settings import with_lora_load, with_saved_modules
from megalith.bridge.families import family_for
from megalith.bridge.load import tokenizer_folder, with_foreign_load, with_init_from
from megalith.config import DataConfig, RunConfig
from megalith.config.rules.fine_tuning_rules import check_epochs
from megalith.config.rules.notes import idle_notes
from megalith.config.train import BatchSizeSchedule
from megalith.data.batch import BoundaryRules
from megalith.data.blend import build_datasets, dataset_prefixes
from megalith.data.chat.chat_dataset import ChatSplits, open_chat_data
from megalith.data.chat.chat_template import read_template
from megalith.data.dataset import SampleDataset, parse_split
from megalith.data.dataset_kinds import load_dataset_kind
from megalith.data.dataset_tokenizer import check_tokenizer
from megalith.data.length_schedule import LengthSchedule
from megalith.data.mixture import MixtureSettings, parse_schedule
from megalith.data.streams.open_stream import stream_opener
from megalith.data.text_data import streamed_entries, with_tokenized_text
from megalith.data.tokenizers.huggingface import CHAT_TEMPLATE, TOOL_TEMPLATE
from megalith.data.tokenizers.open_tokenizer import Tokenizer, build_tokenizer
from megalith.errors import ConfigError
from megalith.models.adapters import add_adapters
from megalith.models.model_types import make_model
from megalith.models.transformer import Transformer
from megalith.models.vocabulary import VOCABULARY
from megalith.optim.optimizer import check_optimizer
from megalith.parallel.mesh import Mesh, build_mesh
from megalith.parallel.model_spec import TransformerSpec
from megalith.parallel.parallel_model import ParallelModel
from megalith.parallel.pipeline.pipeline_rules import check_layout

RunConfig.model_rebuild()  # builds the validators here, so that forked processes save 0.2 s
COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class PreparedRun(NamedTuple):
    """Result of `prepare`."""

    config: RunConfig
    """Configuration with the settings that come from the tokenizer, the data or imported weights."""
    tokenizer: Tokenizer | None
    notes: list[str]
    """Notes for the user about settings without effect and doubtful choices."""


def prepare(config: RunConfig, world_size: int) -> PreparedRun:
    """Complete and check a configuration for `world_size` processes.

    Returns:
        The configuration with all derived settings, the tokenizer, and notes.

    Raises:
        ConfigError: the run is not possible on `world_size` processes.
    """
    load = config.checkpoint.load
    config = with_foreign_load(config)
    imported = config.checkpoint.load != load
    import_notes = [f"{load} is not a Megalith run; only its weights are loaded"] if imported else []
    config = _with_tokenizer_of_weights(with_init_from(config))
    tokenizer = build_run_tokenizer(config)
    config = with_lora_load(with_saved_modules(resolve_config(config, tokenizer)))
    config = _with_epochs(config, tokenizer)
    warnings = check_layout(config, world_size)
    check_optimizer(config.optim)
    boundary_rules(config, tokenizer)
    parse_split(config.data.split)
    if tokenizer is not None:
        check_tokenizer(dataset_prefixes(config.data), tokenizer, config.data)
    config = _with_short_evaluations(config, tokenizer)
    if config.checkpoint.export_hf:
        family_for(config.model)  # raises if the model has no Hugging Face architecture
    return PreparedRun(config, tokenizer, [*config.notes, *import_notes, *warnings, *idle_notes(config)])


def _with_tokenizer_of_weights(config: RunConfig) -> RunConfig:
    """Set `data.tokenizer_model` from `model.init_from` (a Hugging Face folder or a run) if a post-training run sets no
    tokenizer.
    """
    weights = config.model.init_from
    needs_text = config.chat is not None or config.rl.prompts
    if not needs_text or config.data.tokenizer_type is not None or weights is None:
        return config
    folder = tokenizer_folder(weights)
    if folder is None:
        return config
    return config.with_settings(
        {"data.tokenizer_type": "HuggingFaceTokenizer", "data.tokenizer_model": str(folder)}
    )


def open_chat(config: RunConfig, tokenizer: Tokenizer | None) -> ChatSplits:
    """Open the run's tokenized chat data."""
    vocab_size, train = config.model.vocab_size, config.train
    cache = Path(train.output_dir) / "cache"
    return open_chat_data(
        config.data, config.chat, tokenizer, vocab_size, train.seed, cache, may_write=not train.skip_train
    )


def count_training_rows(config: RunConfig) -> int:
    """Return the number of rows of chat data in an epoch, after packing and dropping. Tokenizes them into the cache."""
    config = _with_tokenizer_of_weights(with_init_from(config))
    tokenizer = build_run_tokenizer(config)
    return len(open_chat(resolve_config(config, tokenizer), tokenizer).train)


def _with_epochs(config: RunConfig, tokenizer: Tokenizer | None) -> RunConfig:
    """Replace num_train_epochs by the number of steps, rounded up. The last step may begin another epoch."""
    if config.chat is None or config.chat.num_train_epochs is None:
        return config
    check_epochs(config)
    rows = len(open_chat(config, tokenizer).train)
    steps = math.ceil(config.chat.num_train_epochs * rows / config.train.global_batch_size)
    return config.with_settings({"train.train_iters": steps, f"{config.chat.name}.num_train_epochs": None})


def _with_short_evaluations(config: RunConfig, tokenizer: Tokenizer | None) -> RunConfig:
    """Set `eval_iters` if the run file does not: one epoch of chat data, otherwise at most a tenth of the steps."""
    train = config.train
    if "eval_iters" in train.model_fields_set:
        return config
    if config.chat is not None:
        rows = [len(split) for split in open_chat(config, tokenizer)[1:3] if split is not None]
        return config.with_settings(
            {"train.eval_iters": math.ceil(max(rows, default=0) / train.global_batch_size)}
        )
    steps = BatchSizeSchedule.from_config(train, data_parallel_size=1).iterations(train)
    return config.with_settings({"train.eval_iters": max(1, min(train.eval_iters, steps // 10))})


def boundary_rules(config: RunConfig, tokenizer: Tokenizer | None) -> BoundaryRules:
    """Return the run's rules for document boundaries in micro-batches."""
    data, eod = config.data, tokenizer.eod if tokenizer is not None else None
    points = data.seq_length_schedule
    schedule = None if points is None else LengthSchedule(points, data.seq_length)
    return BoundaryRules(
        eod, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss, schedule
    )


def build_run_tokenizer(config: RunConfig) -> Tokenizer | None:
    """Build the tokenizer configured in section `data`. Returns None if none is configured."""
    data = config.data
    if data.tokenizer_type is None:
        return None
    vocab_size = None
    if data.tokenizer_type == "TikTokenizer":
        vocab_size = config.model.vocab_size
    if data.tokenizer_type == "NullTokenizer" and config.model.vocab_size is not None:
        vocab_size = config.model.vocab_size - 1  # it adds EOD, which model.vocab_size includes
    tokenizer = build_tokenizer(
        data.tokenizer_type,
        data.tokenizer_model,
        vocab_file=data.vocab_file,
        merge_file=data.merge_file,
        vocab_size=vocab_size,
        section="data.",
    )
    if config.chat is not None and config.chat.chat_template_path is not None:
        # Stored with the tokenizer's files in checkpoints and exports.
        tokenizer.files[CHAT_TEMPLATE] = read_template(config.chat.chat_template_path)
        tokenizer.files.pop(TOOL_TEMPLATE, None)
    return tokenizer


def resolve_config(config: RunConfig, tokenizer: Tokenizer | None) -> RunConfig:
    """Return `config` with the vocabulary size and the maximum sequence length filled in from tokenizer and data.

    Raises ConfigError if the tokenizer has more entries than the model.
    """
    model, settings = config.model, {}
    if tokenizer is not None and model.vocab_size is None:
        settings["model.vocab_size"] = tokenizer.model_vocab_size
        if not config.data.mock:
            kind = load_dataset_kind(config.data, model, tokenizer, config.train.seed)
            settings["model.vocab_size"] = kind.default_vocab_size()
    elif tokenizer is not None and tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} entries, but model.vocab_size is {model.vocab_size}; raise "
            "model.vocab_size, or leave it out to use the tokenizer's size"
        )
    if model.max_position_embeddings is None:
        lengths = [config.data.seq_length, *[config.data.decoder_length] * (model.encoder_layers > 0)]
        settings["model.max_position_embeddings"] = max(lengths)
    return config.with_settings(settings)


def build_meta_model(config: RunConfig) -> Transformer:
    """Build the complete model on the meta device: names, shapes and dtypes without values."""
    settings = config.model
    if config.is_batch_invariant:  # the fused kernels are compiled, and round otherwise than the engine's
        settings = settings.model_copy(update={"moe_permute_fusion": False})
    model = make_model(
        settings,
        compute_dtype=COMPUTE_DTYPES[config.train.precision],
        seed=config.train.seed,
        device="meta",
    )
    if config.lora.rank is not None:
        add_adapters(model, config.lora)
    return model


def build_run_mesh(config: RunConfig, world_size: int, device_type: str) -> Mesh:
    """Build the mesh of a run's layout over `world_size` processes. Collective over all processes."""
    has_experts = config.model.num_experts is not None
    return build_mesh(config.parallel, world_size, device_type, has_experts=has_experts)


def build_model(
    config: RunConfig,
    mesh: Mesh,
    device: torch.device,
    stored: Mapping[str, torch.dtype] | None = None,
    frozen: bool = False,
) -> ParallelModel:
    """Build this rank's shard of the model on `device`, with initial weights.

    Args:
        config: the run's configuration.
        mesh: this rank's axes.
        device: device of the parameters.
        stored: names of the parameters that the caller will load, which are not initialized, each with a dtype that
            represents all its values.
        frozen: nothing is trained.
    """
    model = build_meta_model(config)
    if frozen:
        model.requires_grad_(False)
    spec = TransformerSpec(model, config, stored)
    return ParallelModel(spec, config.parallel, mesh, device)


def vocabulary_rows(config: RunConfig) -> dict[str, int]:
    """Return the number of rows without padding, by name, of each parameter that has one row per vocabulary entry."""
    return dict.fromkeys(VOCABULARY, config.model.vocab_size)


def tokenize_text(
    config: RunConfig, tokenizer: Tokenizer | None, show_progress: bool = False
) -> tuple[DataConfig, list[str]]:
    """Tokenize the text files among the run's data paths into the cache. Return notes, and the data settings with the
    tokenized datasets in place of the text files.
    """
    cache = Path(config.train.output_dir) / "cache"
    splits_sentences, may_write = config.model.model_type != "gpt", not config.train.skip_train
    return with_tokenized_text(config.data, splits_sentences, tokenizer, cache, may_write, show_progress)


def mixture_settings(data: DataConfig) -> MixtureSettings:
    """Return the settings of the training blend. Raise ConfigError for a malformed data.blend_schedule."""
    points = parse_schedule(data.blend_schedule, data.seq_length)
    return MixtureSettings(points, data.blend_temperature, data.max_epochs_per_source)


def open_datasets(
    config: RunConfig,
    samples: tuple[int, int, int],
    tokenizer: Tokenizer | None,
    show_progress: bool = False,
    notes: list[str] | None = None,
) -> tuple[SampleDataset, SampleDataset | None, SampleDataset | None]:
    """Open the train, valid and test data with the given numbers of samples.

    Args:
        config: the run's configuration.
        samples: number of train, valid and test samples.
        tokenizer: the run's tokenizer, if any.
        show_progress: show a progress bar while indices are built.
        notes: list to which notes about tokenized text are appended.

    Returns:
        Three datasets; valid and test are None if their split is empty or no samples are requested.
    """
    data, model, seed = config.data, config.model, config.train.seed
    if config.rl.prompts_or_rollouts:
        name = "prompts" if config.rl.prompts else "rollouts"
        raise ConfigError(
            f"rl.{name} requires `megalith grpo`; use that command, or leave rl.{name} out to pre-train"
        )
    kind = load_dataset_kind(data, model, tokenizer, seed)
    if (opened := kind.datasets(samples)) is not None:
        train, valid, test = opened
        return train, valid, test
    if data.mock:
        train, valid, test = (
            kind.mock(count, seed + part) if count else None for part, count in enumerate(samples)
        )
        return train, valid, test
    data, text_notes = tokenize_text(config, tokenizer, show_progress)
    if notes is not None:
        notes += text_notes
    streams = [] if data.data_path is None else streamed_entries(data)
    if streams:
        evaluated = [0, 0]
        if notes is not None and any(samples[1:]):
            notes.append(
                f"{streams[0]} is a stream, which data.split does not divide, so there is no evaluation; to "
                "evaluate, set data.train_data_path and data.valid_data_path"
            )
    elif data.data_path is not None:
        bounds = parse_split(data.split)
        evaluated = [count if bounds[i + 1] > bounds[i] else 0 for i, count in enumerate(samples) if i]
    else:
        paths = (data.valid_data_path, data.test_data_path)
        evaluated = [count if path is not None else 0 for count, path in zip(samples[1:], paths)]
    return build_datasets(
        data.data_path,
        data.split,
        data.seq_length,
        (samples[0], *evaluated),
        seed,
        train_data_path=data.train_data_path,
        valid_data_path=data.valid_data_path,
        test_data_path=data.test_data_path,
        make=kind.factory(),
        mixture=mixture_settings(data),
        open_stream=stream_opener(data, tokenizer, seed, config.train.global_batch_size, notes),
        show_progress=show_progress,
    )
