"""A quantized frozen weight (ops/weight_codes.py). Each matmul dequantizes it (ops/coded_gemm.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from megalith.models.identity import identity
from megalith.ops.coded_gemm import decode_at_use
from megalith.ops.weight_codes import WeightCodes


class CodedWeight(nn.Module):
    """The shard of a quantized weight. Its tensors are buffers, which neither checkpoints nor FSDP2 handle.

    Args:
        form: quantization format: int8, fp8, nf4 or mxfp4.
        shape: shape of the full weight, [out, in] or [experts, out, in].
        local_shape: shape of this rank's shard.
        offset: offset of the shard in the full weight.
        dtype: dtype of the matmuls.
    """

    def __init__(
        self,
        form: str,
        shape: Sequence[int],
        local_shape: Sequence[int],
        offset: Sequence[int],
        dtype: torch.dtype,
    ):
        super().__init__()
        self.form, self.dtype = form, dtype
        self.shape, self.local_shape, self.offset = tuple(shape), tuple(local_shape), tuple(offset)
        self.rows: Callable[[Tensor], Tensor] = identity
        """Function that selects the rows that this rank uses, like `Linear.rows`."""
        self.base_sample: dict[int, str] = {}
        """Sampled values of the weight before it was quantized, by sample number.

        They identify the base (checkpoint/fingerprint.py).
        """

    def fill(self, codes: WeightCodes) -> None:
        """Set the quantized values, which must be on the device that computes the matmuls."""
        for name, part in zip(WeightCodes._fields, codes):
            self.register_buffer(name, part, persistent=False)

    @property
    def parts(self) -> WeightCodes:
        return WeightCodes(self.codes, self.scales, self.block_index, self.table, self.levels)

    def decoded(self, after: Tensor | None = None) -> Tensor:
        """Return the dequantized rows that this rank uses, in the dtype of the matmuls.

        `after` is explained in `ops.coded_gemm.Coded`.
        """
        return self.rows(self.all_rows(after))

    def all_rows(self, after: Tensor | None = None) -> Tensor:
        """Return the dequantized shard, including any rows that this rank does not use."""
        return decode_at_use(self.form, self.parts, self.dtype, self.offset[-1], after)
