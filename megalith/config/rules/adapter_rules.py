"""Rules of LoRA adapters that involve other sections."""

from __future__ import annotations

from megalith.config.lora import EXPERTS, QKV, WHOLE
from megalith.config.rules.parallel_rules import divisors
from megalith.config.run import RunConfig
from megalith.errors import ConfigError


def check_adapters(config: RunConfig) -> None:
    lora, model = config.lora, config.model
    lora.check_requirements("lora")
    if lora.rank is None:
        return
    if lora.trainable_token_indices is not None:
        _check_tokens(config)
    parts = lora.parts(model)
    experts = [site for site in parts if site.startswith(EXPERTS)]
    if experts and lora.dropout:
        raise ConfigError(
            f"lora.dropout {lora.dropout} is not supported with adapters on experts (PEFT does not support it "
            "either); set lora.dropout to 0, or name other targets than the experts, such as linear_qkv and "
            "linear_proj"
        )
    if lora.use_dora and (experts or lora.dropout):
        raise ConfigError(
            "lora.use_dora with "
            f"{'adapters on experts' if experts else f'lora.dropout {lora.dropout}'} is not supported; "
            f"{'set lora.targets to other matrices' if experts else 'set dropout to 0'}, or turn use_dora off"
        )
    if lora.decomposes_base and (experts or lora.has_quantized_base):
        raise ConfigError(
            f"lora.init_lora_weights is {lora.init_lora_weights}, which is not supported "
            + (
                "on experts, as in PEFT; choose other targets, or leave lora.init_lora_weights out"
                if experts
                else f"with lora.quantize_base {lora.quantize_base}, because the base that PiSSA and OLoRA leave would "
                "have to be quantized; leave one of the two out"
            )
        )
    if lora.begins_with_loftq and (experts or lora.use_dora or not lora.has_quantized_base or lora.load):
        raise ConfigError(
            "lora.init_lora_weights is loftq, "
            + (
                "which is not supported on experts, as in PEFT; choose other targets, or leave "
                "lora.init_lora_weights out"
                if experts
                else "which is not supported with lora.use_dora; leave one of the two out"
                if lora.use_dora
                else (
                    f"and lora.load names {lora.load}, which contains initial values too; leave one of the "
                    "two out"
                )
                if lora.load
                else (
                    "but lora.quantize_base is none, so there is no quantization error to approximate; set "
                    "lora.quantize_base, for example to nf4"
                )
            )
        )
    if lora.loftq_iter > 1 and not lora.begins_with_loftq:
        raise ConfigError(
            f"lora.loftq_iter is {lora.loftq_iter}, but lora.init_lora_weights is {lora.init_lora_weights}; set "
            "lora.init_lora_weights to loftq, or leave lora.loftq_iter out"
        )
    if lora.has_quantized_base and config.train.fp8_format is not None:
        raise ConfigError(
            f"lora.quantize_base is {lora.quantize_base} and train.fp8_format is {config.train.fp8_format}, but "
            "a quantized base is multiplied in train.precision, not in FP8; leave one of the two out"
        )
    stack = max(model.num_layers - model.encoder_layers, model.encoder_layers)
    if beyond := [number for number in lora.layers_to_transform or () if number >= stack]:
        raise ConfigError(
            f"lora.layers_to_transform has {beyond[0]}, but the layers are numbered from 0 to {stack - 1}; remove "
            f"{beyond[0]} from the list"
        )
    if model.moe_router_enable_expert_bias and model.moe_router_bias_update_rate:
        raise ConfigError(
            f"lora.rank {lora.rank} freezes the base model, but model.moe_router_enable_expert_bias would update its "
            "expert bias; set model.moe_router_bias_update_rate to 0"
        )
    if config.checkpoint.export_hf:
        raise ConfigError(
            f"checkpoint.export_hf writes a full model, but with lora.rank {lora.rank} a run only has adapters; set "
            "checkpoint.export_hf to false, and merge or export the adapters afterwards with megalith lora"
        )
    size = config.parallel.tensor_model_parallel_size
    if parts.get(QKV) == (WHOLE,) and model.query_groups % size:
        raise ConfigError(
            f"lora.targets {', '.join(lora.targets)} has one adapter for all rows of linear_qkv, but "
            f"parallel.tensor_model_parallel_size {size} does not divide model.num_query_groups "
            f"{model.query_groups}; use the target linear_qkv, which then has one adapter each for queries, keys "
            f"and values, or choose a tensor size among {divisors(model.query_groups)}"
        )


def _check_tokens(config: RunConfig) -> None:
    lora, model = config.lora, config.model
    if model.model_type != "gpt":
        raise ConfigError(
            f"lora.trainable_token_indices is supported only with model.model_type gpt, not with {model.model_type}; "
            "leave lora.trainable_token_indices out"
        )
    largest = max(token for tokens in lora.tokens_by_matrix().values() for token in tokens)
    if model.vocab_size is not None and largest >= model.vocab_size:
        raise ConfigError(
            f"lora.trainable_token_indices has token {largest}, but the vocabulary has {model.vocab_size} tokens, "
            f"numbered from 0; remove token {largest} from the list, or raise model.vocab_size"
        )
