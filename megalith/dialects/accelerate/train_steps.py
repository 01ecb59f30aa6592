"""A script's own train step, batch and loss, as Megatron's forward step has them.

A step of the script's gets a micro-batch out of an iterator and calls the model with tokens, positions, mask and
labels; what it returns is a function of the losses of the tokens. Its call of the model is recorded, all micro-batches
go through the schedule together, and the function is called where the losses are: on the last pipeline stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from megalith.data.batch import Batch
from megalith.data.masked_lm import BertBatch
from megalith.data.pairs import T5Batch
from megalith.dialects.accelerate.plugin import MegatronLMPlugin
from megalith.dialects.accelerate.plugin_settings import token_multiple
from megalith.dialects.accelerate.replica_loader import IGNORED
from megalith.dialects.accelerate.script_batches import ends_of, is_right_padded, next_tokens
from megalith.dialects.accelerate.script_engine import MegatronEngine
from megalith.errors import ConfigError
from megalith.models.encoders.bert import BertMicroBatchMean, order_loss
from megalith.models.loss import Loss, MicroBatchMean
from megalith.models.transformer import PADDING
from megalith.ops.cross_entropy import NO_LABEL
from megalith.ops.documents import document_ids


class AbstractTrainStep:
    """A train step: `get_batch_func`, `get_forward_step_func` and `get_loss_func` say what it is."""

    def __init__(self, name: str):
        self.name = name

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable:
        """A function of an iterator of micro-batches: tokens, labels, loss mask, attention mask, position ids."""
        raise NotImplementedError(f"{type(self).__name__} has no get_batch_func; give it one")

    def get_forward_step_func(self) -> Callable:
        """A function of an iterator of micro-batches and the model: the model's output, and a function of it."""
        raise NotImplementedError(f"{type(self).__name__} has no get_forward_step_func; give it one")

    def get_loss_func(self, accelerator: Any) -> Callable:
        """A function of the loss mask [batch, seq] and the losses [batch, seq]: the micro-batch's loss, and figures."""
        raise NotImplementedError(f"{type(self).__name__} has no get_loss_func; give it one")


def mean_loss(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean of losses [batch, seq] over the tokens of loss_mask, and the figures to log."""
    loss = (losses * loss_mask).sum() / loss_mask.sum().clamp(min=1)
    return loss, {"lm loss": loss.detach()}


class GPTTrainStep(AbstractTrainStep):
    """Decoder-only models: each token predicts the next."""

    def __init__(self, accelerator: Any, args: Any):
        """`args`: `megatron_dataset_flag` and `eos_token_id` are read."""
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
            batch = next_tokens(next(data_iterator), 0, None)
            return batch.input_ids, batch.labels, batch.loss_mask, documents_in(batch), batch.position_ids

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
    """Encoders: the masked tokens of a batch, and the order of its two segments where the batch has one."""

    def __init__(self, accelerator: Any, args: Any):
        """`args`: `megatron_dataset_flag` is read."""
        super().__init__("BertTrainStep")
        self.get_batch = self.get_batch_func(accelerator, getattr(args, "megatron_dataset_flag", False))
        self.loss_func = self.get_loss_func(accelerator)
        self.forward_step = self.get_forward_step_func()

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable:
        """A function of an iterator of micro-batches: tokens, tokentypes, order, loss mask, labels, padding mask; None
        for what a micro-batch does not have."""
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
            return output, lambda made: self.loss_func(loss_mask, order, made)

        return forward_step

    def get_loss_func(self, accelerator: Any) -> Callable:
        """A function of the loss mask, the order [batch] and what the model made: losses [batch, seq] and logits of the
        order [batch, 2] or None."""

        def loss_func(
            loss_mask: Tensor, order: Tensor | None, made: tuple[Tensor, Tensor | None]
        ) -> tuple[Tensor, dict[str, Tensor]]:
            losses, logits = made
            loss = (losses * loss_mask).sum() / loss_mask.sum().clamp(min=1)
            figures = {"lm loss": loss.detach()}
            if logits is not None and order is not None:
                of_order = order_loss(logits, order, None)
                loss, figures["sop loss"] = loss + of_order, of_order.detach()
            return loss, figures

        return loss_func


class EncoderStep:
    """The micro-batches of a call of an encoder, and their loss: BertTrainStep's."""

    def __init__(self, handler: BertTrainStep, multiple: int):
        """`multiple`: of tokens, to which sequences are filled up for parallelism."""
        self._handler, self._multiple = handler, multiple

    def micro_batches(self, batch: Mapping[str, Any], count: int) -> tuple[list[Batch], Loss]:
        """The micro-batches of this replica's samples. Raises ConfigError for a batch without labels, and for padding
        that does not stand at the end."""
        given = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.dim()}
        parts = _in_micro_batches(given, count)
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
                "a prepared encoder was called without labels, but it gives a loss alone; its logits and hidden states "
                "are those of accelerator.unwrap_model(model), which every rank calls"
            )
        if padding_mask is not None and not is_right_padded(padding_mask):
            raise ConfigError(
                "the attention_mask of an encoder's batch has zeros before its tokens; pad at the end"
            )
        rows, seq = tokens.shape
        more = -seq % self._multiple
        lengths = torch.full((rows,), seq) if padding_mask is None else padding_mask.sum(1).cpu()
        types = torch.zeros_like(tokens) if types is None else types
        order = torch.full_like(tokens[:, 0], NO_LABEL) if order is None else order.flatten()
        labels = labels.masked_fill(loss_mask == 0, 0)
        of_tokens = {"input_ids": tokens, "labels": labels, "loss_mask": loss_mask, "tokentype_ids": types}
        longer = {name: nn.functional.pad(x, (0, more)) for name, x in of_tokens.items()}
        return BertBatch(
            **longer,
            position_ids=torch.arange(seq + more, device=tokens.device).expand(rows, -1).contiguous(),
            document_ends=torch.stack([lengths, torch.full_like(lengths, seq + more)], 1).int(),
            sample_numbers=torch.arange(rows),
            sentence_order=order,
        )


class T5TrainStep(AbstractTrainStep):
    """Encoder-decoders: the decoder learns the labels, and reads them one place later."""

    def __init__(self, accelerator: Any, args: Any):
        """`args`: `decoder_start_token_id` and `pad_token_id` are read, 0 where they are None."""
        super().__init__("T5TrainStep")
        self.start_token = getattr(args, "decoder_start_token_id", None) or 0
        self.pad_token = getattr(args, "pad_token_id", None) or 0
        self.get_batch = self.get_batch_func(accelerator, getattr(args, "megatron_dataset_flag", False))
        self.loss_func = self.get_loss_func(accelerator)
        self.forward_step = self.get_forward_step_func()

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable:
        """A function of an iterator of micro-batches: the encoder's tokens, the decoder's, loss mask, labels, and the
        encoder's padding mask or None. Without labels loss mask and labels are None."""
        plugin = accelerator.state.megatron_lm_plugin
        if plugin.custom_get_batch_function is not None:
            return plugin.custom_get_batch_function

        def get_batch(data_iterator: Iterator[Mapping[str, Tensor]]) -> tuple[Tensor | None, ...]:
            batch = next(data_iterator)
            labels, tokens = batch.get("labels"), batch.get("decoder_input_ids")
            loss_mask = None if labels is None else (labels != IGNORED).float()
            if tokens is None and labels is not None:
                tokens = nn.functional.pad(labels[:, :-1], (1, 0), value=self.start_token)
                tokens = tokens.masked_fill(tokens == IGNORED, self.pad_token)
            return batch["input_ids"], tokens, loss_mask, labels, batch.get("attention_mask")

        return get_batch

    def get_forward_step_func(self) -> Callable:
        def forward_step(
            data_iterator: Iterator[Mapping[str, Tensor]], model: Callable
        ) -> tuple[Any, Callable]:
            read, tokens, loss_mask, labels, padding_mask = self.get_batch(data_iterator)
            output = model(read, tokens, padding_mask, lm_labels=labels)
            return output, lambda losses: self.loss_func(loss_mask, losses)

        return forward_step

    def get_loss_func(self, accelerator: Any) -> Callable:
        """A function of the loss mask and the losses, [batch, seq] both: their mean over the labels, transformers'."""

        return mean_loss


class PairStep:
    """The micro-batches of a call of an encoder-decoder, and their loss: T5TrainStep's."""

    def __init__(self, handler: T5TrainStep, multiple: int):
        """`multiple`: of tokens, to which both sequences are filled up for parallelism."""
        self._handler, self._multiple = handler, multiple

    def micro_batches(self, batch: Mapping[str, Any], count: int) -> tuple[list[Batch], Loss]:
        """The micro-batches of this replica's samples. Raises ConfigError for a batch without labels."""
        given = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.dim()}
        parts = _in_micro_batches(given, count)
        return [self._batch(*self._handler.get_batch(iter([part]))) for part in parts], MicroBatchMean()

    def _batch(
        self,
        read: Tensor,
        tokens: Tensor,
        loss_mask: Tensor | None,
        labels: Tensor | None,
        padding_mask: Tensor | None,
    ) -> T5Batch:
        if labels is None:
            raise ConfigError(
                "a prepared encoder-decoder was called without labels, but it gives a loss alone; its logits are those "
                "of accelerator.unwrap_model(model), which every rank calls"
            )
        real = torch.ones_like(read) if padding_mask is None else padding_mask
        rows, seq = labels.shape
        labels = labels.masked_fill(loss_mask == 0, 0)
        return T5Batch(
            input_ids=self._filled(tokens),
            labels=self._filled(labels),
            loss_mask=self._filled(loss_mask),
            position_ids=torch.arange(seq + -seq % self._multiple, device=labels.device).repeat(rows, 1),
            document_ends=None,
            sample_numbers=torch.arange(rows),
            encoder_input_ids=self._filled(read),
            encoder_padding_mask=self._filled(real.bool()),
            encoder_document_ends=None,
        )

    def _filled(self, x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, -x.shape[1] % self._multiple))


@dataclass
class CustomBatch(Batch):
    """A micro-batch with its number in the step, by which its loss is found."""

    number: Tensor = None  # int64 [1]


class CustomStep:
    """A train step of the script's: the micro-batches of a call, and their loss."""

    def __init__(self, handler: Any):
        self._handler = handler

    def micro_batches(self, batch: Mapping[str, Any], count: int) -> tuple[list[Batch], Loss]:
        """The micro-batches of this replica's samples. Raises ConfigError for a mask that cannot be had."""
        given = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.dim()}
        made, functions = [], []
        for number, part in enumerate(_in_micro_batches(given, count)):
            call = _RecordedCall()
            output, function = self._handler.forward_step(iter([part]), call)
            if output is not call.output:
                raise ConfigError(
                    "the forward step has changed what the model gave before it returned it; do that in the function "
                    "that it returns, which gets the losses of the tokens"
                )
            made.append(call.batch(number))
            functions.append(function)
        return made, CustomLoss(functions, made[0].input_ids.shape[1])


def _in_micro_batches(given: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    rows = len(next(iter(given.values())))
    if rows % count:
        raise ConfigError(
            f"a train step was given {rows} samples for num_micro_batches {count}, which does not divide them; set "
            "drop_last in the dataloader"
        )
    size = rows // count
    return [
        {name: value[number * size : (number + 1) * size] for name, value in given.items()}
        for number in range(count)
    ]


class CustomLoss(Loss):
    """The mean over the step's micro-batches of what the script's function makes of each one's losses."""

    def __init__(self, functions: Sequence[Callable[[Tensor], Any]], seq: int):
        """`seq`: the tokens of a sequence, without those that fill it up for parallelism."""
        self._functions, self._seq = functions, seq

    def denominator(self, batch: Batch) -> float:
        return 1.0

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, batch: CustomBatch) -> Tensor:
        """logprobs [batch, seq]; the script's function gets the losses [batch, seq]."""
        function = self._functions[int(batch.number[0])]
        made = function(-logprobs[:, : self._seq])
        return (made[0] if isinstance(made, tuple) else made).float()


class _RecordedCall:
    """Stands for the model in a forward step, and keeps what it is called with."""

    def __init__(self) -> None:
        self.output = torch.empty(0)

    def __call__(self, input_ids: Tensor, position_ids: Tensor | None = None, attention_mask: Any = None,
                 labels: Tensor | None = None, **others: Any) -> Tensor:  # fmt: skip
        if labels is None:
            raise ConfigError(
                "the forward step called the model without labels; give it the tokens to predict"
            )
        self._input_ids, self._labels = input_ids, labels
        self._position_ids, self._mask = position_ids, attention_mask
        return self.output

    def batch(self, number: int) -> CustomBatch:
        tokens = self._input_ids
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return CustomBatch(
            input_ids=tokens,
            labels=self._labels.clamp(min=0),
            loss_mask=(self._labels >= 0).float(),
            position_ids=(places if self._position_ids is None else self._position_ids).contiguous(),
            document_ends=documents_of(self._mask, tokens),
            sample_numbers=torch.arange(len(tokens)),
            padding=padding_of(self._mask),
            number=torch.tensor([number]),
        )


def documents_in(batch: Batch) -> Tensor | None:
    """Return the number of each token's document, int32 [batch, seq], negative for padding that predicts; None where
    all is one document. Raises ConfigError for padding between tokens."""
    ends, padding = batch.document_ends, batch.padding
    if ends is None and padding is not None:
        raise ConfigError(
            "attention_mask has zeros between the tokens of a sample, or labels other than −100 on the padding at its "
            "end, which a train step of the script's own does not have; pad at the beginning or the end, with labels "
            "of −100"
        )
    if ends is None:
        return None
    numbers = document_ids(ends, batch.input_ids.shape[1])
    return numbers if padding is None else numbers.masked_fill(padding, PADDING)


def padding_of(mask: Tensor | None) -> Tensor | None:
    """Return the padding of a mask as `documents_in` makes it."""
    if mask is None or mask.dim() != 2 or not bool((mask < 0).any()):
        return None
    return mask < 0


def documents_of(mask: Any, tokens: Tensor) -> Tensor | None:
    """The ends of the documents that a mask of Megatron's, bool [batch or 1, 1, seq, seq] with True where a token must
    not look, keeps apart, or int [batch, seq] tells apart. Raises ConfigError for another mask."""
    if mask is None or mask.dim() == 2:
        return None if mask is None else ends_of(mask)
    seq = tokens.shape[1]
    hidden = mask.bool()[:, 0]  # [batch or 1, seq, seq]
    first = (~hidden).to(torch.int32).argmax(-1)  # of each token the first that it sees
    places = torch.arange(seq, device=mask.device)
    causal = (places > places[:, None])[None] | (places < first[..., None])
    if hidden.shape[-2:] != (seq, seq) or not bool((hidden == causal).all()):
        raise ConfigError(
            "the attention mask of the script's batch function is neither causal nor one of documents one behind the "
            "other; there is no other mask here: give None for a causal one"
        )
    starts = (first == places).to(torch.int32)
    return ends_of(starts.cumsum(1, dtype=torch.int32).expand_as(tokens))


def custom_step(
    accelerator: Any, plugin: MegatronLMPlugin, engine: MegatronEngine
) -> CustomStep | EncoderStep | PairStep | None:
    """The script's own train step, or that of a model with an encoder; None for a decoder without one. Raises
    ConfigError for what cannot be had together."""
    if not engine.run.model.causal:
        return _encoder_step(accelerator, plugin, engine)
    given = [
        name
        for name in ("custom_train_step_class", "custom_get_batch_function", "custom_loss_function")
        if getattr(plugin, name) is not None
    ]
    if not given:
        return None
    if plugin.return_logits:
        raise ConfigError(
            f"return_logits and {given[0]} cannot be had together: no rank holds whole logits in training"
        )
    args = SimpleNamespace(
        **plugin.megatron_lm_default_args, eos_token_id=getattr(engine.config, "eos_token_id", None)
    )
    if plugin.custom_train_step_class is not None:
        return CustomStep(plugin.custom_train_step_class(args, **(plugin.custom_train_step_kwargs or {})))
    return CustomStep(GPTTrainStep(accelerator, args))


def _encoder_step(
    accelerator: Any, plugin: MegatronLMPlugin, engine: MegatronEngine
) -> EncoderStep | PairStep:
    is_pair = engine.run.model.model_type == "t5"
    step, learnt = (
        (T5TrainStep, "its labels")
        if is_pair
        else (BertTrainStep, "its masked tokens and the order of its segments")
    )
    for name in ("custom_train_step_class", "custom_loss_function", "return_logits"):
        if getattr(plugin, name):
            raise ConfigError(
                f"{name} is set, but {'an encoder-decoder' if is_pair else 'an encoder'} is trained by "
                f"{step.__name__}, by {learnt}, and gives a loss alone; leave it out, or give a "
                "custom_get_batch_function"
            )
    if not engine.run.model.add_lm_head:
        raise ConfigError(
            "the model has no head that predicts masked tokens, so it cannot be trained here; prepare a "
            "BertForMaskedLM or a BertForPreTraining"
        )
    tokens = {name: getattr(engine.config, name, None) for name in ("decoder_start_token_id", "pad_token_id")}
    args = SimpleNamespace(**plugin.megatron_lm_default_args, **tokens)
    if is_pair:
        return PairStep(T5TrainStep(accelerator, args), token_multiple(plugin))
    return EncoderStep(BertTrainStep(accelerator, args), token_multiple(plugin))
