"""A decoder with a score instead of next-token logits: a reward model, or PPO's critic.

    score of a token = score · norm(stack(embedding))

It is transformers' `…ForSequenceClassification` with one label, whose score of a sequence is the score of its last
token. A loss gets the scores of all tokens, float32 [batch, seq], where other models' losses get log-probabilities.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.config import ModelConfig
from megalith.errors import ConfigError
from megalith.models.inputs import LossInputs
from megalith.models.linear import Linear
from megalith.models.pass_context import Context
from megalith.models.transformer import Transformer

SCORE = "score.weight"
"""Name of the score's parameter."""


class ScoreModel(Transformer):
    """A decoder without an output matrix, with a matrix [1, hidden] for the score."""

    heads = ("score",)

    def __init__(self, config: ModelConfig, *, device: torch.device | str | None = None, **options):
        super().__init__(config, device=device, **options)
        self.output_layer = self.vocabulary = None
        self.score = Linear(config.hidden_size, 1, bias=False, device=device)

    def vocabulary_logits(self, x: Tensor, context: Context) -> Tensor:
        """Return the scores [batch, seq, 1] of x, the last norm's output [batch, seq, hidden]."""
        return self.scores(x, context)[..., None].to(self.compute_dtype)

    def vocabulary_loss(
        self,
        x: Tensor,
        context: Context,
        labels: Tensor,
        loss_mask: Tensor | None,
        inputs: LossInputs,
    ) -> Tensor:
        """Return the loss that the objective computes from the scores, a float32 scalar."""
        if inputs.objective is None:
            raise ConfigError(
                "model.score_head is on, so the model predicts no tokens, but cross-entropy needs their logits; "
                "train the model with `megalith reward`, or leave model.score_head out"
            )
        return inputs.objective.loss(self.scores(x, context), None, None, inputs.loss_scale)

    def scores(self, x: Tensor, context: Context) -> Tensor:
        """Return the score of every token, float32 [batch, seq], the same on every tensor-parallel rank."""
        scores = self.score(x.float()).flatten()  # of this rank's tokens, in fp32 in every precision
        shape = context.position_ids.shape
        index = torch.arange(shape.numel(), device=x.device).view(shape)
        index = self.shard_sequence(index, context.layout).flatten()
        every = scores.new_zeros(shape.numel()).index_copy(0, index, scores)
        return self.reduce_sequence(every, context.layout).view(shape)
