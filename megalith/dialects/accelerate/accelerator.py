"""Accelerator: Accelerate's own, with Megalith behind it where it has a MegatronLMPlugin; else it is the same."""

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
    gather_across_data_parallel_groups,
    gather_objects,
    megalith_for_megatron,
    on_every_rank,
    over_replicas,
    reduce_over_replicas,
    set_replicas,
    watch_calls,
)
from megalith.dialects.accelerate.replica_loader import Share, prepare_loader, skip_first_batches
from megalith.dialects.accelerate.script_engine import MegatronEngine
from megalith.dialects.accelerate.script_optimizer import (
    MegatronLMOptimizerWrapper,
    MegatronLMSchedulerWrapper,
)
from megalith.dialects.accelerate.train_steps import custom_step
from megalith.errors import ConfigError
from megalith.launch.launcher import TIMEOUT
from megalith.small_files import read_optional_file
from megalith.training.process import raise_cuda_connections

SCHEDULERS = "schedulers.json"
ASKED_FOR = "ACCELERATE_USE_MEGATRON_LM"  # by the launcher


class Accelerator(accelerate.Accelerator):
    """Accelerate's Accelerator. With a MegatronLMPlugin, given or asked for by the environment, models of transformers
    are trained by Megalith, in any layout, by the loop that a script has for DDP."""

    def __init__(self, *args: Any, megatron_lm_plugin: Any = None, cpu: bool = False, **options: Any):
        if megatron_lm_plugin is None and os.environ.get(ASKED_FOR, "false").lower() == "true":
            megatron_lm_plugin = MegatronLMPlugin()
        if megatron_lm_plugin is None:
            super().__init__(*args, cpu=cpu, **options)
            return
        if not isinstance(megatron_lm_plugin, MegatronLMPlugin):
            raise ConfigError(
                "megatron_lm_plugin is Accelerate's own class; import MegatronLMPlugin from megalith.accelerate, or "
                "run the script by `megalith accelerate launch`"
            )
        raise_cuda_connections()  # the layout is known, and asks for them, when CUDA has started
        cpu = cpu or not torch.cuda.is_available()
        handlers = options.get("kwargs_handlers") or ()
        group = next((one for one in handlers if isinstance(one, InitProcessGroupKwargs)), None)
        with megalith_for_megatron(cpu, TIMEOUT if group is None else group.timeout):
            super().__init__(*args, cpu=cpu, megatron_lm_plugin=megatron_lm_plugin, **options)
        megatron_lm_plugin.data_parallel_size_of(self.num_processes)
        watch_calls()

    @property
    def _engine(self) -> MegatronEngine | None:
        return next((model for model in self._models if isinstance(model, MegatronEngine)), None)

    @property
    def _is_ours(self) -> bool:
        return self.distributed_type == DistributedType.MEGATRON_LM

    @property
    def _plugin(self) -> MegatronLMPlugin:
        return self.state.megatron_lm_plugin

    @property
    def _replica(self) -> tuple[int, int]:
        """The number of this rank's data-parallel replica, and how many there are."""
        plugin, replicas = self._plugin, self._plugin.data_parallel_size_of(self.num_processes)
        return self.process_index // (plugin.tp_degree * plugin.context_parallel_size) % replicas, replicas

    @property
    def _share(self) -> Share:
        """What of the script's dataloaders this rank gets. Raises ConfigError for options that are not had."""
        given, count, (replica, replicas) = (
            self.dataloader_config,
            self._plugin.num_micro_batches,
            self._replica,
        )
        if given.split_batches and replicas * count > 1:
            raise ConfigError(
                f"split_batches is true, but a dataloader's batch is a micro-batch here, {count} of which a replica "
                f"gets in a turn; leave it out, and divide the dataloader's batch_size by {replicas} replicas × "
                f"num_micro_batches {count} = {replicas * count}"
            )
        if given.use_stateful_dataloader:
            raise ConfigError(
                "use_stateful_dataloader is not had: save_state keeps no place in a dataloader; after load_state leave "
                "out the turns that the epoch has had: accelerator.skip_first_batches(loader, turns)"
            )
        seed = torch.random.initial_seed() if given.data_seed is None else given.data_seed
        kinds = tuple(str(getattr(kind, "value", kind)) for kind in self.rng_types or ())
        return Share(
            count, replicas, replica, self.device, kinds, seed if given.use_seedable_sampler else None
        )

    def _prepare_megatron_lm(self, *args: Any) -> Any:
        """What `prepare` does: every argument in its turn. Every rank calls it alike."""
        plugin, given = self._plugin, args
        kept = (*self._models, *self._optimizers, *self._dataloaders, *self._schedulers)
        made = {id(one): one for one in kept}  # what is prepared stays as it is
        args = tuple(one for one in given if id(one) not in made)
        modules = [one for one in args if isinstance(one, nn.Module)]
        if len(modules) > 1 or (modules and self._engine is not None):
            raise ConfigError(
                "prepare was given a second model; one Accelerator trains one here: prepare the others by another "
                "without the plugin, or leave them unprepared"
            )
        self._set_batch(args)
        optimizer = next((one for one in args if isinstance(one, torch.optim.Optimizer)), None)
        for one in args:
            if isinstance(one, MegatronLMDummyScheduler):
                plugin.set_scheduler_args(one)
        if modules:
            if optimizer is not None:
                plugin.set_optimizer_type(optimizer)
            plugin.set_network_size_args(modules[0])
            engine = self._build_engine(modules[0], optimizer)
            self._models.append(engine)
        elif optimizer is not None:
            if self._engine is None:
                raise ConfigError("prepare was given an optimizer without its model; give both to one call")
            plugin.set_optimizer_type(optimizer)
            self._engine.set_optimizer(optimizer)
        result = []
        for one in given:
            if id(one) not in made or isinstance(one, MegatronLMDummyDataLoader):
                made[id(one)] = self._prepared(one)
            result.append(made[id(one)])
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
        engine.custom = custom_step(self, self._plugin, engine)
        set_replicas(engine.mesh.dp)
        return engine

    def _prepared(self, one: Any) -> Any:
        if isinstance(one, nn.Module):
            return self._engine
        if isinstance(one, torch.optim.Optimizer):
            self._optimizers.append(MegatronLMOptimizerWrapper(self._engine.optimizer))
            return self._optimizers[-1]
        if isinstance(one, DataLoader):
            self._dataloaders.append(prepare_loader(one, self._share))
            return self._dataloaders[-1]
        if isinstance(one, MegatronLMDummyDataLoader):
            return one.next_split(self._engine, self._plugin, self.device)
        if isinstance(one, (LRScheduler, MegatronLMDummyScheduler)):
            return self.prepare_scheduler(one)
        return one

    def _set_batch(self, args: Sequence[Any]) -> None:
        """The plugin's batch sizes: a dataloader's batch is the micro-batch."""
        sizes = []
        for one in args:
            if isinstance(one, DataLoader):
                sizes.append(one.batch_size or getattr(one.batch_sampler, "batch_size", None))
            elif isinstance(one, MegatronLMDummyDataLoader):
                sizes.append(one.dataset_args.get("micro_batch_size"))
        sizes = [size for size in sizes if size is not None]
        if sizes or not hasattr(self._plugin, "micro_batch_size"):
            size = 1 if not sizes else min(sizes) if self._plugin.is_train_batch_min else max(sizes)
            self._plugin.set_training_args(size, self._replica[1])

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """As `prepare`; a model for evaluation alone stays whole on every rank."""
        ours = self._is_ours and not evaluation_mode
        return (
            self.prepare(model) if ours else super().prepare_model(model, device_placement, evaluation_mode)
        )

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> Any:
        return (
            self.prepare(optimizer)
            if self._is_ours
            else super().prepare_optimizer(optimizer, device_placement)
        )

    def prepare_data_loader(self, data_loader: DataLoader, *args: Any, **options: Any) -> Any:
        if self._is_ours:
            return self.prepare(data_loader)
        return super().prepare_data_loader(data_loader, *args, **options)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        if not self._is_ours:
            return super().prepare_scheduler(scheduler)
        optimizers = self._optimizers
        if self._engine is None or self._engine.optimizer is None:
            raise ConfigError("prepare was given a scheduler before its optimizer; give both to one call")
        if isinstance(scheduler, MegatronLMDummyScheduler):
            scheduler = scheduler.real(self._engine.optimizer, self._plugin)
        else:
            scheduler.optimizer = self._engine.optimizer
        fp16 = self._engine.run.train.precision == "fp16"
        wrapper = MegatronLMSchedulerWrapper(
            scheduler, optimizers or self._engine.optimizer, fp16, self.step_scheduler_with_optimizer
        )
        self._schedulers.append(wrapper)
        return wrapper

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Adds d(loss / gradient_accumulation_steps) to the gradients of the step."""
        if not self._is_ours:
            super().backward(loss, **kwargs)
            return
        if not isinstance(loss, Tensor):
            raise ConfigError(
                f"backward was given {loss!r} and no loss; the model gives one where the batch has labels: the "
                "input_ids again, with -100 where a token does not count"
            )
        (loss / self.gradient_accumulation_steps).backward(**kwargs)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clips the gradients of the whole model, in the place of the plugin's gradient_clipping; their norm.

        `parameters`: all that are trained, of the prepared model, of the one before it, or of `unwrap_model`.
        """
        if not self._is_ours:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        if norm_type != 2:
            raise ConfigError(
                f"clip_grad_norm_ was given norm_type {norm_type}; gradients are clipped by their 2-norm"
            )
        with on_every_rank("clip_grad_norm_"):
            return self._prepared_model().optimizer_of(parameters).clip_norm(max_norm)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Cuts off every element of the gradients at ±clip_value."""
        if not self._is_ours:
            super().clip_grad_value_(parameters, clip_value)
            return
        self._prepared_model().optimizer_of(parameters).clip_value(clip_value)

    def _prepared_model(self) -> MegatronEngine:
        if self._engine is None:
            raise ConfigError("no model is prepared; give model and optimizer to one call of prepare")
        return self._engine

    def gather(self, tensor: Any) -> Any:
        """Tensors of all data-parallel replicas, one behind the other; every rank calls it, and has them."""
        if not self._is_ours:
            return super().gather(tensor)
        with over_replicas("gather"):
            return gather_across_data_parallel_groups(tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum, the mean or the maximum over the data-parallel replicas. `scale` is for TPUs, as in Accelerate."""
        if not self._is_ours:
            return super().reduce(tensor, reduction, scale)
        with over_replicas("reduce"):
            return reduce_over_replicas(tensor, reduction)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This replica's share: the ranks that share a model have the same."""
        replica, replicas = self._replica if self._is_ours else (self.process_index, self.num_processes)
        here = SimpleNamespace(process_index=replica, num_processes=replicas, device=self.device)
        with PartialState.split_between_processes(here, inputs, apply_padding) as share:
            yield share

    def check_trigger(self) -> bool:
        """Whether any process, be it of one replica with others, has called `set_trigger`. Every rank calls it."""
        if not self._is_ours:
            return super().check_trigger()
        flag = torch.zeros((), dtype=torch.int64, device=self.device) + (self.flag_tensor or 0)
        with on_every_rank("check_trigger"):
            dist.all_reduce(flag)
        self.flag_tensor = None
        return bool(flag)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `gather`, without the samples that only fill up the last batch of the dataloader."""
        if not self._is_ours:
            return super().gather_for_metrics(input_data, use_gather_object)
        tensors = not use_gather_object and _has_tensors_alone(input_data)
        with over_replicas("gather_for_metrics"):
            data = self.gather(input_data) if tensors else gather_objects(input_data)
        state = self.gradient_state
        if not (state.end_of_dataloader and state.remainder > 0):
            return data
        return recursively_apply(lambda t: t[: state.remainder], data) if tensors else data[: state.remainder]

    def unwrap_model(self, model: nn.Module, *args: Any, **options: Any) -> nn.Module:
        """The script's own model with the weights of now. Of a prepared one every rank calls it."""
        if isinstance(model, MegatronEngine):
            with on_every_rank("unwrap_model"):
                return model.hugging_face_module()
        return super().unwrap_model(model, *args, **options)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """The whole model's weights by its own names, on every rank's CPU. Of a prepared one every rank calls it."""
        if isinstance(model, MegatronEngine):
            with on_every_rank("get_state_dict"):
                return model.hugging_face_module().state_dict()
        return super().get_state_dict(model, unwrap)

    def save_model(
        self, model: nn.Module, save_directory: str | os.PathLike, *args: Any, **options: Any
    ) -> None:
        """Writes the whole model's weights, and beside them config.json. Of a prepared one every rank calls it."""
        if not isinstance(model, MegatronEngine):
            super().save_model(model, save_directory, *args, **options)
            return
        with on_every_rank("save_model"):
            module = model.hugging_face_module()
        super().save_model(module, save_directory, *args, **options)
        if self.is_main_process:
            module.config.save_pretrained(save_directory)
        self.wait_for_everyone()

    def save_state(self, output_dir: str | None = None, *args: Any, **options: Any) -> Any:
        """Accelerate's own, with the schedulers. Every rank calls it; any layout loads it."""
        with on_every_rank("save_state") if self._is_ours else nullcontext():
            where = super().save_state(output_dir, *args, **options)
        if self._is_ours and self.is_main_process:
            states = [_plain(scheduler.state_dict()) for scheduler in self._schedulers]
            Path(where, SCHEDULERS).write_text(json.dumps(states, indent=1), encoding="utf-8")
        self.wait_for_everyone()
        return where

    def load_state(self, input_dir: str | None = None, *args: Any, **options: Any) -> None:
        """Loads what `save_state` saved, in whatever layout. Every rank calls it."""
        with on_every_rank("load_state") if self._is_ours else nullcontext():
            super().load_state(input_dir, *args, **options)
        if not self._is_ours or self._engine is None or self._plugin.no_load_optim:
            return
        file = (
            Path(self._engine.loaded_from) / SCHEDULERS
        )  # the newest of several, where Accelerate names them
        states = json.loads(read_optional_file(file, file.parent) or b"[]")
        for scheduler, state in zip(self._schedulers, states):
            scheduler.load_state_dict(state)

    def skip_first_batches(self, dataloader: DataLoader, num_batches: int = 0) -> DataLoader:
        """A loader that leaves out so many turns, without reading them."""
        return skip_first_batches(dataloader, num_batches)

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Every replica has as many turns as the others: there is nothing to join."""
        if self._is_ours:
            yield
        else:
            with super().join_uneven_inputs(joinables, even_batches):
                yield

    def wait_for_everyone(self) -> None:
        """Waits for all processes, which Accelerate itself does not under Megatron."""
        if self._is_ours:
            barrier()
        else:
            super().wait_for_everyone()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        with self._first(self.is_main_process) if self._is_ours else super().main_process_first():
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        with self._first(self.is_local_main_process) if self._is_ours else super().local_main_process_first():
            yield

    @contextmanager
    def _first(self, goes: bool) -> Iterator[None]:
        if not goes:
            barrier()
        yield
        if goes:
            barrier()


def _has_tensors_alone(data: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """What of a scheduler's state JSON can say: its functions, which torch leaves out of it too, are the script's."""
    kinds = (int, float, str, bool, type(None))
    flat = {k: v for k, v in state.items() if isinstance(v, (*kinds, list, tuple, dict))}
    return {
        k: v
        for k, v in flat.items()
        if isinstance(v, kinds) or all(isinstance(one, kinds) for one in _values(v))
    }


def _values(value: Any) -> list[Any]:
    return [*value.values()] if isinstance(value, dict) else [*value]
