"""A teacher that a vLLM or SGLang server runs.

The first tensor- and context-parallel rank of each replica's last pipeline stage sends its rows, and shares the answers
with the other ranks of the stage. A server returns the log-probabilities of the k most likely entries. The remaining
probability is assigned to all other entries together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megalith.comm.collectives import all_reduce_no_grad, gather_json
from megalith.data.batch import Batch
from megalith.errors import TrainingError
from megalith.ops.distillation_loss import NONE
from megalith.rl.engines.deadline import Deadline
from megalith.rl.teachers.scoring_server import SCORING_SERVERS
from megalith.rl.teachers.teacher import Prediction
from megalith.training.run_state import Run

CONCURRENT = 32  # requests per rank
LEAST_REST = 1e-7  # probability of all other entries, which rounding could make negative


class ServedTeacher:
    """A teacher on a server."""

    def __init__(self, run: Run, url: str, engine: str, timeout: float, setting: str):
        """Prepare to request predictions.

        Args:
            run: the run.
            url: address of the server.
            engine: vllm or sglang.
            timeout: time limit of a step's requests in seconds.
            setting: the setting that names the server, for errors.
        """
        self._run, self._timeout, self._setting = run, timeout, setting
        self._server = SCORING_SERVERS[engine](url, setting, run.config.model.vocab_size)
        self._k = min(run.config.distill.top_k or 1, run.config.model.vocab_size)
        self.note = f"the teacher is the {self._server.program} server at {url}"

    def predict(self, batches: Sequence[Batch]) -> list[Prediction]:
        mesh, k = self._run.mesh, self._k
        is_last = mesh.pp.rank == mesh.pp.size - 1
        answers = self._answers(batches, partial(self._server.top_entries, k=k), is_last)
        if not is_last:
            return [Prediction()] * len(batches)
        predictions = []
        for batch, rows in zip(batches, answers, strict=True):
            indices = np.zeros((*batch.labels.shape, k), dtype=np.int64)
            logprobs = np.zeros((*batch.labels.shape, k + 1), dtype=np.float32)
            if rows is not None:  # the others add zeros
                logprobs[..., :k] = NONE  # tokens outside the loss
                for row, answer in enumerate(rows):
                    if answer is not None:
                        top, values = answer
                        indices[row, : len(top)], logprobs[row, : len(top), :k] = top, values
                        logprobs[row, : len(top), k] = _log_rest(values)
            predictions.append(Prediction(None, self._shared(indices), self._shared(logprobs)))
        return predictions

    def logprobs(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Return the log-probabilities of the labels, float32 [batch, seq]; 0 after the last token of the loss."""
        answers = self._answers(batches, self._server.logprobs, True)
        results = []
        for batch, rows in zip(batches, answers, strict=True):
            values = np.zeros(batch.labels.shape, dtype=np.float32)
            for row, answer in enumerate(rows or ()):
                if answer is not None:
                    values[row, : len(answer)] = answer
            results.append(self._shared(values))
        return results

    def _answers(
        self, batches: Sequence[Batch], ask: Callable[..., Any], takes_part: bool
    ) -> list[list[Any] | None]:
        """Return the server's answers, a list per micro-batch with one answer per row. Collective over all ranks.

        A row without a token in the loss has the answer None. On ranks that send no requests, each list is None. If a
        request fails, every rank raises TrainingError.
        """
        mesh = self._run.mesh
        sends = takes_part and mesh.tp.rank == mesh.cp.rank == 0
        results, error = [None] * len(batches), None
        if sends:
            deadline = Deadline(self._timeout, f"{self._setting}_timeout")
            texts = [_scored_ids(batch) for batch in batches]
            try:
                with ThreadPoolExecutor(CONCURRENT) as pool:
                    futures = [
                        [ids and pool.submit(ask, ids, deadline=deadline) for ids in rows] for rows in texts
                    ]
                    results = [[future and future.result() for future in rows] for rows in futures]
            except TrainingError as failure:
                error = str(failure)
        for message in gather_json(error, mesh.world):
            if message is not None:
                raise TrainingError(message)
        return results

    def _shared(self, values: np.ndarray) -> Tensor:
        """Return the requesting rank's values on every rank of its tensor- and context-parallel group."""
        mesh, tensor = self._run.mesh, torch.from_numpy(values).to(self._run.device)
        return all_reduce_no_grad(all_reduce_no_grad(tensor, mesh.tp), mesh.cp)


def _scored_ids(batch: Batch) -> list[list[int] | None]:
    """Return each row's tokens up to its last label in the loss, or None for a row without such a label."""
    texts: list[list[int] | None] = []
    ids, labels, mask = (x.cpu() for x in (batch.input_ids, batch.labels, batch.loss_mask))
    for row in range(len(ids)):
        learned = mask[row].nonzero()
        last = int(learned.max()) if len(learned) else -1
        texts.append([*ids[row, : last + 1].tolist(), int(labels[row, last])] if last >= 0 else None)
    return texts


def _log_rest(values: np.ndarray) -> np.ndarray:
    """Return the log of 1 minus the sum of the entries' probabilities, float64 [tokens]."""
    return np.log(np.maximum(1 - np.exp(values).sum(-1), LEAST_REST))
