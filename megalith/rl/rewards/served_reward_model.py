"""Rewards from a reward model that another program serves over HTTP (`rl.reward_models` with an address).

The protocol is OpenRLHF's for `--remote_rm_url`:

    {"query": [prompt with completion, …], "prompts": [prompt, …], "labels": [label, …]}  ─▶  {"rewards": [number, …]}

Texts contain the special tokens. A label is the prompt record's `label` or `answer`, as text, or empty. Each rank
sends its share of the completions, and all ranks get all scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from urllib.parse import urlsplit

import numpy as np

from megalith.comm.collectives import gather_json
from megalith.errors import TrainingError
from megalith.rl.engines.deadline import Deadline
from megalith.rl.engines.json_http import JsonServer
from megalith.rl.rewards.scored_text import ScoredText
from megalith.training.run_state import Run

LABELS = "label", "answer"  # columns of a prompt's record, the first that it has


class ServedRewardModel:
    """Client of a reward model at an address."""

    def __init__(self, run: Run, url: str):
        """Prepare to score. The server is called at the first use."""
        parts = urlsplit(url)
        self._run, self._path = run, f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
        address = f"{parts.scheme}://{parts.netloc}"
        self._server = JsonServer(address, "the reward model", "rl.reward_models")

    def scores(self, texts: Sequence[ScoredText]) -> np.ndarray:
        """Return the score of each text, float64 [texts], on every rank. Collective over all ranks.

        Raises:
            TrainingError: on every rank, if the server cannot be reached in rl.reward_model_timeout or its answer has
                no number for each text.
        """
        world = self._run.mesh.world
        local = texts[world.rank :: world.size]
        try:
            outcome = [self._ask(local) if local else [], None]
        except TrainingError as error:
            outcome = [None, str(error)]
        outcomes = gather_json(outcome, world)
        if errors := [error for _, error in outcomes if error is not None]:
            raise TrainingError(errors[0])
        scores = np.zeros(len(texts))
        for rank, (share, _) in enumerate(outcomes):
            scores[rank :: world.size] = share
        return scores

    def _ask(self, texts: Sequence[ScoredText]) -> list[float]:
        decode = self._run.tokenizer.decode
        body = {
            "query": [decode([*one.prompt.ids, *one.ids]) for one in texts],
            "prompts": [decode(one.prompt.ids) for one in texts],
            "labels": [
                next((str(one.prompt.columns[name]) for name in LABELS if name in one.prompt.columns), "")
                for one in texts
            ],
        }
        deadline = Deadline(self._run.config.rl.reward_model_timeout, "rl.reward_model_timeout")
        answer = self._server.post(self._path, body, deadline)
        rewards = answer.get("rewards") if isinstance(answer, dict) else None
        if not isinstance(rewards, list) or len(rewards) != len(texts) or not all(map(_is_number, rewards)):
            raise TrainingError(
                f"{self._server} returns {str(answer)[:200]!r} for {len(texts)} completions; it must return "
                '{"rewards": […]} with one finite number each'
            )
        return [float(value) for value in rewards]


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
