"""`megalith oumi migrate`: VERL_GRPO or TRL_GRPO → MEGATRON_GRPO, in the file's own lines, comments and order.

Five things change: the trainer, a megatron section, FSDP and DeepSpeed off, the batch in micro-batches, and what was
installed, which is a note. Values are changed in their lines and absent ones added to their sections, so that the
difference is what a person would have typed; the result is read again, and has to be a run.
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
from megalith.dialects.oumi.oumi_keys import ACTOR, ROLLOUT
from megalith.dialects.oumi.oumi_settings import (
    Asked,
    read_configuration,
    read_overrides,
    read_sections,
    resolved,
    translate_oumi,
)
from megalith.errors import ConfigError, install_line

FROM = ("VERL_GRPO", "TRL_GRPO")
PER_DEVICE, ACCUMULATION = "training.per_device_train_batch_size", "training.gradient_accumulation_steps"


def migrated(path: Path, overrides: Sequence[str] = ()) -> tuple[str, str, list[str]]:
    """The new text of a file, the difference, and notes. `overrides` set further keys, such as the layout.

    Raises ConfigError where the file is of another trainer, or where what comes out is refused.
    """
    tree = read_configuration(path)
    read = Asked({})
    read_sections(read, tree)
    trainer = str(read.values.get("training.trainer_type", "")).upper()
    if trainer not in FROM:
        raise ConfigError(
            f"{path} has trainer_type {trainer or 'HF'}; what can be migrated is {' and '.join(FROM)}"
        )
    old = path.read_text(encoding="utf-8")
    changes = _changes(read, trainer)
    changes |= dict(read_overrides(overrides))
    new = re.sub(r"\n\.\.\.\s*$", "", old).rstrip() + "\n"
    if yaml.compose(new, Loader=yaml.SafeLoader).flow_style:  # all of it in braces
        new = yaml.safe_dump(parse_yaml(new), sort_keys=False)
    try:
        for key, value in changes.items():
            new = with_key(new, key, value)
        after = parse_yaml(new)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{path} cannot be changed in its lines ({' '.join(str(error).split())}); write its sections as lines of "
            "their own, without anchors, and migrate it again"
        ) from None
    problems = read.problems  # those of values too that are replaced
    try:
        asked = translate_oumi(resolved(after, after))
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
    layout = asked.model_parallel
    number = f"a multiple of {layout}" if layout > 1 else "any number of"
    takes = f"the layout takes {number} processes"
    if ACCUMULATION in changes:
        takes = (
            f"a job of {layout} {'process' if layout == 1 else 'processes'} has this batch; for one of N times as many "
            "divide gradient_accumulation_steps by N, or multiply megatron.global_batch_size"
        )
    notes = [
        f"dependencies: {install_line('hf')} in the place of verl and Ray",
        f"{takes}; `megalith oumi plan -c FILE --gpus N` prices it, and megatron.tensor_model_parallel_size and "
        "pipeline_model_parallel_size change it",
        *_left_behind(read, trainer),
        *asked.notes,
    ]
    return new, "".join(diff), notes


def _left_behind(read: Asked, trainer: str) -> list[str]:
    """What the old trainer did, by a key or without one, that the new file does not."""
    notes = []
    if read["fsdp.cpu_offload"] or "cpu" in read["deepspeed.offload_optimizer.device"].lower():
        notes.append(
            "the optimizer was on the host by fsdp or deepspeed, which are off now: "
            "megatron.optimizer_config.optimizer_cpu_offload: True has it there again"
        )
    if trainer == "TRL_GRPO":
        notes.append(
            "the batch is that of one GPU before: TRL multiplied it by the number of GPUs; "
            "megatron.global_batch_size is of all"
        )
    elif f"{ACTOR}ppo_mini_batch_size" not in read:
        notes.append(
            "per_device_train_batch_size gave the batch, which Oumi never handed to verl: a step had verl's own 256 "
            "prompts, of 1,024 a rollout batch; megatron.global_batch_size sets as many"
        )
    return notes


def _changes(read: Asked, trainer: str) -> dict[str, Any]:
    """The keys to set, in order."""
    given = read.values
    changes: dict[str, Any] = {"training.trainer_type": "MEGATRON_GRPO"}
    each = given.get(f"{ROLLOUT}n") or given.get("training.grpo.num_generations") or 8
    micro, minis = 1, given.get(f"{ACTOR}ppo_mini_batch_size")
    if trainer == "VERL_GRPO" and minis:
        micro = given.get(f"{ACTOR}ppo_micro_batch_size_per_gpu") or 1
        whole = minis * each
    else:
        whole = read[PER_DEVICE] * read[ACCUMULATION]
        whole = -(-whole // each) * each  # whole groups
    changes[PER_DEVICE] = micro
    if ACCUMULATION in read or not minis:
        changes[ACCUMULATION] = max(1, whole // micro)
    for name, value in (
        ("tensor_model_parallel_size", 1),
        ("pipeline_model_parallel_size", 1),
        ("micro_batch_size", micro),
        ("global_batch_size", whole),
        ("enable_sequence_packing", True),
    ):
        if f"megatron.{name}" not in read:
            changes[f"megatron.{name}"] = value
    changes["fsdp.enable_fsdp"] = False
    changes["deepspeed.enable_deepspeed"] = False
    return changes


def with_key(text: str, key: str, value: Any) -> str:
    """`text` with `section.name` set to a value, in its place where it has one. Raises ConfigError."""
    section, _, name = key.partition(".")
    if "." in name:
        raise ConfigError(f"{key} is deeper than a section; set it in the file")
    written = yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")
    text = _in_lines(text, section)
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    node = _value_of(root, section)
    if node is None:
        return f"{text.rstrip()}\n\n{section}:\n  {name}: {written}\n"
    if not isinstance(node, yaml.MappingNode):  # null
        return _replaced(text, node, f"\n  {name}: {written}")
    if (found := _value_of(node, name)) is not None:
        return _replaced(text, found, written)
    line = f"{' ' * node.value[0][0].start_mark.column}{name}: {written}\n"
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        node = node.value[-1][1] if isinstance(node, yaml.MappingNode) else node.value[-1]
    end = node.end_mark.index
    end = end if text[end - 1] == "\n" else text.index("\n", end) + 1
    return text[:end] + line + text[end:]


def _value_of(mapping: yaml.Node | None, name: str) -> yaml.Node | None:
    """The node of a key. Raises ConfigError where it stands elsewhere in the file."""
    for key, value in mapping.value if isinstance(mapping, yaml.MappingNode) else ():
        if key.value == name:
            if value.start_mark.index < key.end_mark.index:
                raise ConfigError(
                    f"{name} is an alias, *…, of what stands elsewhere; write it out and migrate again"
                )
            return value
    return None


def _replaced(text: str, node: yaml.Node, written: str) -> str:
    """`text` with a value in the place of another."""
    start, end = node.start_mark.index, node.end_mark.index
    before, after = text[:start], "\n" if text[start:end].endswith("\n") else ""
    if written.startswith("\n"):
        before = before.rstrip()
    elif not before[-1].isspace():  # the colon of an empty value
        before += " "
    return before + written + after + text[end:]


def _in_lines(text: str, section: str) -> str:
    """`text` with a section that is in braces written as lines."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    value = _value_of(root, section)
    if not isinstance(value, yaml.MappingNode) or not value.flow_style:
        return text
    inner = yaml.safe_load(text)[section]
    lines = "\n" + textwrap.indent(yaml.safe_dump(inner, sort_keys=False), "  ") if inner else ""
    return f"{text[: value.start_mark.index].rstrip()}{lines.rstrip()}{text[value.end_mark.index :]}"
