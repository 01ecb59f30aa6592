"""Settings of precision and optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megalith.dialects.megatron.flag_kinds import ParsedFlags


def precision(flags: ParsedFlags) -> None:
    """Set train.precision: bf16, fp16, or fp32 without either flag."""
    if flags["--bf16"] and flags["--fp16"]:
        flags.problems.append("--bf16 and --fp16 contradict each other; remove one of the two")
    for flag in ("--bf16", "--fp16"):
        if flags[flag]:
            flags.set("train.precision", flag.removeprefix("--"))


def emerging_optimizer(flags: ParsedFlags) -> None:
    """Set optim.muon_split_gate_up and optim.muon_moment2_method for Muon, and the variant of SOAP.

    Muon orthogonalizes gate and up as one matrix. It never splits a matrix, whatever the layout, as with
    --muon-tp-mode duplicated and distributed; blockwise is rejected. SOAP sets optim.soap_use_kl_shampoo and removes
    optim.soap_max_precond_dim, as in emerging-optimizers. It rejects an --adam-eps other than 1e-8.
    """
    optimizer = flags["--optimizer"]
    if optimizer == "soap":
        flags.set("optim.soap_use_kl_shampoo", True)
        flags.set("optim.soap_max_precond_dim", None)
        if flags["--adam-eps"] != 1e-8:
            flags.problems.append(
                f"--adam-eps {flags['--adam-eps']:g} is refused with --optimizer soap, because Megatron uses 1e-8 "
                "for the matrices of layers; remove --adam-eps"
            )
    if optimizer not in ("muon", "dist_muon", "adaptive_muon"):
        return
    if flags["--muon-tp-mode"] == "blockwise":
        flags.problems.append(
            "--muon-tp-mode blockwise is not supported, because matrices are never split; use duplicated or "
            "distributed"
        )
    flags.set("optim.muon_split_gate_up", False)
    if optimizer == "adaptive_muon":
        flags.set("optim.muon_moment2_method", "adamuon")


def moments(flags: ParsedFlags) -> None:
    """Set optim.exp_avg_dtype and optim.exp_avg_sq_dtype, with --use-precision-aware-optimizer and --optimizer adam.

    bf16 uses stochastic rounding. fp8 has a scale per block and a dynamic exponent. Weights and gradients stay in fp32;
    --main-params-dtype and --main-grads-dtype do not change this.
    """
    for flag in ("--exp-avg-dtype", "--exp-avg-sq-dtype"):
        value = flags[flag]
        if value == "fp32":
            continue
        if not flags["--use-precision-aware-optimizer"]:
            flags.problems.append(
                f"{flag} {value} needs --use-precision-aware-optimizer; add that flag, or remove {flag}"
            )
        elif value == "fp16":
            flags.problems.append(f"{flag} fp16 is not supported; use bf16, which has the same size, or fp8")
        else:
            flags.set(f"optim.{flag[2:].replace('-', '_')}", value)
