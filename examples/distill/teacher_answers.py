"""Turn completions of `megalith rollout --output FILE` into fine-tuning data with the same tokens.

python examples/distill/teacher_answers.py data/teacher_rollouts.jsonl data/teacher_answers.jsonl
"""

import argparse
import json
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rollouts", type=Path)
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    _, *groups = map(json.loads, args.rollouts.read_text().splitlines())
    with open(args.output, "w") as file:
        for group in groups:
            for sample in group["samples"]:
                prompt, answer = group["prompt_ids"], sample["completion_ids"]
                record = {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
