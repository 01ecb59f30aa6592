"""This rank's share of a step's loss: micro-batches with token weights or objectives, and the loss's denominators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megalith.comm.collectives import Axis
from megalith.config import ModelConfig
from megalith.data.batch import Batch
from megalith.data.token_ids import TokenIds
from megalith.errors import ConfigError
from megalith.models.loss import CrossEntropy, Loss, Objective
from megalith.models.mtp import make_mtp_targets
from megalith.parallel.context.context_parallel import shard_batch, unshard_replicated
from megalith.parallel.data.gradient_norm import loss_denominators
from megalith.parallel.mesh import Mesh
from megalith.parallel.model_spec import LocalMicroBatch


class LocalLosses:
    """Preparation of this data-parallel rank's micro-batches for a loss.

    Args:
        mesh: this rank's axes.
        device: device of the computation.
        ids: checks that token ids are in the vocabulary.
        checks_labels: check labels before the passes; otherwise the head of the user's own model checks them.
        mtp_layers: number of MTP layers of the model.
    """

    def __init__(self, mesh: Mesh, device: torch.device, ids: TokenIds, checks_labels: bool, mtp_layers: int):
        self.mesh, self.device, self.ids = mesh, device, ids
        self.checks_labels, self.mtp_layers = checks_labels, mtp_layers

    def prepare(self, micro_batches: Sequence[Batch], loss: Loss) -> list[LocalMicroBatch]:
        """Return this rank's micro-batches with the token weights that `loss` assigns, with objectives and with MTP
        targets.
        """
        self.ids.check_batches(micro_batches, labels=self.checks_labels)
        return [self._prepare_micro_batch(batch, loss) for batch in micro_batches]

    def _context_axis(self, batch: Batch) -> Axis:
        """Return the axis of the ranks that share the rows of a micro-batch."""
        groups = self.mesh.context_groups
        return groups[batch.cp_size] if groups else self.mesh.cp

    def _prepare_micro_batch(self, batch: Batch, loss: Loss) -> LocalMicroBatch:
        weights, objective, fused_head_loss = loss.weights(batch), None, loss.fused_head_loss(batch)
        if weights is not None:
            _require_shape(loss, "weights", weights, batch.loss_mask.shape)
        changed = loss.temperature != 1 or loss.needs_entropy or loss.vocab_size
        if weights is None or fused_head_loss is not None or changed:
            batch, options = batch.to(self.device), (loss.temperature, loss.needs_entropy, loss.vocab_size)
            weights = batch.loss_mask
            if (tokens := loss.tokens(batch)) is None:
                objective = Objective(partial(self._sequence_loss, loss, batch), *options)
            else:
                observe = partial(self._observe, loss, batch)
                objective = Objective(observe, *options, loss.token_losses, tokens, fused_head_loss)
        local_batch, token_index = shard_batch(loss.with_weights(batch, weights), self._context_axis(batch))
        if objective is not None and self._context_axis(batch).size > 1:
            objective = replace(
                objective, tokens={name: x[:, token_index] for name, x in objective.tokens.items()}
            )
        max_label_tokens = (
            None if local_batch.loss_mask.is_cuda else int(local_batch.loss_mask.count_nonzero())
        )
        ids = None if self.checks_labels else self.ids
        micro_batch = LocalMicroBatch(
            local_batch, token_index, objective, max_label_tokens=max_label_tokens, ids=ids
        )
        if layers := self.mtp_layers:
            mtp_targets = make_mtp_targets(batch.labels, batch.loss_mask, batch.document_ends, layers)
            micro_batch.mtp_targets = mtp_targets.at(token_index)
        return micro_batch

    def _observe(self, loss: Loss, batch: Batch, logprobs: Tensor, entropy: Tensor | None) -> None:
        cp = self._context_axis(batch)
        entropy = None if entropy is None else unshard_replicated(entropy, cp)
        loss.observe(unshard_replicated(logprobs, cp), entropy, batch)

    def _sequence_loss(self, loss: Loss, batch: Batch, logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        """Return the loss of full sequences. Every context-parallel rank computes it, but only the first one adds it to
        the step's loss.
        """
        cp = self._context_axis(batch)
        entropy = None if entropy is None else unshard_replicated(entropy, cp)
        total = loss(unshard_replicated(logprobs, cp), entropy, batch)
        _require_shape(
            loss, "__call__", total, torch.Size(), ": the sum over the micro-batch, as .sum() returns it"
        )
        return total if cp.rank == 0 else total - total.detach()

    def denominators(
        self, loss: Loss, micro_batches: Sequence[Batch], local_batches: list[LocalMicroBatch]
    ) -> Tensor:
        """Return the denominators of the loss, of each MTP loss and of the logged loss, summed over data × context
        ranks.

        Also sets `logged_weight` of the local batches. The result is float32 [1 + MTP layers + 1].
        """
        sums = torch.zeros(1 + self.mtp_layers + 1, dtype=torch.float64)
        for batch, micro_batch in zip(micro_batches, local_batches):
            micro_batch.logged_weight = loss.logged_weight(batch)
            if self._context_axis(batch).rank == 0:  # these belong to full sequences
                sums[0] += _scalar(loss, loss.denominator(batch))
                sums[-1] += micro_batch.logged_weight or 0.0
            if micro_batch.mtp_targets is not None:
                sums[1:-1] += micro_batch.mtp_targets.loss_mask.sum((-2, -1), dtype=torch.float64).cpu()
        return loss_denominators(sums, self.mesh.dp_cp, self.device)


def _require_shape(loss: Loss, method: str, value: object, shape: torch.Size, hint: str = "") -> None:
    """Raise ConfigError unless a user's loss returned a tensor of this shape."""
    if isinstance(value, Tensor) and value.shape == shape:
        return
    returned = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise ConfigError(
        f"{type(loss).__name__}.{method} returned {returned}; return a tensor of shape {list(shape)}{hint}"
    )


def _scalar(loss: Loss, value: Tensor | float) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        _require_shape(loss, "denominator", value, torch.Size(), ", or a number")
    return float(value)


class CollectLogprobs(Loss):
    """A loss of zero that records each micro-batch's log-probabilities and, with `needs_entropy`, entropies."""

    def __init__(self, temperature: float, vocab_size: int | None, needs_entropy: bool = False):
        self.temperature, self.vocab_size, self.needs_entropy = temperature, vocab_size, needs_entropy
        self.logprobs: list[Tensor] = []
        self.entropies: list[Tensor] = []

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: Batch) -> Tensor:
        self.logprobs.append(logprobs)
        if entropy is not None:
            self.entropies.append(entropy)
        return logprobs.new_zeros(())


def check_z_loss(config: ModelConfig | None, loss: Loss) -> None:
    """Raise ConfigError if `loss` does not support the configured z-loss of the output."""
    if config is None or not config.output_z_loss_coeff:
        return
    changed = loss.temperature != 1 or loss.needs_entropy or loss.vocab_size is not None
    is_cross_entropy = isinstance(loss, CrossEntropy)
    if not is_cross_entropy or changed:
        reason = " with a temperature, entropies or a vocab_size" if is_cross_entropy else ""
        raise ConfigError(
            f"model.output_z_loss_coeff is {config.output_z_loss_coeff:g}, which is supported only with the "
            f"cross-entropy of `megalith train` and `megalith sft`, but the loss is {type(loss).__name__}{reason}; "
            "set model.output_z_loss_coeff to 0"
        )
