"""A configuration made small: what each field becomes stands on it (`Shrinks`), the sizes in config/small.py."""

from __future__ import annotations

from megalith.config import RunConfig


def shrink(config: RunConfig, steps: int, device: str = "cpu") -> RunConfig:
    """The small run of `steps` steps in fp32, on made-up data and one process; `config.model` has its shape.

    On a GPU attention has no dropout, the one thing that a fused kernel makes different in every layout.
    """
    tree = {section: getattr(config, section).shrunk(config) for section in RunConfig.model_fields}
    tree["train"]["train_iters"] = steps
    tree["runtime"]["device"] = device
    if device != "cpu":
        tree["model"]["attention_dropout"] = 0.0
    return RunConfig.from_tree(tree)
