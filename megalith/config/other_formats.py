"""Whose configuration a file is that is none of ours, and what takes it: a command, or the page with its names.

A format is known by keys at the top of its files that no run file has together, or by how the file's name ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

OWN = "write its values into a run file of your own"
# (system, keys that its files have at the top, what to do); `{file}` is the file.
FORMATS: tuple[tuple[str, str, str], ...] = (
    ("Oumi", "training model", "run megalith oumi train -c {file}"),
    ("Accelerate's launcher", "compute_environment", "run megalith accelerate launch --config_file {file} SCRIPT.py"),
    ("verl", "actor_rollout_ref", f"{OWN} for megalith grpo, whose section rl takes verl's names: docs/grpo.md"),
    ("NeMo-RL", "policy cluster", f"{OWN} for megalith grpo, whose section rl takes NeMo-RL's names: docs/grpo.md"),
    ("Axolotl", "base_model datasets",
     f"{OWN} for megalith sft (base_model is model.init_from, datasets data.data_path): docs/sft.md"),
    ("TRL's or LLaMA-Factory's commands", "model_name_or_path",
     f"{OWN} for megalith sft, dpo or grpo (model_name_or_path is model.init_from): docs/sft.md; a script with a "
     "trainer of transformers' is run by megalith accelerate launch SCRIPT.py"),
    ("NeMo", "trainer model", f"{OWN} for megalith train or sft: docs/configuration.md; a .nemo checkpoint is no model "
     "folder, so have NeMo export it to Hugging Face's form"),
    ("Megatron-LM", "MODEL_ARGS", "give its flags to megalith pretrain-gpt: docs/from_megatron.md"),
    ("Megatron-LM", "language_model model_parallel",
     "give the flags that it stands for to megalith pretrain-gpt: docs/from_megatron.md"),
    ("DeepSpeed", "zero_optimization",
     f"{OWN}; its stages are parallel.data_parallel_sharding_strategy: docs/parallelism.md"),
    ("Hugging Face, a model's", "architectures", "name its folder as model.init_from in a run file"),
)  # fmt: skip
ENDINGS = {
    ".toml": f"is TOML, as torchtitan's configurations are; {OWN}: docs/first_hour/torchtitan.md has the names",
    ".sh": "is a script; run it with megalith megatron run {file} where it is Megatron-LM's",
    ".py": "is a script; run it with megalith accelerate launch {file} where it trains by Accelerate or the Trainer",
}


def by_ending(path: str | Path) -> str:
    """The sentence for a file whose name ends as no run file's does; "" for any other."""
    ending = ENDINGS.get(Path(path).suffix)
    return f"{path} {ending.format(file=path)}" if ending else ""


def by_content(path: str | Path, content: Mapping[Any, Any]) -> str:
    """The sentence for a file that holds another system's configuration; "" for any other."""
    for system, keys, what_to_do in FORMATS:
        if content.keys() >= set(keys.split()):
            return f"{path} is a configuration of {system}; {what_to_do.format(file=path)}"
    return ""
