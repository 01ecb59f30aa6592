"""Custom train steps, batch functions and loss functions of a script, with the interface of Megatron's forward step.

A step reads a micro-batch from an iterator and calls the model with tokens, positions, mask and labels. It returns a
function of the per-token losses. The model call is recorded, all micro-batches run through the schedule together, and
the function is called on the last pipeline stage, which has the losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from megalith.data.batch import Batch
from megalith.data.masked_lm import BertBatch
from megalith.data.pairs import T5Batch
from megalith.dialects.accelerate.batch_masks import document_ids_of
from megalith.dialects.accelerate.custom_step import CustomStep, split_batch
from megalith.dialects.accelerate.plugin import MegatronLMPlugin
from megalith.dialects.accelerate.plugin_settings import token_multiple
from megalith.dialects.accelerate.replica_loader import IGNORED
from megalith.dialects.accelerate.script_batches import is_right_padded, next_token_batch
from megalith.dialects.accelerate.script_engine import MegatronEngine
from megalith.errors import ConfigError
from megalith.models.encoders.bert import BertMicroBatchMean, order_loss
from megalith.models.loss import Loss, MicroBatchMean
from megalith.ops.cross_entropy import NO_LABEL


class AbstractTrainStep:
    """A train step, defined by `get_batch_func`, `get_forward_step_func` and `get_loss_func`."""

    def __init__(self, name: str):
        self.name = name

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable:
        """Return a function that takes an iterator of micro-batches.

        It returns tokens, labels, loss mask, attention mask and position ids of the next micro-batch.
        """
        raise NotImplementedError(f"{type(self).__name__} has no get_batch_func; define it")

    def get_forward_step_func(self) -> Callable:
        """Return a function that takes an iterator of micro-batches and the model.

        It returns the model's output and a loss function.
        """
        raise NotImplementedError(f"{type(self).__name__} has no get_forward_step_func; define it")

    def get_loss_func(self, accelerator: Any) -> Callable:
        """Return a function that takes loss mask and losses, [batch, seq].

        It returns the micro-batch's loss and metrics.
        """
        raise NotImplementedError(f"{type(self).__name__} has no get_loss_func; define it")


def mean_loss(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean of losses [batch, seq], weighted by loss_mask, and the metrics to log."""
    loss = (losses * loss_mask).sum() / loss_mask.sum().clamp(min=1)
    return loss, {"lm loss": loss.detach()}


class GPTTrainStep(AbstractTrainStep):
    """Train step of decoder-only models, in which each token predicts the next."""

    def __init__(self, accelerator: Any, args: Any):
        """Read `megatron_dataset_flag` and `eos_token_id` of `args`."""
        super().__init__("GPTTrainStep")
        self.eod_token = self.pad_token = getattr(args, "eos_token_id", None)
        self.get_batch = self.get_batch_func(accelerator, getattr(args, "megatron_dataset_flag", False))
        self.loss_func = self.get_loss_func(accelerator)
        self.forward_step = self.get_forward_step_func()

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable:
        plugin = accelerator.state.megatron_lm_plugin
        if plugin.custom_get_batch_function is not None:
            return plugin.custom_get_batch_function

        def get_batch(data_iterator: Iterator[Mapping[str, Tensor]]) -> tuple[Tensor, ...]:
            batch = next_token_batch(next(data_iterator), 0, None)
            return batch.input_ids, batch.labels, batch.loss_mask, document_ids_of(batch), batch.position_ids

        return get_batch

    def get_forward_step_func(self) -> Callable:
        def forward_step(
            data_iterator: Iterator[Mapping[str, Tensor]], model: Callable
        ) -> tuple[Tensor, Callable]:
            tokens, labels, loss_mask, attention_mask, position_ids = self.get_batch(data_iterator)
            output = model(tokens, position_ids, attention_mask, labels=labels)
            return output, lambda losses: self.loss_func(loss_mask.to(losses.device), losses)

        return forward_step

    def get_loss_func(self, accelerator: Any) -> Callable:
        plugin = accelerator.state.megatron_lm_plugin
        if plugin.custom_loss_function is not None:
            return plugin.custom_loss_function

        return mean_loss


class BertTrainStep(AbstractTrainStep):
    """Train step of encoders, for masked tokens and, if the batch has it, the order of two segments."""

    def __init__(self, accelerator: Any, args: Any):
        """Read `megatron_dataset_flag` of `args`."""
        super().__init__("BertTrainStep")
        self.get_batch = self.get_batch_func(accelerator, getattr(args, "megatron_dataset_flag", False))
        self.loss_func = self.get_loss_func(accelerator)
        self.forward_step = self.get_forward_step_func()

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable:
        """Return a function that takes an iterator of micro-batches and returns the fields of the next one.

        The fields are tokens, token types, order, loss mask, labels and mask; fields that the micro-batch lacks are
        None.
        """
        plugin = accelerator.state.megatron_lm_plugin
        if plugin.custom_get_batch_function is not None:
            return plugin.custom_get_batch_function

        def get_batch(data_iterator: Iterator[Mapping[str, Tensor]]) -> tuple[Tensor | None, ...]:
            batch = next(data_iterator)
            labels = batch.get("labels")
            loss_mask = None if labels is None else (labels != IGNORED).float()
            types, order = batch.get("token_type_ids"), batch.get("next_sentence_label")
            return batch["input_ids"], types, order, loss_mask, labels, batch.get("attention_mask")

        return get_batch

    def get_forward_step_func(self) -> Callable:
        def forward_step(
            data_iterator: Iterator[Mapping[str, Tensor]], model: Callable
        ) -> tuple[Any, Callable]:
            tokens, types, order, loss_mask, labels, padding_mask = self.get_batch(data_iterator)
            output = model(tokens, padding_mask, tokentype_ids=types, lm_labels=labels)
            return output, lambda outputs: self.loss_func(loss_mask, order, outputs)

        return forward_step

    def get_loss_func(self, accelerator: Any) -> Callable:
        """Return a function that takes the loss mask, the order [batch] and the model's outputs.

        The outputs are losses [batch, seq] and order logits [batch, 2] or None.
        """

        def loss_func(
            loss_mask: Tensor, order: Tensor | None, outputs: tuple[Tensor, Tensor | None]
        ) -> tuple[Tensor, dict[str, Tensor]]:
            losses, logits = outputs
            loss = (losses * loss_mask).sum() / loss_mask.sum().clamp(min=1)
            metrics = {"lm loss": loss.detach()}
            if logits is not None and order is not None:
                sop_loss = order_loss(logits, order, None)
                loss, metrics["sop loss"] = loss + sop_loss, sop_loss.detach()
            return loss, metrics

        return loss_func


class EncoderStep:
    """Micro-batches and loss of a call of an encoder."""

    def __init__(self, handler: BertTrainStep, multiple: int):
        """Prepare to pad sequences to a multiple of `multiple`, for SP and CP."""
        self._handler, self._multiple = handler, multiple

    def micro_batches(self, batch: Mapping[str, Any], count: int) -> tuple[list[Batch], Loss]:
        """Split this replica's samples. Raises ConfigError without labels, and for padding before tokens."""
        parts = split_batch(batch, count)
        return [self._batch(*self._handler.get_batch(iter([part]))) for part in parts], BertMicroBatchMean()

    def _batch(
        self,
        tokens: Tensor,
        types: Tensor | None,
        order: Tensor | None,
        loss_mask: Tensor | None,
        labels: Tensor | None,
        padding_mask: Tensor | None,
    ) -> BertBatch:
        if labels is None:
            raise ConfigError(
                "a prepared encoder was called without labels, but it returns only a loss; for logits and hidden "
                "states call accelerator.unwrap_model(model), on every rank"
            )
        if padding_mask is not None and not is_right_padded(padding_mask):
            raise ConfigError(
                "the attention_mask of an encoder's batch has zeros before its tokens; pad at the end"
            )
        rows, seq = tokens.shape
        extra = -seq % self._multiple
        lengths = torch.full((rows,), seq) if padding_mask is None else padding_mask.sum(1).cpu()
        types = torch.zeros_like(tokens) if types is None else types
        order = torch.full_like(tokens[:, 0], NO_LABEL) if order is None else order.flatten()
        labels = labels.masked_fill(loss_mask == 0, 0)
        per_token = {"input_ids": tokens, "labels": labels, "loss_mask": loss_mask, "tokentype_ids": types}
        padded = {name: nn.functional.pad(x, (0, extra)) for name, x in per_token.items()}
        return BertBatch(
            **padded,
            position_ids=torch.arange(seq + extra, device=tokens.device).expand(rows, -1).contiguous(),
            document_ends=torch.stack([lengths, torch.full_like(lengths, seq + extra)], 1).int(),
            sample_numbers=torch.arange(rows),
            sentence_order=order,
        )


class T5TrainStep(AbstractTrainStep):
    """Train step of encoder-decoders. The decoder predicts the labels from the labels shifted right."""

    def __init__(self, accelerator: Any, args: Any):
        """Read `decoder_start_token_id` and `pad_token_id` of `args`; None means 0.

        With `wraps_last_token`, the decoder starts with the last token of the labels, as in mBART.
        """
        super().__init__("T5TrainStep")
        self.wraps_last_token = getattr(args, "wraps_last_token", False)
        self.start_token = getattr(args, "decoder_start_token_id", None) or 0
        self.pad_token = getattr(args, "pad_token_id", None) or 0
        self.get_batch = self.get_batch_func(accelerator, getattr(args, "megatron_dataset_flag", False))
        self.loss_func = self.get_loss_func(accelerator)
        self.forward_step = self.get_forward_step_func()

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable:
        """Return a function that takes an iterator of micro-batches and returns the fields of the next one.

        The fields are encoder tokens, decoder tokens, loss mask, labels, and the encoder's padding mask or None.
        Without labels, loss mask and labels are None.
        """
        plugin = accelerator.state.megatron_lm_plugin
        if plugin.custom_get_batch_function is not None:
            return plugin.custom_get_batch_function

        def get_batch(data_iterator: Iterator[Mapping[str, Tensor]]) -> tuple[Tensor | None, ...]:
            batch = next(data_iterator)
            labels, tokens = batch.get("labels"), batch.get("decoder_input_ids")
            loss_mask = None if labels is None else (labels != IGNORED).float()
            if tokens is None and labels is not None:
                filled = labels.masked_fill(labels == IGNORED, self.pad_token)
                tokens = nn.functional.pad(filled[:, :-1], (1, 0), value=self.start_token)
                if self.wraps_last_token:
                    last = (filled != self.pad_token).sum(1, keepdim=True) - 1
                    tokens[:, :1] = filled.gather(1, last)
            return batch["input_ids"], tokens, loss_mask, labels, batch.get("attention_mask")

        return get_batch

    def get_forward_step_func(self) -> Callable:
        def forward_step(
            data_iterator: Iterator[Mapping[str, Tensor]], model: Callable
        ) -> tuple[Any, Callable]:
            encoder_tokens, tokens, loss_mask, labels, padding_mask = self.get_batch(data_iterator)
            output = model(encoder_tokens, tokens, padding_mask, lm_labels=labels)
            return output, lambda losses: self.loss_func(loss_mask, losses)

        return forward_step

    def get_loss_func(self, accelerator: Any) -> Callable:
        """Return `mean_loss`, which equals transformers' loss."""
        return mean_loss


class EncoderDecoderStep:
    """Micro-batches and loss of a call of an encoder-decoder."""

    def __init__(self, handler: T5TrainStep, multiple: int):
        """Prepare to pad both sequences to a multiple of `multiple`, for SP and CP."""
        self._handler, self._multiple = handler, multiple

    def micro_batches(self, batch: Mapping[str, Any], count: int) -> tuple[list[Batch], Loss]:
        """Split this replica's samples. Raises ConfigError for a batch without labels."""
        parts = split_batch(batch, count)
        return [self._batch(*self._handler.get_batch(iter([part]))) for part in parts], MicroBatchMean()

    def _batch(
        self,
        encoder_tokens: Tensor,
        tokens: Tensor,
        loss_mask: Tensor | None,
        labels: Tensor | None,
        padding_mask: Tensor | None,
    ) -> T5Batch:
        if labels is None:
            raise ConfigError(
                "a prepared encoder-decoder was called without labels, but it returns only a loss; for logits call "
                "accelerator.unwrap_model(model), on every rank"
            )
        mask = torch.ones_like(encoder_tokens) if padding_mask is None else padding_mask
        rows, seq = labels.shape
        labels = labels.masked_fill(loss_mask == 0, 0)
        return T5Batch(
            input_ids=self._pad_sequence(tokens),
            labels=self._pad_sequence(labels),
            loss_mask=self._pad_sequence(loss_mask),
            position_ids=torch.arange(seq + -seq % self._multiple, device=labels.device).repeat(rows, 1),
            document_ends=None,
            sample_numbers=torch.arange(rows),
            encoder_input_ids=self._pad_sequence(encoder_tokens),
            encoder_padding_mask=self._pad_sequence(mask.bool()),
            encoder_document_ends=None,
        )

    def _pad_sequence(self, x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, -x.shape[1] % self._multiple))


def build_train_step(
    accelerator: Any, plugin: MegatronLMPlugin, engine: MegatronEngine
) -> CustomStep | EncoderStep | EncoderDecoderStep | None:
    """Return the plugin's custom train step, or the train step of a model with an encoder.

    None for a decoder-only model without a custom train step. Raises ConfigError for options that exclude each other.
    """
    if not engine.run.model.causal:
        return _encoder_step(accelerator, plugin, engine)
    custom = [
        name
        for name in ("custom_train_step_class", "custom_get_batch_function", "custom_loss_function")
        if getattr(plugin, name) is not None
    ]
    if not custom:
        return None
    if plugin.return_logits:
        raise ConfigError(
            f"return_logits cannot be combined with {custom[0]}, because no rank has the full logits in training; "
            "leave one of the two out"
        )
    args = SimpleNamespace(
        **plugin.megatron_lm_default_args, eos_token_id=getattr(engine.config, "eos_token_id", None)
    )
    if plugin.custom_train_step_class is not None:
        return CustomStep(plugin.custom_train_step_class(args, **(plugin.custom_train_step_kwargs or {})))
    return CustomStep(GPTTrainStep(accelerator, args))


def _encoder_step(
    accelerator: Any, plugin: MegatronLMPlugin, engine: MegatronEngine
) -> EncoderStep | EncoderDecoderStep:
    is_pair = engine.run.model.model_type == "t5"
    step = T5TrainStep if is_pair else BertTrainStep
    for name in ("custom_train_step_class", "custom_loss_function", "return_logits"):
        if getattr(plugin, name):
            raise ConfigError(
                f"{name} is set, but {'an encoder-decoder' if is_pair else 'an encoder'} is always trained with "
                f"{step.__name__} and returns only a loss; leave {name} out, or set custom_get_batch_function"
            )
    if not engine.run.model.add_lm_head:
        raise ConfigError(
            "the model has no masked-language-model head, so it cannot be trained; prepare a BertForMaskedLM or a "
            "BertForPreTraining"
        )
    tokens = {name: getattr(engine.config, name, None) for name in ("decoder_start_token_id", "pad_token_id")}
    tokens["wraps_last_token"] = getattr(engine.config, "model_type", None) in ("mbart", "plbart")
    args = SimpleNamespace(**plugin.megatron_lm_default_args, **tokens)
    if is_pair:
        return EncoderDecoderStep(T5TrainStep(accelerator, args), token_multiple(plugin))
    return EncoderStep(BertTrainStep(accelerator, args), token_multiple(plugin))
