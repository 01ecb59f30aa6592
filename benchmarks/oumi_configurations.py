"""How many of Oumi's training configurations are taken, and for which keys the others are refused.

    python benchmarks/oumi_configurations.py CHECKOUT [--json]

CHECKOUT is a folder with Oumi's repository, or with its unpacked source distribution. Each YAML with a `training.
trainer_type` below it is translated as `megalith oumi train` would; neither models nor data are looked for. A refused
one is counted under each key that a sentence of its error names. Prints the count by trainer and the keys by how often.
"""

import argparse
import json
import re
from collections import Counter
from pathlib import Path

import yaml

from megalith.dialects.oumi.oumi_keys import ALL
from megalith.dialects.oumi.oumi_settings import read_configuration, translate_oumi
from megalith.errors import ConfigError

KEY = re.compile(r"\b(?:model|data|training|peft|fsdp|deepspeed|grpo|megatron)(?:\.\w+|\[\d+\])+")


def trainer_of(path: Path) -> str | None:
    """The trainer_type of a file, where it is a training configuration."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        return None
    training = tree.get("training") if isinstance(tree, dict) else None
    return (
        str(training["trainer_type"]) if isinstance(training, dict) and "trainer_type" in training else None
    )


def keys_in(sentence: str) -> list[str]:
    """The keys of Oumi's that a sentence names first: those that the file would have to change."""
    found = KEY.findall(sentence.partition(": ")[0]) or KEY.findall(sentence)
    return [re.sub(r"\[\d+\]", "[]", key) for key in found[:1]]


def count(checkout: Path) -> dict:
    trainers, taken, refused, whole = Counter(), Counter(), Counter(), {}
    for path in sorted(checkout.rglob("*.yaml")):
        trainer = trainer_of(path)
        if trainer is None:
            continue
        trainers[trainer] += 1
        try:
            run = translate_oumi(read_configuration(path))
            run.config({"preset": "llama3.1-8b"})
        except ConfigError as error:
            sentences = str(error).splitlines()
            names = dict.fromkeys(key for sentence in sentences for key in keys_in(sentence))
            refused.update(list(names) or ["(no key)"])
            whole[str(path.relative_to(checkout))] = sentences
        else:
            taken[trainer] += 1
    return {"files": dict(trainers), "taken": dict(taken), "refused_by_key": dict(refused.most_common()),
            "errors": whole}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--json", action="store_true", help="all of it, with the error of each file")
    args = parser.parse_args()
    found = count(args.checkout)
    if args.json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
        return
    print(f"{len(ALL)} keys are known; taken of the files, by trainer_type:")
    for trainer, files in sorted(found["files"].items(), key=lambda item: -item[1]):
        print(f"  {trainer:14} {found['taken'].get(trainer, 0):4} of {files}")
    print(f"  all            {sum(found['taken'].values()):4} of {sum(found['files'].values())}")
    print("refused, by the key that has to change:")
    for key, times in found["refused_by_key"].items():
        print(f"  {times:4}  {key}")


if __name__ == "__main__":
    main()
