"""Rewards computed by reward models (`rl.reward_models`) in the run's layout.

A model with the policy's tokenizer reads the sampled tokens. For a model with another tokenizer, prompt and completion
are decoded to text and tokenized again, with that tokenizer's end-of-document token if the completion has ended. If the
prompt has messages, both kinds read the conversation as rendered by their own chat template. The reward is the score of
the last token. Every rank scores its data-parallel share of the completions, and all ranks get all scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from megalith.bridge.load import tokenizer_folder
from megalith.comm.collectives import all_reduce_no_grad
from megalith.config import RunConfig
from megalith.config.distillation import is_served
from megalith.data.batch import Batch
from megalith.data.chat.chat_template import template_of
from megalith.data.tokenizers.open_tokenizer import Tokenizer, build_tokenizer
from megalith.errors import ConfigError, DataError
from megalith.parallel.parallel_model import ParallelModel
from megalith.parallel.pipeline.stages import padded_micro_batches
from megalith.rl.auxiliary_models.frozen_model import frozen_config, load_frozen
from megalith.rl.rewards.scored_text import ScoredText
from megalith.rl.rewards.served_reward_model import ServedRewardModel
from megalith.training.run_state import Run

ROW_MULTIPLE = 64  # tokens, so that compiled layers see few lengths


def model_names(paths: Sequence[str]) -> list[str]:
    """Return the metric names of reward models: the folder name, or the last component of the address."""
    return [Path(path.rstrip("/")).name for path in paths]


def reward_model_config(config: RunConfig, path: str) -> RunConfig:
    """Return the configuration for loading the reward model at `path` in the run's parallel layout.

    Raises ConfigError if the model has no score head.
    """
    model = frozen_config(config, path, "rl.reward_models")
    if not model.model.score_head:
        raise ConfigError(
            f"rl.reward_models has {path}, a language model without a score head; set it to a run of "
            "`megalith reward`, or to a …ForSequenceClassification model with one label"
        )
    return model


class RewardModel:
    """A reward model and its tokenizer."""

    def __init__(self, run: Run, path: str):
        """Check the model. It is loaded at the first use."""
        self._run, self.path, self.config = run, path, reward_model_config(run.config, path)
        folder = tokenizer_folder(path)
        self._tokenizer: Tokenizer = (
            run.tokenizer if folder is None else build_tokenizer("HuggingFaceTokenizer", folder)
        )
        self._template = template_of(self._tokenizer)
        self._model: ParallelModel | None = None

    def scores(self, texts: Sequence[ScoredText]) -> np.ndarray:
        """Return the score of each text, float64 [texts], on every rank. Collective over all ranks."""
        run = self._run
        if self._model is None:
            self._model = load_frozen(self.config, run.mesh, run.device)
        sequences = [self._ids(text) for text in texts]
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]), reverse=True)
        size, dp = self.config.train.micro_batch_size, run.mesh.dp
        count = padded_micro_batches(self.config.parallel, -(-len(order) // (size * dp.size)))
        chunks = [order[at * size * dp.size : (at + 1) * size * dp.size] for at in range(count)]
        longest = len(sequences[order[0]])
        batches, rows = [], []
        for chunk in chunks:
            mine = chunk[dp.rank * size : (dp.rank + 1) * size]
            same_length = run.mesh.pp.size > 1 or not chunk
            tokens = longest if same_length else len(sequences[chunk[0]])
            batches.append(self._batch([sequences[i] for i in mine], size, tokens))
            rows.append(mine)
        scores = torch.zeros(len(order), dtype=torch.float64, device=run.device)
        for mine, outputs in zip(rows, self._model.all_logprobs(batches), strict=True):
            for row, number in enumerate(mine):
                scores[number] = outputs[row, len(sequences[number]) - 1].double()
        return all_reduce_no_grad(scores, dp).cpu().numpy()

    def _ids(self, scored: ScoredText) -> list[int]:
        prompt, tokenizer = scored.prompt, self._tokenizer
        if prompt.messages is None and tokenizer.fingerprint == self._run.tokenizer.fingerprint:
            ids = [*prompt.ids, *scored.ids]
        elif prompt.messages is None:
            end = [tokenizer.eod] if scored.has_ended and tokenizer.eod is not None else []
            ids = [*tokenizer.encode(prompt.text + scored.text), *end]
        elif self._template is None:
            raise ConfigError(
                f"the reward model {self.path} (rl.reward_models) has no chat template, but the prompts are "
                "messages; add chat_template.jinja to its folder"
            )
        else:
            answer = scored.messages or [{"role": "assistant", "content": scored.text}]
            ids = list(tokenizer.encode(self._template.render([*prompt.messages, *answer])))
        limit = self.config.model.max_position_embeddings
        if not ids or (self.config.model.learns_positions and len(ids) > limit):
            raise DataError(
                f"prompt {prompt.id} ({prompt.where}) with its completion has {len(ids):,} tokens, but the reward "
                f"model {self.path} reads 1 to {limit:,}; lower rl.max_completion_length, or choose another model"
            )
        return ids

    def _batch(self, sequences: Sequence[list[int]], rows: int, tokens: int) -> Batch:
        """Return a micro-batch of padded rows. Padding does not change the scores, because a causal model ignores later
        tokens.
        """
        multiple = math.lcm(ROW_MULTIPLE, 2 * self._run.mesh.cp.size * self._run.mesh.tp.size)
        length = -(-tokens // multiple) * multiple
        ids = torch.zeros(rows, length, dtype=torch.int64)
        for row, sequence in zip(ids, sequences):
            row[: len(sequence)] = torch.tensor(sequence)
        return Batch(
            input_ids=ids,
            labels=ids,
            loss_mask=torch.ones(rows, length),
            position_ids=torch.arange(length).expand(rows, length).contiguous(),
            document_ends=None,
            sample_numbers=torch.arange(rows),
        )


class ModelRewards:
    """The reward models of a run."""

    def __init__(self, run: Run):
        self._models = [
            ServedRewardModel(run, path) if is_served(path) else RewardModel(run, path)
            for path in run.config.rl.reward_model_paths
        ]

    def __call__(self, texts: Sequence[ScoredText]) -> np.ndarray:
        """Return the scores, float64 [texts, models]. Collective over all ranks, which pass all texts."""
        return np.stack([model.scores(texts) for model in self._models], axis=1)
