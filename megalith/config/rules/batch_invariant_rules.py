"""Rules of train.batch_invariant and rl.exact: settings that need an operator without a batch-invariant version are
rejected by name."""

from __future__ import annotations

from collections.abc import Iterator

from megalith.config.lora import LoraConfig
from megalith.config.model import ModelConfig
from megalith.config.run import RunConfig
from megalith.errors import ConfigError

Setting = tuple[str, object, str]
"""A setting's name, its value, and the reason why it is not supported."""


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
        settings.append(("lora.rank", lora.rank, _ADAPTERS))
    if adapter_slots:
        settings.append(("adapter_slots", adapter_slots, _ADAPTERS))
    _refuse(settings, "the engine is batch invariant")


def _refuse(settings: list[Setting], switch: str) -> None:
    for name, value, reason in settings:
        raise ConfigError(f"{name} is {value} and {switch}, but {reason}; turn one of them off")


_KERNEL = "the batch-invariant kernel does not have it"
_SIGMOID = "this gate has no batch-invariant operator"
_NORM = "this norm has no batch-invariant operator"
_OTHER_TOKENS = "a token's experts then depend on the other tokens of its micro-batch"
_PARTIAL_SUMS = "the sums over its ranks have another order for each size"
_ADAPTERS = "adapters have no batch-invariant operators"


def _of_model(model: ModelConfig) -> Iterator[Setting]:
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
        "attention_output_gate": (model.attention_output_gate, _SIGMOID),
        "moe_shared_expert_gate": (model.moe_shared_expert_gate, _SIGMOID),
        "qk_layernorm_full_width": (model.qk_layernorm_full_width, _NORM),
        "qk_layernorm_per_head": (model.qk_layernorm_per_head, _NORM),
        "qk_l2_norm": (model.qk_l2_norm, _NORM),
        "mtp_num_layers": (
            model.mtp_num_layers is not None,
            "multi-token prediction has no batch-invariant loss",
        ),
        "moe_expert_capacity_factor": (model.moe_expert_capacity_factor is not None, _OTHER_TOKENS),
        "moe_router_load_balancing_type": (
            model.num_experts is not None and model.moe_router_load_balancing_type == "sinkhorn",
            _OTHER_TOKENS,
        ),
        "moe_router_force_load_balancing": (model.moe_router_force_load_balancing, _OTHER_TOKENS),
    }
    for name, (is_set, reason) in unsupported.items():
        if is_set:
            yield f"model.{name}", getattr(model, name), reason
    if model.model_type != "gpt":
        return
    for layer in range(model.num_layers):
        if not model.has_attention(layer) or model.parallel_mixers:
            yield f"layer {layer}'s mixer", "recurrent", "recurrences have no batch-invariant operators"
            return
    if model.rope_scaling is not None and model.rope_scaling.type == "longrope":
        yield (
            "model.rope_scaling.type",
            "longrope",
            "its angles depend on the length of the row, which packing and padding change",
        )


def _of_layout(config: RunConfig) -> Iterator[Setting]:
    """Yield the settings of layout and precision that are not supported."""
    parallel, train = config.parallel, config.train
    for name in (
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
    ):
        if (getattr(parallel, name) or 1) > 1:
            yield f"parallel.{name}", getattr(parallel, name), _PARTIAL_SUMS
    if train.fp8_format is not None:
        yield (
            "train.fp8_format",
            train.fp8_format,
            "FP8 scales depend on all tokens of the batch",
        )
    if config.lora.rank is not None or config.lora.load is not None:
        yield "lora.rank", config.lora.rank, _ADAPTERS
    if config.runtime.compile is True:
        yield "runtime.compile", True, "each compiled graph rounds in its own way"


def _of_rows(config: RunConfig) -> Iterator[Setting]:
    """Yield the settings that prevent gradients from being computed row by row."""
    chat = config.chat
    if chat is not None and not config.sft.enabled:
        yield f"{chat.name}.enabled", True, "a preference's answers cannot be computed in passes of one row"
    if config.rl.prompts_or_rollouts:
        yield (
            "rl.prompts or rl.rollouts",
            "set",
            "a policy loss is computed over the sequences of a micro-batch; rl.exact is the setting for rollouts",
        )
    if config.distill.teacher_or_logits is not None:
        yield "distill.teacher", "set", "distillation has no batch-invariant loss"
    if config.data.balance_batches:
        yield "data.balance_batches", True, "it assigns samples to ranks by micro-batch"


def _of_rollouts(config: RunConfig) -> Iterator[Setting]:
    """Yield the settings that make the engine's log-probabilities differ from the trainer's."""
    rl = config.rl
    if rl.engine != "own":
        yield "rl.engine", rl.engine, "its kernels are not the trainer's"
    if config.model.hidden_dropout:
        yield "model.hidden_dropout", config.model.hidden_dropout, "the engine samples without dropout"
    if rl.max_drift is not None:
        yield "rl.max_drift", rl.max_drift, "no drift at all is then allowed"
    if rl.teacher is not None:
        yield "rl.teacher", rl.teacher, "distillation has no batch-invariant loss"
