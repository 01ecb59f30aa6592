"""Tasks of lm-evaluation-harness, judged by a model in any layout.

Every rank runs the harness on the same requests; the model's calls are collective. Log-likelihoods are those of packed
rows, whose sequences do not see each other, shared out over data-parallel ranks. Completions come from the engine that
`generate` has, over the model's tensor-parallel axis.
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
from megalith.data.chat.chat_dataset import best_fit_decreasing
from megalith.data.chat.chat_template import ChatTemplate, template_of
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import ConfigError, DataError
from megalith.generation.requests import Sampling
from megalith.generation.sync import engine_for
from megalith.launch.launcher import end_distributed, init_distributed, this_process
from megalith.parallel.mesh import build_mesh
from megalith.parallel.parallel_model import ParallelModel
from megalith.planner.layout import with_auto
from megalith.training.build import build_model, prepare, vocabulary_rows
from megalith.training.process import detect_machine, prepare_process

SHARP = 1e-4  # a temperature at which the likeliest token has nearly all of the probability
ROWS = 64  # completions of a replica at a time
NEW_TOKENS = 256  # of a completion whose task does not say


@dataclass(frozen=True)
class TaskRequest:
    """What is asked of the harness; its own names."""

    tasks: list[str]
    """Names, or paths of tasks' YAML files."""
    num_fewshot: int | None = None
    limit: int | None = None
    """Documents of each task; None: all."""
    include_path: str | None = None
    """A folder with tasks of one's own."""
    apply_chat_template: bool = False


def run_harness_tasks(config: RunConfig, tokenizer: Tokenizer, asked: TaskRequest) -> dict[str, Any]:
    """The harness's results, the same on every rank of `config`'s layout; its model begins from `model.init_from`.
    ConfigError: an unknown task."""
    manager = _tasks_of(asked)
    if unknown := _unknown(asked, manager):
        raise ConfigError(
            f"--tasks names {', '.join(unknown)}, which lm-evaluation-harness has not ({len(manager.all_tasks):,} "
            "tasks and groups); see `lm-eval ls tasks`, or give the folder of your own by --include-path"
        )
    process = this_process()
    config = prepare(config, process.world_size).config
    if config.model.model_type != "gpt":
        raise ConfigError(
            f"--tasks asks for what continues a text, but {config.model.init_from} is of model.model_type "
            f"{config.model.model_type}; evaluate a decoder"
        )
    device = prepare_process(config, process.local_rank)
    init_distributed(device)
    try:
        # requests of ranks differ in length
        config = config.with_settings({"parallel.moe_static_dispatch": False})
        config, _ = with_auto(config, process.world_size, detect_machine(config, device))
        experts = config.model.num_experts is not None
        mesh = build_mesh(config.parallel, process.world_size, device.type, has_experts=experts)
        model = build_model(config, mesh, device)
        rows, trust = vocabulary_rows(config), config.checkpoint.trust
        load_initial_weights(config.model.init_from, model.chunks, rows, config.train.seed, mesh.world, trust)
        harness = HarnessModel(model.eval(), tokenizer, config)
        options = dict(
            num_fewshot=asked.num_fewshot, limit=asked.limit, task_manager=manager, log_samples=False
        )
        chat = dict(apply_chat_template=asked.apply_chat_template)
        return simple_evaluate(model=harness, tasks=asked.tasks, **options, **chat)
    finally:
        end_distributed()


class TaskCatalog(TaskManager):
    """The harness's tasks. DataError: a task's file or its data is not what the harness takes."""

    def load(self, task_list: list[str]) -> dict[str, Any]:
        try:
            return super().load(task_list)
        except (OSError, yaml.YAMLError, TemplateError, LookupError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise DataError(
                f"--tasks {','.join(task_list)}: a task or its data cannot be read ({reason}); give them to the cache "
                "of `datasets` where there is a network, or correct the task's file"
            ) from error


def _tasks_of(asked: TaskRequest) -> TaskCatalog:
    """The user's own where they are all that is asked for: reading all others takes the harness ten seconds."""
    if asked.include_path is not None:
        if not Path(asked.include_path).is_dir():
            raise ConfigError(f"--include-path {asked.include_path} is no folder; check the path")
        own = TaskCatalog(include_path=asked.include_path, include_defaults=False)
        if not _unknown(asked, own):
            return own
    return TaskCatalog(include_path=asked.include_path)


def _unknown(asked: TaskRequest, manager: TaskCatalog) -> list[str]:
    return [task for task in asked.tasks if not manager.match_tasks([task]) and not Path(task).is_file()]


class HarnessModel(TemplateLM):
    """The harness's model interface."""

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
                    f"data.seq_length {self.longest:,} is longer than the {original:,} tokens up to which longrope has "
                    "its short_factor: log-likelihoods are all of long_factor; lower it, unless requests are longer",
                    stacklevel=2,
                )
        if not self.begin and tokenizer.eod is None:
            raise ConfigError(
                f"this {tokenizer.tokenizer_type} has neither a first token nor an end of document, so a text without "
                "a context has nothing to begin with; name an eos_token in its tokenizer_config.json"
            )

    # Its text.

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
        """With the tokens that the tokenizer puts before a text, unless the text begins with them."""
        ids = list(self.tokenizer.encode(string))
        begins = add_special_tokens is not False and ids[: len(self.begin)] != self.begin
        return self.begin + ids if begins else ids

    def apply_chat_template(self, chat_history: list[dict], add_generation_prompt: bool = True) -> str:
        if self.template is None:
            raise ConfigError("--apply-chat-template: the tokenizer has no chat template; leave it out")
        return self.template.render(chat_history, ask=add_generation_prompt)

    # Log-likelihoods.

    def _loglikelihood_tokens(self, requests: Sequence[tuple], **_: Any) -> list[tuple[float, bool]]:
        return self.score([(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, in windows that do not overlap."""
        pairs, owners = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(
                request.args[0]
            )  # a first token counts, as in the harness's own model of transformers
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.longest, context_len=1)
            for window in map(make_disjoint_window, windows):
                pairs.append(window)
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self.score(pairs), strict=True):
            totals[owner] += logprob
        return totals

    def score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Of each (context, continuation) of ids Σ log p of the continuation, and whether each of its tokens is the
        likeliest. Contexts lose their beginning where both are longer than a row."""
        sequences = [self._cut(context, continuation) for context, continuation in pairs]
        found = self._logprobs(sequences, temperature=1.0)
        sure = [bool((x > np.log(0.5)).all()) for x in found]  # above one half a token is the likeliest
        asked = [n for n, is_sure in enumerate(sure) if not is_sure]
        sharp = self._logprobs([sequences[n] for n in asked], temperature=SHARP)
        for n, x in zip(asked, sharp, strict=True):
            sure[n] = bool((x > np.log(0.5)).all())
        return [(float(x.sum()), greedy) for x, greedy in zip(found, sure)]

    def _cut(self, context: list[int], continuation: list[int]) -> tuple[list[int], int]:
        """At most a row of tokens and one, and how many of them are the continuation's."""
        if len(continuation) > self.longest:
            raise DataError(
                f"a continuation of {len(continuation):,} tokens is longer than the {self.longest:,} of a row; raise "
                "data.seq_length"
            )
        return [*context, *continuation][-(self.longest + 1) :], len(continuation)

    def _logprobs(self, sequences: Sequence[tuple[list[int], int]], temperature: float) -> list[np.ndarray]:
        """Of the last tokens of each sequence, as many as it says: float64 each, on every rank."""
        if not sequences:
            return []
        lengths = np.array([len(ids) - 1 for ids, _ in sequences])
        rows = best_fit_decreasing(lengths, self.longest, seed=0)
        mesh, train = self.parallel.mesh, self.config.train
        dp, rank, size = mesh.dp.size, mesh.dp.rank, train.micro_batch_size
        at_once = train.global_batch_size // (size * dp)  # micro-batches of a rank, as a schedule takes them
        found: dict[int, list[float]] = {}
        for first in range(0, len(rows), size * dp * at_once):
            mine = rows[first : first + size * dp * at_once][rank::dp]
            batches = [self._batch(sequences, mine[n * size : (n + 1) * size]) for n in range(at_once)]
            results = self.parallel.all_logprobs(batches, temperature, self.tokenizer.vocab_size)
            flat = torch.cat(results).double().cpu().numpy()
            for row, values in zip(mine, flat):
                end = 0
                for number in row:
                    end += lengths[number]
                    found[number] = values[end - sequences[number][1] : end].tolist()
        everywhere = {int(k): v for part in gather_json(found, mesh.world) for k, v in part.items()}
        return [np.array(everywhere[number]) for number in range(len(sequences))]

    def _batch(self, sequences: Sequence[tuple[list[int], int]], rows: Sequence[list[int]]) -> Batch:
        """Rows of sequences, empty ones behind the last."""
        shape = self.config.train.micro_batch_size, self.longest
        ids, labels = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        places, begins = np.zeros(shape, np.int64), np.zeros(shape, bool)
        for at, row in enumerate(rows):
            begin = 0
            for number in row:
                sequence = sequences[number][0]
                end = begin + len(sequence) - 1
                ids[at, begin:end], labels[at, begin:end] = sequence[:-1], sequence[1:]
                places[at, begin:end] = np.arange(end - begin)
                begins[at, begin] = True
                begin = end
            begins[at, begin : begin + 1] = True
        tensors = map(torch.from_numpy, (ids, labels, np.ones(shape, np.float32), places))
        return Batch(*tensors, document_ends(begins), torch.arange(shape[0]))

    # Completions.

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Completions up to the first of the strings that end one, the likeliest tokens unless a task samples."""
        mesh = self.parallel.mesh
        own = list(range(len(requests)))[mesh.world.rank // mesh.tp.size :: mesh.world.size // mesh.tp.size]
        alike: dict[str, list[int]] = {}
        for number in own:
            alike.setdefault(repr(sorted(requests[number].args[1].items())), []).append(number)
        room = self.config.model.max_position_embeddings
        engine = engine_for(self.parallel, max_rows=min(ROWS, max(len(own), 1)), max_tokens=room)
        texts: dict[int, str] = {}
        for numbers in alike.values():
            asked = requests[numbers[0]].args[1]
            until, sampling = self._sampling(asked)
            keep = room - sampling.max_new_tokens
            if keep < 1:
                raise ConfigError(
                    f"a task asks for {sampling.max_new_tokens:,} new tokens, and the model has {room:,} positions; "
                    "they leave no room for a prompt"
                )
            prompts = [self.tok_encode(requests[number].args[0])[-keep:] for number in numbers]
            for number, one in zip(numbers, engine.generate(prompts, sampling, keys=numbers), strict=True):
                text = self.tokenizer.decode(one.ids if one.truncated else one.ids[:-1])
                texts[number] = text[
                    : min((at for at in map(text.find, until) if at >= 0), default=len(text))
                ]
        engine.release()
        found = gather_json(texts if mesh.tp.rank == 0 else {}, mesh.world)
        everywhere = {int(number): text for part in found for number, text in part.items()}
        return [everywhere[number] for number in range(len(requests))]

    def _sampling(self, asked: dict[str, Any]) -> tuple[list[str], Sampling]:
        """The strings that end a completion, and how its tokens are drawn, by a task's generation_kwargs."""
        until = asked.get("until") or []
        samples = asked.get("do_sample", False) or asked.get("temperature", 0) > 0
        return [until] if isinstance(until, str) else list(until), Sampling(
            max_new_tokens=int(asked.get("max_gen_toks", NEW_TOKENS)),
            temperature=float(asked.get("temperature", 1.0)) if samples else 0.0,
            top_k=int(asked.get("top_k", 0)),
            top_p=float(asked.get("top_p", 1.0)),
            stop=() if self.tokenizer.eod is None else (self.tokenizer.eod,),
            vocab_size=self.tokenizer.vocab_size,
        )
