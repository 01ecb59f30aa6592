"""T5 (Raffel et al. 2020): an encoder, and a decoder whose layers attend to all that it has made.

    encoded = encoder(embedding of the one sequence)
    logits  = decoder(embedding of the other, encoded) · output matrixᵀ

Both share the word embedding. Layers are numbered through both, so that a pipeline can be cut anywhere. Both residual
streams go from stage to stage: while the encoder's layers last, the decoder's embedded tokens go along; after that,
what the encoder has made. Before T5 1.1 the output matrix is the embedding, and is given the stream / √hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from megalith.config import ModelConfig
from megalith.models.pass_context import Context, Encoded
from megalith.models.transformer import Stack, Transformer


class T5(Transformer):
    """An encoder-decoder: the decoder's layers and heads are its own, the encoder's its `encoder`'s."""

    streams = {"encoded": "encoder_input_ids", "hidden": "input_ids"}
    reads = ("encoder_input_ids", "encoder_padding_mask", "encoder_document_ends", "encoder_token_index")

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
        encoder_padding_mask: Tensor
        | None = None,  # bool [batch, encoder seq], False for what fills up; of whole sequences everywhere
        encoder_document_ends: Tensor
        | None = None,  # int32 [batch, 2], in its place: where what is real ends, and all
        encoder_token_index: Tensor | None = None,  # int64 [encoder seq], as `token_index` of the decoder's
        streams: Mapping[str, Tensor] | None = None,
        **rest,
    ) -> Tensor | dict[str, Tensor]:
        """Logits [batch, seq, vocab] of the decoder, or its loss. All other arguments are those of Transformer.forward,
        and of the decoder's tokens."""
        if encoder_input_ids is None:
            encoder_input_ids = input_ids
        encoded = self.encode(
            encoder_input_ids,
            encoder_padding_mask,
            encoder_document_ends,
            trains=rest.get("labels") is not None,
            sample_numbers=rest.get("sample_numbers"),
            token_index=encoder_token_index,
            stream=None if streams is None else streams["encoded"],
        )
        if encoder_document_ends is not None:
            length = input_ids.shape[1] * encoded.context.layout.cp_size
            queries = torch.full_like(encoder_document_ends, length)  # all see what is real
            encoded = replace(encoded, documents=torch.stack([queries, encoder_document_ends]))
        y = super().forward(input_ids, streams=streams, encoded=encoded, **rest)
        return y if isinstance(y, Tensor) else {"encoded": encoded.hidden} | y

    def encode(
        self,
        input_ids: Tensor,  # int64 [batch, seq], the encoder's
        padding_mask: Tensor | None,  # bool [batch, seq], False for what fills up
        document_ends: Tensor | None = None,  # int32 [batch, 2], as `forward` has them
        *,
        trains: bool,
        sample_numbers: Tensor | None = None,  # int64 [batch]
        token_index: Tensor | None = None,  # int64 [seq]: each token's in the whole sequence; None: 0, 1, …
        stream: Tensor | None = None,  # of the stage before; None: this is the first
    ) -> Encoded:
        """What the encoder's layers on this stage make of these tokens, for the decoder to attend to."""
        context = self.encoder.context(
            input_ids,
            trains=trains,
            token_index=token_index,
            padding_mask=padding_mask,
            document_ends=document_ends,
            sample_numbers=sample_numbers,
        )
        x = self.embed(input_ids, context) if stream is None else stream
        seen = None if padding_mask is None else padding_mask[:, None, None]
        return Encoded(self.encoder(x, context), context, seen)

    def vocabulary_logits(self, x: Tensor, context: Context) -> Tensor:
        return super().vocabulary_logits(self._scaled(x), context)

    def vocabulary_loss(self, x: Tensor, context: Context, *targets) -> Tensor:
        return super().vocabulary_loss(self._scaled(x), context, *targets)

    def _scaled(self, x: Tensor) -> Tensor:
        return x * self.config.hidden_size**-0.5 if self.config.scale_decoder_outputs else x
