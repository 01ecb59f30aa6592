"""Accelerate's Accelerator, which trains with Megalith if it has a MegatronLMPlugin."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType, InitProcessGroupKwargs, recursively_apply
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from megalith.dialects.accelerate.dummies import MegatronLMDummyDataLoader, MegatronLMDummyScheduler
from megalith.dialects.accelerate.plugin import MegatronLMPlugin
from megalith.dialects.accelerate.process_state import (
    barrier,
    collective_call,
    gather_across_data_parallel_groups,
    gather_objects,
    reduce_over_replicas,
    replace_megatron,
    replica_collective_call,
    set_data_parallel_axis,
    track_call_order,
)
from megalith.dialects.accelerate.replica_loader import ReplicaSharding, prepare_loader, skip_first_batches
from megalith.dialects.accelerate.script_engine import MegatronEngine
from megalith.dialects.accelerate.script_optimizer import (
    MegatronLMOptimizerWrapper,
    MegatronLMSchedulerWrapper,
)
from megalith.dialects.accelerate.train_steps import build_train_step
from megalith.errors import ConfigError
from megalith.launch.launcher import TIMEOUT
from megalith.small_files import read_optional_file
from megalith.training.process import raise_cuda_connections

SCHEDULERS = "schedulers.json"
USE_MEGATRON_LM = "ACCELERATE_USE_MEGATRON_LM"  # set by Accelerate's launcher


class Accelerator(accelerate.Accelerator):
    """Accelerate's Accelerator.

    With a MegatronLMPlugin, passed or selected by the environment, it trains transformers models with Megalith in any
    layout. The script keeps the training loop that it has for DDP. Without a plugin, it works as Accelerate's class.
    """

    def __init__(self, *args: Any, megatron_lm_plugin: Any = None, cpu: bool = False, **options: Any):
        if megatron_lm_plugin is None and os.environ.get(USE_MEGATRON_LM, "false").lower() == "true":
            megatron_lm_plugin = MegatronLMPlugin()
        if megatron_lm_plugin is None:
            super().__init__(*args, cpu=cpu, **options)
            return
        if not isinstance(megatron_lm_plugin, MegatronLMPlugin):
            raise ConfigError(
                "megatron_lm_plugin is an object of Accelerate's own class; import MegatronLMPlugin from "
                "megalith.accelerate, or run the script with `megalith accelerate launch`"
            )
        raise_cuda_connections()  # before CUDA starts; the layout that needs it is known only later
        cpu = cpu or not torch.cuda.is_available()
        handlers = options.get("kwargs_handlers") or ()
        group = next((handler for handler in handlers if isinstance(handler, InitProcessGroupKwargs)), None)
        with replace_megatron(cpu, TIMEOUT if group is None else group.timeout):
            super().__init__(*args, cpu=cpu, megatron_lm_plugin=megatron_lm_plugin, **options)
        megatron_lm_plugin.data_parallel_size_of(self.num_processes)
        track_call_order()

    @property
    def _engine(self) -> MegatronEngine | None:
        return next((model for model in self._models if isinstance(model, MegatronEngine)), None)

    @property
    def _uses_megalith(self) -> bool:
        return self.distributed_type == DistributedType.MEGATRON_LM

    @property
    def _plugin(self) -> MegatronLMPlugin:
        return self.state.megatron_lm_plugin

    @property
    def _replica(self) -> tuple[int, int]:
        """Return the index of this rank's data-parallel replica and the number of replicas."""
        plugin, replicas = self._plugin, self._plugin.data_parallel_size_of(self.num_processes)
        return self.process_index // (plugin.tp_degree * plugin.context_parallel_size) % replicas, replicas

    @property
    def _sharding(self) -> ReplicaSharding:
        """Determine which samples of a dataloader this rank uses. Raises ConfigError for unsupported options."""
        options, count = self.dataloader_config, self._plugin.num_micro_batches
        replica, replicas = self._replica
        if options.split_batches and replicas * count > 1:
            raise ConfigError(
                "split_batches is true, but in Megalith a dataloader's batch is one micro-batch, and each replica "
                f"reads {count} of them per iteration; leave split_batches out, and divide the dataloader's "
                f"batch_size by {replicas} replicas × num_micro_batches {count} = {replicas * count}"
            )
        if options.use_stateful_dataloader:
            raise ConfigError(
                "use_stateful_dataloader is not supported, because save_state does not store the position in a "
                "dataloader; leave use_stateful_dataloader out, and after load_state skip the iterations already "
                "done with accelerator.skip_first_batches(loader, iterations)"
            )
        seed = torch.random.initial_seed() if options.data_seed is None else options.data_seed
        kinds = tuple(str(getattr(kind, "value", kind)) for kind in self.rng_types or ())
        return ReplicaSharding(
            count, replicas, replica, self.device, kinds, seed if options.use_seedable_sampler else None
        )

    def _prepare_megatron_lm(self, *args: Any) -> Any:
        """Prepare the arguments in order. Collective over all ranks, which pass the same kinds of arguments."""
        plugin = self._plugin
        # Objects that are already prepared are returned unchanged.
        already = (*self._models, *self._optimizers, *self._dataloaders, *self._schedulers)
        prepared = {id(obj): obj for obj in already}
        new = tuple(obj for obj in args if id(obj) not in prepared)
        modules = [obj for obj in new if isinstance(obj, nn.Module)]
        if len(modules) > 1 or (modules and self._engine is not None):
            raise ConfigError(
                "prepare was called with a second model, but Megalith's Accelerator trains one model; prepare the "
                "others with another Accelerator without the plugin, or leave them unprepared"
            )
        self._set_batch(new)
        optimizer = next((obj for obj in new if isinstance(obj, torch.optim.Optimizer)), None)
        for obj in new:
            if isinstance(obj, MegatronLMDummyScheduler):
                plugin.set_scheduler_args(obj)
        if modules:
            if optimizer is not None:
                plugin.set_optimizer_type(optimizer)
            plugin.set_network_size_args(modules[0])
            engine = self._build_engine(modules[0], optimizer)
            self._models.append(engine)
        elif optimizer is not None:
            if self._engine is None:
                raise ConfigError(
                    "prepare was called with an optimizer but not its model; pass both in one call"
                )
            plugin.set_optimizer_type(optimizer)
            self._engine.set_optimizer(optimizer)
        result = []
        for obj in args:
            if id(obj) not in prepared or isinstance(obj, MegatronLMDummyDataLoader):
                prepared[id(obj)] = self._prepare_object(obj)
            result.append(prepared[id(obj)])
        return tuple(result)

    def _build_engine(self, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> MegatronEngine:
        custom = self._plugin.custom_prepare_model_function
        if custom is not None:
            module = custom(self._plugin.custom_model_provider_function or (lambda *args, **options: module))
        engine = MegatronEngine(
            module, optimizer, self._plugin, self.mixed_precision, self.device, self.scaler_handler
        )
        layout = {name: getattr(engine.mesh, name).size for name in ("tp", "pp", "cp", "dp")}
        sizes = " × ".join(f"{name.upper()} {size}" for name, size in layout.items())
        self.print(f"megalith: {type(module).__name__} in {sizes}", flush=True)
        for note in engine.notes:
            self.print(f"note: {note}", flush=True)
        engine.train_step = build_train_step(self, self._plugin, engine)
        set_data_parallel_axis(engine.mesh.dp)
        return engine

    def _prepare_object(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module):
            return self._engine
        if isinstance(obj, torch.optim.Optimizer):
            self._optimizers.append(MegatronLMOptimizerWrapper(self._engine.optimizer))
            return self._optimizers[-1]
        if isinstance(obj, DataLoader):
            self._dataloaders.append(prepare_loader(obj, self._sharding))
            return self._dataloaders[-1]
        if isinstance(obj, MegatronLMDummyDataLoader):
            return obj.next_split(self._engine, self._plugin, self.device)
        if isinstance(obj, (LRScheduler, MegatronLMDummyScheduler)):
            return self.prepare_scheduler(obj)
        return obj

    def _set_batch(self, args: Sequence[Any]) -> None:
        """Set the plugin's batch sizes. A dataloader's batch is the micro-batch."""
        sizes = []
        for obj in args:
            if isinstance(obj, DataLoader):
                sizes.append(obj.batch_size or getattr(obj.batch_sampler, "batch_size", None))
            elif isinstance(obj, MegatronLMDummyDataLoader):
                sizes.append(obj.dataset_args.get("micro_batch_size"))
        sizes = [size for size in sizes if size is not None]
        if sizes or not hasattr(self._plugin, "micro_batch_size"):
            size = 1 if not sizes else min(sizes) if self._plugin.is_train_batch_min else max(sizes)
            self._plugin.set_training_args(size, self._replica[1])

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare a model. With `evaluation_mode` it stays unsharded on every rank."""
        if self._uses_megalith and not evaluation_mode:
            return self.prepare(model)
        return super().prepare_model(model, device_placement, evaluation_mode)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> Any:
        return (
            self.prepare(optimizer)
            if self._uses_megalith
            else super().prepare_optimizer(optimizer, device_placement)
        )

    def prepare_data_loader(self, data_loader: DataLoader, *args: Any, **options: Any) -> Any:
        if self._uses_megalith:
            return self.prepare(data_loader)
        return super().prepare_data_loader(data_loader, *args, **options)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        if not self._uses_megalith:
            return super().prepare_scheduler(scheduler)
        optimizers = self._optimizers
        if self._engine is None or self._engine.optimizer is None:
            raise ConfigError(
                "prepare was called with a scheduler before its optimizer; pass both in one call"
            )
        if isinstance(scheduler, MegatronLMDummyScheduler):
            scheduler = scheduler.build(self._engine.optimizer, self._plugin)
        else:
            scheduler.optimizer = self._engine.optimizer
        fp16 = self._engine.run.train.precision == "fp16"
        wrapper = MegatronLMSchedulerWrapper(
            scheduler, optimizers or self._engine.optimizer, fp16, self.step_scheduler_with_optimizer
        )
        self._schedulers.append(wrapper)
        return wrapper

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Add the gradients of loss / gradient_accumulation_steps to the step's gradients."""
        if not self._uses_megalith:
            super().backward(loss, **kwargs)
            return
        if not isinstance(loss, Tensor):
            raise ConfigError(
                f"backward needs a loss, not {loss!r}; the model returns a loss if the batch has labels, which are a "
                "copy of input_ids with -100 for tokens that do not count"
            )
        (loss / self.gradient_accumulation_steps).backward(**kwargs)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the model's gradients and return their norm before clipping. Replaces gradient_clipping.

        Args:
            parameters: all trained parameters: of the prepared model, of the model passed to prepare, or of
                `unwrap_model`.
            max_norm: upper bound of the norm.
            norm_type: must be 2.
        """
        if not self._uses_megalith:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        if norm_type != 2:
            raise ConfigError(
                f"clip_grad_norm_ was called with norm_type {norm_type}, but only the 2-norm is supported; leave "
                "norm_type out"
            )
        with collective_call("clip_grad_norm_"):
            return self._prepared_model().optimizer_of(parameters).clip_norm(max_norm)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp every element of the gradients to ±clip_value."""
        if not self._uses_megalith:
            super().clip_grad_value_(parameters, clip_value)
            return
        self._prepared_model().optimizer_of(parameters).clip_value(clip_value)

    def _prepared_model(self) -> MegatronEngine:
        if self._engine is None:
            raise ConfigError("no model is prepared; pass model and optimizer to one call of prepare")
        return self._engine

    def gather(self, tensor: Any) -> Any:
        """Return the tensors of all data-parallel replicas, concatenated along dim 0. Collective over all ranks."""
        if not self._uses_megalith:
            return super().gather(tensor)
        with replica_collective_call("gather"):
            return gather_across_data_parallel_groups(tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce over the data-parallel replicas: sum, mean, max or none. `scale` is for TPUs, as in Accelerate."""
        if not self._uses_megalith:
            return super().reduce(tensor, reduction, scale)
        with replica_collective_call("reduce"):
            return reduce_over_replicas(tensor, reduction)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this replica's share of the inputs. All ranks of a replica get the same share."""
        replica, replicas = self._replica if self._uses_megalith else (self.process_index, self.num_processes)
        here = SimpleNamespace(process_index=replica, num_processes=replicas, device=self.device)
        with PartialState.split_between_processes(here, inputs, apply_padding) as share:
            yield share

    def check_trigger(self) -> bool:
        """Return True if any process has called `set_trigger`. Collective over all ranks."""
        if not self._uses_megalith:
            return super().check_trigger()
        flag = torch.zeros((), dtype=torch.int64, device=self.device) + (self.flag_tensor or 0)
        with collective_call("check_trigger"):
            dist.all_reduce(flag)
        self.flag_tensor = None
        return bool(flag)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather like `gather`, without the padding samples of a dataloader's last batch."""
        if not self._uses_megalith:
            return super().gather_for_metrics(input_data, use_gather_object)
        tensors = not use_gather_object and _has_only_tensors(input_data)
        with replica_collective_call("gather_for_metrics"):
            data = self.gather(input_data) if tensors else gather_objects(input_data)
        state = self.gradient_state
        if not (state.end_of_dataloader and state.remainder > 0):
            return data
        return recursively_apply(lambda t: t[: state.remainder], data) if tensors else data[: state.remainder]

    def unwrap_model(self, model: nn.Module, *args: Any, **options: Any) -> nn.Module:
        """Return the script's model with the current weights. Collective over all ranks for a prepared model."""
        if isinstance(model, MegatronEngine):
            with collective_call("unwrap_model"):
                return model.hugging_face_module()
        return super().unwrap_model(model, *args, **options)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Return the full state dict on every rank's CPU. Collective over all ranks for a prepared model."""
        if isinstance(model, MegatronEngine):
            with collective_call("get_state_dict"):
                return model.hugging_face_module().state_dict()
        return super().get_state_dict(model, unwrap)

    def save_model(
        self, model: nn.Module, save_directory: str | os.PathLike, *args: Any, **options: Any
    ) -> None:
        """Write the full model's weights and config.json. Collective over all ranks for a prepared model."""
        if not isinstance(model, MegatronEngine):
            super().save_model(model, save_directory, *args, **options)
            return
        with collective_call("save_model"):
            module = model.hugging_face_module()
        super().save_model(module, save_directory, *args, **options)
        if self.is_main_process:
            module.config.save_pretrained(save_directory)
        self.wait_for_everyone()

    def save_state(self, output_dir: str | None = None, *args: Any, **options: Any) -> Any:
        """Save model, optimizer and schedulers, for any layout. Collective over all ranks. Returns the folder."""
        with collective_call("save_state") if self._uses_megalith else nullcontext():
            folder = super().save_state(output_dir, *args, **options)
        if self._uses_megalith and self.is_main_process:
            states = [_json_state(scheduler.state_dict()) for scheduler in self._schedulers]
            Path(folder, SCHEDULERS).write_text(json.dumps(states, indent=1), encoding="utf-8")
        self.wait_for_everyone()
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **options: Any) -> None:
        """Load what `save_state` saved, in any layout. Collective over all ranks."""
        with collective_call("load_state") if self._uses_megalith else nullcontext():
            super().load_state(input_dir, *args, **options)
        if not self._uses_megalith or self._engine is None or self._plugin.no_load_optim:
            return
        # Accelerate may have chosen the newest of several folders.
        file = Path(self._engine.loaded_from) / SCHEDULERS
        states = json.loads(read_optional_file(file, file.parent) or b"[]")
        for scheduler, state in zip(self._schedulers, states):
            scheduler.load_state_dict(state)

    def skip_first_batches(self, dataloader: DataLoader, num_batches: int = 0) -> DataLoader:
        """Return a loader that skips the first `num_batches` iterations without reading them."""
        return skip_first_batches(dataloader, num_batches)

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Do nothing: with Megalith, every replica has the same number of iterations."""
        if self._uses_megalith:
            yield
        else:
            with super().join_uneven_inputs(joinables, even_batches):
                yield

    def wait_for_everyone(self) -> None:
        """Wait for all processes. Accelerate's own method does not wait with Megatron-LM."""
        if self._uses_megalith:
            barrier()
        else:
            super().wait_for_everyone()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        with (
            self._main_process_first(self.is_main_process)
            if self._uses_megalith
            else super().main_process_first()
        ):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        with (
            self._first(self.is_local_main_process)
            if self._uses_megalith
            else super().local_main_process_first()
        ):
            yield

    @contextmanager
    def _main_process_first(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            barrier()
        yield
        if is_first:
            barrier()


def _has_only_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _json_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a scheduler's state that JSON can store. Functions are not stored, as in torch."""
    kinds = (int, float, str, bool, type(None))

    def is_plain(value: Any) -> bool:
        if isinstance(value, (dict, list, tuple)):
            members = value.values() if isinstance(value, dict) else value
            return all(isinstance(member, kinds) for member in members)
        return isinstance(value, kinds)

    return {name: value for name, value in state.items() if is_plain(value)}
