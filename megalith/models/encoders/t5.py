"""T5 (Raffel et al. 2020): an encoder, and a decoder whose layers attend to all that it has made.

    encoded = encoder(embedding of the one sequence)
    logits  = decoder(embedding of the other, encoded) · output matrixᵀ

Both share the word embedding. Layers are numbered through both, so that a pipeline can be cut anywhere. Both residual
streams go from stage to stage: while the encoder's layers last, the decoder's embedded tokens go along; after that,
what the encoder has made. Before T5 1.1 the output matrix is the embedding, and is given the stream / √hidden.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megalith.config import ModelConfig
from megalith.models.pass_context import Context, Encoded
from megalith.models.transformer import Stack, Transformer


class T5(Transformer):
    """An encoder-decoder: the decoder's layers and heads are its own, the encoder's its `encoder`'s."""

    streams = {"encoded": "encoder_input_ids", "hidden": "input_ids"}
    reads = ("encoder_input_ids", "encoder_padding_mask")

    def __init__(
        self, config: ModelConfig, *, device: torch.device | str | None = None, seed: int = 0, **how
    ):
        ours = range(config.encoder_layers, config.num_layers)
        super().__init__(config, numbers=ours, cross=True, device=device, seed=seed, **how)
        self.encoder = Stack(config, range(config.encoder_layers), causal=False, device=device, seed=seed)

    def forward(
        self,
        input_ids: Tensor,  # int64 [batch, seq], the decoder's
        *,
        encoder_input_ids: Tensor | None = None,  # int64 [batch, encoder seq]; None: the decoder's
        encoder_padding_mask: Tensor | None = None,  # bool [batch, encoder seq], False for what fills up
        streams: Mapping[str, Tensor] | None = None,
        **rest,
    ) -> Tensor | dict[str, Tensor]:
        """Logits [batch, seq, vocab] of the decoder, or its loss. All other arguments are those of Transformer.forward,
        and of the decoder's tokens."""
        if encoder_input_ids is None:
            encoder_input_ids = input_ids
        context = self.encoder.context(
            encoder_input_ids,
            trains=rest.get("labels") is not None,
            padding_mask=encoder_padding_mask,
            sample_numbers=rest.get("sample_numbers"),
        )
        x = self.embed(encoder_input_ids, context) if streams is None else streams["encoded"]
        x = self.encoder(x, context)  # those of its layers that are on this stage
        seen = None if encoder_padding_mask is None else encoder_padding_mask[:, None, None]
        y = super().forward(input_ids, streams=streams, encoded=Encoded(x, context, seen), **rest)
        return y if isinstance(y, Tensor) else {"encoded": x} | y

    def vocabulary_logits(self, x: Tensor, context: Context) -> Tensor:
        return super().vocabulary_logits(self._scaled(x), context)

    def vocabulary_loss(self, x: Tensor, context: Context, *targets) -> Tensor:
        return super().vocabulary_loss(self._scaled(x), context, *targets)

    def _scaled(self, x: Tensor) -> Tensor:
        return x * self.config.hidden_size**-0.5 if self.config.scale_decoder_outputs else x
