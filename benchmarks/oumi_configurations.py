"""How many of Oumi's training configurations are accepted, and which keys cause the others to be rejected.

    python benchmarks/oumi_configurations.py CHECKOUT [--json] [--train MODEL --chat FILE --pairs FILE]

CHECKOUT is a folder with Oumi's repository, or with its unpacked source distribution, whose chat templates are taken as
those of an installed Oumi. Each YAML with a `training.
trainer_type` below it is translated as `megalith oumi train` would; neither models nor data are looked for. A refused
one is counted under each key that a sentence of its error names. Prints the count by trainer and the keys by how often.

--train: each that is taken is also trained for two steps in this process, shrunk: MODEL, a small folder with a
tokenizer and a chat template, in the place of its model, FILE, JSONL of conversations or of preferences, in that of its
data, rows of 128 tokens, a batch of 1, nothing compiled; all its other keys are its own.
"""

import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

import yaml

from megalith.dialects.oumi.oumi_file import read_configuration
from megalith.dialects.oumi.oumi_keys import ALL_KEYS
from megalith.dialects.oumi.oumi_settings import translate_oumi
from megalith.errors import ConfigError, MegalithError

KEY = re.compile(r"\b(?:model|data|training|peft|fsdp|deepspeed|grpo|megatron)(?:\.\w+|\[\d+\])+")


def trainer_of(path: Path) -> str | None:
    """Return the trainer_type of a file if it is a training configuration."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        return None
    training = tree.get("training") if isinstance(tree, dict) else None
    return (
        str(training["trainer_type"]) if isinstance(training, dict) and "trainer_type" in training else None
    )


def keys_in(sentence: str) -> list[str]:
    """Return the keys of Oumi that an error names first, which the file would have to change."""
    result = KEY.findall(sentence.partition(": ")[0]) or KEY.findall(sentence)
    return [re.sub(r"\[\d+\]", "[]", key) for key in result[:1]]


SHRUNK = {
    "model.model_max_length": 128,
    "model.tokenizer_name": "null",
    "training.per_device_train_batch_size": 1,
    "training.gradient_accumulation_steps": 1,
    "training.max_steps": 2,
    "training.warmup_steps": "null",
    "training.save_steps": 0,
    "training.compile": False,
    "training.enable_wandb": False,
    "training.enable_tensorboard": False,
    "training.eval_strategy": "no",
    "data.validation": "null",
    "training.resume_from_checkpoint": "null",
}


def train_shrunk(path: Path, model: Path, data: Path) -> str | None:
    """Train two steps of a configuration. Return the reason if that fails, otherwise None."""
    from megalith.dialects.oumi.oumi_run import open_run, train_run

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        dataset = f"[{{dataset_name: text_sft, dataset_path: {data}}}]"
        given = SHRUNK | {
            "model.model_name": model,
            "data.train.datasets": dataset,
            "training.output_dir": f"{folder}/run",
        }
        words = [f"--{key}={value}" for key, value in given.items()]
        try:
            asked = translate_oumi(read_configuration(path, words), 1)
            asked.tree.setdefault("log", {})["layout_report"] = False
            result = train_run(open_run(asked, 1))
        except MegalithError as error:
            return str(error).splitlines()[0]
    return None if result.step == 2 else f"it ended after step {result.step}"


def count(
    checkout: Path, model: Path | None = None, chat: Path | None = None, pairs: Path | None = None
) -> dict:
    """Return the figures of a checkout. With a model and data, also train the accepted configurations."""
    sys.path.append(str(checkout.resolve() / "src"))
    trainers, taken, refused, whole, trained, failed = Counter(), Counter(), Counter(), {}, Counter(), {}
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
            if model is not None and trainer in ("TRL_SFT", "TRL_DPO"):
                why = train_shrunk(path, model, chat if trainer == "TRL_SFT" else pairs)
                trained[trainer] += why is None
                failed |= {str(path.relative_to(checkout)): why} if why else {}
    return {"files": dict(trainers), "taken": dict(taken), "refused_by_key": dict(refused.most_common()),
            "errors": whole, "trained": dict(trained), "failed": failed}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--json", action="store_true", help="all of it, with the error of each file")
    parser.add_argument(
        "--train", type=Path, metavar="MODEL", help="train those that are taken, shrunk to this model"
    )
    parser.add_argument("--chat", type=Path, metavar="FILE", help="conversations for TRL_SFT")
    parser.add_argument("--pairs", type=Path, metavar="FILE", help="preferences for TRL_DPO")
    args = parser.parse_args()
    if args.train and not (args.chat and args.pairs):
        parser.error("--train takes --chat and --pairs too")
    result = count(args.checkout, *(path and path.resolve() for path in (args.train, args.chat, args.pairs)))
    if args.json:
        print(json.dumps(result, indent=1, ensure_ascii=False))
        return
    print(f"{len(ALL_KEYS)} keys are known; taken of the files, by trainer_type:")
    for trainer, files in sorted(result["files"].items(), key=lambda item: -item[1]):
        print(f"  {trainer:14} {result['taken'].get(trainer, 0):4} of {files}")
    print(f"  all            {sum(result['taken'].values()):4} of {sum(result['files'].values())}")
    if args.train:
        print(f"trained two steps, shrunk: {result['trained']}; not: {len(result['failed'])}")
        for path, why in result["failed"].items():
            print(f"  {path}: {why}")
    print("refused, by the key that has to change:")
    for key, times in result["refused_by_key"].items():
        print(f"  {times:4}  {key}")


if __name__ == "__main__":
    main()
