"""MegalithTrainer: transformers' Trainer with Megalith behind it, in every layout without pipeline stages.

The Trainer makes its own Accelerator, calls the model once a micro-batch with the number of tokens of the whole step,
and saves from its first process. What differs here are the Accelerator, that number's meaning (the tokens of all
replicas, whose losses are one loss here and not averaged), and that every rank takes part in saving.
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
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    # Arguments that the Trainer would apply to its own model and processes: the values that have no effect, and why.
    "neftune_noise_alpha": ((None, 0), "a hook adds its noise to an embedding that Megalith does not call"),
    "average_tokens_across_devices": ((True,), "the loss is the mean over the tokens of all replicas"),
    "fsdp": ((None, False, "", []), "MegatronLMPlugin says the layout"),
    "deepspeed": ((None,), "MegatronLMPlugin says the layout"),
    "parallelism_config": ((None,), "MegatronLMPlugin says the layout"),
    "bf16_full_eval": ((False,), "an evaluation has the training's precision"),
    "fp16_full_eval": ((False,), "an evaluation has the training's precision"),
}


class MegalithTrainer(Trainer):
    """transformers' Trainer. `megatron_lm_plugin` says the layout; its `num_micro_batches` stays 1, for
    gradient_accumulation_steps of the TrainingArguments is what it would be."""

    def __init__(self, *args: Any, megatron_lm_plugin: MegatronLMPlugin | None = None, **options: Any):
        """Raises ConfigError for pipeline stages, losses made from logits, and a best model without its checkpoint."""
        self._plugin = megatron_lm_plugin or MegatronLMPlugin()
        if self._plugin.pp_degree > 1:
            raise ConfigError(
                f"pp_degree is {self._plugin.pp_degree}, but the Trainer gives the model its micro-batches one by one, "
                "and with one at a time all stages of a pipeline but one are idle; use tp_degree, "
                "context_parallel_size and data parallelism, or a loop of your own"
            )
        super().__init__(*args, **options)
        self._refuse_arguments()
        self._refuse_losses_from_logits()
        if self.args.load_best_model_at_end and self.args.save_only_model:
            raise ConfigError(
                "load_best_model_at_end and save_only_model are both true, but the best model is read from the whole "
                "checkpoint of its step, in any layout; leave save_only_model out"
            )
        self.args.average_tokens_across_devices = True

    def _refuse_arguments(self) -> None:
        for name, (values, reason) in ONLY.items():
            given = getattr(self.args, name, values[0])
            if given not in values:
                raise ConfigError(f"{name} is {given!r:.80}, which is refused: {reason}; leave it out")

    def _refuse_losses_from_logits(self) -> None:
        smoothing = self.args.label_smoothing_factor
        given = [f"label_smoothing_factor is {smoothing:g}"] * (smoothing != 0)
        given += ["compute_loss_func is given"] * (self.compute_loss_func is not None)
        if given:
            raise ConfigError(
                f"{' and '.join(given)}, which makes the loss from the model's logits, and no gradient comes back "
                "through these; leave it out, or give MegatronLMPlugin a custom_loss_function(loss_mask, losses), "
                "which gets the loss of each token"
            )

    @property
    def _engine(self) -> MegatronEngine | None:
        return self.model_wrapped if isinstance(self.model_wrapped, MegatronEngine) else None

    def create_accelerator_and_postprocess(self) -> None:
        made, stock.Accelerator = stock.Accelerator, partial(Accelerator, megatron_lm_plugin=self._plugin)
        try:
            super().create_accelerator_and_postprocess()
        finally:
            stock.Accelerator = made

    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples of a step: those of the replicas, for the ranks that share a model have the same ones."""
        shared = self._plugin.tp_degree * self._plugin.context_parallel_size
        return self._train_batch_size * args.gradient_accumulation_steps * (args.world_size // shared)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return self._engine or model

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **options: Any) -> Any:
        """As the Trainer's, without its factor for the average over processes."""
        self.args.average_tokens_across_devices = False
        try:
            return super().compute_loss(model, inputs, *args, **options)
        finally:
            self.args.average_tokens_across_devices = True

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Every rank calls it, as the Trainer does, and goes on when the folder is there."""
        with self._whole_model():
            super().save_model(output_dir, _internal_call)
        self.accelerator.wait_for_everyone()

    @contextmanager
    def _whole_model(self) -> Iterator[None]:
        """In it `model` has the weights of now."""
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
        """As the Trainer's; logits are made where something reads them."""
        asked, self._plugin.return_logits = self._plugin.return_logits, not prediction_loss_only
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        finally:
            self._plugin.return_logits = asked

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
