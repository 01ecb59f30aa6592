"""Base class of the adapters of a frozen matrix."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from megalith.config import LoraConfig


class Adapter(nn.Module):
    """The adapters of one matrix, one per sub-matrix. A `scaling` of 0 turns them off."""

    lora_A: nn.ModuleDict
    lora_B: nn.ModuleDict

    def __init__(self, lora: LoraConfig, layer: str, site: str, parts: Mapping[str, int]):
        """Read each sub-matrix's rank and scale from `lora`.

        `layer` and `site` are named as in `LoraConfig.rank_of`.
        """
        super().__init__()
        self.site = site
        self.ranks = {part: lora.rank_of(layer, site, part) for part in parts}
        scalings = {part: lora.scaling_of(layer, site, part) for part in parts}
        self.scaling = next(iter(scalings.values()))
        self.factors = {part: each / self.scaling for part, each in scalings.items() if each != self.scaling}
        """Scales relative to `scaling`, of the parts whose scale differs from it."""

    def delta(self) -> Tensor:
        """Return the update that merging adds to the weight, in the weight's shape (its shard under tensor
        parallelism)."""
        raise NotImplementedError(f"{type(self).__name__} does not implement delta")

    def pair(self) -> tuple[Tensor, Tensor]:
        """Return one A [rank, in] and B [out, rank] with B · A = `delta()`; the adapter must be unsharded.

        The rank is the sum of the sub-matrices' ranks. For experts, A and B have a leading dimension of experts.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement pair")

    def merged(self, weight: Tensor) -> Tensor:
        """Return the merged weight in float32; adapter and weight must be unsharded."""
        return weight.float() + self.delta()

    @property
    def rescales(self) -> bool:
        """True if the matrix's output is also multiplied by a factor per row (DoRA)."""
        return False

    def scaled(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs `parts` of the sub-matrices.

        The output of a sub-matrix that has its own scale is multiplied by its scale / `scaling`.
        """
        if not self.factors:
            return parts
        return {part: x * self.factors[part] if part in self.factors else x for part, x in parts.items()}
