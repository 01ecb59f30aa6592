"""Settings of parallelism and recomputation."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megalith.dialects.megatron.flag_kinds import ParsedFlags


RECOMPUTED = ("core_attn", "mlp", "layernorm")


def sharding(flags: ParsedFlags) -> None:
    """Set parallel.data_parallel_sharding_strategy, to optim with --use-distributed-optimizer."""
    if flags["--use-torch-fsdp2"]:
        flags.set("parallel.data_parallel_sharding_strategy", "optim_grads_params")
    elif flags["--use-megatron-fsdp"]:
        flags.set("parallel.data_parallel_sharding_strategy", flags["--data-parallel-sharding-strategy"])
    elif flags["--use-distributed-optimizer"]:
        flags.set("parallel.data_parallel_sharding_strategy", "optim")


def sequence_parallel(flags: ParsedFlags) -> None:
    """Set parallel.sequence_parallel, unless --tensor-model-parallel-size is 1."""
    if not flags["--sequence-parallel"]:
        return
    if flags["--tensor-model-parallel-size"] > 1:
        flags.set("parallel.sequence_parallel", True)
    else:
        flags.notes.append(
            "--sequence-parallel has no effect with --tensor-model-parallel-size 1, as in Megatron"
        )


def recompute(flags: ParsedFlags) -> None:
    """Set parallel.recompute_granularity, recompute_method, recompute_num_layers and recompute_modules.

    --recompute-activations means the granularity selective.
    """
    granularity = "selective" if flags["--recompute-activations"] else flags["--recompute-granularity"]
    if granularity is None:
        return
    flags.set("parallel.recompute_granularity", granularity)
    if granularity == "full":
        for flag in ("--recompute-method", "--recompute-num-layers"):
            if flags[flag] is not None:
                flags.set(f"parallel.{flag.removeprefix('--').replace('-', '_')}", flags[flag])
        return
    requested = flags["--recompute-modules"] or ["core_attn"]
    supported = [module for module in requested if module in RECOMPUTED]
    if unsupported := [module for module in requested if module not in RECOMPUTED]:
        flags.notes.append(
            f"--recompute-modules {' '.join(unsupported)}: these modules are not recomputed, which costs memory but "
            f"changes nothing else; supported: {', '.join(RECOMPUTED)}"
        )
    if supported:
        flags.set("parallel.recompute_modules", supported)
    else:
        del flags.tree["parallel"]["recompute_granularity"]


def stages(flags: ParsedFlags) -> None:
    """Set parallel.pipeline_model_parallel_layout. MTP layers (m) must be on the last stage, with the head."""
    layout = flags["--pipeline-model-parallel-layout"]
    if layout is None:
        return
    *others, last = layout.split("|")
    if any("m" in stage for stage in others):
        flags.problems.append(
            f"--pipeline-model-parallel-layout {layout} is refused: MTP layers (m) must be in the last stage, with "
            "the head; move them there"
        )
        return
    flags.set(
        "parallel.pipeline_model_parallel_layout", "|".join([*others, re.sub(r"m(\*\d+)?,?", "", last)])
    )


def context(flags: ParsedFlags) -> None:
    """Set parallel.cp_comm_type to the first layer's type. All layers then use it."""
    kinds = flags["--cp-comm-type"]
    if "--cp-comm-type" in flags:
        flags.set("parallel.cp_comm_type", kinds[0])
    if len(set(kinds)) > 1:
        flags.notes.append(
            f"--cp-comm-type {' '.join(kinds)}: every layer uses the first of these types; the others would change "
            "only the speed"
        )
