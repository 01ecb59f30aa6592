"""Open the model and the data of an Oumi configuration, train, and write the results to the paths that Oumi uses.

    OUTPUT/checkpoints/           checkpoints to resume from
    OUTPUT/megatron_checkpoint/   the initial weights, converted once and reused by later starts
    OUTPUT/hf_model/              at the end: weights, config.json and tokenizer (also in tokenizer/)

Every rank opens the data. Rank 0 converts the weights; the others wait for the file that it writes last.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from megalith.bridge.adapters.adapter_folder import export_adapters
from megalith.bridge.adapters.adapter_settings import trains_tied_embedding
from megalith.bridge.adapters.merge_adapters import merge
from megalith.bridge.exporter import export_hf, merge_hf
from megalith.bridge.folder import (
    CONFIG,
    DTYPE_NAMES,
    name_in_folder,
    read_config_json,
    resolve_folder,
    tokenizer_files,
)
from megalith.bridge.importer import PRECISIONS, import_hf
from megalith.bridge.load import is_foreign_weights, model_of
from megalith.checkpoint import open_existing
from megalith.config import ModelConfig, RunConfig
from megalith.data.chat.chat_files import chat_files
from megalith.data.chat.chat_template import template_of
from megalith.data.inputs.sources import read_records
from megalith.dialects.oumi.oumi_errors import oumi_key_errors
from megalith.dialects.oumi.oumi_settings import OumiRun
from megalith.dialects.oumi.oumi_values import OumiDataset
from megalith.errors import CheckpointError, ConfigError, DataError, install_line
from megalith.io import atomic_file, write_file
from megalith.launch.launcher import Process, this_process
from megalith.small_files import read_small_file
from megalith.training.build import build_run_tokenizer
from megalith.training.trainer import TrainingResult
from megalith.training.training_job import train

HF_MODEL, CONVERTED, BIN = "hf_model", "megatron_checkpoint", "pytorch_model.bin"
SOURCE = "source.json"  # in CONVERTED; written last
INSTRUCTION = 'Think step by step, and give the final answer behind "####".'
COUNTDOWN = (
    "Make {target} of the numbers {nums} with + - * /, each number once. Reason first; the last line is the formula "
    "between <answer> and </answer>."
)
SUBSETS = {"gsm8k": "main"}  # for datasets without a default subset


@dataclass(frozen=True)
class OpenedRun:
    """A run after its model and data have been located."""

    run: OumiRun
    config: RunConfig
    records: list[dict[str, Any]] | None
    """GRPO's prompts; None for SFT and DPO."""
    eval_records: list[dict[str, Any]]
    """GRPO's evaluation prompts."""
    notes: list[str]


def open_run(
    run: OumiRun,
    processes: int,
    records: Iterable[Mapping[str, Any]] | None = None,
    eval_records: Iterable[Mapping[str, Any]] | None = None,
) -> OpenedRun:
    """Locate the model and the data of a run.

    Args:
        run: the translated configuration.
        processes: world size.
        records: prompts that replace data.train.datasets.
        eval_records: prompts that replace data.validation.datasets.

    Raises:
        ConfigError, DataError, CheckpointError: name Oumi's keys.
    """
    with oumi_key_errors():
        folder = (
            resolve_folder(run.model_name) if is_foreign_weights(run.model_name) else Path(run.model_name)
        )
        shape, notes = model_of(str(folder)), [*run.notes]
        config = run.config({"init_from": str(folder)})
        settings: dict[str, Any] = pipeline_split(config, shape, notes)
        if run.infers_precision:
            settings["train.precision"] = _precision_of(folder)
        tokenizer = folder if run.tokenizer_name is None else resolve_folder(run.tokenizer_name)
        if run.tokenizer_name is not None or (tokenizer / "tokenizer.json").is_file():
            settings |= {
                "data.tokenizer_type": "HuggingFaceTokenizer",
                "data.tokenizer_model": str(tokenizer),
            }
        if trains_tied_embedding(config):
            raise ConfigError(
                f"peft.lora_modules_to_save is {config.lora.modules_to_save}, but embedding and output matrix of "
                f"{run.model_name} are tied, and Oumi would train a copy of one and leave the other unchanged; leave "
                "embed_tokens and lm_head out, or use weights with tie_word_embeddings false"
            )
        if run.exports_hf and config.lora.rank is None:
            settings["checkpoint.export_hf"] = True
        if run.trainer == "grpo":
            config = config.with_settings(settings)
            train = list(records) if records is not None else _prompts(run, run.train, config)
            evals = list(eval_records) if eval_records is not None else _prompts(run, run.validation, config)
            if run.epochs is not None:
                config = config.with_settings({"train.train_iters": _steps(run.epochs, len(train), config)})
            config = _with_eval_interval(run, len(train), config, bool(evals), notes)
            return OpenedRun(run, config, train, evals, notes)
        if run.chat_template not in (None, "auto"):
            settings[f"{run.trainer}.chat_template_path"] = run.chat_template
        out = Path(config.train.output_dir)
        train_files = [str(path) for dataset in run.train for path in _files(dataset, out)]
        valid_files = [str(path) for dataset in run.validation for path in _files(dataset, out)]
        if valid_files:
            settings |= {"data.train_data_path": train_files, "data.valid_data_path": valid_files}
        else:
            settings |= {"data.data_path": train_files, "data.split": "100,0,0"}
        return OpenedRun(run, config.with_settings(settings), None, [], notes)


def _with_eval_interval(
    run: OumiRun, prompts: int, config: RunConfig, has_eval_prompts: bool, notes: list[str]
) -> RunConfig:
    """Return the configuration with GRPO's evaluation interval set from eval_strategy."""
    if not has_eval_prompts:
        if run.eval_strategy != "no":
            notes.append(
                f"training.eval_strategy is {run.eval_strategy}, but there are no evaluation "
                "prompts; add some to data.validation.datasets"
            )
        return config
    if run.eval_strategy == "steps":
        return config
    if run.eval_strategy == "epoch":
        return config.with_settings({"train.eval_interval": _steps(1, prompts, config)})
    notes.append(
        "training.eval_strategy is no: the prompts of data.validation are evaluated once, after the last step"
    )
    return config.with_settings({"train.eval_interval": config.train.train_iters})


def pipeline_split(config: RunConfig, shape: ModelConfig, notes: list[str]) -> dict[str, Any]:
    """Return settings that count the embedding, and the head, as a layer if the layers do not split evenly."""
    parallel = config.parallel
    stages = parallel.pipeline_model_parallel_size * (parallel.virtual_pipeline_model_parallel_size or 1)
    layers = shape.num_layers
    if layers % stages == 0:
        return {}
    counted = {
        "account_for_embedding_in_pipeline_split": (layers + 1) % stages == 0 or (layers + 2) % stages == 0,
        "account_for_loss_in_pipeline_split": (layers + 2) % stages == 0,
    }
    if not any(counted.values()):
        return {}  # the trainer's own validation reports it
    adjustment = (
        "embedding and head count as one layer each"
        if all(counted.values())
        else "the embedding counts as a layer"
    )
    notes.append(
        f"{layers} layers are not divisible by {stages} pipeline stages: {adjustment}, to balance the stages"
    )
    return {f"parallel.{name}": value for name, value in counted.items()}


def _precision_of(folder: Path) -> str:
    if not (folder / CONFIG).is_file():
        return "fp32"
    hf_config = read_config_json(folder)
    name = str(hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32").removeprefix("torch.")
    return PRECISIONS.get(DTYPE_NAMES.get(name), "fp32")


def _steps(epochs: float, prompts: int, config: RunConfig) -> int:
    sequences = prompts * config.rl.num_generations
    return max(1, math.ceil(epochs * sequences / config.train.global_batch_size)) * config.rl.num_iterations


def _files(dataset: OumiDataset, out: Path) -> list[Any]:
    """Return a dataset's files: a path, or a Hub dataset downloaded by `datasets` into OUTPUT/datasets."""
    split, _, row_range = dataset.split.partition("[")
    local = dataset.path or (dataset.name if dataset.name and Path(dataset.name).exists() else None)
    if local is not None:
        if row_range:
            raise ConfigError(
                f"data.train.datasets has split {dataset.split!r}, but Megalith reads whole files; split the file "
                "before the run"
            )
        folder = Path(local)
        if not folder.is_dir() or (folder / "dataset_info.json").is_file():
            return chat_files([local])
        files = [path for path in sorted(folder.rglob(f"{split}*")) if path.is_file()]
        if (folder / split).is_dir() and not files:
            return [folder / split]
        if not files:
            raise DataError(
                f"{folder} has no file whose name starts with {split!r}; set dataset_path to the file"
            )
        return files
    name = dataset.kwargs.get("hf_dataset_path") or dataset.name
    if not name:
        raise ConfigError(
            "an entry of data.train.datasets has neither dataset_name nor dataset_path; set one"
        )
    return [_download(str(name), dataset, out / "datasets")]


def _download(name: str, dataset: OumiDataset, folder: Path) -> Path:
    last, split = name.rpartition("/")[2], dataset.split
    path = folder / f"{last}-{split.replace('[', '-').replace(':', '-').rstrip(']')}.jsonl"
    if path.exists():
        return path
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"the dataset {name!r} is not a local file or folder; set data.train.datasets[0].dataset_path=…, or "
            f"install the Hub's library to download it: {install_line('hf')}"
        ) from None
    try:
        rows = datasets.load_dataset(name, dataset.subset or SUBSETS.get(last), split=split)
    except (OSError, ValueError) as error:  # not found, offline, no such split
        raise DataError(
            f"the dataset {name!r} with split {split!r} could not be downloaded ({str(error).splitlines()[0]}); set "
            "dataset_path to a local file"
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    return path


def _records(dataset: OumiDataset, out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ("file, line", record)."""
    for path in _files(dataset, out):
        for line, record in read_records(Path(path) if isinstance(path, str) else path):
            yield f"{path}, {line}", record


def _prompts(run: OumiRun, datasets: Sequence[OumiDataset], config: RunConfig) -> list[dict[str, Any]]:
    """Return GRPO's prompt records.

    A question becomes a user message if the tokenizer has a chat template. The gsm8k reward's instruction is appended.
    """
    tokenizer = build_run_tokenizer(config)
    uses_chat = tokenizer is not None and template_of(tokenizer) is not None
    if run.chat_template not in (None, "auto"):
        raise ConfigError(
            "model.chat_template is only read for TRL_SFT and TRL_DPO; for GRPO put it next to the tokenizer"
        )
    records = []
    for dataset in datasets:
        for position, record in islice(
            _records(dataset, Path(config.train.output_dir)), dataset.sample_count
        ):
            if "prompt" in record:
                records.append(dict(record))
            elif "question" in record or {"target", "nums"} <= {*record}:
                text = str(record["question"]) if "question" in record else COUNTDOWN.format_map(record)
                text = f"{text} {INSTRUCTION}" if run.rewards == ["gsm8k"] else text
                prompt = [{"role": "user", "content": text}] if uses_chat else text + "\n"
                records.append({**record, "prompt": prompt})
            else:
                raise DataError(f"{position} has neither 'prompt' nor 'question', only {', '.join(record)}")
    return records


def train_run(
    opened: OpenedRun,
    reward_funcs: Sequence[str | Callable[..., Any]] | None = None,
    init_from: str | None = None,
) -> TrainingResult:
    """Train to the end. Collective over all ranks.

    Args:
        opened: the run.
        reward_funcs: reward functions that replace the configured ones.
        init_from: a Megalith run or a folder of weights that replaces OUTPUT/megatron_checkpoint.
    """
    process, run, config = this_process(), opened.run, opened.config
    with oumi_key_errors():
        if run.trainer == "grpo":
            from megalith.rl.grpo import train_grpo

            # Exported adapters name their base model, so LoRA keeps the original path.
            uses_lora = config.lora.rank is not None
            initial = config.model.init_from if uses_lora else convert_weights(opened, process)
            config = config.with_settings({"model.init_from": init_from or str(initial)})
            eval_records = opened.eval_records or None
            result = train_grpo(config, reward_funcs or run.rewards, opened.records, eval_records)
        elif run.trainer == "dpo":
            from megalith.rl.dpo import train_dpo

            result = train_dpo(config)
        else:
            result = train(config)
        if process.is_first and result.ended == "train_iters" and run.exports_hf:
            finish_hf_model(config, result.checkpoint, run)
    return result


def convert_weights(opened: OpenedRun, process: Process) -> Path:
    """Convert the weights to OUTPUT/megatron_checkpoint on rank 0, unless it exists. Returns the folder."""
    config = opened.config
    path, source = Path(config.train.output_dir) / CONVERTED, str(config.model.init_from)
    mark = path / SOURCE
    if process.is_first and not mark.exists():
        shutil.rmtree(path, ignore_errors=True)  # left by an interrupted import
        if is_foreign_weights(source):
            import_hf(source, path, show_progress=False)
        else:
            path.mkdir(parents=True, exist_ok=True)
        write_file(mark, json.dumps({"model_name": source}) + "\n")
    deadline = time.monotonic() + 60 * config.runtime.distributed_timeout_minutes
    while not mark.exists():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{mark} has not appeared in {config.runtime.distributed_timeout_minutes:g} minutes: rank 0 converts "
                "the weights there; put training.output_dir on a disk that all machines share"
            )
        time.sleep(0.05)
    converted_from = json.loads(read_small_file(mark, path))["model_name"]
    if converted_from != source:
        raise ConfigError(
            f"{path} was converted from {converted_from}, but model.model_name is {source}; remove {path}, or choose "
            "another training.output_dir"
        )
    return path if is_foreign_weights(source) else Path(source)


def finish_hf_model(config: RunConfig, checkpoint: Any, run: OumiRun) -> Path:
    """Write OUTPUT/hf_model unless the run already has, then add tokenizer/ and, if configured, pytorch_model.bin.

    A LoRA run exports its adapters in PEFT's format with the tokenizer, or the merged model.
    """
    folder, base = Path(config.train.output_dir) / HF_MODEL, Path(str(config.model.init_from))
    if config.lora.rank is not None and not run.merges_adapters:
        shutil.rmtree(folder, ignore_errors=True)
        export_adapters(checkpoint, folder, show_progress=False)
        tokenizer = Path(config.data.tokenizer_model or base)
        _copy_tokenizer(tokenizer, folder)
    elif config.lora.rank is not None:
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            checkpoint = merge(checkpoint, Path(temporary) / "merged", show_progress=False)
            export_hf(checkpoint, folder, replace=True, show_progress=False)
            if run.writes_bin:
                merge_hf(open_existing(checkpoint), folder / BIN)
    elif not (folder / CONFIG).exists():
        export_hf(checkpoint, folder, replace=True, show_progress=False)
    if tokenizer_files(folder):
        (folder / "tokenizer").mkdir(exist_ok=True)
        _copy_tokenizer(folder, folder / "tokenizer")
    if run.writes_bin and config.lora.rank is None:
        merge_hf(open_existing(checkpoint), folder / BIN)
    return folder


def with_bin(opened: OpenedRun) -> OpenedRun:
    """Return the run with pytorch_model.bin in hf_model."""
    return replace(opened, run=replace(opened.run, writes_bin=True))


def _copy_tokenizer(source: Path, target: Path) -> None:
    for file in tokenizer_files(source):
        copy = target / name_in_folder(file)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
