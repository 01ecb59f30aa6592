"""Low-rank adapters (LoRA, Hu et al. 2021): a small trained product is added to a frozen linear.

    y = x · Wᵀ + bias + (alpha / rank) · dropout(x) · Aᵀ · Bᵀ        A [rank, in], B [out, rank]

A is initialized randomly and B to zero, so an adapter does not change the model at first. linear_qkv and linear_fc1
fuse matrices that other libraries keep separate, so their adapters consist of several pairs A, B: one each for queries,
keys and values, or one each for gate and up. The rows of each B are ordered as in the separate matrix (heads in order,
units in order); `join` puts them into the order of the fused rows. A pair is therefore bitwise what PEFT trains on
q_proj or gate_proj. The pair `whole` is for all fused rows, for models whose matrices are fused in other libraries too
(GPT-2, Phi-3).

Each expert has its own pair; the pairs of all experts are stacked in two tensors.

DoRA (Liu et al. 2024) also trains a magnitude m for each row of the adapted matrix, initially the norm of the row of W:

    y = (x · Wᵀ + x · ΔWᵀ) · m / ‖W + ΔW‖ + bias        no gradient flows through the norms of the rows

PiSSA and OLoRA begin with factors A₀, B₀ of W and train on W − scale · B₀ · A₀. Here W is not changed: A₀ and B₀ are
kept, frozen, and ΔW is scale · (B · A − B₀ · A₀). With LoftQ and several iterations, A₀ and B₀ are kept too, because
the base is then the quantized W − scale · B₀ · A₀.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy

import torch
from torch import Tensor, nn

from megalith.config import LoraConfig, ModelConfig
from megalith.config.lora import EXPERTS, OUTPUT_LAYER, WHOLE, WORD_EMBEDDINGS
from megalith.errors import ConfigError
from megalith.local_shards import local
from megalith.models.adapter import Adapter
from megalith.models.identity import identity
from megalith.models.linear import Linear
from megalith.models.mixers.attention import Heads
from megalith.models.moe import GroupedLinear
from megalith.models.pass_context import Context
from megalith.models.saved_modules import saved_names
from megalith.models.score_model import SCORE
from megalith.models.token_rows import TokenRows
from megalith.models.transformer import Transformer, layers_of
from megalith.ops.dropout import ADAPTER_INPUTS, column_keys, counter_dropout
from megalith.ops.grouped_gemm import RowGroups

ADAPTER = ".adapter."  # in the name of every parameter of an adapter, and in no other
INITIAL = ".adapter.initial_"  # of the frozen factors among them


def is_initial_factor(name: str) -> bool:
    """Return True for A₀ and B₀ of an adapter, which stay frozen."""
    return INITIAL in f".{name}"


def is_trained_with_adapters(name: str, saved: Collection[str]) -> bool:
    """Return True for a parameter that a run with adapters trains: an adapter's, a reward model's score, or one of
    `saved` (`Transformer.saved_names`)."""
    return ADAPTER in name or name == SCORE or name in saved


class Magnitude(nn.Module):
    """DoRA's magnitudes: the trained row norms of a sub-matrix, [rows]. `rows` is a seam, as in Linear."""

    def __init__(self, count: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, device="meta"))
        self.rows = identity


class LinearAdapter(Adapter):
    """The adapters of a Linear. `gather`, `first_column` and `sum_columns` are seams of tensor parallelism."""

    def __init__(self, lora: LoraConfig, layer: str, site: str, inputs: int, rows: Mapping[str, int]):
        """Create the adapters of a linear on the meta device.

        Args:
            lora: ranks, scales and dropout.
            layer: name of the layer in the model.
            site: path of the linear in the layer, such as self_attention.linear_qkv.
            inputs: number of columns of every A.
            rows: number of rows of B by sub-matrix.
        """
        super().__init__(lora, layer, site, rows)
        self.dropout, self.dropout_site = lora.dropout, ADAPTER_INPUTS[site]
        self.takes_stream = not site.endswith(("linear_proj", "linear_fc2", "linear_out"))
        """True if the input is the residual stream, or has its shape."""
        self.first_column = 0  # global index of x's first column: tensor parallelism shards the columns
        self.gather: Callable[[Tensor, Context | None], Tensor] = identity
        self.lora_A = nn.ModuleDict(
            {part: Linear(inputs, self.ranks[part], bias=False, device="meta") for part in rows}
        )
        self.lora_B = nn.ModuleDict(
            {part: Linear(self.ranks[part], count, bias=False, device="meta") for part, count in rows.items()}
        )
        self.initial_A: nn.ModuleDict | None = None  # PiSSA, OLoRA, LoftQ
        self.initial_B: nn.ModuleDict | None = None
        self.subtracts_initial = lora.decomposes_base
        if lora.keeps_initial_factors:
            self.initial_A, self.initial_B = deepcopy(self.lora_A), deepcopy(self.lora_B)
            self.initial_A.requires_grad_(False)
            self.initial_B.requires_grad_(False)
        self.sum_columns: Callable[[Tensor], Tensor] = identity
        self.lora_magnitude: nn.ModuleDict | None = None
        if lora.use_dora:
            self.lora_magnitude = nn.ModuleDict({part: Magnitude(count) for part, count in rows.items()})

    @property
    def rescales(self) -> bool:
        """True if the linear's output is multiplied by `row_factors`."""
        return self.lora_magnitude is not None and self.scaling != 0

    def row_factors(self, weight: Tensor) -> Tensor:
        """Return the factor that DoRA applies to each output of the linear, float32 [out]. `weight` [out, in] holds
        this rank's rows.
        """
        with torch.no_grad():
            squares = (weight.float() + self.delta().float()).square().sum(1)
            norms = self.sum_columns(squares).sqrt()
        return self.factors_of(norms)

    def factors_of(self, norms: Tensor, first_row: int = 0) -> Tensor:
        """Return trained magnitude / norm for each row from `first_row` on. 1 for rows without an adapter."""
        magnitudes = {
            part: each.rows(local(each.weight)).float() for part, each in self.lora_magnitude.items()
        }
        adapted = self.join({part: torch.ones_like(each) for part, each in magnitudes.items()})
        magnitudes, adapted = (x.narrow(0, first_row, len(norms)) for x in (self.join(magnitudes), adapted))
        return torch.where(adapted > 0, magnitudes / norms, 1.0)

    def merged(self, weight: Tensor) -> Tensor:
        weight = weight.float()
        total = weight + self.delta()
        return total if not self.rescales else total * self.row_factors(weight)[:, None]

    def part_rows(self, part: str) -> Tensor:
        """Return the linear's row for each row of a sub-matrix's B, int64. The adapter must be unsharded."""
        rows = {
            other: torch.arange(1, b.weight.shape[0] + 1)
            if other == part
            else torch.zeros(b.weight.shape[0], dtype=torch.int64)
            for other, b in self.lora_B.items()
        }
        order = self.join(rows)
        return order.argsort(stable=True)[-rows[part].numel() :]

    def row_norms(self, weight: Tensor) -> dict[str, Tensor]:
        """Return DoRA's initial magnitudes, float32 [rows] per sub-matrix: the row norms of the full weight.

        The adapter must be unsharded.
        """
        norms = weight.float().norm(dim=1)
        return {part: norms[self.part_rows(part)] for part in self.lora_magnitude}

    def forward(self, x: Tensor, context: Context | None) -> Tensor:  # [..., in] -> [..., out]
        whole_x = x
        if self.dropout and context is not None and context.dropout is not None:
            keys, site = context.dropout, self.dropout_site
            rows = keys.stream_rows(site) if self.takes_stream else keys.token_rows(site)
            columns = column_keys(x.shape[-1], x.device, self.first_column)
            x = counter_dropout(x, self.dropout, rows.view(x.shape[:-1]), columns)
        low = [a(x, context) for a in self.lora_A.values()]
        if self.subtracts_initial:  # the frozen part W − B₀ · A₀ has no dropout
            low += [a(whole_x, context) for a in self.initial_A.values()]
        low = torch.cat(low, dim=-1)  # [..., sum of the ranks], or twice that
        ranks = list(self.ranks.values()) * (2 if self.subtracts_initial else 1)
        low = self.gather(low, context).split(ranks, dim=-1)
        high = {part: b(z, context) for (part, b), z in zip(self.lora_B.items(), low)}
        if self.subtracts_initial:
            initial = zip(self.initial_B.items(), low[len(high) :])
            high = {part: high[part] - b(z, context) for (part, b), z in initial}
        return self.join(self.scaled(high)) * self.scaling

    def join(self, parts: dict[str, Tensor]) -> Tensor:
        """Join the sub-matrices [..., their rows] into [..., out], in the linear's row order.

        Absent sub-matrices are 0.
        """
        return parts[WHOLE]

    def delta(self) -> Tensor:
        products = _products(self.lora_A, self.lora_B)
        if self.subtracts_initial:
            initial = _products(self.initial_A, self.initial_B)
            products = {part: product - initial[part] for part, product in products.items()}
        return self.join(self.scaled(products)).T * self.scaling

    def taken_from_base(self) -> Tensor | None:
        """Return the matrix that LoftQ subtracts from the base before quantizing, in the weight's shape, or None if
        it subtracts nothing.

        The adapter must be unsharded.
        """
        if self.initial_A is None or self.subtracts_initial:
            return None
        return self.join(self.scaled(_products(self.initial_A, self.initial_B))).T * self.scaling

    def pair(self) -> tuple[Tensor, Tensor]:
        halves = [(self.lora_A, self.lora_B, self.scaling)]
        if self.subtracts_initial:
            halves.append((self.initial_A, self.initial_B, -self.scaling))
        a = [each.weight for first, _, _ in halves for each in first.values()]
        b = [
            self.join(self.scaled({part: each.weight.T})).T * scaling
            for _, second, scaling in halves
            for part, each in second.items()
        ]
        return torch.cat(a), torch.cat(b, dim=1)


class QKVAdapter(LinearAdapter):
    """Adapters of linear_qkv. Its rows are ordered by KV group: the group's queries, key and value."""

    heads: Heads
    head_dim: int
    gated = False  # the queries of a group are followed by their gates, which are rows of the part q

    def heads_of_parts(self) -> dict[str, int]:
        """Return the number of heads that a group has in each sub-matrix."""
        return {"q": self.heads.in_group * (1 + self.gated), "k": 1, "v": 1}

    def join(self, parts: dict[str, Tensor]) -> Tensor:
        if WHOLE in parts:
            return parts[WHOLE]
        heads = self.heads_of_parts()
        grouped = {part: x.unflatten(-1, (-1, heads[part], self.head_dim)) for part, x in parts.items()}
        first = next(iter(grouped.values()))  # [..., groups, heads, head_dim]
        zeros = {part: first.new_zeros(*first.shape[:-2], heads[part], self.head_dim) for part in heads}
        return torch.cat([grouped.get(part, zeros[part]) for part in heads], dim=-2).flatten(-3)


class KVAdapter(QKVAdapter):
    """Adapters of cross-attention's linear_kv, whose rows are a key and a value per KV group."""

    def heads_of_parts(self) -> dict[str, int]:
        return {"k": 1, "v": 1}


class GateUpAdapter(LinearAdapter):
    """Adapters of a gated linear_fc1. Its rows alternate: gate 0, up 0, gate 1, up 1, …"""

    def join(self, parts: dict[str, Tensor]) -> Tensor:
        if WHOLE in parts:
            return parts[WHOLE]
        zeros = torch.zeros_like(next(iter(parts.values())))
        return torch.stack([parts.get("gate", zeros), parts.get("up", zeros)], dim=-1).flatten(-2)


class GroupedAdapter(Adapter):
    """The adapters of a GroupedLinear, one per expert: A [experts, rank, in] and B [experts, out, rank]."""

    def __init__(self, lora: LoraConfig, layer: str, site: str, linear: GroupedLinear, config: ModelConfig):
        """Create the adapters of `linear` on the meta device."""
        super().__init__(lora, layer, site, {WHOLE: 0})
        _, rows, inputs = linear.weight.shape
        options, rank = dict(device="meta", bias=False), self.ranks[WHOLE]
        self.lora_A = nn.ModuleDict({WHOLE: GroupedLinear(config, inputs, rank, **options)})
        self.lora_B = nn.ModuleDict({WHOLE: GroupedLinear(config, rank, rows, **options)})

    def forward(self, x: Tensor, groups: RowGroups) -> Tensor:  # [rows, in] -> [rows, out], sorted by expert
        for matrix in (self.lora_A[WHOLE], self.lora_B[WHOLE]):
            x = matrix(x, matrix.prepare_weights(matrix.cast(x.dtype)), groups)
        return x * self.scaling

    def delta(self) -> Tensor:
        a, b = (local(pair[WHOLE].weight) for pair in (self.lora_A, self.lora_B))
        return _product(b, a) * self.scaling

    def pair(self) -> tuple[Tensor, Tensor]:
        return self.lora_A[WHOLE].weight, self.lora_B[WHOLE].weight * self.scaling


def add_adapters(model: Transformer, lora: LoraConfig, config: ModelConfig | None = None) -> None:
    """Add adapters on the meta device to the matrices that `lora` names, and freeze everything else, in place.

    A reward model's score and the modules in `lora.modules_to_save` stay trained. The rows in
    `lora.trainable_token_indices` are added to their matrices.

    `config` is the configuration of the full model if `model` has only some of its layers.

    Raises ConfigError for a module in one of these settings that the full model lacks or that cannot be trained.
    """
    is_full, config = config is None, config or model.config
    saved = saved_names(model, lora.modules_to_save or (), may_lack=not is_full)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained_with_adapters(name, saved))
    model.has_adapters, model.saved_names = True, saved
    model.draws_dropout = model.draws_dropout or lora.dropout > 0
    sites = lora.parts(config)
    for layer_name, layer in layers_of(model).items():
        if not lora.adapts_layer(layer.number, config):
            continue
        modules = dict(layer.named_modules())
        for site, parts in sites.items():
            if (linear := modules.get(site)) is not None:
                owner = modules[site.rpartition(".")[0]]
                linear.adapter = _make_adapter(lora, layer_name, site, parts, linear, owner, config)
    modules = dict(model.named_modules())
    for path, tokens in lora.tokens_by_matrix().items():
        if (matrix := modules.get(path)) is not None:
            matrix.adapter = TokenRows(tokens, config.hidden_size)
        elif is_full:
            raise ConfigError(
                f"lora.trainable_token_indices has {path}, which this model does not have; use {WORD_EMBEDDINGS}, "
                f"or {OUTPUT_LAYER} if the output matrix is not the embedding"
            )


def _make_adapter(
    lora: LoraConfig,
    layer: str,
    site: str,
    parts: tuple[str, ...],
    linear: Linear | GroupedLinear,
    owner: nn.Module,
    config: ModelConfig,
) -> Adapter:
    if site.startswith(EXPERTS):
        return GroupedAdapter(lora, layer, site, linear, config)
    rows, inputs = linear.weight.shape
    name = site.rpartition(".")[2]
    if name in ("linear_qkv", "linear_kv"):
        kind = QKVAdapter if name == "linear_qkv" else KVAdapter
        head, gated = config.query_groups * config.head_dim, kind is QKVAdapter and owner.gated
        queries = head * owner.heads.in_group * (1 + gated)
        counts = {"q": queries, "k": head, "v": head, WHOLE: rows}
        adapter = kind(lora, layer, site, inputs, {part: counts[part] for part in parts})
        adapter.heads, adapter.head_dim, adapter.gated = owner.heads, config.head_dim, gated
        return adapter
    kind = GateUpAdapter if name == "linear_fc1" else LinearAdapter
    return kind(lora, layer, site, inputs, {part: rows if part == WHOLE else rows // 2 for part in parts})


def _products(a: nn.ModuleDict, b: nn.ModuleDict) -> dict[str, Tensor]:
    """Return (B · A)ᵀ per sub-matrix, [in, rows]."""
    return {
        part: _product(each.rows(local(each.weight)), local(a[part].weight)).T for part, each in b.items()
    }


def _product(b: Tensor, a: Tensor) -> Tensor:
    """Return B · A, [..., out, in]."""
    return b @ a


def adapters(model: nn.Module) -> Iterator[tuple[str, Adapter]]:
    """Yield (name of the linear, adapter) for the adapters in a module."""
    for name, module in model.named_modules():
        if isinstance(module, Adapter):
            yield name.removesuffix(".adapter"), module
