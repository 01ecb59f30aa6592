"""Low-rank adapters (LoRA, Hu et al. 2021): a frozen linear gets a small trained product beside it.

    y = x · Wᵀ + bias + (alpha / rank) · dropout(x) · Aᵀ · Bᵀ        A [rank, in], B [out, rank]

A begins random and B zero, so the model begins as it was. linear_qkv and linear_fc1 hold several matrices of other
libraries in one, so their adapters come in parts: a pair A, B for queries, for keys and for values, another for gate
and for up. The rows of each B stand as in the matrix of its own: heads in order, units in order; `join` gives them the
order of the fused rows. So a part is to the bit what PEFT trains on q_proj or gate_proj. A part `whole` is one pair
for all fused rows, in our order, for models whose matrices are fused elsewhere too (GPT-2, Phi-3).
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


class Adapter(nn.Module):
    """The adapters of one linear. `gather` is a seam of tensor parallelism."""

    def __init__(self, lora: LoraConfig, linear: str, inputs: int, rows: Mapping[str, int]):
        """`linear` is its role's name, `rows` the rows of each part's B. Made on the meta device."""
        super().__init__()
        self.rank, self.scaling, self.dropout = lora.rank, lora.alpha / lora.rank, lora.dropout
        self.site = ADAPTER_INPUTS[linear]
        self.takes_stream = linear in ("linear_qkv", "linear_fc1")  # and not what a rank has of all tokens
        self.first_column = 0  # of x among all columns; a seam, for tensor parallelism cuts them
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
        """The parts [..., rows of the part] in the order of the linear's rows: [..., out]. Zeros for those without."""
        return parts[WHOLE]

    def delta(self) -> Tensor:
        """What merging adds to the weight: [out, in], from the whole of A and B."""
        products = {part: (b.weight @ self.lora_A[part].weight).T for part, b in self.lora_B.items()}
        return self.join(products).T * self.scaling


class QKVAdapter(Adapter):
    """Of linear_qkv, whose rows stand by KV group: its queries, its key, its value."""

    heads: Heads
    head_dim: int

    def join(self, parts: dict[str, Tensor]) -> Tensor:
        if WHOLE in parts:
            return parts[WHOLE]
        heads = {"q": self.heads.in_group, "k": 1, "v": 1}
        grouped = {part: x.unflatten(-1, (-1, heads[part], self.head_dim)) for part, x in parts.items()}
        some = next(iter(grouped.values()))  # [..., groups, heads, head_dim]
        missing = {part: some.new_zeros(*some.shape[:-2], heads[part], self.head_dim) for part in heads}
        return torch.cat([grouped.get(part, missing[part]) for part in heads], dim=-2).flatten(-3)


class GateUpAdapter(Adapter):
    """Of a gated linear_fc1, whose rows alternate: gate 0, up 0, gate 1, up 1, …"""

    def join(self, parts: dict[str, Tensor]) -> Tensor:
        if WHOLE in parts:
            return parts[WHOLE]
        zeros = torch.zeros_like(next(iter(parts.values())))
        return torch.stack([parts.get("gate", zeros), parts.get("up", zeros)], dim=-1).flatten(-2)


def add_adapters(model: Transformer, lora: LoraConfig) -> None:
    """Gives the linears that `lora` names their adapters, on the meta device, and freezes everything else, in place."""
    config = model.config
    model.requires_grad_(False)
    model.has_adapters = True
    model.draws_dropout = model.draws_dropout or lora.dropout > 0
    for layer in layers_of(model).values():
        for name, (inputs, rows) in lora.sizes(config).items():
            owner = layer.self_attention if name in ("linear_qkv", "linear_proj") else layer.mlp
            kind = {"linear_qkv": QKVAdapter, "linear_fc1": GateUpAdapter}.get(name, Adapter)
            adapter = getattr(owner, name).adapter = kind(lora, name, inputs, rows)
            if name == "linear_qkv":
                adapter.heads, adapter.head_dim = owner.heads, config.head_dim


def adapters(model: nn.Module) -> Iterator[tuple[str, Adapter]]:
    """Every adapter in a model or a part of one, with the name of its linear."""
    for name, module in model.named_modules():
        if isinstance(module, Adapter):
            yield name.removesuffix(".adapter"), module
