"""Learning-rate and epsilon factors of the maximal update parametrization (µP) and of CompleteP, by kind of parameter
and optimizer.

For a model m times wider and d times deeper than its base model (config/mup.py), with α = mup_depth_alpha:

    optimizer            matrices of layers          other parameters       source
    Adam, Lion, others   rate 1 / m, epsilon 1 / m   rate 1                 Yang et al. 2022, table 8
    SGD                  rate 1                      rate m                 the same
    Adafactor            rate m^-1/2                 rate 1                 its rate is relative to the RMS of a matrix
    Muon                 rate 1                      -                      with muon_scale_mode unit_rms_norm

In layers, rates are multiplied by d^(α - 1) and epsilons by d^-α (Dey et al. 2025), but not for SGD, whose rates would
also depend on how gradients scale. With a base number of layers, the epsilons of all parameters have the factor 1 / m,
as in CompleteP, because all gradients shrink with the width. Without it, only the epsilons of matrices have that
factor, as in Megatron-LM.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalith.config.mup import MupRatios, in_layers, is_hidden_matrix

MATRIX_POWER = {"sgd": 0.0, "adafactor": -0.5, "muon": 0.0}
"""Power of the width ratio in the rate of a layer's matrices, by optimizer; -1 for all others."""
OTHER_POWER = {"sgd": 1.0}
"""Power of the width ratio in the rate of all other parameters, by optimizer; 0 for all others."""


@dataclass(frozen=True)
class RateFactors:
    """Factors on the settings of a parameter's update."""

    lr: float = 1.0
    eps: float = 1.0
    weight_decay: float = 1.0


def rate_factors(name: str, ndim: int, optimizer: str, ratios: MupRatios | None) -> RateFactors:
    """Return the factors on a parameter's learning rate, epsilon and weight decay.

    Args:
        name: the parameter's name.
        ndim: its number of dimensions.
        optimizer: name of the optimizer that updates it.
        ratios: size of the model relative to its base model, or None without µP.
    """
    if ratios is None or "lora_" in name:
        return RateFactors()
    depth_lr = depth_eps = 1.0
    if in_layers(name):
        depth_lr, depth_eps = ratios.depth ** (ratios.depth_alpha - 1), ratios.depth**-ratios.depth_alpha
    if not is_hidden_matrix(name, ndim):
        eps = depth_eps / ratios.width if ratios.scales_depth else depth_eps
        return RateFactors(depth_lr * ratios.width ** OTHER_POWER.get(optimizer, 0.0), eps)
    return RateFactors(
        lr=depth_lr * ratios.width ** MATRIX_POWER.get(optimizer, -1.0),
        eps=depth_eps / ratios.width,
        weight_decay=ratios.width if ratios.scales_weight_decay else 1.0,
    )
