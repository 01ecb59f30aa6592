"""A run of Oumi's: its model and data opened, trained by our own programs, its results where Oumi's readers look.

    OUTPUT/checkpoints/           steps, to go on from
    OUTPUT/megatron_checkpoint/   the weights that the run began from, converted once: the next start takes them again
    OUTPUT/hf_model/              at the end: weights, config.json and the tokenizer, which is in tokenizer/ too

Every rank opens the data; the first one converts the weights, and the others wait for the file that it writes last.
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

from megalith.bridge.adapter_folder import export_adapters, merge
from megalith.bridge.exporter import export_hf, merge_hf
from megalith.bridge.folder import CONFIG, DTYPE_NAMES, TOKENIZER_FILES, read_config_json, resolve_folder
from megalith.bridge.importer import PRECISIONS, import_hf
from megalith.bridge.load import is_foreign_weights, model_of
from megalith.checkpoint import open_existing
from megalith.config import ModelConfig, RunConfig
from megalith.data.chat.chat_files import chat_files, read_records
from megalith.data.chat.chat_template import template_of
from megalith.dialects.oumi.oumi_settings import DatasetAsked, OumiRun, in_keys
from megalith.errors import CheckpointError, ConfigError, DataError, install_line
from megalith.io import atomic_file, write_file
from megalith.launch.launcher import Process, this_process
from megalith.small_files import read_small_file
from megalith.training.build import build_run_tokenizer
from megalith.training.trainer import TrainingResult, train

HF_MODEL, CONVERTED, BIN = "hf_model", "megatron_checkpoint", "pytorch_model.bin"
SOURCE = "source.json"  # in CONVERTED, written last
INSTRUCTION = 'Think step by step, and give the final answer behind "####".'
COUNTDOWN = (
    "Make {target} of the numbers {nums} with + - * /, each number once. Reason first; the last line is the formula "
    "between <answer> and </answer>."
)
SUBSETS = {"gsm8k": "main"}  # of datasets that have no default


@dataclass(frozen=True)
class OpenedRun:
    """A run whose model and data are found."""

    asked: OumiRun
    config: RunConfig
    records: list[dict[str, Any]] | None
    """GRPO's prompts."""
    held_out: list[dict[str, Any]]
    """And those that it is evaluated by."""
    notes: list[str]


def open_run(
    asked: OumiRun,
    processes: int,
    records: Iterable[Mapping[str, Any]] | None = None,
    held_out: Iterable[Mapping[str, Any]] | None = None,
) -> OpenedRun:
    """Finds the model and the data of a configuration. `records`: prompts in the place of data.train.datasets,
    `held_out`: in that of data.validation.datasets.

    Raises ConfigError, DataError or CheckpointError, in Oumi's words.
    """
    with in_keys():
        folder = (
            resolve_folder(asked.model_name)
            if is_foreign_weights(asked.model_name)
            else Path(asked.model_name)
        )
        shape, notes = model_of(str(folder)), [*asked.notes]
        config = asked.config({"init_from": str(folder)})
        found: dict[str, Any] = pipeline_split(config, shape, notes)
        if asked.finds_precision:
            found["train.precision"] = _precision_of(folder)
        words = folder if asked.tokenizer_name is None else resolve_folder(asked.tokenizer_name)
        if asked.tokenizer_name is not None or (words / "tokenizer.json").is_file():
            found |= {"data.tokenizer_type": "HuggingFaceTokenizer", "data.tokenizer_model": str(words)}
        if asked.exports and config.lora.rank is None:
            found["checkpoint.export_hf"] = True
        if asked.trainer == "grpo":
            config = config.with_settings(found)
            made = list(records) if records is not None else _prompts(asked, asked.train, config)
            judged = list(held_out) if held_out is not None else _prompts(asked, asked.validation, config)
            if asked.epochs is not None:
                config = config.with_settings({"train.train_iters": _steps(asked.epochs, len(made), config)})
            config = _evaluated(asked, len(made), config, bool(judged), notes)
            return OpenedRun(asked, config, made, judged, notes)
        if asked.chat_template not in (None, "auto"):
            found[f"{asked.trainer}.chat_template_path"] = asked.chat_template
        out = Path(config.train.output_dir)
        train_files = [str(path) for one in asked.train for path in _files(one, out)]
        valid_files = [str(path) for one in asked.validation for path in _files(one, out)]
        if valid_files:
            found |= {"data.train_data_path": train_files, "data.valid_data_path": valid_files}
        else:
            found |= {"data.data_path": train_files, "data.split": "100,0,0"}
        return OpenedRun(asked, config.with_settings(found), None, [], notes)


def _evaluated(
    asked: OumiRun, prompts: int, config: RunConfig, is_judged: bool, notes: list[str]
) -> RunConfig:
    """With the steps between the evaluations of GRPO."""
    if not is_judged:
        if asked.evaluates != "no":
            notes.append(
                f"training.eval_strategy is {asked.evaluates}, but there are no prompts to evaluate by: name some as "
                "data.validation.datasets"
            )
        return config
    if asked.evaluates == "steps":
        return config
    if asked.evaluates == "epoch":
        return config.with_settings({"train.eval_interval": _steps(1, prompts, config)})
    notes.append(
        "training.eval_strategy is no: data.validation's prompts are judged once, after the last step"
    )
    return config.with_settings({"train.eval_interval": config.train.train_iters})


def pipeline_split(config: RunConfig, shape: ModelConfig, notes: list[str]) -> dict[str, Any]:
    """Counts embedding or head as a layer of the first or last stage where the layers alone cannot be split evenly."""
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
        return {}  # the trainer's rules have the sentence
    told = (
        "embedding and head count as a layer each"
        if all(counted.values())
        else "the embedding counts as a layer"
    )
    notes.append(
        f"{layers} layers are no multiple of {stages} stages: {told}, so that each stage has the same work"
    )
    return {f"parallel.{name}": value for name, value in counted.items()}


def _precision_of(folder: Path) -> str:
    if not (folder / CONFIG).is_file():
        return "fp32"
    kept = read_config_json(folder)
    name = str(kept.get("dtype") or kept.get("torch_dtype") or "float32").removeprefix("torch.")
    return PRECISIONS.get(DTYPE_NAMES.get(name), "fp32")


def _steps(epochs: float, prompts: int, config: RunConfig) -> int:
    sequences = prompts * config.rl.num_generations
    return max(1, math.ceil(epochs * sequences / config.train.global_batch_size)) * config.rl.num_iterations


def _files(one: DatasetAsked, out: Path) -> list[Any]:
    """The files of a dataset: a path, or a name of the hub by the `datasets` library, kept in OUTPUT/datasets."""
    split, _, cut = one.split.partition("[")
    given = one.path or (one.name if one.name and Path(one.name).exists() else None)
    if given is not None:
        if cut:
            raise ConfigError(
                f"data.train.datasets has split {one.split!r}, but files are taken whole; cut them before"
            )
        folder = Path(given)
        if not folder.is_dir() or (folder / "dataset_info.json").is_file():
            return chat_files([given])
        found = [path for path in sorted(folder.rglob(f"{split}*")) if path.is_file()]
        if (folder / split).is_dir() and not found:
            return [folder / split]
        if not found:
            raise DataError(f"{folder} has no file {split}*; name the file as dataset_path")
        return found
    name = one.kwargs.get("hf_dataset_path") or one.name
    if not name:
        raise ConfigError(
            "an entry of data.train.datasets has neither dataset_name nor dataset_path; give one"
        )
    return [_fetched(str(name), one, out / "datasets")]


def _fetched(name: str, one: DatasetAsked, folder: Path) -> Path:
    last = name.rpartition("/")[2]
    path = folder / f"{last}-{one.split.replace('[', '-').replace(':', '-').rstrip(']')}.jsonl"
    if path.exists():
        return path
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"the dataset {name!r} is no file or folder here; give its file as dataset_path (data.train.datasets[0]."
            f"dataset_path=…), or let the hub's library find it: {install_line('hf')}"
        ) from None
    try:
        rows = datasets.load_dataset(name, one.subset or SUBSETS.get(last), split=one.split)
    except (OSError, ValueError) as error:  # not found, offline, no such split
        raise DataError(
            f"the dataset {name!r} with split {one.split!r} could not be had ({str(error).splitlines()[0]}); give its "
            "file as dataset_path"
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    return path


def _records(one: DatasetAsked, out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file and line, record) of a dataset."""
    for path in _files(one, out):
        for where, record in read_records(Path(path) if isinstance(path, str) else path):
            yield f"{path}, {where}", record


def _prompts(asked: OumiRun, datasets: Sequence[DatasetAsked], config: RunConfig) -> list[dict[str, Any]]:
    """GRPO's records: of gsm8k a question with the instruction that its reward needs, as a user's message where the
    tokenizer has a chat template."""
    tokenizer = build_run_tokenizer(config)
    chats = tokenizer is not None and template_of(tokenizer) is not None
    if asked.chat_template not in (None, "auto"):
        raise ConfigError(
            "model.chat_template is read for TRL_SFT and TRL_DPO; for prompts put it beside the tokenizer"
        )
    made = []
    for one in datasets:
        for where, record in islice(_records(one, Path(config.train.output_dir)), one.sample_count):
            if "prompt" in record:
                made.append(dict(record))
            elif "question" in record or {"target", "nums"} <= {*record}:
                text = str(record["question"]) if "question" in record else COUNTDOWN.format_map(record)
                text = f"{text} {INSTRUCTION}" if asked.rewards == ["gsm8k"] else text
                prompt = [{"role": "user", "content": text}] if chats else text + "\n"
                made.append({**record, "prompt": prompt})
            else:
                raise DataError(f"{where} has neither 'prompt' nor 'question', only {', '.join(record)}")
    return made


def train_run(
    opened: OpenedRun,
    reward_funcs: Sequence[str | Callable[..., Any]] | None = None,
    begins_from: str | None = None,
) -> TrainingResult:
    """Trains to the end; every rank calls it. `reward_funcs`: functions in the place of those that are named,
    `begins_from`: a run of ours or another folder in the place of OUTPUT/megatron_checkpoint."""
    process, asked, config = this_process(), opened.asked, opened.config
    with in_keys():
        if asked.trainer == "grpo":
            from megalith.rl.grpo import train_grpo

            adapters = config.lora.rank is not None  # whose base is named in what they are written as
            own = config.model.init_from if adapters else converted(opened, process)
            start = begins_from or str(own)
            config = config.with_settings({"model.init_from": start})
            held_out = opened.held_out or None
            result = train_grpo(config, reward_funcs or asked.rewards, opened.records, held_out)
        elif asked.trainer == "dpo":
            from megalith.rl.dpo import train_dpo

            result = train_dpo(config)
        else:
            result = train(config)
        if process.is_first and result.ended == "train_iters" and asked.exports:
            finish_hf_model(config, result.checkpoint, asked)
    return result


def converted(opened: OpenedRun, process: Process) -> Path:
    """OUTPUT/megatron_checkpoint, made by the first rank where it is not there."""
    config = opened.config
    path, source = Path(config.train.output_dir) / CONVERTED, str(config.model.init_from)
    mark = path / SOURCE
    if process.is_first and not mark.exists():
        shutil.rmtree(path, ignore_errors=True)  # what an import that was killed has left
        if is_foreign_weights(source):
            import_hf(source, path, show_progress=False)
        else:
            path.mkdir(parents=True, exist_ok=True)
        write_file(mark, json.dumps({"model_name": source}) + "\n")
    patience = time.monotonic() + 60 * config.runtime.distributed_timeout_minutes
    while not mark.exists():
        if time.monotonic() > patience:
            raise CheckpointError(
                f"{mark} has not appeared in {config.runtime.distributed_timeout_minutes:g} minutes: the first rank "
                "converts the weights there; is training.output_dir on a disk that all machines share?"
            )
        time.sleep(0.05)
    found = json.loads(read_small_file(mark, path))["model_name"]
    if found != source:
        raise ConfigError(
            f"{path} was made of {found}, but model.model_name is {source}; remove it, or choose another "
            "training.output_dir"
        )
    return path if is_foreign_weights(source) else Path(source)


def finish_hf_model(config: RunConfig, checkpoint: Any, asked: OumiRun) -> Path:
    """OUTPUT/hf_model, written unless the run has, with tokenizer/ in it and, if asked for, pytorch_model.bin.

    Of a run of adapters it is these in PEFT's format with the tokenizer, or, if asked for, a whole model with them.
    """
    folder, base = Path(config.train.output_dir) / HF_MODEL, Path(str(config.model.init_from))
    if config.lora.rank is not None and not asked.merges:
        shutil.rmtree(folder, ignore_errors=True)
        export_adapters(checkpoint, folder, show_progress=False)
        words = Path(config.data.tokenizer_model or base)
        for name in TOKENIZER_FILES:
            if (words / name).is_file():
                shutil.copyfile(words / name, folder / name)
    elif config.lora.rank is not None:
        with tempfile.TemporaryDirectory(dir=folder.parent) as between:
            checkpoint = merge(checkpoint, Path(between) / "merged", show_progress=False)
            export_hf(checkpoint, folder, replace=True, show_progress=False)
            if asked.writes_bin:
                merge_hf(open_existing(checkpoint), folder / BIN)
    elif not (folder / CONFIG).exists():
        export_hf(checkpoint, folder, replace=True, show_progress=False)
    if names := [name for name in TOKENIZER_FILES if (folder / name).is_file()]:
        (folder / "tokenizer").mkdir(exist_ok=True)
        for name in names:
            shutil.copyfile(folder / name, folder / "tokenizer" / name)
    if asked.writes_bin and config.lora.rank is None:
        merge_hf(open_existing(checkpoint), folder / BIN)
    return folder


def with_bin(opened: OpenedRun) -> OpenedRun:
    """The run whose hf_model has pytorch_model.bin too."""
    return replace(opened, asked=replace(opened.asked, writes_bin=True))
