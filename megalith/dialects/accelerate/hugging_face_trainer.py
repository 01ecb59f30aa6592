"""MegalithTrainer: transformers' Trainer on Megalith, in every layout without pipeline parallelism.

transformers' Trainer creates its own Accelerator, calls the model once per micro-batch with the number of tokens of the
step, and saves on rank 0. This subclass replaces the Accelerator, counts the tokens of all replicas (their losses form
one loss and are not averaged), and makes every rank take part in saving.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import transformers.trainer as stock
from torch import Tensor, nn
from transformers import Trainer

from megalith.dialects.accelerate.accelerator import Accelerator
from megalith.dialects.accelerate.plugin import MegatronLMPlugin
from megalith.dialects.accelerate.script_engine import MegatronEngine
from megalith.errors import ConfigError

SCHEDULER = "scheduler.pt"
SUPPORTED_VALUES: dict[str, tuple[tuple[Any, ...], str]] = {
    # TrainingArguments that act on the Trainer's own model and processes: the supported values, and the reason.
    "neftune_noise_alpha": ((None, 0), "it hooks an embedding module that Megalith does not call"),
    "average_tokens_across_devices": ((True,), "the loss is the mean over the tokens of all replicas"),
    "fsdp": ((None, False, "", []), "MegatronLMPlugin sets the layout"),
    "deepspeed": ((None,), "MegatronLMPlugin sets the layout"),
    "parallelism_config": ((None,), "MegatronLMPlugin sets the layout"),
    "bf16_full_eval": ((False,), "evaluation uses the training precision"),
    "fp16_full_eval": ((False,), "evaluation uses the training precision"),
}


class MegalithTrainer(Trainer):
    """transformers' Trainer on Megalith.

    `megatron_lm_plugin` sets the layout. Keep its `num_micro_batches` at 1 and use gradient_accumulation_steps of the
    TrainingArguments.
    """

    def __init__(self, *args: Any, megatron_lm_plugin: MegatronLMPlugin | None = None, **options: Any):
        """Check the arguments. Raises ConfigError for pipeline parallelism and losses computed from logits."""
        self._plugin = megatron_lm_plugin or MegatronLMPlugin()
        if self._plugin.pp_degree > 1:
            raise ConfigError(
                f"pp_degree is {self._plugin.pp_degree}, but the Trainer passes micro-batches to the model one at a "
                "time, which would leave all pipeline stages but one idle; use tp_degree, context_parallel_size and "
                "data parallelism, or write the training loop yourself"
            )
        super().__init__(*args, **options)
        self._check_arguments()
        self._reject_losses_from_logits()
        if self.args.load_best_model_at_end and self.args.save_only_model:
            raise ConfigError(
                "load_best_model_at_end and save_only_model are both true, but the best model is loaded from the full "
                "checkpoint of its step; leave save_only_model out"
            )
        self.args.average_tokens_across_devices = True

    def _check_arguments(self) -> None:
        for name, (values, reason) in SUPPORTED_VALUES.items():
            value = getattr(self.args, name, values[0])
            if value not in values:
                raise ConfigError(
                    f"{name} is {value!r:.80}, which is not supported: {reason}; leave {name} out"
                )

    def _reject_losses_from_logits(self) -> None:
        smoothing = self.args.label_smoothing_factor
        unsupported = [f"label_smoothing_factor is {smoothing:g}"] * (smoothing != 0)
        unsupported += ["compute_loss_func is set"] * (self.compute_loss_func is not None)
        if unsupported:
            raise ConfigError(
                f"{' and '.join(unsupported)}, which computes the loss from the model's logits, "
                "but these have no gradient; leave it out, or set MegatronLMPlugin's "
                "custom_loss_function(loss_mask, losses), which is called with the loss of each "
                "token"
            )

    @property
    def _engine(self) -> MegatronEngine | None:
        return self.model_wrapped if isinstance(self.model_wrapped, MegatronEngine) else None

    def create_accelerator_and_postprocess(self) -> None:
        original = stock.Accelerator
        stock.Accelerator = partial(Accelerator, megatron_lm_plugin=self._plugin)
        try:
            super().create_accelerator_and_postprocess()
        finally:
            stock.Accelerator = original

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the samples per step. Ranks of the same replica train on the same samples."""
        shared = self._plugin.tp_degree * self._plugin.context_parallel_size
        return self._train_batch_size * args.gradient_accumulation_steps * (args.world_size // shared)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return self._engine or model

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        """Compute the loss without the Trainer's factor for averaging over processes."""
        self.args.average_tokens_across_devices = False
        try:
            return super().compute_loss(model, inputs, *args, **options)
        finally:
            self.args.average_tokens_across_devices = True

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model. Collective over all ranks, as in the Trainer; each waits for the folder."""
        with self._gathered_weights():
            super().save_model(output_dir, _internal_call)
        self.accelerator.wait_for_everyone()

    @contextmanager
    def _gathered_weights(self) -> Iterator[None]:
        """Fill `self.model` with the current weights inside the block."""
        if self._engine is None:
            yield
            return
        self._engine.hugging_face_module()
        try:
            yield
        finally:
            self.model.to("meta")

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """Run a prediction step. Computes logits only if they are used."""
        return_logits, self._plugin.return_logits = self._plugin.return_logits, not prediction_loss_only
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        finally:
            self._plugin.return_logits = return_logits

    def _load_best_model(self) -> None:
        self._engine.load_checkpoint(self.state.best_model_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._engine.save_checkpoint(output_dir)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self._engine is None:
            return
        self._engine.load_checkpoint(checkpoint)
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER), weights_only=True))

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        return (
            self.accelerator.clip_grad_norm_(model.parameters(), float("inf"))
            if grad_norm is None
            else grad_norm
        )
