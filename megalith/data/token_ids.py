"""Checks for token ids outside a model's vocabulary.

With a sharded vocabulary, an id that is on no rank would silently get an embedding of zeros, and ids of padding rows
would be accepted. Ids are therefore compared with the vocabulary before a pass.
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
    """Rejects token ids outside [0, vocab_size), with an error that names sample, position and id of the first one.

    Ids on the host are checked at once. Ids on a device are checked there, and a later call raises the error, so that
    the host does not synchronize.
    """

    def __init__(self, vocab_size: int | None, remedy: str):
        """Set the vocabulary size. If it is None, each call of `check` must pass a size. Error messages end with
        `remedy`.
        """
        self.vocab_size, self.remedy = vocab_size, remedy
        self._pending: deque[tuple[Tensor, Any, Callable[[int, int], DataError]]] = deque()

    def check_batches(self, micro_batches: Sequence[Batch], *, labels: bool) -> None:
        """Check the ids of micro-batches and, with `labels`, the labels whose loss_mask is not 0. Raises DataError."""
        for number, batch in enumerate(micro_batches):
            where = f"micro-batch {number}"
            for name in ("input_ids", *batch.of_encoder_tokens):
                self.check(batch[name], name, where)
            if labels:
                self.check(batch.labels, "labels", where, mask=batch.loss_mask != 0)

    def check(
        self, ids: Tensor, name: str, where: str, *, mask: Tensor | None = None, size: int | None = None
    ) -> None:
        """Raise DataError for an id outside [0, size), or for one that an earlier call found on a device.

        Args:
            ids: int64 [batch, seq].
            name: field name within the batch.
            where: name of the batch, for the message.
            mask: bool [batch, seq], False for ids that are ignored; None means check all.
            size: vocabulary size; None means `vocab_size`.
        """
        self.raise_pending()
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
                f"sample {row} of {where} has token id {token} at position {position} of {name}, but the "
                f"vocabulary has {size:,} entries; {self.remedy}"
            )

        first_outside = _first_outside(ids, size, mask)
        if not ids.is_cuda:
            self._raise(first_outside, error)
            return
        on_host = torch.empty(2, dtype=torch.int64, pin_memory=True)
        on_host.copy_(first_outside, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(ids.device))
        self._pending.append((on_host, copied, error))

    def raise_pending(self) -> None:
        """Raise DataError for ids that earlier calls found on a device, as far as results are available."""
        while self._pending and self._pending[0][1].query():
            first_outside, _, error = self._pending.popleft()
            self._raise(first_outside, error)

    def _raise(self, first_outside: Tensor, error: Callable[[int, int], DataError]) -> None:
        position, token = first_outside.tolist()
        if position >= 0:
            self._pending.clear()
            raise error(position, token)


def _first_outside(ids: Tensor, size: int, mask: Tensor | None) -> Tensor:
    """Return the flat position of the first id outside [0, size), and the id: int64 [2] on the device of `ids`. −1 if
    there is none.
    """
    outside = (ids < 0) | (ids >= size)
    if mask is not None:
        outside &= mask.to(ids.device)
    flat = outside.flatten()
    at = flat.to(torch.uint8).argmax()
    return torch.stack([torch.where(flat.any(), at, -1), ids.take(at)])
