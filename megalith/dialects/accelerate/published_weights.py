"""A Hugging Face model in memory ↔ this rank's part of ours, by the families of the bridge.

The families know the names of published files. In memory transformers 5 has some tensors otherwise, such as the
experts of a layer in one; it can tell what a file would have, and read that back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import swap_tensors

from megalith.bridge.families import FAMILIES, family_of
from megalith.bridge.family import Family, Group
from megalith.bridge.load import load_source
from megalith.bridge.transfer import to_ours, to_theirs
from megalith.bridge.verify import no_progress_bars
from megalith.checkpoint.state import Model, base_shards
from megalith.comm.collectives import Axis
from megalith.config import ModelConfig
from megalith.errors import ConfigError, shorten
from megalith.parallel.gather import global_tensors

ADAPTERS = (
    "adapters are not trained by Accelerate's scripts: merge_and_unload() them before, or train them by "
    "`megalith train` or `megalith sft` with lora.rank"
)


def family_of_module(module: nn.Module) -> tuple[Family, dict[str, Any]]:
    """The family of a model of transformers, and its config as config.json has it. Raises ConfigError."""
    kind, config = type(module), getattr(module, "config", None)
    if not hasattr(config, "to_dict"):
        raise ConfigError(
            f"prepare was given a {kind.__name__} without a config of transformers; give a model of transformers, of "
            f"{', '.join(FAMILIES)}"
        )
    known = next((base.__name__ for base in kind.__mro__ if base.__name__ in FAMILIES), None)
    if known is not None and known != kind.__name__:
        raise ConfigError(
            f"{kind.__name__} is a class of the script's own over {known}, and what it changes would be lost; give a "
            f"{known}"
        )
    inner = {type(one).__name__ for one in module.modules()} & set(FAMILIES) if known is None else None
    if inner:
        raise ConfigError(
            f"{kind.__name__} is a wrapper of {', '.join(inner)}, and what it adds would be lost; give prepare "
            f"the model itself (torch.compile: leave it out; {ADAPTERS})"
        )
    theirs = {**config.to_dict(), "architectures": [kind.__name__]}
    return family_of(theirs, kind.__name__), theirs


def as_published(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of `module` under the names, and in the shapes, of published files. It may share memory."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5 both were the same
        return dict(state)
    return revert_weight_conversion(module, dict(state))


# What a script may ask of a sharded parameter: what holds of the whole, and what torch's optimizers check.
OF_THE_WHOLE = frozenset((
    "__get__ shape", "__get__ dtype", "__get__ ndim", "__get__ layout", "__get__ requires_grad", "__get__ is_leaf",
    "__get__ retains_grad", "__get__ itemsize", "__get__ nbytes", "__get__ is_sparse", "__get__ grad_fn",
    "__get__ is_quantized", "__get__ is_meta", "numel", "nelement", "size", "dim", "ndimension", "element_size",
    "is_floating_point", "is_complex", "__len__", "__hash__", "__repr__",
))  # fmt: skip
WAYS = {
    "grad": "clip by accelerator.clip_grad_norm_ or clip_grad_value_, forget by optimizer.zero_grad(), and give an "
    "optimizer that is made of these parameters to accelerator.prepare before it steps"
}
ANOTHER_WAY = (
    "read weights from accelerator.unwrap_model(model) on every rank, change or freeze them before prepare"
)


class ShardedParameter(nn.Parameter):
    """A parameter of a prepared model under the script's name: the whole one's shape and dtype, and where it trains.

    Its values and its gradient are shards of the ranks: what would read or change them raises ConfigError.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name in ("__get__", "__set__"):
            name = f"{name} {func.__self__.__name__}"
        if name in OF_THE_WHOLE:
            return super().__torch_function__(func, types, args, kwargs or {})
        asked = name.split()[-1]
        raise ConfigError(
            f"{asked} of a parameter of the prepared model is not had, for its values and gradient are sharded over "
            f"the ranks; {WAYS.get(asked, ANOTHER_WAY)}"
        )

    @property
    def device(self) -> torch.device:
        """Where this rank's shard is."""
        return self.place

    def __deepcopy__(self, memo: Any) -> Any:
        return self.clone()


class GatheredParameter(nn.Parameter):
    """A parameter of the script's own model with the whole values of now, which has no part in the training.

    While the prepared model has gradients of a step, `grad` raises ConfigError and not None: torch's clip_grad_norm_
    would clip nothing, and say 0. Once the training has gone on, `detach` raises it too, by which a state_dict is made:
    a script would save weights without their last steps.
    """

    sharded: ShardedParameter
    has_gradients: Callable[[], bool]
    is_outdated: Callable[[], bool]

    def detach(self) -> Tensor:
        if self.is_outdated():
            raise ConfigError(
                "the weights of unwrap_model(model) are from before the last optimizer step or load_state; call "
                "accelerator.unwrap_model(model) again, on every rank, before you save or copy them"
            )
        return super().detach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain parameter, so that torch.save of the whole module needs nothing of the training."""
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)

    @property
    def grad(self) -> Tensor | None:
        own = nn.Parameter.grad.__get__(self)
        if own is None and self.has_gradients():
            raise ConfigError(
                "grad of a parameter of unwrap_model(model) is asked for, whose gradient is the prepared model's, and "
                f"sharded over the ranks; {WAYS['grad']}"
            )
        return own

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        nn.Parameter.grad.__set__(self, value)

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        return memo.setdefault(id(self), nn.Parameter(self.data.clone(), self.requires_grad))


def shard_parameters(module: nn.Module, device: torch.device) -> dict[int, ShardedParameter]:
    """Makes every parameter of `module` a ShardedParameter, without its memory, for whoever has it in a list too: by
    the id that it had, what it is. One that a graph holds stays to that, and the module gets another."""
    found: dict[int, ShardedParameter] = {}
    for parameter in list(module.parameters()):
        sharded = ShardedParameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        sharded.place = device
        try:
            swap_tensors(parameter, sharded)
            found[id(parameter)] = parameter
        except RuntimeError:
            found[id(parameter)] = sharded
    for one in module.modules():
        for name, parameter in one.named_parameters(recurse=False, remove_duplicate=False):
            one.register_parameter(name, found[id(parameter)])
    return found


@dataclass(frozen=True)
class ModuleWeights:
    """The tensors of a module as the groups of a model: what `load_source` reads from."""

    groups: list[Group]
    state: Mapping[str, Tensor]

    def ours(
        self, group: Group, seed: int, offset: Sequence[int] | None, shape: Sequence[int] | None
    ) -> Tensor:
        return to_ours(group, self.state.__getitem__, offset, shape)


def load_module(module: nn.Module, family: Family, model: ModelConfig, chunks: Model) -> list[Group]:
    """Fills the chunks of this rank from a module, and returns the groups of the model. One on the meta device, as of
    accelerate.init_empty_weights, leaves initial weights there, for a checkpoint to be loaded.

    Raises ConfigError for tensors that are missing, of another shape, or of no use here.
    """
    groups, state = family.groups(model), as_published(module, module.state_dict())
    wanted = {name: shape for group in groups for name, shape in group.sources.items()}
    spare = {name for name in state if any(re.search(pattern, name) for pattern in family.ignored)}
    if not model.untie_embeddings_and_output_weights:
        spare.add(family.tied)
    other = [n for n, shape in wanted.items() if n not in state or tuple(state[n].shape) != tuple(shape)]
    other += [name for name in state if name not in wanted and name not in spare]
    if any("lora_" in name or ".base_layer." in name for name in state):
        raise ConfigError(f"{type(module).__name__} has adapters in it, and {ADAPTERS}")
    if other:
        raise ConfigError(
            f"{type(module).__name__} has not the tensors that its config says: {shorten(other)}; give the model as "
            "transformers makes it"
        )
    if not any(tensor.is_meta for tensor in state.values()):
        load_source(ModuleWeights(groups, state), chunks, 0)
    return groups


def origins(module: nn.Module, groups: Sequence[Group]) -> dict[str, list[nn.Parameter]]:
    """By our names the parameters of `module` that each tensor of ours is made of."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    marks = {
        name: torch.tensor(number).expand(parameter.shape)
        for number, (name, parameter) in enumerate(parameters.items())
    }
    listed, published = list(parameters.values()), as_published(module, marks)
    found = {}
    for group in groups:
        numbers = [published[name].flatten()[:1].tolist() for name in group.sources if name in published]
        found[group.name] = [listed[number] for number in dict.fromkeys(n for one in numbers for n in one)]
    return found


def gather_state(
    groups: Sequence[Group], chunks: Model, world: Axis, device: torch.device
) -> dict[str, Tensor]:
    """The whole model's tensors under published names, float32 on every rank's CPU. Every rank calls it."""
    tensors, found = global_tensors(base_shards(chunks), world), {}
    for group in groups:
        whole = tensors[group.name].gather()
        if world.size > 1:
            shape = tensors[group.name].shape
            own = whole.to(device) if whole is not None else torch.empty(shape, device=device)
            dist.broadcast(own, 0, group=world.group)
            whole = own.cpu()
        ours = whole[: group.shape[0]] if group.shape else whole
        dtypes = dict.fromkeys(group.sources, torch.float32)
        found.update({name: tensor.clone() for name, tensor in to_theirs(group, ours, dtypes)})
    return found


def fill_module(module: nn.Module, state: dict[str, Tensor], dtype: torch.dtype,
                sharded: Mapping[str, ShardedParameter], has_gradients: Callable[[], bool],
                is_outdated: Callable[[], bool]) -> None:  # fmt: skip
    """Gives a module, which may be on the meta device, the tensors of published names. `sharded`: by its names, what
    trains in their place; `has_gradients`: whether that has gradients of a step; `is_outdated`: whether it has changed
    since."""
    with no_progress_bars():
        fresh = type(module).from_pretrained(None, config=module.config, state_dict=state).to(dtype)
    filled, gathered = fresh.state_dict(), {}
    for name, parameter in fresh.named_parameters(remove_duplicate=False):
        if id(parameter) not in gathered:
            one = gathered[id(parameter)] = GatheredParameter(parameter.data, sharded[name].requires_grad)
            one.sharded, one.has_gradients, one.is_outdated = sharded[name], has_gradients, is_outdated
        filled[name] = gathered[id(parameter)]
    module.load_state_dict(filled, assign=True)
    buffers = dict(fresh.named_buffers())
    for name, own in module.named_modules():
        for kind in own._non_persistent_buffers_set:
            own.register_buffer(kind, buffers[f"{name}.{kind}".lstrip(".")], persistent=False)
    if hasattr(module, "tie_weights"):
        module.tie_weights()
