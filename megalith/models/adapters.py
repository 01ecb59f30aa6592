"""Low-rank adapters (LoRA, Hu et al. 2021): a small trained product is added to a frozen linear.

    y = x · Wᵀ + bias + (alpha / rank) · dropout(x) · Aᵀ · Bᵀ        A [rank, in], B [out, rank]

A is initialized randomly and B to zero, so an adapter does not change the model at first. linear_qkv and linear_fc1
fuse matrices that other libraries keep separate, so their adapters have parts: a pair A, B each for queries, keys and
values, or for gate and up. The rows of each B are ordered as in the separate matrix (heads in order, units in order);
`join` puts them into the order of the fused rows. A part is therefore bitwise what PEFT trains on q_proj or gate_proj.
A part `whole` is one pair for all fused rows, for models whose matrices are fused elsewhere too (GPT-2, Phi-3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from megalith.config import LoraConfig
from megalith.config.lora import WHOLE
from megalith.models.identity import identity
from megalith.models.linear import Linear
from megalith.models.mixers.attention import Heads
from megalith.models.pass_context import Context
from megalith.models.transformer import Transformer, layers_of
from megalith.ops.dropout import ADAPTER_INPUTS, column_keys, counter_dropout

ADAPTER = ".adapter."  # in the name of every parameter of an adapter, and in no other


TAKES_STREAM = ("linear_qkv", "linear_zxbcdt", "linear_bcx", "linear_fc1")
"""Linears whose input is the residual stream."""


class Adapter(nn.Module):
    """The adapters of one linear. `gather` and `first_column` are seams of tensor parallelism."""

    def __init__(self, lora: LoraConfig, linear: str, inputs: int, rows: Mapping[str, int]):
        """Create the adapters of the linear `linear` on the meta device.

        Args:
            lora: rank, alpha and dropout.
            linear: name of the linear in the layer, such as linear_qkv.
            inputs: columns of every A.
            rows: rows of each part's B, by the part's name.
        """
        super().__init__()
        self.rank, self.scaling, self.dropout = lora.rank, lora.alpha / lora.rank, lora.dropout
        self.site = ADAPTER_INPUTS[linear]
        self.takes_stream = linear in TAKES_STREAM
        self.first_column = 0  # global index of x's first column: tensor parallelism shards the columns
        self.gather: Callable[[Tensor, Context | None], Tensor] = identity
        self.lora_A = nn.ModuleDict(
            {part: Linear(inputs, lora.rank, bias=False, device="meta") for part in rows}
        )
        self.lora_B = nn.ModuleDict(
            {part: Linear(lora.rank, count, bias=False, device="meta") for part, count in rows.items()}
        )

    def forward(self, x: Tensor, context: Context | None) -> Tensor:  # [..., in] -> [..., out]
        if self.dropout and context is not None and context.dropout is not None:
            keys = context.dropout
            rows = keys.stream_rows(self.site) if self.takes_stream else keys.token_rows(self.site)
            columns = column_keys(x.shape[-1], x.device, self.first_column)
            x = counter_dropout(x, self.dropout, rows.view(x.shape[:-1]), columns)
        low = torch.cat([a(x, context) for a in self.lora_A.values()], dim=-1)  # [..., parts · rank]
        low = self.gather(low, context).split(self.rank, dim=-1)
        high = {part: b(z, context) for (part, b), z in zip(self.lora_B.items(), low)}
        return self.join(high) * self.scaling

    def join(self, parts: dict[str, Tensor]) -> Tensor:
        """Return the parts [..., rows of the part] in the order of the linear's rows: [..., out]; absent ones are 0."""
        return parts[WHOLE]

    def delta(self) -> Tensor:
        """Return the matrix [out, in] that merging adds to the weight; A and B are unsharded."""
        products = {part: (b.weight @ self.lora_A[part].weight).T for part, b in self.lora_B.items()}
        return self.join(products).T * self.scaling


class QKVAdapter(Adapter):
    """Adapters of linear_qkv, whose rows are ordered by KV group: its queries, its key, its value."""

    heads: Heads
    head_dim: int

    def join(self, parts: dict[str, Tensor]) -> Tensor:
        if WHOLE in parts:
            return parts[WHOLE]
        heads = {"q": self.heads.in_group, "k": 1, "v": 1}
        grouped = {part: x.unflatten(-1, (-1, heads[part], self.head_dim)) for part, x in parts.items()}
        first = next(iter(grouped.values()))  # [..., groups, heads, head_dim]
        zeros = {part: first.new_zeros(*first.shape[:-2], heads[part], self.head_dim) for part in heads}
        return torch.cat([grouped.get(part, zeros[part]) for part in heads], dim=-2).flatten(-3)


class GateUpAdapter(Adapter):
    """Adapters of a gated linear_fc1, whose rows alternate: gate 0, up 0, gate 1, up 1, …"""

    def join(self, parts: dict[str, Tensor]) -> Tensor:
        if WHOLE in parts:
            return parts[WHOLE]
        zeros = torch.zeros_like(next(iter(parts.values())))
        return torch.stack([parts.get("gate", zeros), parts.get("up", zeros)], dim=-1).flatten(-2)


def add_adapters(model: Transformer, lora: LoraConfig) -> None:
    """Add adapters on the meta device to the linears that `lora` names, and freeze everything else, in place."""
    config = model.config
    model.requires_grad_(False)
    model.has_adapters = True
    model.draws_dropout = model.draws_dropout or lora.dropout > 0
    for layer in layers_of(model).values():
        for name, parts in lora.sizes(config).items():
            kind = {"linear_qkv": QKVAdapter, "linear_fc1": GateUpAdapter}.get(name, Adapter)
            for owner in (*layer.mixers, layer.mlp):
                linear = getattr(owner, name, None)
                if linear is None:
                    continue
                out, inputs = linear.weight.shape
                rows = {part: out if rows is None else rows for part, rows in parts.items()}
                adapter = linear.adapter = kind(lora, name, inputs, rows)
                if name == "linear_qkv":
                    adapter.heads, adapter.head_dim = owner.heads, config.head_dim


def adapters(model: nn.Module) -> Iterator[tuple[str, Adapter]]:
    """Iterate over the adapters in a module, each with the name of its linear."""
    for name, module in model.named_modules():
        if isinstance(module, Adapter):
            yield name.removesuffix(".adapter"), module
