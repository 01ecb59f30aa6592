"""The quantized base of adapters (`lora.quantize_base`): quantizes the weights in `model.init_from`, and dequantizes
them again.

Each matrix of the Hugging Face model is quantized separately, in every layout and for every format of the weights. All
layouts therefore have the same quantized weights. If a folder already contains a matrix in the configured format, its
quantized values are used unchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.bridge.families import family_for
from megalith.bridge.family import Group, build_on_meta
from megalith.bridge.load import is_foreign_weights, open_weights
from megalith.bridge.match import Match
from megalith.bridge.quantized import QuantizedMatrix
from megalith.checkpoint import Checkpoint, open_existing
from megalith.checkpoint.extent import Extent
from megalith.checkpoint.fingerprint import sample
from megalith.checkpoint.state import MODEL, Model, model_shards
from megalith.comm.collectives import Axis
from megalith.config import RunConfig
from megalith.models.adapters import ADAPTER, LinearAdapter, adapters, is_initial_factor
from megalith.models.coded_weight import CodedWeight
from megalith.ops.weight_codes import CodedMatrix, WeightCodes, assemble, decode, encode, stack, take
from megalith.parallel.coded_base import base_matrices, coded_weights
from megalith.parallel.gather import ALONE, global_tensors
from megalith.parallel.shards import LocalShard
from megalith.progress import Progress


class CodedBase:
    """The weights in `model.init_from`, quantized to the format in `lora.quantize_base`."""

    def __init__(
        self,
        config: RunConfig,
        device: torch.device | str = "cpu",
        taken: Callable[[str], Tensor | None] = lambda name: None,
    ):
        """Open the weights. They are quantized on `device`.

        `taken` is a function from a parameter's name to the matrix, of the parameter's shape, that LoftQ subtracts
        before quantizing.
        """
        self._taken = taken
        path, model = config.model.init_from, config.model
        self.form, self._seed, self._device = config.lora.quantize_base, config.train.seed, device
        self._match: Match | None = None
        self._checkpoint: Checkpoint | None = None
        if is_foreign_weights(path):
            self._match = open_weights(path, config.checkpoint.trust, model.vocab_size)
        else:
            self._checkpoint = open_existing(path, show_progress=False)
        groups = self._match.groups if self._match is not None else family_for(model).groups(model)
        self._groups = {group.name: group for group in groups}
        self._model = model

    @cached_property
    def names(self) -> set[str]:
        """Names of the quantized parameters."""
        return {f"{name}.weight" for name, _ in base_matrices(build_on_meta(self._model))}

    def read(self, name: str, first: int, count: int) -> Tensor:
        """Return rows, or experts, of a parameter with the source's values: float32 on the CPU."""
        group = self._groups[name]
        offset, shape = (first, *(0,) * (len(group.shape) - 1)), (count, *group.shape[1:])
        if self._match is not None:
            return self._match.read(group, self._seed, offset, shape)
        return self._checkpoint.read(MODEL, name, Extent(offset, shape)).float()

    def codes(self, name: str, dense: Tensor, first_expert: int = 0) -> WeightCodes:
        """Return a quantized parameter; `dense` is the full parameter, or some of its experts."""
        group = self._groups[name]
        dense = dense.to(self._device)
        if dense.ndim == 2:
            taken = self._taken(name)
            if taken is not None:
                return self.codes_without(name, dense, taken)
            return assemble(self.form, dense.shape, self._matrices(group, dense, None))
        return stack(
            self.form,
            [
                assemble(self.form, matrix.shape, self._matrices(group, matrix, expert))
                for expert, matrix in enumerate(dense, first_expert)
            ],
        )

    def codes_without(self, name: str, dense: Tensor, taken: Tensor) -> WeightCodes:
        """Subtract `taken` from a matrix, and quantize the difference. Quantized values in the folder are not used."""
        group, rest = self._groups[name], dense - taken.to(dense)
        matrices = (
            encode(self.form, rest[rows.to(rest.device)], rows) for rows in rows_of_sources(group).values()
        )
        return assemble(self.form, rest.shape, matrices)

    def codes_rows_alone(self, name: str) -> bool:
        """Return True if rows of this matrix can be quantized independently of the other rows.

        It is False if the folder already has quantized values of the matrix, or if LoftQ subtracts something from it.
        """
        group = self._groups[name]
        has_codes = any(self._stored(group, source) is not None for source in group.sources)
        is_whole = self._taken(name) is None
        return self.form in ("int8", "mxfp4") and len(group.shape) == 2 and not has_codes and is_whole

    def codes_of_rows(self, dense: Tensor) -> WeightCodes:
        """Quantize some rows of a matrix for which `codes_rows_alone` is True."""
        rows = torch.arange(len(dense), device=self._device)
        return assemble(self.form, dense.shape, [encode(self.form, dense.to(self._device), rows)])

    def decoded(self, name: str, dense: Tensor) -> Tensor:
        """Return the full value of a parameter after quantization, in float32: the value that the run computes with."""
        return decode(self.form, self.codes(name, dense), torch.float32)

    def full(self, name: str) -> Tensor:
        """Return a complete parameter of the source after quantization, in float32 (see `decoded`)."""
        return self.decoded(name, self.read(name, 0, self._groups[name].shape[0]))

    def _matrices(self, group: Group, dense: Tensor, expert: int | None) -> Iterator[CodedMatrix]:
        for source, rows in rows_of_sources(group).items():
            stored = self._stored(group, group.names(expert)[source])
            if stored is not None:
                yield stored.coded(rows, self._device)
            else:
                yield encode(self.form, dense[rows.to(dense.device)], rows)

    def _stored(self, group: Group, name: str) -> QuantizedMatrix | None:
        """Return a stored matrix of the folder if it is already quantized as configured, otherwise None."""
        stored = None if self._match is None else self._match.source.tensors.get(name)
        same = getattr(stored, "form", None) == self.form
        return stored if same and not group.rule.transposed else None


def rows_of_sources(group: Group) -> dict[int, Tensor]:
    """Return Megalith's rows, int64, for each Hugging Face matrix of a parameter or of one expert."""
    sizes: Counter[int] = Counter()
    for run in group.runs:
        sizes[run.source] += run.count
    rows = {source: torch.empty(size, dtype=torch.int64) for source, size in sizes.items()}
    for run in group.runs:
        rows[run.source][run.theirs : run.theirs + run.count] = run.ours + run.step * torch.arange(run.count)
    return rows


@torch.no_grad()
def load_coded_base(
    config: RunConfig, model: Model, device: torch.device, world: Axis = ALONE, show_progress: bool = False
) -> None:
    """Fill the quantized weights of this rank's chunks from `model.init_from`. Collective over `world`.

    With LoftQ, the adapters must be initialized first. Each rank reads one matrix at a time, quantizes it and keeps
    its shard. If rows can be quantized independently, it reads only the rows of its shard.
    """
    chunks = model if isinstance(model, list) else [model]
    weights = {name: each for chunk in chunks for name, each in coded_weights(chunk).items()}
    if not weights:
        return
    base = CodedBase(config, device, taken_by_loftq(config, chunks, world))
    total = sum(torch.Size(each.local_shape).numel() for each in weights.values())
    with Progress("quantize", total, show=show_progress) as progress:
        for name, weight in weights.items():
            _fill(weight, base, name)
            progress.add(torch.Size(weight.local_shape).numel())


@torch.no_grad()
def taken_by_loftq(
    config: RunConfig, chunks: Sequence[torch.nn.Module], world: Axis
) -> Callable[[str], Tensor | None]:
    """Return a function from a parameter's name to the matrix that LoftQ subtracts from it, read from the adapters of
    all ranks; None for a parameter that LoftQ does not change.

    Collective over `world`; each rank gets the factors of all matrices.
    """
    if not (config.lora.begins_with_loftq and config.lora.keeps_initial_factors):
        return lambda name: None
    shards = {
        name: x for chunk in chunks for name, x in model_shards(chunk).items() if is_initial_factor(name)
    }
    values: dict[str, Tensor] = {}
    for name, tensor in global_tensors(shards, world).items():
        full = tensor.gather("cpu")
        values[name] = torch.empty(tensor.shape, dtype=tensor.dtype) if full is None else full
        if world.size > 1:
            on_device = values[name].to(next(iter(shards.values())).values.device if shards else "cpu")
            dist.broadcast(on_device, 0, group=world.group)
            values[name] = on_device.cpu()
    return taken_from(config, values.__getitem__)


def taken_from(config: RunConfig, read: Callable[[str], Tensor]) -> Callable[[str], Tensor | None]:
    """Return a function from a parameter's name to the matrix that LoftQ subtracts from it, or None; `read` returns
    the adapters' factors."""
    if not (config.lora.begins_with_loftq and config.lora.keeps_initial_factors):
        return lambda name: None
    with_factors = dict(adapters(build_on_meta(config.model, config.lora)))

    @torch.no_grad()
    def taken(name: str) -> Tensor | None:
        linear = name.removesuffix(".weight")
        adapter = with_factors.get(linear)
        if not isinstance(adapter, LinearAdapter):
            return None
        adapter = deepcopy(adapter).to_empty(device="cpu")
        for kind, parameter in adapter.named_parameters():
            if is_initial_factor(f"{linear}{ADAPTER}{kind}"):
                parameter.copy_(read(f"{linear}{ADAPTER}{kind}"))
        return adapter.taken_from_base()

    return taken


@torch.no_grad()
def round_base(
    config: RunConfig, model: torch.nn.Module, taken: Callable[[str], Tensor | None] = lambda name: None
) -> None:
    """Round the linears' weights in an unsharded model, loaded from `model.init_from`, to their quantized values.

    `taken` is as in CodedBase.
    """
    base, parameters = CodedBase(config, taken=taken), dict(model.named_parameters())
    for name in sorted(base.names):
        parameters[name].copy_(base.decoded(name, parameters[name].float()))


def _fill(weight: CodedWeight, base: CodedBase, name: str) -> None:
    shape, local, offset = weight.shape, weight.local_shape, weight.offset
    of_experts, rows_alone = len(shape) == 3, base.codes_rows_alone(name)
    first, count = (offset[0], local[0]) if of_experts or rows_alone else (0, shape[0])
    dense = base.read(name, first, count)
    full = LocalShard(dense, (first, *(0,) * (len(shape) - 1)), shape, owned=True)
    weight.base_sample = sample(full)
    codes = base.codes_of_rows(dense) if rows_alone else base.codes(name, dense, first)
    rows, columns = (slice(at, at + size) for at, size in zip(offset[-2:], local[-2:]))
    if rows_alone:
        rows = slice(0, count)
    weight.fill(take(base.form, codes, rows, columns))
