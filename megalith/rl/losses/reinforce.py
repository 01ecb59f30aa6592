"""REINFORCE with importance weights, as in verl's bypass mode: the policy gradient on samples of another policy."""

from __future__ import annotations

from megalith.rl.losses.gpg import Gpg


class Reinforce(Gpg):
    """Token loss −w · A · log π, with w = sg[π / π_rollout] bounded by rl.vllm_importance_sampling_mode, averaged over
    tokens."""

    weighs_policy = True
