"""Build a run's tokenizer, model and data from its configuration."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from megalith.bridge.adapter_folder import with_lora_load
from megalith.bridge.families import family_for
from megalith.bridge.load import tokenizer_folder, with_foreign_load, with_init_from
from megalith.comm.collectives import Axis
from megalith.config import DataConfig, RunConfig
from megalith.config.rules.notes import idle_notes
from megalith.config.rules.run_rules import check_epochs
from megalith.config.train import BatchSizeSchedule
from megalith.data.batch import BoundaryRules
from megalith.data.blend import BlendedDataset, build_datasets, indexed_datasets
from megalith.data.chat.chat_dataset import ChatDataset, ChatSplits, make_chat_batch, open_chat_data
from megalith.data.chat.chat_template import read_template
from megalith.data.dataset import SampleDataset, parse_split
from megalith.data.dataset_kinds import load_dataset_kind
from megalith.data.loader import Collate, Loader
from megalith.data.mixture import MixtureSettings, parse_schedule
from megalith.data.order import SampleOrder, SingleOrder, sample_order, stream_position
from megalith.data.own_dataset import MapDataset, OwnCollate, StreamDataset
from megalith.data.source_plan import source_notes, source_plan
from megalith.data.text_data import cached_name, with_tokenized_text
from megalith.data.tokenizers.huggingface import CHAT_TEMPLATE
from megalith.data.tokenizers.open_tokenizer import Tokenizer, build_tokenizer
from megalith.errors import ConfigError
from megalith.models.adapters import add_adapters
from megalith.models.model_types import make_model
from megalith.models.transformer import Transformer
from megalith.models.vocabulary import VOCABULARY
from megalith.optim.optimizer import check_optimizer
from megalith.parallel.mesh import Mesh
from megalith.parallel.model_spec import TransformerSpec
from megalith.parallel.parallel_model import ParallelModel
from megalith.parallel.pipeline.pipeline_rules import check_layout
from megalith.report.report import TokenCounts
from megalith.small_files import read_small_file

RunConfig.model_rebuild()  # builds the validators here, so that forked processes save 0.2 s
STREAM_FILE = "data_stream.json"  # in checkpoints: the position of a stream
COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class PreparedRun(NamedTuple):
    """Result of `prepare`."""

    config: RunConfig
    """Configuration with the settings that come from the tokenizer, the data or imported weights."""
    tokenizer: Tokenizer | None
    notes: list[str]
    """Notes for the user: settings without effect, and doubtful choices."""


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
    config = _with_epochs(with_lora_load(resolve_config(config, tokenizer)), tokenizer)
    warnings = check_layout(config, world_size)
    check_optimizer(config.optim)
    _boundary_rules(config, tokenizer)
    parse_split(config.data.split)
    config = _with_short_evaluations(config, tokenizer)
    if config.checkpoint.export_hf:
        family_for(config.model)  # raises if the model has no Hugging Face architecture
    return PreparedRun(config, tokenizer, [*config.notes, *import_notes, *warnings, *idle_notes(config)])


def _with_tokenizer_of_weights(config: RunConfig) -> RunConfig:
    """Use the tokenizer of `model.init_from` (a Hugging Face folder or a run) if post-training names none."""
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


def _with_epochs(config: RunConfig, tokenizer: Tokenizer | None) -> RunConfig:
    """Replace num_train_epochs by the number of steps, rounded up. The last step may begin another epoch."""
    if config.chat is None or config.chat.num_train_epochs is None:
        return config
    check_epochs(config)
    rows = len(open_chat(config, tokenizer).train)
    steps = math.ceil(config.chat.num_train_epochs * rows / config.train.global_batch_size)
    return config.with_settings({"train.train_iters": steps, f"{config.chat.name}.num_train_epochs": None})


def _with_short_evaluations(config: RunConfig, tokenizer: Tokenizer | None) -> RunConfig:
    """Set `eval_iters` if the run file does not: at most a tenth of the run's steps, or one pass over chat data."""
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


def _boundary_rules(config: RunConfig, tokenizer: Tokenizer | None) -> BoundaryRules:
    data, eod = config.data, tokenizer.eod if tokenizer is not None else None
    return BoundaryRules(eod, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)


def build_run_tokenizer(config: RunConfig) -> Tokenizer | None:
    """Build the tokenizer named in `data`. None if it names none."""
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
    )
    if config.chat is not None and config.chat.chat_template_path is not None:
        # Stored with the tokenizer's files in checkpoints and exports.
        tokenizer.files[CHAT_TEMPLATE] = read_template(config.chat.chat_template_path)
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
            f"the tokenizer has {tokenizer.vocab_size} entries but model.vocab_size is {model.vocab_size}; "
            "raise it, or omit it to use the tokenizer's"
        )
    if model.max_position_embeddings is None:
        lengths = [config.data.seq_length, *[config.data.decoder_length] * (model.encoder_layers > 0)]
        settings["model.max_position_embeddings"] = max(lengths)
    return config.with_settings(settings)


def build_meta_model(config: RunConfig) -> Transformer:
    """Build the complete model on the meta device: names, shapes and dtypes without values."""
    model = make_model(
        config.model,
        compute_dtype=COMPUTE_DTYPES[config.train.precision],
        seed=config.train.seed,
        device="meta",
    )
    if config.lora.rank is not None:
        add_adapters(model, config.lora)
    return model


def build_model(config: RunConfig, mesh: Mesh, device: torch.device) -> ParallelModel:
    """Build this rank's part of the model on `device`, initialized and ready to train."""
    return ParallelModel(TransformerSpec(build_meta_model(config), config), config.parallel, mesh, device)


def vocabulary_rows(config: RunConfig) -> dict[str, int]:
    """Return the parameters with one row per vocabulary entry, and the number of their rows that are not padding."""
    return dict.fromkeys(VOCABULARY, config.model.vocab_size)


def tokenize_text(
    config: RunConfig, tokenizer: Tokenizer | None, show_progress: bool = False
) -> tuple[DataConfig, list[str]]:
    """Tokenize the text among the run's data paths into its cache. Return the data settings with the results'
    prefixes, and notes."""
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
        notes: receives notes about tokenized text.

    Returns:
        Three datasets; valid and test are None if their split is empty or no samples are requested.
    """
    data, model, seed = config.data, config.model, config.train.seed
    if config.rl.prompts_or_rollouts:
        name = "prompts" if config.rl.prompts else "rollouts"
        raise ConfigError(f"rl.{name} requires `megalith grpo`; use that, or omit the setting to pre-train")
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
    if data.data_path is not None:
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
        show_progress=show_progress,
    )


class Data:
    """Datasets of a run and their loaders."""

    make_chat_batch = staticmethod(make_chat_batch)
    """Collate function for chat data."""

    def __init__(
        self,
        config: RunConfig,
        batch_sizes: BatchSizeSchedule,
        total_steps: int,
        tokenizer: Tokenizer | None,
        dp: Axis,
        show_progress: bool = False,
    ):
        """Open the run's data.

        Ranks along `dp` read different micro-batches. All other ranks of the mesh read the same ones.
        """
        self._config, self._dp = config, dp
        self._batch_sizes = batch_sizes
        self._total_steps = total_steps
        self._ahead = 2 * max(batch_sizes.all_micro_batches)  # micro-batches of two steps
        self._rules = _boundary_rules(config, tokenizer)
        self._kind = load_dataset_kind(config.data, config.model, tokenizer, config.train.seed)
        evaluated = config.train.eval_iters * batch_sizes.global_batch_size
        samples = (batch_sizes.samples_for_iterations(total_steps), evaluated, evaluated)
        self.notes: list[str] = []
        if config.chat is not None:
            self.train, *others, self.notes = open_chat(config, tokenizer)
            self.valid, self.test = (
                split and split.pad_to_batches(batch_sizes.global_batch_size) for split in others
            )
        else:
            self.train, self.valid, self.test = open_datasets(
                config, samples, tokenizer, show_progress, self.notes
            )
        blend = isinstance(self.train, BlendedDataset)
        if blend:
            self.notes += source_notes(source_plan(self.train, samples[0], config.data.seq_length))
        epochs = [f"{prefix} {count} times" for prefix, count in self.train.epochs().items() if count > 1]
        if epochs and not blend and config.data.dataloader_type == "single":
            self.notes.append(
                f"the run's {samples[0]:,} samples, read in order (data.dataloader_type single), cover documents more "
                f"than once: {', '.join(epochs)}"
            )

    def train_loader(
        self,
        step: int,
        consumed_samples: int,
        device: torch.device,
        left_out: Sequence[Sequence[int]] = (),
    ) -> Loader:
        """Return a loader of micro-batches from `consumed_samples` to the end of the run.

        The ranges `left_out` are skipped (see data/order.py).
        """

        def sizes() -> Iterable[int]:
            consumed = consumed_samples
            for _ in range(step, self._total_steps):
                size = self._batch_sizes.size(consumed)
                yield size
                consumed += size

        data, seed = self._config.data, self._config.train.seed
        if isinstance(self.train, StreamDataset):
            self.order = partial(stream_position, skipped=left_out)
            block = self._config.train.micro_batch_size * self._dp.size
            kept = 2 + self._ahead + max(self._batch_sizes.all_micro_batches)
            self.train.restart(self.order(consumed_samples), block, kept)
        else:
            self.order = sample_order(data.dataloader_type, len(self.train), seed, left_out)
        return self._loader(self.train, self.order, sizes(), device, consumed_samples)

    def work(self, consumed_samples: int, batch_size: int) -> TokenCounts | None:
        """Return the work in the next `batch_size` samples of the latest train loader. None if all sequences are
        full."""
        if not isinstance(self.train, ChatDataset):
            return None
        rows = [self.order(consumed_samples + at) for at in range(batch_size)]
        return TokenCounts(*(int(each) for each in self.train.work[rows].sum(0)))

    def micro_batches(self, consumed_samples: int) -> int:
        """Return the number of micro-batches per data-parallel rank in the step after `consumed_samples`."""
        return self._batch_sizes.micro_batches(consumed_samples)

    def files(self) -> dict[str, dict[str, int | str]]:
        """Return the identity of each training dataset (`identity`), by prefix."""
        if isinstance(self.train, ChatDataset):
            return {"chat data": self.train.identity()}
        return {cached_name(indexed.prefix): indexed.identity() for indexed in indexed_datasets(self.train)}

    def state_files(self, consumed_samples: int, left_out: Sequence[Sequence[int]]) -> dict[str, bytes]:
        """Return the state of a stream after `consumed_samples` for a checkpoint, contents by file name."""
        if not isinstance(self.train, StreamDataset):
            return {}
        state = self.train.state_at(stream_position(consumed_samples, left_out))
        return {} if state is None else {STREAM_FILE: json.dumps(state).encode()}

    def load_state(self, files: Mapping[str, Path]) -> None:
        """Set the state of a stream that `state_files` returned when the checkpoint was saved."""
        if isinstance(self.train, StreamDataset):
            path = files.get(STREAM_FILE)
            self.train.load_state(None if path is None else json.loads(read_small_file(path, path.parent)))

    def preserves_order(self, num_samples: int) -> bool:
        """Return True if a run with `num_samples` samples reads the same samples, up to the shorter length."""
        return self.train.preserves_order(num_samples, permuted=self._config.data.dataloader_type == "cyclic")

    def evaluation_loader(self, dataset: SampleDataset, device: torch.device) -> Loader:
        """Return a loader of the first eval_iters global batches of `dataset`, the same in every evaluation."""
        sizes = [self._batch_sizes.global_batch_size] * self._config.train.eval_iters
        if isinstance(dataset, StreamDataset):
            dataset = dataset.restarted()
        return self._loader(dataset, SingleOrder(len(dataset), wrap=True), sizes, device)

    def _loader(
        self,
        dataset: SampleDataset,
        order: SampleOrder,
        batch_sizes: Iterable[int],
        device: torch.device,
        consumed_samples: int = 0,
    ) -> Loader:
        threads = self._config.data.num_workers
        if isinstance(dataset, StreamDataset):
            threads = min(threads, 1)  # a stream is read in order
        return Loader(
            dataset,
            order,
            micro_batch_size=self._config.train.micro_batch_size,
            batch_sizes=batch_sizes,
            vocab_size=self._config.model.vocab_size,
            data_parallel_rank=self._dp.rank,
            data_parallel_size=self._dp.size,
            consumed_samples=consumed_samples,
            num_workers=threads,
            ahead=self._ahead,
            pin_memory=device.type == "cuda",
            rules=self._rules,
            collate=self._collate(dataset),
        )

    def _collate(self, dataset: SampleDataset) -> Collate | None:
        if isinstance(dataset, ChatDataset):
            return self.make_chat_batch
        if isinstance(dataset, MapDataset | StreamDataset):
            return OwnCollate(dataset) if dataset.collates else None
        return self._kind.collate
