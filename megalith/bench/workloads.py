"""Workloads and layouts of `megalith bench`."""

from __future__ import annotations

import math
from typing import Any

import yaml

from megalith.errors import ConfigError, did_you_mean

# The notes' GPT-2-large has 16 heads of 80.
_LARGE = dict(preset="gpt2-large", num_attention_heads=16)
_NO_DROPOUT = dict(hidden_dropout=0.0, attention_dropout=0.0)
_LLAMA = dict(preset="llama3-8b", vocab_size=128256)
_TINY = dict(preset="tiny-llama", vocab_size=1024, max_position_embeddings=256)  # for any machine
_BERT = dict(preset="bert-large", **_NO_DROPOUT)
_T5 = dict(preset="t5-3b", **_NO_DROPOUT)
_BALANCED = dict(moe_router_force_load_balancing=True)
_QWEN3_MOE = dict(_BALANCED, preset="qwen3-30b-a3b")
# 14 of its 27 layers, the most that fit two GPUs.
_DEEPSEEK = dict(_BALANCED, preset="deepseek-v2-lite", num_layers=14, moe_layer_freq=[0] + [1] * 13)
# Two stages, groups of four micro-batches.
_IN_FOURS = dict(pipeline_model_parallel_size=2, microbatch_group_size_per_virtual_pipeline_stage=4)

# fmt: off
WORKLOADS: dict[str, dict[str, Any]] = {
    "tiny":               dict(model=_TINY, seq_length=256, precision="fp32", batch=4),
    "gpt2":               dict(model=dict(preset="gpt2", **_NO_DROPOUT), seq_length=1024, precision="bf16", batch=64),
    "gpt2-large":         dict(model=dict(_LARGE, **_NO_DROPOUT), seq_length=1024, precision="bf16", batch=32),
    "gpt2-large-dropout": dict(model=_LARGE, seq_length=1024, precision="fp16", batch=32),
    "llama3-8b":          dict(model=_LLAMA, seq_length=8192, precision="bf16", batch=2),
    "llama3-70b":         dict(model=dict(_LLAMA, preset="llama3-70b"), seq_length=8192, precision="bf16", batch=2),
    "llama3.2-1b":        dict(model=dict(_LLAMA, preset="llama3.2-1b"), seq_length=4096, precision="bf16", batch=32),
    "bert-large":         dict(model=_BERT, seq_length=512, precision="bf16", batch=64),
    "t5-3b":              dict(model=_T5, seq_length=512, decoder_seq_length=128, precision="bf16", batch=16),
    "qwen3-30b-a3b":      dict(model=_QWEN3_MOE, seq_length=4096, precision="bf16", batch=2),
    "deepseek-v2-lite":   dict(model=_DEEPSEEK, seq_length=4096, precision="bf16", batch=4),
}
# processes; micro-batch size as a fraction of the sequences per process; settings
LAYOUTS: dict[str, dict[str, Any]] = {
    "one":         dict(processes=1, micro=1.0, parallel={}),
    # Llama-3-8B on one GPU: estimated at 136 and 130 GB, compared with 185 GB without recomputation or offloading.
    "one-recompute": dict(processes=1, micro=0.5, parallel=dict(recompute_granularity="full")),
    "one-offload": dict(processes=1, micro=0.5, parallel=dict(recompute_granularity="full", recompute_method="block",
                        recompute_num_layers=16), optim=dict(optimizer_cpu_offload=True,
                        optimizer_offload_fraction=0.5)),
    "dp2":         dict(processes=2, micro=0.5, parallel={}),
    "dp2-optim":   dict(processes=2, micro=0.5, parallel=dict(data_parallel_sharding_strategy="optim")),
    "dp2-full":    dict(processes=2, micro=0.5, parallel=dict(data_parallel_sharding_strategy="optim_grads_params")),
    "tp2":         dict(processes=2, micro=1.0, parallel=dict(tensor_model_parallel_size=2)),
    "tp2+sp":      dict(processes=2, micro=1.0, parallel=dict(tensor_model_parallel_size=2, sequence_parallel=True)),
    "cp2":         dict(processes=2, micro=1.0, parallel=dict(context_parallel_size=2)),
    "cp2-ring":    dict(processes=2, micro=1.0, parallel=dict(context_parallel_size=2, cp_comm_type="p2p")),
    "cp2-gather":  dict(processes=2, micro=1.0, parallel=dict(context_parallel_size=2, cp_comm_type="all_gather")),
    "cp2-a2a":     dict(processes=2, micro=1.0, parallel=dict(context_parallel_size=2, cp_comm_type="a2a")),
    "pp2":         dict(processes=2, micro=0.125, parallel=dict(pipeline_model_parallel_size=2)),
    "pp2-v2":      dict(processes=2, micro=0.125, parallel=dict(pipeline_model_parallel_size=2,
                        virtual_pipeline_model_parallel_size=2)),
    # 36 layers, with a head and loss that cost as much as 2.7 layers: rank 0 has 19 layers, and small stages at both
    # ends let the ranks start and finish together. Sizes are the simulator's best for several assumed costs.
    "pp2-v3":      dict(processes=2, micro=0.25, parallel=dict(_IN_FOURS,
                        pipeline_model_parallel_layout="Et|t*4|t*10|t*10|t*8|t*3L")),
    "pp2-v4":      dict(processes=2, micro=0.25, parallel=dict(_IN_FOURS,
                        pipeline_model_parallel_layout="E|t*2|(t*5|)*3t*6|t*9|t*4L")),
    "tp2-dp2":     dict(processes=4, micro=0.5, parallel=dict(tensor_model_parallel_size=2, sequence_parallel=True)),
    "tp2-pp2":     dict(processes=4, micro=0.125, parallel=dict(tensor_model_parallel_size=2, sequence_parallel=True,
                        pipeline_model_parallel_size=2)),
    "tp2-cp2":     dict(processes=4, micro=1.0, parallel=dict(tensor_model_parallel_size=2, sequence_parallel=True,
                        context_parallel_size=2)),
    "tp2-pp2-dp2": dict(processes=8, micro=0.0625, parallel=dict(tensor_model_parallel_size=2, sequence_parallel=True,
                        pipeline_model_parallel_size=2)),
    "tp2-pp2-v4-dp2": dict(processes=8, micro=0.03125, parallel=dict(tensor_model_parallel_size=2,
                        sequence_parallel=True, pipeline_model_parallel_size=2,  # Llama-3-8B: head = 2 layers
                        pipeline_model_parallel_layout="Et*4|(t*4|)*4(t*5|)*2t*2L",
                        data_parallel_sharding_strategy="optim")),
    "tp2-cp2-dp2": dict(processes=8, micro=0.5, parallel=dict(tensor_model_parallel_size=2, sequence_parallel=True,
                        context_parallel_size=2)),
    "dp8-optim":   dict(processes=8, micro=0.0625, parallel=dict(data_parallel_sharding_strategy="optim")),
    "dp8-full":    dict(processes=8, micro=0.0625, parallel=dict(data_parallel_sharding_strategy="optim_grads_params")),
    "ep2":         dict(processes=2, micro=0.25, parallel=dict(expert_model_parallel_size=2,
                        data_parallel_sharding_strategy="optim")),
    "ep4":         dict(processes=4, micro=0.125, parallel=dict(expert_model_parallel_size=4,
                        data_parallel_sharding_strategy="optim")),
    "ep8":         dict(processes=8, micro=0.0625, parallel=dict(expert_model_parallel_size=8,
                        data_parallel_sharding_strategy="optim")),
    "ep8-full":    dict(processes=8, micro=0.0625, parallel=dict(expert_model_parallel_size=8,
                        data_parallel_sharding_strategy="optim_grads_params")),
}
# fmt: on

DEGREES = {  # settings by degree, in layouts such as tp=2,dp=2
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
MULTIPLIED = "tp", "cp", "pp", "dp"  # degrees whose product is the number of processes


def layout_of(name: str) -> dict[str, Any]:
    """Return a layout of LAYOUTS, or one described by degrees and settings of `parallel`.

    For example, `tp=2,pp=2,dp=2,sequence_parallel=true` has eight processes. With a pipeline, a micro-batch is one
    sequence; otherwise it is all sequences of a replica.

    Raises:
        ConfigError: the layout is unknown, or a degree is not a positive integer.
    """
    if name in LAYOUTS:
        return LAYOUTS[name]
    if "=" not in name:
        raise ConfigError(
            f"unknown layout {name!r}{did_you_mean(name, list(LAYOUTS))}; `megalith bench` lists all layouts; "
            "or write degrees, such as tp=2,pp=2,dp=2"
        )
    options = {
        key.strip(): yaml.safe_load(value) for key, _, value in (x.partition("=") for x in name.split(","))
    }
    degrees = {key: value for key, value in options.items() if key in DEGREES or key == "dp"}
    for key, value in degrees.items():
        if type(value) is not int or value < 1:
            raise ConfigError(f"--layout {name}: {key} is {value!r}, but a degree is a positive integer")
    replicas = degrees.get("dp", 1)
    return dict(
        processes=math.prod(degrees.get(key, 1) for key in MULTIPLIED),
        micro=0.0 if degrees.get("pp", 1) > 1 else 1 / replicas,
        parallel={DEGREES.get(key, key): value for key, value in options.items() if key != "dp"},
    )


def lengths(workload: dict[str, Any]) -> dict[str, int]:
    """Return a workload's sequence lengths, as settings of `data`."""
    return {name: workload[name] for name in ("seq_length", "decoder_seq_length") if name in workload}


def run_tree(
    name: str,
    layout: str,
    data: dict[str, Any],
    folder: str,
    *,
    steps: int = 1,
    batch: int | None = None,
    profiles: bool = False,
) -> dict[str, Any]:
    """Return the run file of a workload.

    Args:
        data: settings of `data`.
        batch: sequences per step. Default: the workload's sequences per process times the number of processes.
        profiles: add a step that is profiled.
    """
    workload, layout_settings = WORKLOADS[name], layout_of(layout)
    batch = batch or workload["batch"] * layout_settings["processes"]
    profile = {"profile": True, "profile_step_start": steps + 1, "profile_step_end": steps + 2}
    return {
        "model": workload["model"],
        "parallel": layout_settings["parallel"],
        "data": {**data, **lengths(workload)},
        "optim": {"lr": 1e-4, "lr_decay_style": "constant", **layout_settings.get("optim", {})},
        "checkpoint": {"save_at_end": False},
        "log": {"log_interval": 5, **(profile if profiles else {})},  # a step after the measured ones
        "train": {
            "micro_batch_size": max(1, int(layout_settings["micro"] * batch)),
            "global_batch_size": batch,
            "precision": workload["precision"],
            "train_iters": steps + profiles,
            "eval_iters": 0,
            "output_dir": f"{folder}/run",
        },
    }
