"""Evaluation on lm-evaluation-harness tasks, for a model in any layout.

Every rank runs the harness on the same requests; calls of the model are collective. Log-likelihoods are computed on
packed rows, distributed over data-parallel ranks. Completions come from the generation engine over the tensor-parallel
axis.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from jinja2 import TemplateError
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megalith.bridge.load import load_initial_weights
from megalith.comm.collectives import gather_json
from megalith.config import RunConfig
from megalith.data.batch import Batch, document_ends
from megalith.data.best_fit import best_fit_decreasing
from megalith.data.chat.chat_template import ChatTemplate, template_of
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import ConfigError, DataError
from megalith.generation.requests import Sampling
from megalith.generation.stop_strings import StopStrings
from megalith.generation.sync import engine_for
from megalith.launch.launcher import end_distributed, init_distributed, this_process
from megalith.parallel.parallel_model import ParallelModel
from megalith.planner.memory_choices import with_auto
from megalith.training.build import build_model, build_run_mesh, prepare, vocabulary_rows
from megalith.training.process import detect_machine, prepare_process

GREEDY_TEMPERATURE = 1e-4  # gives the most likely token nearly all of the probability
ROWS = 64  # concurrent completions per replica
NEW_TOKENS = 256  # maximum completion length for tasks that set none


@dataclass(frozen=True)
class TaskRequest:
    """Options of an evaluation, with the harness's names."""

    tasks: list[str]
    """Task names, or paths of tasks' YAML files."""
    num_fewshot: int | None = None
    limit: int | None = None
    """Documents per task. None: all."""
    include_path: str | None = None
    """Folder with custom tasks."""
    apply_chat_template: bool = False


def run_harness_tasks(config: RunConfig, tokenizer: Tokenizer, request: TaskRequest) -> dict[str, Any]:
    """Run the harness on the model of `model.init_from` in `config`'s layout.

    Returns:
        The harness's results, identical on every rank.

    Raises:
        ConfigError: a task is unknown, or the model is not a decoder.
    """
    manager = _tasks_of(request)
    if unknown := _unknown(request, manager):
        raise ConfigError(
            f"--tasks has {', '.join(unknown)}, but lm-evaluation-harness has no such task ({len(manager.all_tasks):,} "
            "tasks and groups); see `lm-eval ls tasks`, or pass the folder of custom tasks with "
            "--include-path"
        )
    process = this_process()
    config = prepare(config, process.world_size).config
    if config.model.model_type != "gpt":
        raise ConfigError(
            f"--tasks evaluates text continuations, but {config.model.init_from} is of model.model_type "
            f"{config.model.model_type}; evaluate a decoder"
        )
    device = prepare_process(config, process.local_rank)
    init_distributed(device)
    try:
        # The lengths of requests differ between ranks.
        config = config.with_settings({"parallel.moe_static_dispatch": False})
        config, _ = with_auto(config, process.world_size, detect_machine(config, device))
        mesh = build_run_mesh(config, process.world_size, device.type)
        model = build_model(config, mesh, device)
        rows, trust = vocabulary_rows(config), config.checkpoint.trust
        load_initial_weights(config.model.init_from, model.chunks, rows, config.train.seed, mesh.world, trust)
        harness = HarnessModel(model.eval(), tokenizer, config)
        options = dict(
            num_fewshot=request.num_fewshot, limit=request.limit, task_manager=manager, log_samples=False
        )
        chat = dict(apply_chat_template=request.apply_chat_template)
        return simple_evaluate(model=harness, tasks=request.tasks, **options, **chat)
    finally:
        end_distributed()


class TaskCatalog(TaskManager):
    """The harness's task manager. Raises DataError if a task's file or data cannot be read."""

    def load(self, task_list: list[str]) -> dict[str, Any]:
        try:
            return super().load(task_list)
        except (OSError, yaml.YAMLError, TemplateError, LookupError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise DataError(
                f"--tasks {','.join(task_list)}: a task or its data cannot be read ({reason}); download the data to "
                "the cache of `datasets` on a machine with network access, or correct the task's file"
            ) from error


def _tasks_of(request: TaskRequest) -> TaskCatalog:
    """Return the task catalog, with only the custom tasks if they suffice: indexing all tasks takes ten seconds.

    Raises:
        ConfigError: if `include_path` is not a folder.
    """
    if request.include_path is not None:
        if not Path(request.include_path).is_dir():
            raise ConfigError(f"--include-path {request.include_path} is not a folder; check the path")
        custom = TaskCatalog(include_path=request.include_path, include_defaults=False)
        if not _unknown(request, custom):
            return custom
    return TaskCatalog(include_path=request.include_path)


def _unknown(request: TaskRequest, manager: TaskCatalog) -> list[str]:
    return [task for task in request.tasks if not manager.match_tasks([task]) and not Path(task).is_file()]


class HarnessModel(TemplateLM):
    """Implements the harness's model interface."""

    def __init__(self, model: ParallelModel, tokenizer: Tokenizer, config: RunConfig):
        super().__init__()
        self.parallel, self.tokenizer, self.config = model, tokenizer, config
        self.longest = config.data.seq_length
        self.begin = tokenizer.prefix
        scaling = config.model.rope_scaling
        if scaling is not None and scaling.type == "longrope":
            original = scaling.original_max_position_embeddings
            if self.longest > original:
                warnings.warn(
                    f"data.seq_length {self.longest:,} is longer than the {original:,} tokens up to which longrope "
                    "uses short_factor, so all log-likelihoods use long_factor; lower data.seq_length, unless "
                    "requests are longer",
                    stacklevel=2,
                )
        if not self.begin and tokenizer.eod is None:
            raise ConfigError(
                f"this {tokenizer.tokenizer_type} has neither a prefix nor an EOD token, and a text without context "
                "must begin with one; add an eos_token to its tokenizer_config.json"
            )

    # Text.

    @cached_property
    def template(self) -> ChatTemplate | None:
        return template_of(self.tokenizer)

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        return self.begin[0] if self.begin else self.tokenizer.eod

    @property
    def tokenizer_name(self) -> str:
        return f"{self.tokenizer.tokenizer_type}-{self.tokenizer.fingerprint}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a text and prepend the tokenizer's prefix tokens.

        The prefix is not added if the text already begins with it or `add_special_tokens` is False.
        """
        ids = list(self.tokenizer.encode(string))
        begins = add_special_tokens is not False and ids[: len(self.begin)] != self.begin
        return self.begin + ids if begins else ids

    def apply_chat_template(self, chat_history: list[dict], add_generation_prompt: bool = True) -> str:
        if self.template is None:
            raise ConfigError(
                "--apply-chat-template needs a chat template, which the tokenizer does not have; remove "
                "--apply-chat-template"
            )
        return self.template.render(chat_history, add_generation_prompt=add_generation_prompt)

    # Log-likelihoods.

    def _loglikelihood_tokens(self, requests: Sequence[tuple], **_: Any) -> list[tuple[float, bool]]:
        return self.score([(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihoods of texts, computed in non-overlapping windows."""
        pairs, owners = [], []
        for number, request in enumerate(requests):
            # The prefix token is scored too, as in the harness's transformers model.
            ids = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.longest, context_len=1)
            for window in map(make_disjoint_window, windows):
                pairs.append(window)
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self.score(pairs), strict=True):
            totals[owner] += logprob
        return totals

    def score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Return (log-probability, is greedy) of the continuation of each (context, continuation), both token ids.

        The log-probability is summed over the continuation's tokens. A continuation is greedy if each of its tokens is
        the most likely one. If a pair has more than data.seq_length + 1 tokens, the beginning of its context is cut
        off.
        """
        sequences = [self._cut(context, continuation) for context, continuation in pairs]
        logprobs = self._logprobs(sequences, temperature=1.0)
        is_greedy = [bool((x > np.log(0.5)).all()) for x in logprobs]  # p > 0.5 is the most likely token
        unclear = [n for n, greedy in enumerate(is_greedy) if not greedy]
        sharp = self._logprobs([sequences[n] for n in unclear], temperature=GREEDY_TEMPERATURE)
        for n, x in zip(unclear, sharp, strict=True):
            is_greedy[n] = bool((x > np.log(0.5)).all())
        return [(float(x.sum()), greedy) for x, greedy in zip(logprobs, is_greedy)]

    def _cut(self, context: list[int], continuation: list[int]) -> tuple[list[int], int]:
        """Return the last `longest` + 1 tokens of `context` + `continuation`, and the number of tokens of the
        continuation.

        Raises:
            DataError: if the continuation is longer than `longest` tokens.
        """
        if len(continuation) > self.longest:
            raise DataError(
                f"a continuation of {len(continuation):,} tokens is longer than a row ({self.longest:,} tokens); raise "
                "data.seq_length"
            )
        return [*context, *continuation][-(self.longest + 1) :], len(continuation)

    def _logprobs(self, sequences: Sequence[tuple[list[int], int]], temperature: float) -> list[np.ndarray]:
        """Return the log-probabilities of each continuation, float64 [tokens], on every rank."""
        if not sequences:
            return []
        lengths = np.array([len(ids) - 1 for ids, _ in sequences])
        rows = best_fit_decreasing(lengths, self.longest, seed=0)
        mesh, train = self.parallel.mesh, self.config.train
        dp, rank, size = mesh.dp.size, mesh.dp.rank, train.micro_batch_size
        count = train.global_batch_size // (size * dp)  # micro-batches per rank, as pipeline schedules need
        logprobs: dict[int, list[float]] = {}
        for first in range(0, len(rows), size * dp * count):
            mine = rows[first : first + size * dp * count][rank::dp]
            batches = [self._batch(sequences, mine[n * size : (n + 1) * size]) for n in range(count)]
            results = self.parallel.all_logprobs(batches, temperature, self.tokenizer.vocab_size)
            flat = torch.cat(results).double().cpu().numpy()
            for row, values in zip(mine, flat):
                end = 0
                for number in row:
                    end += lengths[number]
                    logprobs[number] = values[end - sequences[number][1] : end].tolist()
        gathered = {int(k): v for part in gather_json(logprobs, mesh.world) for k, v in part.items()}
        return [np.array(gathered[number]) for number in range(len(sequences))]

    def _batch(self, sequences: Sequence[tuple[list[int], int]], rows: Sequence[list[int]]) -> Batch:
        """Build a batch from token sequences, one per row, and fill missing rows with empty ones."""
        shape = self.config.train.micro_batch_size, self.longest
        ids, labels = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        positions, is_start = np.zeros(shape, np.int64), np.zeros(shape, bool)
        for index, row in enumerate(rows):
            start = 0
            for number in row:
                sequence = sequences[number][0]
                end = start + len(sequence) - 1
                ids[index, start:end], labels[index, start:end] = sequence[:-1], sequence[1:]
                positions[index, start:end] = np.arange(end - start)
                is_start[index, start] = True
                start = end
            is_start[index, start : start + 1] = True
        tensors = map(torch.from_numpy, (ids, labels, np.ones(shape, np.float32), positions))
        return Batch(*tensors, document_ends(is_start), torch.arange(shape[0]))

    # Completions.

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Complete each prompt up to one of its stop strings, greedily unless the task samples."""
        mesh = self.parallel.mesh
        local = list(range(len(requests)))[mesh.world.rank // mesh.tp.size :: mesh.world.size // mesh.tp.size]
        by_settings: dict[str, list[int]] = {}
        for number in local:
            by_settings.setdefault(repr(sorted(requests[number].args[1].items())), []).append(number)
        room = self.config.model.max_position_embeddings
        engine = engine_for(self.parallel, max_rows=min(ROWS, max(len(local), 1)), max_tokens=room)
        texts: dict[int, str] = {}
        for indices in by_settings.values():
            sampling = self._sampling(requests[indices[0]].args[1])
            stops = sampling.stop_strings
            keep = room - sampling.max_new_tokens
            if keep < 1:
                raise ConfigError(
                    f"a task generates {sampling.max_new_tokens:,} tokens, which leaves no room for a prompt in the "
                    f"model's {room:,} positions; exclude the task, or use a model with a longer context"
                )
            prompts = [self.tok_encode(requests[number].args[0])[-keep:] for number in indices]
            for number, one in zip(indices, engine.generate(prompts, sampling, keys=indices), strict=True):
                texts[number] = stops.cut(self.tokenizer.decode(one.content))
        engine.release()
        parts = gather_json(texts if mesh.tp.rank == 0 else {}, mesh.world)
        gathered = {int(number): text for part in parts for number, text in part.items()}
        return [gathered[number] for number in range(len(requests))]

    def _sampling(self, kwargs: dict[str, Any]) -> Sampling:
        """Translate a task's generation_kwargs to sampling settings, with stop strings."""
        until = kwargs.get("until") or []
        samples = kwargs.get("do_sample", False) or kwargs.get("temperature", 0) > 0
        texts = [until] if isinstance(until, str) else [text for text in until if text]
        return Sampling(
            max_new_tokens=int(kwargs.get("max_gen_toks", NEW_TOKENS)),
            temperature=float(kwargs.get("temperature", 1.0)) if samples else 0.0,
            top_k=int(kwargs.get("top_k", 0)),
            top_p=float(kwargs.get("top_p", 1.0)),
            stop=self.tokenizer.stop_ids,
            vocab_size=self.tokenizer.vocab_size,
            stop_strings=StopStrings(self.tokenizer, texts),
        )
