"""Rules of train.batch_invariant and rl.exact: the errors name settings that need an
operator without a batch-invariant version."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import NamedTuple

from megalith.config.lora import LoraConfig
from megalith.config.model import ModelConfig
from megalith.config.run import RunConfig
from megalith.errors import ConfigError


class Unsupported(NamedTuple):
    """A setting that is not supported."""

    name: str
    value: object
    reason: str
    way_out: str = "change one of the two"


def check_batch_invariant(config: RunConfig) -> None:
    """Raise ConfigError if the run has a part without batch-invariant operators. A run without both settings passes."""
    if not config.is_batch_invariant:
        return
    switch = "train.batch_invariant" if config.train.batch_invariant else "rl.exact"
    settings = [*_of_model(config.model), *_of_layout(config)]
    if config.train.batch_invariant:
        settings += _of_rows(config)
    if config.rl.exact:
        settings += _of_rollouts(config)
    _refuse(settings, f"{switch} is on")


def check_batch_invariant_engine(model: ModelConfig, lora: LoraConfig | None, adapter_slots: int = 0) -> None:
    """Raise ConfigError if an engine cannot run this model with batch-invariant operators."""
    settings = [*_of_model(model)]
    if lora is not None and lora.rank is not None:
        settings.append(Unsupported("lora.rank", lora.rank, _ADAPTERS))
    if adapter_slots:
        settings.append(Unsupported("adapter_slots", adapter_slots, _ADAPTERS))
    _refuse(settings, "the engine is batch invariant")


def _refuse(settings: list[Unsupported], switch: str) -> None:
    for name, value, reason, way_out in settings:
        raise ConfigError(f"{name} is {value} and {switch}, but {reason}; {way_out}")


PARTS = 8
"""Number of parts of the inner dimension of experts' second linears (ops/batch_invariant/matmul.py)."""

_KERNEL = "the batch-invariant kernel does not support that"
_NORM = "this norm has no batch-invariant operator"
_OTHER_TOKENS = "a token's experts then depend on the other tokens of its micro-batch"
_ADAPTERS = "adapters have no batch-invariant operators"


def _of_model(model: ModelConfig) -> Iterator[Unsupported]:
    """Yield the settings of the model that are not supported."""
    unsupported = {
        "model_type": (model.model_type != "gpt", "only decoders have batch-invariant operators"),
        "score_head": (model.score_head, "reward models have no batch-invariant loss"),
        "softmax_type": (model.softmax_type != "vanilla", _KERNEL),
        "attn_logit_softcapping": (model.attn_logit_softcapping is not None, _KERNEL),
        "final_logit_softcapping": (model.final_logit_softcapping is not None, _KERNEL),
        "position_embedding_type": (model.position_embedding_type in ("alibi", "relative"), _KERNEL),
        "attention_chunk_size": (model.attention_chunk_size is not None, _KERNEL),
        "attention_dropout": (model.attention_dropout > 0, _KERNEL),
        "qk_layernorm_full_width": (model.qk_layernorm_full_width, _NORM),
        "qk_layernorm_per_head": (model.qk_layernorm_per_head, _NORM),
        "qk_l2_norm": (model.qk_l2_norm, _NORM),
        "activation": (model.mlp_activation == "xielu", "xIELU has no batch-invariant operator"),
        "moe_expert_capacity_factor": (model.moe_expert_capacity_factor is not None, _OTHER_TOKENS),
        "moe_router_load_balancing_type": (
            model.num_experts is not None and model.moe_router_load_balancing_type == "sinkhorn",
            _OTHER_TOKENS,
        ),
        "moe_router_force_load_balancing": (model.moe_router_force_load_balancing, _OTHER_TOKENS),
    }
    for name, (is_set, reason) in unsupported.items():
        if is_set:
            yield Unsupported(f"model.{name}", getattr(model, name), reason)
    if model.rope_scaling is not None and model.rope_scaling.type == "longrope":
        yield Unsupported(
            "model.rope_scaling.type",
            "longrope",
            "the angles of longrope depend on the length of the row, which packing and padding change",
        )


def _of_layout(config: RunConfig) -> Iterator[Unsupported]:
    """Yield the settings of layout and precision that are not supported."""
    parallel, train = config.parallel, config.train
    if parallel.context_parallel_size > 1 and parallel.cp_comm_type in ("p2p", "a2a+p2p"):
        yield Unsupported(
            "parallel.cp_comm_type",
            parallel.cp_comm_type,
            "a ring adds a token's keys in an order that depends on its rank",
            "set parallel.cp_comm_type to a2a or all_gather",
        )
    if config.model.num_experts is not None and (etp := parallel.expert_tensor_parallel_size) > 1:
        for name, size in (
            ("moe_ffn_hidden_size", config.model.expert_size),
            ("hidden_size", config.model.hidden_size),
        ):
            if gcd(size, PARTS) % etp:
                yield Unsupported(
                    "parallel.expert_tensor_parallel_size",
                    etp,
                    f"only 2, 4 and 8 keep the order of additions, if they divide model.{name}, which is {size}",
                )
    if train.fp8_format is not None:
        yield Unsupported(
            "train.fp8_format",
            train.fp8_format,
            "FP8 scales depend on all tokens of the batch",
        )
    if config.lora.rank is not None or config.lora.load is not None:
        yield Unsupported("lora.rank", config.lora.rank, _ADAPTERS)
    if config.runtime.compile is True:
        yield Unsupported("runtime.compile", True, "each compiled graph rounds in its own way")


def _of_rows(config: RunConfig) -> Iterator[Unsupported]:
    """Yield the settings that prevent gradients from being computed row by row."""
    chat = config.chat
    if chat is not None and not config.sft.enabled:
        yield Unsupported(
            f"{chat.name}.enabled", True, "a preference's answers cannot be computed in passes of one row"
        )
    if config.rl.prompts_or_rollouts:
        yield Unsupported(
            "rl.prompts or rl.rollouts",
            "set",
            "a policy loss is computed over the sequences of a micro-batch; rl.exact is the setting for rollouts",
        )
    if config.distill.teacher_or_logits is not None:
        yield Unsupported("distill.teacher", "set", "distillation has no batch-invariant loss")
    if config.data.balance_batches:
        yield Unsupported("data.balance_batches", True, "samples would be assigned to ranks by micro-batch")


def _of_rollouts(config: RunConfig) -> Iterator[Unsupported]:
    """Yield the settings that make the engine's log-probabilities differ from the trainer's."""
    rl = config.rl
    if rl.engine != "own":
        yield Unsupported(
            "rl.engine", rl.engine, "that engine's kernels round differently from the trainer's"
        )
    if config.model.hidden_dropout:
        yield Unsupported(
            "model.hidden_dropout", config.model.hidden_dropout, "the engine samples without dropout"
        )
    if rl.max_drift is not None:
        yield Unsupported("rl.max_drift", rl.max_drift, "exact log-probabilities have no drift to limit")
    if rl.teacher is not None:
        yield Unsupported("rl.teacher", rl.teacher, "distillation has no batch-invariant loss")
