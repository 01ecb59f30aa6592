"""Write sums for the GRPO example: `python examples/grpo/make_sums.py data` writes four files.

data/sums_sft.jsonl: prompts with mostly wrong completions, for a short fine-tuning;
data/sums_text.jsonl: the same as plain text, to train a tokenizer on;
data/sums.jsonl: prompts with answers, for GRPO;
data/held_out.jsonl: prompts for evaluation. Below 10 there are only 100 sums, so these also occur in training.
"""

import argparse
import json
import random
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", default="data")
    parser.add_argument("--below", type=int, default=10, help="upper bound of both numbers (exclusive)")
    parser.add_argument("--right", type=float, default=0.4, help="fraction of right completions")
    parser.add_argument("--count", type=int, default=50_000, help="number of completions for fine-tuning")
    args = parser.parse_args()
    rng, out = random.Random(0), Path(args.folder)
    out.mkdir(parents=True, exist_ok=True)

    def sums(count: int):
        for _ in range(count):
            a, b = rng.randrange(args.below), rng.randrange(args.below)
            yield f"{a}+{b}=", a + b

    with open(out / "sums_sft.jsonl", "w") as file, open(out / "sums_text.jsonl", "w") as text:
        for prompt, answer in sums(args.count):
            said = answer if rng.random() < args.right else rng.randrange(2 * args.below)
            file.write(json.dumps({"prompt": prompt, "completion": str(said)}) + "\n")
            text.write(json.dumps({"text": f"{prompt}{said}"}) + "\n")
    for name, count in {"sums": 4_000, "held_out": 100}.items():
        with open(out / f"{name}.jsonl", "w") as file:
            for number, (prompt, answer) in enumerate(sums(count)):
                file.write(json.dumps({"id": f"sum-{number}", "prompt": prompt, "answer": answer}) + "\n")


if __name__ == "__main__":
    main()
