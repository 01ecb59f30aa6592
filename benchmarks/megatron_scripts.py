"""How many of Megatron-LM's own training scripts are accepted, and which flags cause the others to be rejected.

    python benchmarks/megatron_scripts.py CHECKOUT [--all]

Reads the functional tests' model_config.yaml files and the shell scripts below CHECKOUT (a folder with Megatron-LM,
which is not part of this repository), takes their flags and asks what they mean to `megalith pretrain-gpt`. What a
script takes from its environment is filled in: a number where a number is needed, a word elsewhere. A script passes
whole if nothing is refused, unknown or contradictory; files of inference, multimodal, reinforcement-learning, hybrid,
BERT and T5 runs are left out, unless --all. Nothing is trained.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections import Counter
from pathlib import Path

import yaml

from megalith.config import RunConfig
from megalith.config.rules.run_rules import check_training
from megalith.dialects.megatron.flag_kinds import Refused
from megalith.dialects.megatron.flag_table import FLAGS
from megalith.dialects.megatron.other_flags import MODELOPT
from megalith.dialects.megatron.translate import REQUIRED, in_flags, translate
from megalith.errors import ConfigError

KNOWN = FLAGS | MODELOPT
DATA = {"--data-path", "--train-data-path", "--data-args-path", "--per-split-data-args-path", "--mock-data"}
AXES = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
LEFT_OUT = re.compile(
    r"inference|multimodal|mimo|llava|vlm|grpo|/rl/|mamba|hybrid|bert|t5|retro|vision|export|msdp|detxoify"
)
VARIABLE = re.compile(r"\$\{?\w+[^\s\"']*|\$\(.*?\)")
FILLED_IN = {"--train-iters": "10", **dict.fromkeys(REQUIRED, "8"), "--lr": "1e-3", "--vocab-size": "8"}


def flags_of_yaml(path: Path) -> list[str] | None:
    """Return the words of MODEL_ARGS, or None without any."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        return None
    given = tree.get("MODEL_ARGS") if isinstance(tree, dict) else None
    if not isinstance(given, dict):
        return None
    words: list[str] = []
    for flag, value in given.items():
        if value is not False and value is not None:
            words += [flag] if value is True else [flag, *words_of(value)]
    return words


def words_of(value: object) -> list[str]:
    """Return the words of a value in MODEL_ARGS: one, or with brackets several, as Megatron-LM's _run_training.sh."""
    if isinstance(value, list):
        return " ".join(map(str, value)).split()
    text = str(value).strip()
    return text[1:-1].split() if text.startswith("[") and text.endswith("]") else [text]


def flags_of_script(path: Path) -> list[str] | None:
    """Return the words of a script's arrays and command lines, or None if it starts no pretrain_….py."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if not re.search(r"pretrain_\w+\.py", text):
        return None
    words: list[str] = []
    for line in text.splitlines():
        if re.fullmatch(r"\s*(-\w\s*\|\s*)?--[\w-]+\)\s*", line):
            continue  # a label of the script's own options
        line = re.sub(r"(^|\s)#.*", "", line).strip().removesuffix("\\").strip(" ()")
        line = re.sub(r"^[\w]+\+?=[\"(']*\s*", "", line)
        if re.match("[\"']?--", line):
            for word in shlex.split(balanced(line)):
                # A quoted flag with its value, in an array that is expanded without quotes
                words += word.split() if re.match(r"--\S+\s", word) else [word]
    return words


def balanced(line: str) -> str:
    """Return a line of a quoted block without the quote that begins or ends the block."""
    for quote in "\"'":
        if line.count(quote) % 2:
            at = line.rfind(quote)
            line = line[:at] + line[at + 1 :]
    try:
        shlex.split(line)
    except ValueError:
        return line.replace('"', "").replace("'", "").replace("\\", "")
    return line


def subject(problem: str) -> str:
    """Return what a problem is about: its flag, with the value where that is the cause."""
    if problem.startswith(("--", "there is no flag")):
        return re.split(r" is (?!no flag)|; ", problem)[0]
    return problem[:100]


def in_words_of_ours(words: list[str]) -> list[str]:
    """Without the launchers' flags and what stands behind no flag; with a value in the place of each variable."""
    result: list[str] = []
    takes = None  # what the last flag takes, if it may have more words
    for word in words:
        if word.startswith("--"):
            flag = word.partition("=")[0]
            takes = KNOWN[flag].takes if flag in KNOWN else None
            if flag not in LAUNCHERS:
                result.append(VARIABLE.sub("1", word))
            else:
                takes = "switch"
        elif takes != "switch" and result:
            number = takes is not None and takes.startswith(("int", "float"))
            result.append(VARIABLE.sub("8" if number else "word", word))
    return result


LAUNCHERS = ("--nproc_per_node", "--nproc-per-node", "--nnodes", "--node_rank", "--node-rank", "--master_addr",
             "--master_port", "--master-addr", "--master-port", "--rdzv_id", "--rdzv_backend", "--rdzv_endpoint",
             "--log-dir", "--tee", "--redirects",  # torchrun's, then srun's and nsys's
             "--container-image", "--container-mounts", "--container-workdir", "--mpi", "--output",
             "--sample", "--cpuctxsw", "--trace", "--capture-range", "--capture-range-end", "--cuda-graph-trace",
             "--cuda-memory-usage")  # fmt: skip


def problems_of(words: list[str]) -> list[str]:
    """Why a command line, or the run that it means, does not pass; what is missing is filled in first."""
    known = {word.partition("=")[0] for word in words}
    for flag, value in FILLED_IN.items():
        if flag not in known and not (flag == "--train-iters" and "--train-samples" in known):
            words = [*words, flag, value]
    if not known & DATA:
        words = [*words, "--mock-data"]
    try:
        translated = translate(words)
        sizes = translated.tree.get("parallel", {})
        tp, pp, cp, ep, etp = (sizes.get(f"{name}_parallel_size") or 1 for name in AXES)
        processes = pp * math.lcm(tp * cp, ep * etp)  # the fewest that the layout takes
        tree = translate(words, processes).tree
        tree["model"].setdefault("vocab_size", 50257)  # the tokenizer's, where there is one
        with in_flags():
            check_training(RunConfig.from_tree(tree), processes)
    except ConfigError as error:
        return str(error).split("\n")
    return []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument(
        "--all", action="store_true", help="also inference, multimodal, RL, hybrid, BERT and T5 files"
    )
    options = parser.parse_args()
    readers = {"model_config.yaml": flags_of_yaml, "*.sh": flags_of_script}
    whole, files, uses, refused, reasons = 0, 0, 0, Counter[str](), Counter[str]()
    for pattern, read in readers.items():
        for path in sorted(options.checkout.rglob(pattern)):
            if not options.all and LEFT_OUT.search(str(path.relative_to(options.checkout)).lower()):
                continue
            words = read(path)
            if not words:
                continue
            flags = {word.partition("=")[0] for word in words if word.startswith("--")} - {*LAUNCHERS}
            files, uses = files + 1, uses + len(flags)
            refused.update(flag for flag in flags if flag not in KNOWN or isinstance(KNOWN[flag], Refused))
            told = problems_of(in_words_of_ours(words))
            whole += not told
            reasons.update(map(subject, told))
    print(
        f"{whole} of {files} scripts pass whole; of {uses:,} uses of flags {sum(refused.values())} are of refused or "
        "unknown ones"
    )
    for name, count in reasons.most_common():
        print(f"{count:5d}  {name}")


if __name__ == "__main__":
    main()
