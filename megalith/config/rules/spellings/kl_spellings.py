"""verl's and NeMo-RL's spellings of the KL to the reference policy."""

from __future__ import annotations

from typing import Any

from megalith.config.rules.spellings.spelling import Rl
from megalith.errors import ConfigError

KL_COEFFICIENT = 0.001  # verl's kl_loss_coef
KL_CLAMPS = {"kl_input_clamp_value": 20.0, "kl_output_clamp_value": 10.0}  # verl's k3 and NeMo-RL
KL_TYPES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def use_kl_loss(value: bool, rl: Rl) -> dict[str, Any]:
    if value and rl.get("beta") == 0:
        raise ConfigError(
            "rl.use_kl_loss is true, but the KL's coefficient (rl.beta, kl_loss_coef) is 0; set rl.beta above 0, or "
            "leave rl.use_kl_loss out"
        )
    return {} if value else {"beta": 0.0}


def verl_coefficient(value: bool, rl: Rl) -> dict[str, Any]:
    return {"beta": KL_COEFFICIENT, **verl_kl(value, {"beta": KL_COEFFICIENT, **rl})} if value else {}


def verl_kl(value: Any, rl: Rl) -> dict[str, Any]:
    """Return verl's KL settings: no bias correction, and k3 clamped."""
    if not rl.get("beta"):
        return {}
    clamps = KL_CLAMPS if rl.get("kl_estimator", "k3") == "k3" else {}
    return {"use_bias_correction_kl": False, **clamps}


def nemo_kl(value: Any, rl: Rl) -> dict[str, Any]:
    """Return NeMo-RL's KL settings: multiplied by exp(log π − sg[log π]), and all estimators clamped."""
    return {"use_bias_correction_kl": False, "kl_score_gradient": True, **KL_CLAMPS} if rl.get("beta") else {}
