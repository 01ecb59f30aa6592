"""Plot the reward over a run's steps: `python examples/grpo/plot_reward.py runs/sums_grpo` writes reward.png there."""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main(folder: str) -> None:
    metrics = Path(folder) / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.is_file() else []
    if not lines:
        sys.exit(
            f"error: {metrics} is missing or empty; pass the output folder of a GRPO run that has finished a step"
        )
    steps = [json.loads(line) for line in lines]
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot([step["step"] for step in steps], [step["rewards_mean"] for step in steps])
    axes.set(xlabel="step", ylabel="mean reward", title=Path(folder).name)
    axes.grid(alpha=0.3)
    figure.savefig(Path(folder) / "reward.png", dpi=150)
    first, last = (sum(s["rewards_mean"] for s in some) / len(some) for some in (steps[:5], steps[-5:]))
    print(f"mean reward {first:.3f} over the first five steps, {last:.3f} over the last; {folder}/reward.png")


if __name__ == "__main__":
    main(sys.argv[1])
