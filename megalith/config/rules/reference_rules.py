"""Rules of reference models that follow the policy."""

from __future__ import annotations

from megalith.config.run import RunConfig
from megalith.errors import ConfigError


def check_reference_sync(config: RunConfig) -> None:
    """Raise ConfigError if sync_ref_model is on for a run without a reference model of its own."""
    dpo, rl = config.dpo, config.rl
    synced = {
        "dpo": dpo.enabled and dpo.sync_ref_model,
        "kto": config.kto.enabled and config.kto.sync_ref_model,
        "rl": rl.prompts_or_rollouts is not None and rl.sync_ref_model,
    }
    section = next((name for name, is_on in synced.items() if is_on), None)
    if section is None:
        return
    setting = f"{section}.sync_ref_model"
    if section == "dpo" and not dpo.needs_reference:
        raise ConfigError(
            f"{setting} is true, but dpo.loss_type {dpo.loss_type} reads no reference model; leave {setting} out"
        )
    if section == "rl" and not rl.beta:
        raise ConfigError(
            f"{setting} is true, but with rl.beta 0 there is no reference model; set rl.beta, for example to 0.04, "
            f"or leave {setting} out"
        )
    if config.lora.rank is not None:
        raise ConfigError(
            f"{setting} is true and lora.rank is {config.lora.rank}, but with adapters the reference is the model "
            "without them, which cannot follow the policy; leave one of the two settings out"
        )
