"""A job in FP8 and what is looked at: besides the parity job's outcome, the scales and amaxes at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from parity_cases import run_config
from torch import Tensor

from megalith.config import RunConfig
from megalith.parity import job
from megalith.parity.job import Outcome

# Sizes that FP8 matmuls take, on two tensor-parallel ranks too.
LLAMA = {"hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 16,
         "num_layers": 4}  # fmt: skip


@dataclass
class Fp8Outcome:
    outcome: Outcome
    history: Tensor | None  # float32 [len, linears, 3]
    scale: Tensor | None  # float32 [linears, 3]


def fp8_config(
    layout: str | None, run: str = "llama", more: dict[str, Any] | None = None, **train: Any
) -> RunConfig:
    model = LLAMA | {"num_layers": 4} | (more or {})
    return run_config(run, layout, "", model=model, train={"fp8_format": "hybrid", **train})


def run_fp8_job(config: RunConfig) -> Fp8Outcome:
    made = []
    begin = job.start

    def start(config: RunConfig):
        made.append(begin(config))
        return made[0]

    job.start = start
    try:
        outcome = job.run_job(config)
    finally:
        job.start = begin
    table = made[0].model.amaxes
    return Fp8Outcome(
        outcome, *(None, None) if table is None else (table.history.clone(), table.scale.clone())
    )
