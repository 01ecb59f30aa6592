"""Encoder-decoders: T5 (Raffel et al. 2020), BART (Lewis et al. 2020), and translation models like Marian.

    encoded = encoder(embedding of the input sequence)
    logits  = decoder(embedding of the output sequence, encoded) · output matrixᵀ

Both share the word embedding; in BART each has its own positions and embedding norm. Layer numbers run through both, so
that a pipeline can be split anywhere. Both residual streams are sent from stage to stage. While the encoder runs, the
decoder's stream holds its embedded tokens; while the decoder runs, the encoder's stream holds the encoder's output.
Before T5 1.1 the output matrix is tied, and the stream is divided by √hidden before it is multiplied by that matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from megalith.config import ModelConfig
from megalith.models.inputs import TokenInputs
from megalith.models.pass_context import Context, Encoded
from megalith.models.transformer import Stack, Transformer
from megalith.models.vocabulary import PositionEmbedding


class T5(Transformer):
    """An encoder-decoder: a decoder with its heads, and a stack `encoder`."""

    streams = {"encoded": "encoder_input_ids", "hidden": "input_ids"}
    reads = ("encoder_input_ids", "encoder_padding_mask", "encoder_document_ends", "encoder_token_index")

    def __init__(
        self, config: ModelConfig, *, device: torch.device | str | None = None, seed: int = 0, **how
    ):
        decoder_layers = range(config.encoder_layers, config.num_layers)
        super().__init__(config, layer_numbers=decoder_layers, cross=True, device=device, seed=seed, **how)
        positions = PositionEmbedding(config, device) if config.separate_encoder_positions else None
        self.encoder = Stack(
            config, range(config.encoder_layers), causal=False, device=device, seed=seed, embedding=positions
        )

    def forward(
        self,
        input_ids: Tensor,
        *,
        encoder_input_ids: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        encoder_document_ends: Tensor | None = None,
        encoder_token_index: Tensor | None = None,
        token_inputs: TokenInputs | None = None,
        labels: Tensor | None = None,
        streams: Mapping[str, Tensor] | None = None,
        **rest,
    ) -> Tensor | dict[str, Tensor]:
        """Return the decoder's logits, or its loss if there are labels.

        Args:
            input_ids: int64 [batch, seq], the decoder's tokens.
            encoder_input_ids: int64 [batch, encoder seq], the encoder's tokens; None means the same as the decoder's.
            encoder_padding_mask: bool [batch, full encoder seq], not sharded by context parallelism; False for padding.
            encoder_document_ends: int32 [batch, 2], replaces the mask: the number of real tokens, and the number of all
                tokens, of each sequence.
            encoder_token_index: int64 [encoder seq], the index of each encoder token in the full sequence.
            token_inputs, labels, streams, rest: see Transformer.forward; they describe the decoder's tokens.

        Returns:
            Logits [batch, seq, vocab], or the loss, a float32 scalar.
        """
        if encoder_input_ids is None:
            encoder_input_ids = input_ids
        encoded = self.encode(
            encoder_input_ids,
            TokenInputs(
                token_index=encoder_token_index,
                padding_mask=encoder_padding_mask,
                document_ends=encoder_document_ends,
                sample_numbers=None if token_inputs is None else token_inputs.sample_numbers,
            ),
            trains=labels is not None,
            stream=None if streams is None else streams["encoded"],
        )
        if encoder_document_ends is not None:
            length = input_ids.shape[1] * encoded.context.layout.cp_size
            queries = torch.full_like(encoder_document_ends, length)  # every query attends to the real tokens
            encoded = replace(encoded, documents=torch.stack([queries, encoder_document_ends]))
        decoder = dict(token_inputs=token_inputs, labels=labels, streams=streams, encoded=encoded)
        y = super().forward(input_ids, **decoder, **rest)
        return y if isinstance(y, Tensor) else {"encoded": encoded.hidden} | y

    def encode(
        self,
        input_ids: Tensor,
        token_inputs: TokenInputs | None = None,
        *,
        trains: bool,
        stream: Tensor | None = None,
    ) -> Encoded:
        """Return the output of this stage's encoder layers, for the decoder to attend to.

        Args:
            input_ids: int64 [batch, seq], the encoder's tokens.
            token_inputs: padding and positions of these tokens.
            trains: True if a loss follows.
            stream: the encoder's residual stream from the previous pipeline stage; None: this is the first stage.
        """
        token_inputs = token_inputs or TokenInputs()
        context = self.encoder.context(input_ids, token_inputs, trains=trains)
        x = self._embed_encoder(input_ids, context) if stream is None else stream
        mask = token_inputs.padding_mask
        return Encoded(self.encoder(x, context), context, None if mask is None else mask[:, None, None])

    def _embed_encoder(self, input_ids: Tensor, context: Context) -> Tensor:
        if self.encoder.embedding is None:
            return self.embed(input_ids, context)
        position_ids = self.shard_sequence(context.position_ids, context.layout)
        words = self.embedding.embed_words(input_ids, context)
        return self.stream_of(self.encoder.embedding(words, position_ids), context)

    def vocabulary_logits(self, x: Tensor, context: Context) -> Tensor:
        return super().vocabulary_logits(self._scaled(x), context)

    def vocabulary_loss(self, x: Tensor, context: Context, *targets) -> Tensor:
        return super().vocabulary_loss(self._scaled(x), context, *targets)

    def _scaled(self, x: Tensor) -> Tensor:
        return x * self.config.hidden_size**-0.5 if self.config.scale_decoder_outputs else x
