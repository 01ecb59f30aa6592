"""`megalith oumi migrate`: convert VERL_GRPO or TRL_GRPO configurations to MEGATRON_GRPO.

The migration sets the trainer, the megatron section and the micro-batches, and disables FSDP and DeepSpeed. Values are
edited in place and missing keys added to their sections, so comments and order are kept. The new file is validated. A
note names the packages to install instead of verl and Ray.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megalith.config.yaml_loader import parse_yaml
from megalith.dialects.oumi.oumi_file import read_configuration, read_overrides, resolve_references
from megalith.dialects.oumi.oumi_keys import ACTOR, ROLLOUT
from megalith.dialects.oumi.oumi_settings import translate_oumi
from megalith.dialects.oumi.oumi_values import OumiKeys, read_sections
from megalith.errors import ConfigError, install_line

SOURCE_TRAINERS = ("VERL_GRPO", "TRL_GRPO")
PER_DEVICE, ACCUMULATION = "training.per_device_train_batch_size", "training.gradient_accumulation_steps"


def migrated(path: Path, overrides: Sequence[str] = ()) -> tuple[str, str, list[str]]:
    """Convert a configuration.

    Args:
        path: YAML file of Oumi's training configuration.
        overrides: further keys to set, such as the layout.

    Returns:
        The new text, the unified diff, and notes.

    Raises:
        ConfigError: the file has another trainer, or the result is not valid.
    """
    tree = read_configuration(path)
    keys = OumiKeys({})
    read_sections(keys, tree)
    trainer = str(keys.values.get("training.trainer_type", "")).upper()
    if trainer not in SOURCE_TRAINERS:
        raise ConfigError(
            f"{path} has trainer_type {trainer or 'HF'}; only {' and '.join(SOURCE_TRAINERS)} can be migrated"
        )
    old = path.read_text(encoding="utf-8")
    changes = _changes(keys, trainer)
    changes |= dict(read_overrides(overrides))
    new = re.sub(r"\n\.\.\.\s*$", "", old).rstrip() + "\n"
    if yaml.compose(new, Loader=yaml.SafeLoader).flow_style:  # the file is one {…}
        new = yaml.safe_dump(parse_yaml(new), sort_keys=False)
    try:
        for key, value in changes.items():
            new = with_key(new, key, value)
        after = parse_yaml(new)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{path} cannot be edited in place ({' '.join(str(error).split())}); write each key on its own line, "
            "without anchors, and migrate it again"
        ) from None
    problems = keys.problems  # includes values that are replaced
    try:
        run = translate_oumi(resolve_references(after, after))
    except ConfigError as error:
        problems = [*problems, *str(error).splitlines()]
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    diff = difflib.unified_diff(
        f"{old.rstrip()}\n".splitlines(keepends=True),
        new.splitlines(keepends=True),
        str(path),
        "MEGATRON_GRPO",
    )
    layout = run.model_parallel
    number = f"a multiple of {layout}" if layout > 1 else "any number of"
    size_note = f"the layout needs {number} processes"
    if ACCUMULATION in changes:
        size_note = (
            f"{layout} {'process has' if layout == 1 else 'processes have'} this batch; with N times as many divide "
            "gradient_accumulation_steps by N, or multiply megatron.global_batch_size"
        )
    notes = [
        f"dependencies: {install_line('hf')} instead of verl and Ray",
        f"{size_note}; estimate it with `megalith oumi plan -c FILE --gpus N`, and change it with "
        "megatron.tensor_model_parallel_size and pipeline_model_parallel_size",
        *_differences(keys, trainer),
        *run.notes,
    ]
    return new, "".join(diff), notes


def _differences(keys: OumiKeys, trainer: str) -> list[str]:
    """Return notes on behavior of the old trainer that the new file does not reproduce."""
    notes = []
    if keys["fsdp.cpu_offload"] or "cpu" in keys["deepspeed.offload_optimizer.device"].lower():
        notes.append(
            "fsdp or deepspeed, now disabled, had offloaded the optimizer: set "
            "megatron.optimizer_config.optimizer_cpu_offload: True to offload it again"
        )
    if trainer == "TRL_GRPO":
        notes.append(
            "TRL multiplied the batch of one GPU by the number of GPUs; megatron.global_batch_size is the batch of all "
            "GPUs, now set to the batch of one"
        )
    elif f"{ACTOR}ppo_mini_batch_size" not in keys:
        notes.append(
            "the batch is per_device_train_batch_size's, which Oumi did not pass to verl: a step had verl's default "
            "of 256 prompts, from rollout batches of 1,024; set megatron.global_batch_size to reproduce that"
        )
    return notes


def _changes(keys: OumiKeys, trainer: str) -> dict[str, Any]:
    """Return the keys to set, in order."""
    values = keys.values
    changes: dict[str, Any] = {"training.trainer_type": "MEGATRON_GRPO"}
    group_size = values.get(f"{ROLLOUT}n") or values.get("training.grpo.num_generations") or 8
    micro_batch, mini_batch = 1, values.get(f"{ACTOR}ppo_mini_batch_size")
    if trainer == "VERL_GRPO" and mini_batch:
        micro_batch = values.get(f"{ACTOR}ppo_micro_batch_size_per_gpu") or 1
        global_batch = mini_batch * group_size
    else:
        global_batch = keys[PER_DEVICE] * keys[ACCUMULATION]
        global_batch = -(-global_batch // group_size) * group_size  # complete groups
    changes[PER_DEVICE] = micro_batch
    if ACCUMULATION in keys or not mini_batch:
        changes[ACCUMULATION] = max(1, global_batch // micro_batch)
    for name, value in (
        ("tensor_model_parallel_size", 1),
        ("pipeline_model_parallel_size", 1),
        ("micro_batch_size", micro_batch),
        ("global_batch_size", global_batch),
        ("enable_sequence_packing", True),
    ):
        if f"megatron.{name}" not in keys:
            changes[f"megatron.{name}"] = value
    changes["fsdp.enable_fsdp"] = False
    changes["deepspeed.enable_deepspeed"] = False
    return changes


def with_key(text: str, key: str, value: Any) -> str:
    """Return YAML `text` with `key` (section.name) set to `value`: replaced in place, or added. Raises ConfigError."""
    section, _, name = key.partition(".")
    if "." in name:
        raise ConfigError(
            f"{key} cannot be set as an override, because only section.key can; write it into the Oumi "
            "configuration, and migrate again"
        )
    written = yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")
    text = _expand_flow_section(text, section)
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    node = _value_of(root, section)
    if node is None:
        return f"{text.rstrip()}\n\n{section}:\n  {name}: {written}\n"
    if not isinstance(node, yaml.MappingNode):  # null
        return _replaced(text, node, f"\n  {name}: {written}")
    if (old := _value_of(node, name)) is not None:
        return _replaced(text, old, written)
    line = f"{' ' * node.value[0][0].start_mark.column}{name}: {written}\n"
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        node = node.value[-1][1] if isinstance(node, yaml.MappingNode) else node.value[-1]
    end = node.end_mark.index
    end = end if text[end - 1] == "\n" else text.index("\n", end) + 1
    return text[:end] + line + text[end:]


def _value_of(mapping: yaml.Node | None, name: str) -> yaml.Node | None:
    """Return the value node of a key, or None. Raises ConfigError for an alias."""
    for key, value in mapping.value if isinstance(mapping, yaml.MappingNode) else ():
        if key.value == name:
            if value.start_mark.index < key.end_mark.index:
                raise ConfigError(f"{name} is a YAML alias, *…; write the value out and migrate again")
            return value
    return None


def _replaced(text: str, node: yaml.Node, written: str) -> str:
    """Return `text` with the value of `node` replaced."""
    start, end = node.start_mark.index, node.end_mark.index
    before, after = text[:start], "\n" if text[start:end].endswith("\n") else ""
    if written.startswith("\n"):
        before = before.rstrip()
    elif not before[-1].isspace():  # directly after the colon of an empty value
        before += " "
    return before + written + after + text[end:]


def _expand_flow_section(text: str, section: str) -> str:
    """Return `text` with a section in {…} expanded to one line per key."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    value = _value_of(root, section)
    if not isinstance(value, yaml.MappingNode) or not value.flow_style:
        return text
    inner = yaml.safe_load(text)[section]
    lines = "\n" + textwrap.indent(yaml.safe_dump(inner, sort_keys=False), "  ") if inner else ""
    return f"{text[: value.start_mark.index].rstrip()}{lines.rstrip()}{text[value.end_mark.index :]}"
