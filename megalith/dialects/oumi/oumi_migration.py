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

from megalith.config.run import parse_yaml
from megalith.dialects.oumi.oumi_settings import read_configuration, read_overrides, resolved, translate_oumi
from megalith.errors import ConfigError, install_line

FROM = ("VERL_GRPO", "TRL_GRPO")


def migrated(path: Path, overrides: Sequence[str] = ()) -> tuple[str, str, list[str]]:
    """The new text of a file, the difference, and notes. `overrides` set further keys, such as the layout.

    Raises ConfigError where the file is of another trainer, or where what comes out is refused.
    """
    tree = read_configuration(path)
    training = tree.get("training") or {}
    trainer = str(training.get("trainer_type", "")).upper()
    if trainer not in FROM:
        raise ConfigError(
            f"{path} has trainer_type {trainer or 'HF'}; what can be migrated is {' and '.join(FROM)}"
        )
    old = path.read_text(encoding="utf-8")
    changes = _changes(tree, trainer)
    changes |= dict(read_overrides(overrides))
    new = old if old.endswith("\n") else old + "\n"
    for key, value in changes.items():
        new = with_key(new, key, value)
    try:
        after = parse_yaml(new)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{path} cannot be changed in its lines ({' '.join(str(error).split())}); write its sections as lines of "
            "their own, without anchors, and migrate it again"
        ) from None
    asked = translate_oumi(resolved(after, after))
    diff = difflib.unified_diff(
        old.splitlines(keepends=True), new.splitlines(keepends=True), str(path), "MEGATRON_GRPO"
    )
    layout = asked.model_parallel
    number = f"a multiple of {layout}" if layout > 1 else "any number of"
    takes = f"the layout takes {number} processes"
    if _at(after, "training", "gradient_accumulation_steps") is not None:
        takes = (
            f"a job of {layout} {'process' if layout == 1 else 'processes'} has this batch; for one of N times as many "
            "divide gradient_accumulation_steps by N, or multiply megatron.global_batch_size"
        )
    notes = [
        f"dependencies: {install_line('hf')} in the place of verl and Ray",
        f"{takes}; `megalith oumi plan -c FILE --gpus N` prices it, and megatron.tensor_model_parallel_size and "
        "pipeline_model_parallel_size change it",
        *_left_behind(tree, trainer),
        *asked.notes,
    ]
    return new, "".join(diff), notes


def _left_behind(tree: dict[str, Any], trainer: str) -> list[str]:
    """What the old trainer did, by a key or without one, that the new file does not."""
    notes = []
    if (
        _at(tree, "fsdp", "cpu_offload")
        or "cpu" in str(_at(tree, "deepspeed", "offload_optimizer", "device")).lower()
    ):
        notes.append(
            "the optimizer was on the host by fsdp or deepspeed, which are off now: "
            "megatron.optimizer_config.optimizer_cpu_offload: True has it there again"
        )
    if trainer == "TRL_GRPO":
        notes.append(
            "the batch is that of one GPU before: TRL multiplied it by the number of GPUs; "
            "megatron.global_batch_size is of all"
        )
    elif (
        _at(tree, "training", "verl_config_overrides", "actor_rollout_ref", "actor", "ppo_mini_batch_size")
        is None
    ):
        notes.append(
            "per_device_train_batch_size gave the batch, which Oumi never handed to verl: a step had verl's own 256 "
            "prompts, of 1,024 a rollout batch; megatron.global_batch_size sets as many"
        )
    return notes


def _changes(tree: dict[str, Any], trainer: str) -> dict[str, Any]:
    """The keys to set, in order."""
    training, verl = (
        tree.get("training") or {},
        (tree.get("training") or {}).get("verl_config_overrides") or {},
    )
    changes: dict[str, Any] = {"training.trainer_type": "MEGATRON_GRPO"}
    each = _at(verl, "actor_rollout_ref", "rollout", "n") or _at(training, "grpo", "num_generations") or 8
    micro, minis = 1, _at(verl, "actor_rollout_ref", "actor", "ppo_mini_batch_size")
    if trainer == "VERL_GRPO" and minis:
        micro = _at(verl, "actor_rollout_ref", "actor", "ppo_micro_batch_size_per_gpu") or 1
        whole = minis * each
    else:
        device, steps = (
            training.get(name) for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
        )
        whole = (device or 8) * (steps or 1)
        whole = -(-whole // each) * each  # whole groups
    changes["training.per_device_train_batch_size"] = micro
    if "gradient_accumulation_steps" in training or not minis:
        changes["training.gradient_accumulation_steps"] = max(1, whole // micro)
    for name, value in (
        ("tensor_model_parallel_size", 1),
        ("pipeline_model_parallel_size", 1),
        ("micro_batch_size", micro),
        ("global_batch_size", whole),
        ("enable_sequence_packing", True),
    ):
        if _at(tree, "megatron", name) is None:
            changes[f"megatron.{name}"] = value
    changes["fsdp.enable_fsdp"] = False
    changes["deepspeed.enable_deepspeed"] = False
    return changes


def _at(tree: Any, *names: str) -> Any:
    for name in names:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def with_key(text: str, key: str, value: Any) -> str:
    """`text` with `section.name` set to a value, in its line where it has one."""
    section, _, name = key.partition(".")
    if "." in name:
        raise ConfigError(f"{key} is deeper than a section; set it in the file")
    written = yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")
    lines = _in_lines(text, section).splitlines(keepends=True)
    start = next((n for n, line in enumerate(lines) if re.match(rf"{_key(section)}(#.*)?$", line)), None)
    if start is None:
        return f"{text.rstrip()}\n\n{section}:\n  {name}: {written}\n"
    end, last, indent = start + 1, start, "  "
    found = None
    while end < len(lines) and (not lines[end].strip() or lines[end][0] in " \t#-"):
        if lines[end].strip() and lines[end][0] in " \t" and not lines[end].lstrip().startswith("#"):
            if last == start:
                indent = lines[end][: len(lines[end]) - len(lines[end].lstrip())]
            last = end
            if re.match(rf"{indent}{_key(name)}", lines[end]):
                found = end
        end += 1
    if found is not None:
        comment = re.search(r"\s+#.*$", lines[found].rstrip("\n"))
        lines[found] = f"{indent}{name}: {written}{comment[0] if comment else ''}\n"
    else:
        lines.insert(last + 1, f"{indent}{name}: {written}\n")
    return "".join(lines)


def _key(name: str) -> str:
    """The pattern of a key as YAML writes it, in quotes too."""
    return rf"(['\"]?){re.escape(name)}\1\s*:\s*"


def _in_lines(text: str, section: str) -> str:
    """`text` with a section that is in braces written as lines."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        if key.value == section and isinstance(value, yaml.MappingNode) and value.flow_style:
            inner = yaml.safe_load(text)[section]
            lines = "\n" + textwrap.indent(yaml.safe_dump(inner, sort_keys=False), "  ") if inner else ""
            start, end = value.start_mark.index, value.end_mark.index
            return f"{text[:start].rstrip()}{lines.rstrip()}{text[end:]}"
    return text
