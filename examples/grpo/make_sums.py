"""Sums for the example of GRPO: `python examples/grpo/make_sums.py data` writes two files.

data/sums_sft.jsonl: prompts with completions, of which a half are wrong, for a short fine-tuning;
data/sums.jsonl: prompts with answers, for GRPO.
"""

import json
import random
import sys
from pathlib import Path

MOST = 10  # both numbers are below


def main(folder: str, seed: int = 0) -> None:
    rng, out = random.Random(seed), Path(folder)
    out.mkdir(parents=True, exist_ok=True)

    def sums(count: int):
        for _ in range(count):
            a, b = rng.randrange(MOST), rng.randrange(MOST)
            yield f"{a}+{b}=", a + b

    with open(out / "sums_sft.jsonl", "w") as file:
        for prompt, answer in sums(8_000):
            said = answer if rng.random() < 0.5 else rng.randrange(2 * MOST)
            file.write(json.dumps({"prompt": prompt, "completion": str(said)}) + "\n")
    with open(out / "sums.jsonl", "w") as file:
        for number, (prompt, answer) in enumerate(sums(2_000)):
            file.write(json.dumps({"id": f"sum-{number}", "prompt": prompt, "answer": answer}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "data")
