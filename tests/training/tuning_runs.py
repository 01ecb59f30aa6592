"""Small fine-tuning runs: records of tokens, and the settings of two steps from a tiny Llama of transformers."""

import json
import random
from collections.abc import Callable
from pathlib import Path

from models.reference import CASES, random_reference

from megalith.config import RunConfig

VOCAB = 151


def token_samples(count: int, seed: int, length_of: Callable[[int, random.Random], int]) -> list[dict]:
    """Samples with a mask of learned tokens; the first one has a single learned token, its last."""
    rng, records = random.Random(seed), []
    for number in range(count):
        length = length_of(number, rng)
        ids = [rng.randrange(VOCAB) for _ in range(length)]
        mask = [0] * (length - 1) + [1] if number == 0 else [int(rng.random() < 0.6) for _ in ids]
        records.append({"input_ids": ids, "completion_mask": [*mask[:-1], 1]})
    return records


def token_pairs(count: int, least: int = 0) -> list[dict]:
    """Pairs of prompts of 1 to 8 tokens, from `least` up, with answers of 1 to 9: the first pair has answers of one
    token, the second fills rows of 32."""
    rng = random.Random(3)

    def ids(length: int) -> list[int]:
        return [rng.randrange(least, VOCAB) for _ in range(length)]

    sizes = [(2, 1, 1), (12, 20, 20)]
    sizes += [(rng.randrange(1, 9), rng.randrange(1, 10), rng.randrange(1, 10)) for _ in range(count - 2)]
    return [{"prompt_ids": ids(a), "chosen_ids": ids(b), "rejected_ids": ids(c)} for a, b, c in sizes]


def tuning_tree(folder: Path, files: dict[str, list[dict]], seq: int, micro: int, batch: int) -> dict:
    """Write the model and the records into the folder, and return the run's settings without a method's section.

    `files` has the records by setting of `data`, such as train_data_path.
    """
    random_reference(CASES["llama"][0]()).save_pretrained(folder / "base")
    data = {"seq_length": seq, "num_workers": 0}
    for setting, records in files.items():
        path = folder / f"{setting}.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in records))
        data[setting] = str(path)
    return {
        "model": {"init_from": str(folder / "base"), "hidden_dropout": 0.0, "attention_dropout": 0.0},
        "data": data,
        "optim": {"lr": 1e-3, "lr_warmup_iters": 0},
        "train": {"train_iters": 2, "micro_batch_size": micro, "global_batch_size": batch,
                  "output_dir": str(folder / "run")},
    }  # fmt: skip


def config_of(tree: dict, **sections) -> RunConfig:
    """Return the run's configuration, with further settings by section."""
    return RunConfig.from_tree(tree | {name: tree.get(name, {}) | more for name, more in sections.items()})
