"""Training steps with a script's own train step class: its batches, model calls and loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalith.data.batch import Batch
from megalith.dialects.accelerate.batch_masks import document_ends_from_mask, padding_from_ids
from megalith.errors import ConfigError
from megalith.models.loss import Loss


@dataclass
class CustomBatch(Batch):
    """A micro-batch with its index in the step. The index selects its loss function."""

    index: Tensor = None  # int64 [1]


class CustomStep:
    """Micro-batches and loss of a call with a custom train step."""

    def __init__(self, handler: Any):
        self._handler = handler

    def micro_batches(self, batch: Mapping[str, Any], count: int) -> tuple[list[Batch], Loss]:
        """Split this replica's samples. Raises ConfigError for an unsupported mask."""
        micro_batches, functions = [], []
        for index, part in enumerate(split_batch(batch, count)):
            call = ModelCallRecorder()
            output, function = self._handler.forward_step(iter([part]), call)
            if output is not call.output:
                raise ConfigError(
                    "the forward step changed the model's output before returning it, which is not supported; "
                    "change the losses in the function that it returns, which is called with the loss of each token"
                )
            micro_batches.append(call.batch(index))
            functions.append(function)
        return micro_batches, CustomLoss(functions, micro_batches[0].input_ids.shape[1])


def split_batch(batch: Mapping[str, Any], count: int) -> list[dict[str, Tensor]]:
    """Split the tensors of a batch into `count` micro-batches. Raises ConfigError if they do not divide evenly."""
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.dim()}
    rows = len(next(iter(tensors.values())))
    if rows % count:
        raise ConfigError(
            f"a train step has {rows} samples, which is not divisible by num_micro_batches {count}; set drop_last in "
            "the dataloader"
        )
    size = rows // count
    return [
        {name: value[index * size : (index + 1) * size] for name, value in tensors.items()}
        for index in range(count)
    ]


class CustomLoss(Loss):
    """The mean of the script's loss function over the micro-batches of a step."""

    def __init__(self, functions: Sequence[Callable[[Tensor], Any]], seq: int):
        """Store `functions`, one per micro-batch, and `seq`, the sequence length without padding for parallelism."""
        self._functions, self._seq = functions, seq

    def denominator(self, batch: Batch) -> float:
        return 1.0

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: CustomBatch) -> Tensor:
        """Call the script's function with the losses, the negative of logprobs [batch, seq]."""
        function = self._functions[int(batch.index[0])]
        result = function(-logprobs[:, : self._seq])
        return (result[0] if isinstance(result, tuple) else result).float()


class ModelCallRecorder:
    """Placeholder for the model in a forward step. It records the arguments of its call."""

    def __init__(self) -> None:
        self.output = torch.empty(0)

    def __call__(self, input_ids: Tensor, position_ids: Tensor | None = None, attention_mask: Any = None,
                 labels: Tensor | None = None, **others: Any) -> Tensor:  # fmt: skip
        if labels is None:
            raise ConfigError("the forward step called the model without labels; pass the tokens to predict")
        self._input_ids, self._labels = input_ids, labels
        self._position_ids, self._mask = position_ids, attention_mask
        return self.output

    def batch(self, index: int) -> CustomBatch:
        """Return the recorded call as micro-batch `index` of the step."""
        tokens = self._input_ids
        positions = self._position_ids
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return CustomBatch(
            input_ids=tokens,
            labels=self._labels.clamp(min=0),
            loss_mask=(self._labels >= 0).float(),
            position_ids=positions.contiguous(),
            document_ends=document_ends_from_mask(self._mask, tokens),
            sample_numbers=torch.arange(len(tokens)),
            padding=padding_from_ids(self._mask),
            index=torch.tensor([index]),
        )
