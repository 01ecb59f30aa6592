"""A run of GPT-2 in a layout, whose settings the rules look at."""

from megalith.config import RunConfig


def run(parallel: dict, micro_batch_size: int = 2, **model) -> RunConfig:
    return RunConfig.from_tree(
        {
            "model": {"preset": "gpt2", **model},
            "parallel": parallel,
            "data": {"mock": True, "seq_length": 64},
            "optim": {"lr": 1e-3},
            "train": {"micro_batch_size": micro_batch_size, "global_batch_size": 24, "train_iters": 1},
        }
    )
