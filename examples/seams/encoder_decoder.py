"""An encoder-decoder (Vaswani et al. 2017) with cross-attention in the decoder.

Layers are numbered through both stacks, so a pipeline can be split anywhere. Both residual streams pass from stage to
stage: the embedded decoder tokens travel along with the encoder's layers, and the encoder's output with the decoder's.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from megalith.config import ModelConfig
from megalith.data.batch import Batch
from megalith.models.inputs import TokenInputs
from megalith.models.pass_context import Encoded
from megalith.models.transformer import Stack, Transformer


@dataclass
class Pairs(Batch):
    """A batch with two sequences per sample."""

    encoder_input_ids: Tensor  # int64 [batch, encoder seq]
    encoder_padding_mask: Tensor  # bool [batch, encoder seq], False for padding


class EncoderDecoder(Transformer):
    streams = {"encoded": "encoder_input_ids", "hidden": "input_ids"}
    reads = ("encoder_input_ids", "encoder_padding_mask")

    def __init__(self, config: ModelConfig, encoder_layers: int, *, device=None, seed: int = 0):
        decoder = range(encoder_layers, config.num_layers)
        super().__init__(config, layer_numbers=decoder, cross=True, device=device, seed=seed)
        self.encoder = Stack(config, range(encoder_layers), causal=False, device=device, seed=seed)

    def forward(
        self,
        input_ids: Tensor,
        *,
        encoder_input_ids: Tensor,
        encoder_padding_mask: Tensor,
        token_inputs: TokenInputs | None = None,
        streams: Mapping[str, Tensor] | None = None,
        **rest,
    ) -> Tensor | dict[str, Tensor]:
        numbers = None if token_inputs is None else token_inputs.sample_numbers
        context = self.encoder.context(
            encoder_input_ids,
            TokenInputs(padding_mask=encoder_padding_mask, sample_numbers=numbers),
            trains=rest.get("labels") is not None,
        )
        x = self.embed(encoder_input_ids, context) if streams is None else streams["encoded"]
        x = self.encoder(x, context)  # this stage's layers
        encoded = Encoded(x, context, mask=encoder_padding_mask[:, None, None])
        y = super().forward(input_ids, token_inputs=token_inputs, streams=streams, encoded=encoded, **rest)
        return y if isinstance(y, Tensor) else {"encoded": x} | y
