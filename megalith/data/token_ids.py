"""Token ids outside a model's vocabulary, which must not train.

A vocabulary that is sharded takes an id that it does not have for one of another rank, and gives it zeros. Rows that
pad the vocabulary take part as if they were entries. So ids are compared with the vocabulary before a pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megalith.data.batch import Batch
from megalith.errors import DataError


class TokenIds:
    """Refuses token ids outside [0, vocab_size), naming sample, position and id of the first one.

    Ids on the host are checked at once. Ids on a device are checked there, and a later call raises what was found, so
    that the host waits for nothing.
    """

    def __init__(self, vocab_size: int | None, remedy: str):
        """`vocab_size`: None: ids are checked where `check` gets a size."""
        self.vocab_size, self.remedy = vocab_size, remedy
        self._pending: deque[tuple[Tensor, Any, Callable[[int, int], DataError]]] = deque()

    def check_batches(self, micro_batches: Sequence[Batch], *, labels: bool) -> None:
        """Check the ids of micro-batches; with `labels`, also the labels whose loss_mask is not 0. Raises DataError."""
        for number, batch in enumerate(micro_batches):
            where = f"micro-batch {number}"
            for name in ("input_ids", *batch.of_encoder_tokens):
                self.check(batch[name], name, where)
            if labels:
                self.check(batch.labels, "labels", where, counted=batch.loss_mask != 0)

    def check(
        self, ids: Tensor, name: str, where: str, *, counted: Tensor | None = None, size: int | None = None
    ) -> None:
        """Raise DataError for an id outside [0, size), or for one that an earlier call has found on a device.

        Args:
            ids: int64 [batch, seq].
            name: what they are in the batch.
            where: what the batch is, for the message.
            counted: bool [batch, seq], False where an id is not looked at; None: all are.
            size: of the vocabulary; None: vocab_size.
        """
        self.raise_found()
        size = self.vocab_size if size is None else size
        if size is None or not ids.numel():
            return
        if not ids.is_cuda:
            low, high = ids.aminmax()
            if low >= 0 and high < size:
                return

        def error(at: int, token: int) -> DataError:
            row, position = divmod(at, ids.shape[-1])
            return DataError(
                f"sample {row} of {where} has token id {token} at position {position} of {name}, but the vocabulary "
                f"has {size:,} entries; {self.remedy}"
            )

        found = _first_outside(ids, size, counted)
        if not ids.is_cuda:
            self._raise(found, error)
            return
        on_host = torch.empty(2, dtype=torch.int64, pin_memory=True)
        on_host.copy_(found, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(ids.device))
        self._pending.append((on_host, copied, error))

    def raise_found(self) -> None:
        """Raise DataError for what earlier calls have found on a device, as far as that is known by now."""
        while self._pending and self._pending[0][1].query():
            found, _, error = self._pending.popleft()
            self._raise(found, error)

    def _raise(self, found: Tensor, error: Callable[[int, int], DataError]) -> None:
        at, token = found.tolist()
        if at >= 0:
            self._pending.clear()
            raise error(at, token)


def _first_outside(ids: Tensor, size: int, counted: Tensor | None) -> Tensor:
    """Return int64 [2] on the device of `ids`: the flat position of the first id outside [0, size), and the id; −1
    where there is none."""
    outside = (ids < 0) | (ids >= size)
    if counted is not None:
        outside &= counted.to(ids.device)
    flat = outside.flatten()
    at = flat.to(torch.uint8).argmax()
    return torch.stack([torch.where(flat.any(), at, -1), ids.take(at)])
