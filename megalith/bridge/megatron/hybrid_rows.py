"""Mapping rules and arguments of Megatron core's other mixers: gated delta nets and Mamba-2.

Megatron has one input projection per mixer, which consists of sub-matrices: the queries of all heads, then all keys,
and so on. Distributed checkpoints store each sub-matrix as a separate tensor, such as `in_proj.weight.query`. Files of
the legacy format have one tensor with a rank's rows of all sub-matrices. The mapping rules use separate sub-matrices
(`split_parts`, `join_parts`).

A gated delta net is the attention of a GPT layer. Mamba-2 is a layer of the hybrid model, whose pattern gives each
layer a single branch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megalith.bridge.delta_rows import QUERY_KEY_VALUE, QUERY_KEY_VALUE_GATE, STRENGTH_STEP
from megalith.bridge.rows import RowRun, Rule, by_group, same
from megalith.bridge.settings import Tree
from megalith.config import ModelConfig
from megalith.config.hybrid import PATTERN_LAYERS
from megalith.errors import ConfigError

DELTA, MAMBA = "decoder.layers.{layer}.self_attention.", "decoder.layers.{layer}.mixer."
PARTS = {
    ".self_attention.in_proj.weight": ("query", "key", "value", "z", "beta", "alpha"),
    ".self_attention.conv1d.weight": ("query", "key", "value"),
    ".mixer.in_proj.weight": ("z", "x", "B", "C", "dt"),
    ".mixer.conv1d.weight": ("x", "B", "C"),
    ".mixer.conv1d.bias": ("x", "B", "C"),
}
"""Ends of the names of a rank file's tensors that have parts → the parts, in order."""
PART = re.compile(r"(.*\.(?:in_proj|conv1d)\.(?:weight|bias))\.(\w+)$")
DELTA_NORM = ".self_attention.out_norm.weight"
DELTA_SIZES = (
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
    "linear_num_value_heads",
)  # fmt: skip
MAMBA_SIZES = ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups")
MAMBA_EPSILON = 1e-5  # of the mixer's norm, whatever the arguments say
STACK_SPEC = ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"]

NEWER_SPEC = ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"]


def _delta_rule(name: str, parts: Sequence[str], order: Callable[[ModelConfig, int], list[RowRun]]) -> Rule:
    return Rule(tuple(f"{DELTA}{name}.{part}" for part in parts), order)


def _mamba_rows(model: ModelConfig) -> tuple[int, int]:
    """Return the number of rows of x, and of B."""
    return model.mamba_heads * model.mamba_head_dim, model.mamba_num_groups * model.mamba_state_dim


def _mamba_inputs(model: ModelConfig) -> list[int]:
    width, state = _mamba_rows(model)
    return [width, width, state, state, model.mamba_heads]


def _mamba_rule(name: str, rows_of: Callable[[ModelConfig], Sequence[int]]) -> Rule:
    names = tuple(f"{MAMBA}{name}.{part}" for part in PARTS[f".mixer.{name}"])
    return Rule(names, by_group(lambda model: model.mamba_num_groups, rows_of))


# fmt: off
OURS = "layers.{layer}.self_attention."
DELTA_TENSORS = {
    OURS + "linear_in.weight":
        _delta_rule("in_proj.weight", ("query", "key", "value", "z"), QUERY_KEY_VALUE_GATE),
    OURS + "linear_gates.weight":
        _delta_rule("in_proj.weight", ("beta", "alpha"), STRENGTH_STEP),
    OURS + "conv.weight":
        _delta_rule("conv1d.weight", ("query", "key", "value"), QUERY_KEY_VALUE),
    OURS + "decay.weight": same(DELTA + "A_log"),
    OURS + "decay.bias": same(DELTA + "dt_bias"),
    OURS + "out_norm.weight": same(DELTA + "out_norm.weight"),
    OURS + "linear_out.weight": same(DELTA + "out_proj.weight"),
}
MAMBA_TENSORS = {
    OURS + "linear_zxbcdt.weight": _mamba_rule("in_proj.weight", _mamba_inputs),
    OURS + "conv_xbc.weight": _mamba_rule("conv1d.weight", lambda model: _mamba_inputs(model)[1:4]),
    OURS + "conv_xbc.bias": _mamba_rule("conv1d.bias", lambda model: _mamba_inputs(model)[1:4]),
    OURS + "time_step.weight": same(MAMBA + "A_log"),
    OURS + "time_step.bias": same(MAMBA + "dt_bias"),
    OURS + "skip.weight": same(MAMBA + "D"),
    OURS + "gated_norm.weight": same(MAMBA + "norm.weight"),
    OURS + "linear_out.weight": same(MAMBA + "out_proj.weight"),
}
# fmt: on


def split_parts(state: Mapping[str, Any], args: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Return the tensors of a rank file, with each mixer matrix split into its sub-matrices.

    Args:
        state: tensors by name.
        args: Megatron's arguments.
        ranks: tensor-parallel ranks.

    Raises:
        ValueError: a tensor's number of rows does not match the arguments.
    """
    result: dict[str, Any] = {}
    for name, value in state.items():
        end = next((end for end in PARTS if name.endswith(end)), None)
        if end is None or not isinstance(value, Tensor):
            result[name] = value
            continue
        sizes = _part_rows(end, args)
        rows = [sizes[part] // ranks for part in PARTS[end]]
        if sum(rows) != len(value):
            raise ValueError(f"{name} has {len(value)} rows, but the saved arguments require {sum(rows)}")
        result |= {f"{name}.{part}": rest for part, rest in zip(PARTS[end], value.split(rows))}
    return result


def _part_rows(end: str, args: Mapping[str, Any]) -> dict[str, int]:
    if end.startswith(".mixer."):
        heads = args.get("mamba_num_heads") or 2 * args["hidden_size"] // args["mamba_head_dim"]
        width, state = heads * args["mamba_head_dim"], args["mamba_num_groups"] * args["mamba_state_dim"]
        return {"z": width, "x": width, "B": state, "C": state, "dt": heads}
    heads = args["linear_num_value_heads"]
    keys = args["linear_num_key_heads"] * args["linear_key_head_dim"]
    values = heads * args["linear_value_head_dim"]
    return {"query": keys, "key": keys, "value": values, "z": values, "beta": heads, "alpha": heads}


def join_parts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Reverse `split_parts`."""
    result: dict[str, Tensor] = {}
    for name, value in state.items():
        match = PART.match(name)
        if match is None:
            result[name] = value
        elif match[1] not in result:
            parts = next(parts for end, parts in PARTS.items() if match[1].endswith(end))
            result[match[1]] = torch.cat([state[f"{match[1]}.{part}"] for part in parts])
    return result


class DeltaLayers:
    """Maps `experimental_attention_variant` gated_delta_net, `linear_attention_freq` and the sizes of these layers."""

    def read(self, args: Mapping[str, Any]) -> Tree:
        variant = args.get("experimental_attention_variant")
        if variant is None:
            return {}
        if variant != "gated_delta_net":
            raise ConfigError(
                f"config.json has experimental_attention_variant {variant!r}; supported: gated_delta_net"
            )
        if not args.get("swiglu"):
            raise ConfigError(
                "config.json has gated delta nets without swiglu; Megatron core then uses an activation other than "
                "SiLU there, which is not supported"
            )
        frequency = args.get("linear_attention_freq")
        fields = {name: args[name] for name in DELTA_SIZES if args.get(name) is not None}
        fields["experimental_attention_variant"] = variant
        return fields if frequency is None else fields | {"linear_attention_freq": frequency}

    def write(self, model: ModelConfig) -> Tree:
        variant = model.experimental_attention_variant
        if variant is None:
            return {"experimental_attention_variant": None}
        if variant != "gated_delta_net":
            raise ConfigError(
                f"experimental_attention_variant {variant}; Megatron core has gated_delta_net in layers with an MLP, "
                "and Mamba-2 only in layers of its own (hybrid_layer_pattern)"
            )
        layers = [int(layer in model.linear_attention_layers) for layer in range(model.num_layers)]
        return {
            "experimental_attention_variant": variant,
            "linear_attention_freq": layers,
            **{name: getattr(model, name) for name in DELTA_SIZES},
        }


class PatternLayers:
    """Maps `hybrid_layer_pattern` (core 0.17 and newer) or `hybrid_override_pattern`, and Mamba-2's sizes."""

    def read(self, args: Mapping[str, Any]) -> Tree:
        newer, older = args.get("hybrid_layer_pattern"), args.get("hybrid_override_pattern")
        pattern = newer or older
        ratios = [args.get(name) for name in ("hybrid_attention_ratio", "hybrid_mlp_ratio")]
        if pattern is None and any(ratios):
            raise ConfigError(
                f"config.json has hybrid_attention_ratio {ratios[0]} and hybrid_mlp_ratio {ratios[1]} without a "
                "pattern of layers; add the pattern that Megatron printed to the arguments, as "
                "hybrid_override_pattern"
            )
        pattern = pattern or "M" * args["num_layers"]
        pattern = pattern.replace("|", "")  # boundaries of pipeline stages
        if others := sorted(set(pattern) - set(PATTERN_LAYERS)):
            raise ConfigError(
                f"config.json has the layer pattern {pattern}, in which {', '.join(map(repr, others))} is not "
                f"supported; supported: {' '.join(PATTERN_LAYERS)}"
            )
        epsilon = "norm_epsilon" if "norm_epsilon" in args else "layernorm_epsilon"
        if "M" in pattern and args.get(epsilon) != MAMBA_EPSILON:
            raise ConfigError(
                f"config.json has {epsilon} {args.get(epsilon)}, but the "
                f"norms of Mamba-2's mixers use {MAMBA_EPSILON} in Megatron core; models in which the two differ are "
                "not supported"
            )
        fields: Tree = {"hybrid_layer_pattern": pattern, "num_layers": len(pattern)}
        if "M" in pattern:
            names = [name for name in (*MAMBA_SIZES, "mamba_num_heads") if args.get(name) is not None]
            fields |= {name: args[name] for name in names}
        if "G" in pattern:
            fields |= {name: args[name] for name in DELTA_SIZES if args.get(name) is not None}
        return fields

    def write(self, model: ModelConfig) -> Tree:
        pattern = model.hybrid_layer_pattern
        if model.mtp_num_layers:
            raise ConfigError(
                f"mtp_num_layers {model.mtp_num_layers}, which is not supported in Megatron's files of models with "
                "hybrid_layer_pattern"
            )
        mamba = {name: getattr(model, name) for name in MAMBA_SIZES} | {"mamba_num_heads": model.mamba_heads}
        delta = {name: getattr(model, name) for name in DELTA_SIZES}
        is_newer = "G" in pattern  # only the later releases have gated delta nets in a pattern
        return {
            "num_layers": len(pattern),
            "is_hybrid_model": True,
            "hybrid_override_pattern": None if is_newer else pattern,
            "hybrid_layer_pattern": pattern if is_newer else None,
            "hybrid_attention_ratio": 0.0,
            "hybrid_mlp_ratio": 0.0,
            "spec": NEWER_SPEC if is_newer else STACK_SPEC,
            **(mamba if "M" in pattern else {}),
            **(delta if "G" in pattern else {}),
        }
