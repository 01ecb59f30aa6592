"""Scores texts with vLLM's and SGLang's servers: log-probabilities of each token and of the most likely entries at
its position.

Both return log-probabilities at temperature 1 over the whole vocabulary. The request parameter is `prompt_logprobs` for
vLLM, at most its --max-logprobs (20 by default), and `top_logprobs_num` for SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megalith.errors import TrainingError
from megalith.rl.engines.deadline import Deadline
from megalith.rl.engines.json_http import JsonServer
from megalith.rl.engines.vllm_server import at_path

ENTRIES_PER_TOKEN_BYTES = 8  # entries of a response in the bytes that JsonServer allows per token


class ScoringServer:
    """Client of a server that scores texts. `setting` names the config key holding the URL; errors quote it."""

    program: str

    def __init__(self, url: str, setting: str, vocab_size: int):
        self.http, self._vocab_size = JsonServer(url, self.program, setting), vocab_size

    def top_entries(self, ids: Sequence[int], k: int, deadline: Deadline) -> tuple[np.ndarray, np.ndarray]:
        """Return the k most likely entries after each token but the last, and their log-probabilities.

        Returns:
            The entries, int64 [tokens − 1, k], and their log-probabilities, float64 [tokens − 1, k], in descending
            order of probability.

        Raises:
            TrainingError: the server refuses the request, or its response lacks the entries.
        """
        positions = [
            sorted(entries, key=lambda entry: -entry[1])[:k] for entries in self._entries(ids, k, deadline)
        ]
        if any(len(entries) < k for entries in positions):
            raise TrainingError(
                f"{self.http} returns {min(map(len, positions))} log-probabilities for a token, but top_k is "
                f"{k}; lower top_k, or start the server with a higher maximum of log-probabilities"
            )
        array = np.array(positions, dtype=np.float64).reshape(len(ids) - 1, k, 2)
        indices = array[..., 0].astype(np.int64)
        if indices.size and not 0 <= indices.min() <= indices.max() < self._vocab_size:
            raise TrainingError(
                f"{self.http} returns the token {indices.max()}, but the vocabulary has {self._vocab_size} entries; "
                "serve a model with the student's tokenizer"
            )
        if not np.isfinite(array).all():
            raise TrainingError(
                f"{self.http} returns log-probabilities that are not finite; look at the server's log"
            )
        return indices, array[..., 1]

    def logprobs(self, ids: Sequence[int], deadline: Deadline) -> np.ndarray:
        """Return the log-probability of each token but the first, float64 [tokens − 1]. Raises the same errors as
        `top_entries`.
        """
        values = np.array(self._token_logprobs(ids, deadline), dtype=np.float64)
        if not np.isfinite(values).all():
            raise TrainingError(
                f"{self.http} returns log-probabilities that are not finite; look at the server's log"
            )
        return values

    def _entries(self, ids: Sequence[int], k: int, deadline: Deadline) -> list[list[tuple[int, float]]]:
        """Return at least k pairs of entry and log-probability for each token but the first."""
        raise NotImplementedError

    def _token_logprobs(self, ids: Sequence[int], deadline: Deadline) -> list[float]:
        raise NotImplementedError

    def _post(self, path: str, body: dict[str, Any], tokens: int, k: int, deadline: Deadline) -> Any:
        return self.http.post(path, body, deadline, tokens * (2 + k // ENTRIES_PER_TOKEN_BYTES))

    def _require_length(self, values: Any, tokens: int) -> list[Any]:
        """Return a response's list without the first token's value. Raise TrainingError unless it has one per token."""
        if not isinstance(values, list) or len(values) != tokens:
            size = len(values) if isinstance(values, list) else "none"
            raise TrainingError(
                f"{self.http} returns log-probabilities for {size} of {tokens} tokens; check that it is a "
                f"{self.program} server"
            )
        return values[1:]


class VllmScoring(ScoringServer):
    program = "vLLM"
    _model: str | None = None

    def _positions(self, ids: Sequence[int], k: int, deadline: Deadline) -> list[dict[str, Any]]:
        if self._model is None:
            self._model = at_path(self.http.get("/v1/models", deadline), "data", 0, "id")
        body = {
            "model": self._model, "prompt": list(ids), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": k,
            "add_special_tokens": False, "stream": False,
        }  # fmt: skip
        answer = self._post("/v1/completions", body, len(ids), k, deadline)
        return self._require_length(at_path(answer, "choices", 0, "prompt_logprobs"), len(ids))

    def _entries(self, ids: Sequence[int], k: int, deadline: Deadline) -> list[list[tuple[int, float]]]:
        try:
            return [
                [(int(token), float(entry["logprob"])) for token, entry in position.items()]
                for position in self._positions(ids, k, deadline)
            ]
        except (AttributeError, KeyError, TypeError, ValueError):
            raise TrainingError(
                f"{self.http} returns prompt_logprobs in a format that is not supported; update the server"
            ) from None

    def _token_logprobs(self, ids: Sequence[int], deadline: Deadline) -> list[float]:
        positions = self._positions(ids, 0, deadline)
        values = [
            at_path(position, str(token), "logprob")
            for token, position in zip(ids[1:], positions, strict=True)
        ]
        if any(type(value) not in (int, float) for value in values):
            raise TrainingError(f"{self.http} returns no log-probability for some tokens; update the server")
        return values


class SglangScoring(ScoringServer):
    program = "SGLang"

    def _meta(self, ids: Sequence[int], k: int, deadline: Deadline) -> Any:
        body = {
            "input_ids": list(ids), "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": k,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
        }  # fmt: skip
        return at_path(self._post("/generate", body, len(ids), k, deadline), "meta_info")

    def _entries(self, ids: Sequence[int], k: int, deadline: Deadline) -> list[list[tuple[int, float]]]:
        values = self._require_length(at_path(self._meta(ids, k, deadline), "input_top_logprobs"), len(ids))
        try:
            return [[(int(token), float(value)) for value, token, *_ in position] for position in values]
        except (TypeError, ValueError):
            raise TrainingError(
                f"{self.http} returns input_top_logprobs in a format that is not supported; update the server"
            ) from None

    def _token_logprobs(self, ids: Sequence[int], deadline: Deadline) -> list[float]:
        values = self._require_length(at_path(self._meta(ids, 0, deadline), "input_token_logprobs"), len(ids))
        try:
            return [float(value) for value, *_ in values]
        except (TypeError, ValueError):
            raise TrainingError(
                f"{self.http} returns input_token_logprobs in a format that is not supported; update the server"
            ) from None


SCORING_SERVERS: dict[str, type[ScoringServer]] = {"vllm": VllmScoring, "sglang": SglangScoring}
