"""Placeholders that a script passes to `prepare`, for a schedule and for Megatron's indexed datasets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from megalith.config import RunConfig
from megalith.data.order import SingleOrder, sample_order
from megalith.dialects.accelerate.replica_loader import HostCopies, copy_to_device
from megalith.errors import ConfigError
from megalith.optim.schedule import build_schedule
from megalith.training.build import open_datasets

if TYPE_CHECKING:
    from megalith.dialects.accelerate.plugin import MegatronLMPlugin
    from megalith.dialects.accelerate.script_engine import MegatronEngine


class MegatronLMDummyScheduler:
    """Placeholder for a schedule of `total_num_steps` optimizer steps with a linear warmup of `warmup_num_steps`.

    The plugin's lr_decay_style and min_lr set the decay.
    """

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ):
        self.optimizer, self.total_num_steps, self.warmup_num_steps = (
            optimizer,
            total_num_steps,
            warmup_num_steps,
        )
        self.kwargs = kwargs

    def build(self, optimizer: torch.optim.Optimizer, plugin: MegatronLMPlugin) -> LambdaLR:
        """Build a torch scheduler for the prepared optimizer: Megatron's schedule, scaled to each group's learning
        rate.
        """
        steps = plugin.train_iters or self.total_num_steps
        if steps is None:
            raise ConfigError(
                "MegatronLMDummyScheduler has no total_num_steps, and the plugin has no "
                "train_iters; set one of them"
            )
        max_lr = optimizer.param_groups[0]["lr"]
        lengths = {"lr_decay_iters": plugin.lr_decay_iters, "lr_warmup_fraction": plugin.lr_warmup_fraction}
        settings = {
            "train.train_iters": steps,
            "train.global_batch_size": 1,
            "optim.lr": max_lr,
            "optim.min_lr": plugin.min_lr,
            "optim.lr_decay_style": plugin.lr_decay_style,
            **{f"optim.{name}": value for name, value in lengths.items() if value is not None},
        }
        if plugin.lr_warmup_fraction is None:
            settings["optim.lr_warmup_iters"] = plugin.lr_warmup_iters or self.warmup_num_steps
        config = RunConfig().with_settings(settings)
        schedule = build_schedule(config.optim, config.train)

        def factor(step: int) -> float:
            return schedule.learning_rate(step, step) / max_lr if max_lr else 1.0

        return LambdaLR(optimizer, factor)


class MegatronLMDummyDataLoader:
    """Placeholder for indexed datasets in the format of Megatron and `megalith preprocess`.

    Arguments: `data_path`, `split`, `seq_length`, `micro_batch_size`, … Pass it to `prepare` three times for the
    training, the validation and the test data.
    """

    def __init__(self, **dataset_kwargs: Any):
        supported = ("data_path", "split", "seq_length", "micro_batch_size", "train_data_path", "valid_data_path",
                 "test_data_path", "seed", "splits_string", "eod_mask_loss")  # fmt: skip
        self.dataset_args = {"split": "969,30,1", **dataset_kwargs, "megatron_dataset_flag": True}
        if unknown := [name for name in dataset_kwargs if name not in supported]:
            raise ConfigError(
                f"MegatronLMDummyDataLoader has no argument {', '.join(unknown)}; use {', '.join(supported)}"
            )
        self._splits: list[Any] | None = None
        self._next = 0

    def next_split(self, engine: MegatronEngine, plugin: MegatronLMPlugin, device: torch.device) -> Any:
        """Return an iterator over the next of the three splits, or None if it is empty."""
        if self._splits is None:
            self._splits = self._open(engine, plugin)
        split, self._next = self._splits[self._next % 3], self._next + 1
        if split is None:
            return None
        consumed = (plugin.consumed_samples or [0, 0, 0])[(self._next - 1) % 3]
        return IndexedBatches(
            split, engine, self._next > 1, self.dataset_args.get("seed", 1234), consumed, device
        )

    def _open(self, engine: MegatronEngine, plugin: MegatronLMPlugin) -> list[Any]:
        args, step = self.dataset_args, plugin.global_batch_size
        iterations = plugin.train_iters or 1
        evaluations = (iterations // plugin.eval_interval + 1) * plugin.eval_iters
        counts = (iterations * step, evaluations * step, plugin.eval_iters * step)
        if plugin.custom_megatron_datasets_provider_function is not None:
            return list(plugin.custom_megatron_datasets_provider_function(counts))
        path = args.get("data_path")
        names = ("train_data_path", "valid_data_path", "test_data_path")
        settings = {
            "data.mock": False,
            "data.seq_length": args.get("seq_length") or engine.run.data.seq_length,
            "data.split": args["split"],
            "data.data_path": [path] if isinstance(path, str) else path,
            **{
                f"data.{name}": [args[name]] if isinstance(args[name], str) else args[name]
                for name in names
                if name in args
            },
            "train.seed": args.get("seed", 1234),
        }
        config = engine.run.with_settings(
            {name: value for name, value in settings.items() if value is not None}
        )
        return list(open_datasets(config, counts, None))


class IndexedBatches:
    """Iterates over this replica's share of each global batch: `input_ids` and `shift_labels`, int64 [batch, seq].

    `shift_labels` holds, for each token, the token that follows it.
    """

    def __init__(
        self,
        dataset: Any,
        engine: MegatronEngine,
        repeats: bool,
        seed: int,
        consumed: int,
        device: torch.device,
    ):
        self.dataset, self.engine, self.device = dataset, engine, device
        self._next_sample = consumed
        self.host_copies: HostCopies = []
        engine.sources.append(self)
        self._order = (
            SingleOrder(len(dataset), wrap=True)
            if repeats
            else sample_order("cyclic", len(dataset), seed, ())
        )

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self

    def __next__(self) -> dict[str, Tensor]:
        plugin, dp = self.engine.plugin, self.engine.mesh.dp
        local_batch = plugin.micro_batch_size * plugin.num_micro_batches
        first = self._next_sample + dp.rank * local_batch
        self._next_sample += local_batch * dp.size
        rows = [torch.as_tensor(self.dataset[self._order(n)]) for n in range(first, first + local_batch)]
        tokens = torch.stack([row.to(torch.int64) for row in rows])  # [local_batch, seq + 1]
        batch = {"input_ids": tokens[:, :-1], "shift_labels": tokens[:, 1:]}
        batch, self.host_copies = copy_to_device(self.device, batch)
        return batch
