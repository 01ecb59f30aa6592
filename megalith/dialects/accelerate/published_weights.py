"""Convert between a Hugging Face model in memory and this rank's shard of Megalith's model.

The bridge's families use the tensor names of published files. In memory transformers 5 fuses some tensors, such as the
experts of a layer; it provides the conversion to and from the file's tensors.
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
from megalith.bridge.folder import with_current_names
from megalith.bridge.load import load_source
from megalith.bridge.transfer import to_ours, to_theirs
from megalith.bridge.verify import no_progress_bars
from megalith.checkpoint.state import Model, base_shards
from megalith.comm.collectives import Axis
from megalith.compat.training_objects import non_persistent_buffers
from megalith.config import ModelConfig
from megalith.errors import ConfigError, shorten
from megalith.parallel.gather import global_tensors

ADAPTERS = (
    "Accelerate scripts cannot train adapters with Megalith: call merge_and_unload() first, or train with `megalith "
    "train` or `megalith sft` and lora.rank"
)


def family_of_module(module: nn.Module) -> tuple[Family, dict[str, Any]]:
    """Return the family of a transformers model and its config.json. Raises ConfigError for unsupported models."""
    kind, config = type(module), getattr(module, "config", None)
    if not hasattr(config, "to_dict"):
        raise ConfigError(
            f"prepare was called with a {kind.__name__}, which is not a supported transformers model; pass one of "
            f"{', '.join(FAMILIES)}"
        )
    base_class = next((base.__name__ for base in kind.__mro__ if base.__name__ in FAMILIES), None)
    if base_class is not None and base_class != kind.__name__:
        raise ConfigError(
            f"{kind.__name__} is a subclass of {base_class}, and its changes would be lost; pass a {base_class}"
        )
    wrapped = (
        {type(child).__name__ for child in module.modules()} & set(FAMILIES) if base_class is None else None
    )
    if wrapped:
        raise ConfigError(
            f"{kind.__name__} is a wrapper of {', '.join(wrapped)}, and its additions would be lost; pass the wrapped "
            f"model to prepare (torch.compile: leave it out; {ADAPTERS})"
        )
    hf_config = {**config.to_dict(), "architectures": [kind.__name__]}
    if "num_nextn_predict_layers" in hf_config:
        hf_config["num_nextn_predict_layers"] = 0  # the module has no layers of multi-token prediction
    return family_of(hf_config, kind.__name__), hf_config


def published_state_dict(module: nn.Module, family: Family, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a state dict of `module` to the names and shapes of published files. The result may share memory
    with it.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5 the names in memory were those of files
        return with_current_names(state, family)
    return with_current_names(revert_weight_conversion(module, dict(state)), family)


# Attributes and functions that a ShardedParameter supports: they describe the full parameter, or torch's optimizers
# check them.
ALLOWED_ATTRIBUTES = frozenset((
    "__get__ shape", "__get__ dtype", "__get__ ndim", "__get__ layout", "__get__ requires_grad", "__get__ is_leaf",
    "__get__ retains_grad", "__get__ itemsize", "__get__ nbytes", "__get__ is_sparse", "__get__ grad_fn",
    "__get__ is_quantized", "__get__ is_meta", "numel", "nelement", "size", "dim", "ndimension", "element_size",
    "is_floating_point", "is_complex", "__len__", "__hash__", "__repr__",
))  # fmt: skip
ALTERNATIVES = {
    "grad": "clip with accelerator.clip_grad_norm_ or clip_grad_value_, clear with optimizer.zero_grad(), and pass an "
    "optimizer of these parameters to accelerator.prepare before its first step"
}
DEFAULT_ALTERNATIVE = (
    "read weights from accelerator.unwrap_model(model) on every rank; change or freeze them before prepare"
)


class ShardedParameter(nn.Parameter):
    """A parameter of a prepared model under the script's name, with the full shape and dtype.

    Its values and its gradient are sharded over the ranks; operations that read or change them raise ConfigError.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name in ("__get__", "__set__"):
            name = f"{name} {func.__self__.__name__}"
        if name in ALLOWED_ATTRIBUTES:
            return super().__torch_function__(func, types, args, kwargs or {})
        attribute = name.split()[-1]
        raise ConfigError(
            f"{attribute} is not available for a parameter of the prepared model, because its values and gradient are "
            f"sharded over the ranks; {ALTERNATIVES.get(attribute, DEFAULT_ALTERNATIVE)}"
        )

    @property
    def device(self) -> torch.device:
        """Device of this rank's shard."""
        return self.shard_device

    def __deepcopy__(self, memo: Any) -> Any:
        return self.clone()


class GatheredParameter(nn.Parameter):
    """A parameter of the unwrapped model, as a full copy of the current values. It is not trained.

    While the prepared model has gradients, `grad` raises ConfigError instead of returning None, because torch's
    clip_grad_norm_ would clip nothing and return 0. After a further training step, `detach` (used by state_dict) raises
    ConfigError, because the script would save outdated weights.
    """

    sharded: ShardedParameter
    has_gradients: Callable[[], bool]
    is_outdated: Callable[[], bool]

    def detach(self) -> Tensor:
        if self.is_outdated():
            raise ConfigError(
                "the weights of unwrap_model(model) are older than the last optimizer step or load_state; call "
                "accelerator.unwrap_model(model) again, on every rank, before you save or copy them"
            )
        return super().detach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain nn.Parameter, so that torch.save of the module works."""
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)

    @property
    def grad(self) -> Tensor | None:
        grad = nn.Parameter.grad.__get__(self)
        if grad is None and self.has_gradients():
            raise ConfigError(
                "grad is not available for a parameter of unwrap_model(model), because the prepared model has the "
                f"gradients, sharded over the ranks; {ALTERNATIVES['grad']}"
            )
        return grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        nn.Parameter.grad.__set__(self, value)

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        return memo.setdefault(id(self), nn.Parameter(self.data.clone(), self.requires_grad))


def shard_parameters(module: nn.Module, device: torch.device) -> dict[int, ShardedParameter]:
    """Replace every parameter of `module` by a ShardedParameter and free its memory.

    The objects are swapped in place, so lists of parameters elsewhere see the replacement. A parameter that an autograd
    graph references cannot be swapped; the module then gets a new object.

    Returns:
        The ShardedParameter by the id of the original parameter.
    """
    replacements: dict[int, ShardedParameter] = {}
    for parameter in list(module.parameters()):
        sharded = ShardedParameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        sharded.shard_device = device
        try:
            swap_tensors(parameter, sharded)
            replacements[id(parameter)] = parameter
        except RuntimeError:
            replacements[id(parameter)] = sharded
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False, remove_duplicate=False):
            child.register_parameter(name, replacements[id(parameter)])
    return replacements


@dataclass(frozen=True)
class ModuleWeights:
    """A module's state dict as a source of weights for `load_source`."""

    groups: list[Group]
    state: Mapping[str, Tensor]

    def read(
        self, group: Group, seed: int, offset: Sequence[int] | None, shape: Sequence[int] | None
    ) -> Tensor:
        return to_ours(group, self.state.__getitem__, offset, shape)


def load_module(module: nn.Module, family: Family, model: ModelConfig, chunks: Model) -> list[Group]:
    """Load this rank's model chunks from a module. Returns the tensor groups of the model.

    A module on the meta device, as from accelerate.init_empty_weights, keeps the chunks' initial weights; load a
    checkpoint afterwards. Raises ConfigError for missing, misshapen or unknown tensors.
    """
    state = published_state_dict(module, family, module.state_dict())
    groups = family.stored_as({name: tuple(tensor.shape) for name, tensor in state.items()}).groups(model)
    expected = {name: shape for group in groups for name, shape in group.sources.items()}
    ignored = {name for name in state if any(re.search(pattern, name) for pattern in family.ignored)}
    ignored |= {*family.stored_constants(model), *family.stored_tables(model), *family.embedding_copies}
    if not model.untie_embeddings_and_output_weights:
        ignored.add(family.tied)
    mismatched = [
        n for n, shape in expected.items() if n not in state or tuple(state[n].shape) != tuple(shape)
    ]
    mismatched += [name for name in state if name not in expected and name not in ignored]
    if any("lora_" in name or ".base_layer." in name for name in state):
        raise ConfigError(f"{type(module).__name__} contains adapters. {ADAPTERS}")
    if mismatched:
        raise ConfigError(
            f"the tensors of {type(module).__name__} do not match its config: {shorten(mismatched)}; pass the model "
            "unchanged, as transformers creates it"
        )
    if not any(tensor.is_meta for tensor in state.values()):
        load_source(ModuleWeights(groups, state), chunks, 0)
    return family.groups(model)


def source_parameters(
    module: nn.Module, family: Family, groups: Sequence[Group]
) -> dict[str, list[nn.Parameter]]:
    """Return, by Megalith's tensor name, the parameters of `module` that the tensor is built from.

    Each parameter is filled with its index and converted like weights, so that every published tensor shows its source.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    marks = {
        name: torch.tensor(index).expand(parameter.shape)
        for index, (name, parameter) in enumerate(parameters.items())
    }
    listed, published = list(parameters.values()), published_state_dict(module, family, marks)
    sources = {}
    for group in groups:
        tensors = (published[name] for name in group.sources if name in published)
        indices = dict.fromkeys(index for tensor in tensors for index in tensor.flatten()[:1].tolist())
        sources[group.name] = [listed[index] for index in indices]
    return sources


def gather_state(
    groups: Sequence[Group], chunks: Model, world: Axis, device: torch.device
) -> dict[str, Tensor]:
    """Return the full model's tensors under their Hugging Face names, in float32 on every rank's CPU. Collective."""
    tensors, state = global_tensors(base_shards(chunks), world), {}
    for group in groups:
        full = tensors[group.name].gather()
        if world.size > 1:
            shape = tensors[group.name].shape
            buffer = full.to(device) if full is not None else torch.empty(shape, device=device)
            dist.broadcast(buffer, 0, group=world.group)
            full = buffer.cpu()
        unpadded = full[: group.shape[0]] if group.shape else full
        dtypes = dict.fromkeys(group.sources, torch.float32)
        state.update({name: tensor.clone() for name, tensor in to_theirs(group, unpadded, dtypes)})
    return state


def fill_module(module: nn.Module, state: dict[str, Tensor], dtype: torch.dtype,
                sharded: Mapping[str, ShardedParameter], has_gradients: Callable[[], bool],
                is_outdated: Callable[[], bool]) -> None:  # fmt: skip
    """Load weights under their Hugging Face names into the script's model, which may be on the meta device.

    Args:
        module: the script's model; its parameters become GatheredParameters.
        state: tensors by Hugging Face name.
        dtype: dtype of the module.
        sharded: the trained parameters by the module's names.
        has_gradients: returns True if the trained model has gradients.
        is_outdated: returns True if the trained model has changed since.
    """
    with no_progress_bars():
        fresh = type(module).from_pretrained(None, config=module.config, state_dict=state).to(dtype)
    filled, gathered = fresh.state_dict(), {}
    for name, parameter in fresh.named_parameters(remove_duplicate=False):
        if id(parameter) not in gathered:
            copy = gathered[id(parameter)] = GatheredParameter(parameter.data, sharded[name].requires_grad)
            copy.sharded, copy.has_gradients, copy.is_outdated = sharded[name], has_gradients, is_outdated
        filled[name] = gathered[id(parameter)]
    module.load_state_dict(filled, assign=True)
    buffers = dict(fresh.named_buffers())
    for name, child in module.named_modules():
        for buffer in non_persistent_buffers(child):
            child.register_buffer(buffer, buffers[f"{name}.{buffer}".lstrip(".")], persistent=False)
    if hasattr(module, "tie_weights"):
        module.tie_weights()
