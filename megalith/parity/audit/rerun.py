"""The reference of an audit: reruns recorded micro-batches from the recorded weights in one process in fp32.

Gradients are cut into the shards of the job's ranks and sketched like the recorded ones, so that they can be compared
and combined: a sketch is linear in its tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import embedding

from megalith.audit_hook import BUCKETS, sketch
from megalith.bridge.load import load_source
from megalith.bridge.transfer import to_theirs
from megalith.config import ModelConfig
from megalith.models.inputs import TokenInputs
from megalith.models.model_types import make_model
from megalith.models.pass_context import Context
from megalith.parity.audit.recorded_parameters import Parameters, Shard, vocabulary_rows
from megalith.parity.audit.tokens import TokenBatch

Key = tuple[str, Shard]
ROUNDING = 2.0**-22
"""Relative perturbation of fp32 weights. Its effect on gradients bounds the differences that rounding explains."""


@dataclass(frozen=True)
class MicroBatchResult:
    """Sums over the tokens of a micro-batch."""

    loss: float
    count: float
    gradients: Tensor  # float32 [keys, 256], sketches


class Reference:
    """A model with the recorded weights of a step.

    Args:
        parameters: recorded parameters of the step, matched with a model.
        keys: name and shard of each gradient to compute.
        model: model configuration. By default the one that `parameters` were matched with.
        compute_dtype: dtype of the layers' computation.
        perturbed: change the weights by a relative 2⁻²².
        padding_idx: token whose row of the embedding gets no gradient from the lookup.

    Raises:
        CheckpointError: the recorded weights are not the model's.
    """

    def __init__(
        self,
        parameters: Parameters,
        keys: Sequence[Key],
        model: ModelConfig | None = None,
        compute_dtype: torch.dtype = torch.float32,
        perturbed: bool = False,
        padding_idx: int | None = None,
    ):
        self.parameters, self.keys = parameters, keys
        self.config = model or parameters.matched.groups[0].model
        self.model = make_model(self.config, device="cpu", compute_dtype=compute_dtype).eval()
        load_source(parameters.matched, self.model, 0)
        if padding_idx is not None and padding_idx < self.config.vocab_size:
            self.model.embedding.lookup = partial(_lookup, padding_idx)
        if perturbed:
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for weight in self.model.parameters():
                    weight.mul_(1 + ROUNDING * torch.randn(weight.shape, generator=generator))

    def run(self, batch: TokenBatch) -> MicroBatchResult:
        """Return the sums of a micro-batch."""
        self.model.zero_grad(set_to_none=True)
        loss = self._call(batch, labels=batch.labels, loss_mask=batch.weights)
        loss.backward()
        return MicroBatchResult(loss.item(), batch.count, self._sketches())

    def token_gradients(self, batch: TokenBatch) -> Iterator[Tensor]:
        """Yield the gradients' sketches [keys, 256] of each token's loss with weight 1, in row-major order."""
        logits = self._call(batch).float()
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.labels.flatten(), reduction="none"
        )
        for loss in losses:
            self.model.zero_grad(set_to_none=True)
            loss.backward(retain_graph=True)
            yield self._sketches()

    def _call(self, batch: TokenBatch, **arguments: Tensor) -> Tensor:
        self.model.causal = batch.causal
        inputs = TokenInputs(
            position_ids=batch.position_ids, document_ends=batch.document_ends, padding=batch.padding
        )
        return self.model(batch.input_ids, token_inputs=inputs, **arguments)

    def _sketches(self) -> Tensor:
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        whole: dict[str, Tensor] = {}
        for group in self.parameters.matched.groups:
            if group.name in gradients:
                rows = vocabulary_rows(self.config).get(group.name)
                dtypes = dict.fromkeys(group.sources, torch.float32)
                whole |= to_theirs(group, gradients[group.name][:rows], dtypes)
        if self.parameters.tied_copy:
            whole[self.parameters.tied_copy] = whole[self.parameters.embedding]
        sketches = torch.zeros(len(self.keys), BUCKETS)
        for number, (name, shard) in enumerate(self.keys):
            if name in whole:
                sketches[number] = sketch(shard.of(whole[name]))[:BUCKETS]
        return sketches


def _lookup(padding_idx: int, input_ids: Tensor, weight: Tensor, context: Context) -> Tensor:
    """Look up embeddings as nn.Embedding with a padding_idx does."""
    return embedding(input_ids, weight, padding_idx=padding_idx)
