"""docs/sizes.md: the rows of common size guides, with the planner's estimates.

`python -m benchmarks.sizes` prints the page; `make sizes` writes it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from megalith.config import RunConfig
from megalith.errors import ConfigError
from megalith.planner.plan_result import PlannedLayout
from megalith.planner.rates import rates_of
from megalith.planner.search import plan, planned, usable_bytes

A100, H100, H200 = "A100-80GB", "H100", "H200"
GPT2 = "Megalith's benchmark"
OPTIM = {"data_parallel_sharding_strategy": "optim"}
GRADS = {"data_parallel_sharding_strategy": "optim_grads"}
FULL = {"recompute_granularity": "full"}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
HOST = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
ENDS = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}


class SizeRow(NamedTuple):
    guide: str
    label: str
    preset: str
    device: str
    gpus: int
    tp: int
    pp: int
    cp: int
    micro_batches: int
    seq: int
    parallel: dict[str, Any] = {}
    optim: dict[str, Any] = {}


# fmt: off
ROWS = [
    SizeRow("Accelerate's guide", "7B", "llama2-7b", A100, 8, 1, 1, 1, 1, 2048),
    SizeRow("Accelerate's guide", "13B", "llama2-13b", A100, 8, 2, 1, 1, 1, 2048),
    SizeRow("Accelerate's guide", "20B", "gpt-neox-20b", A100, 16, 4, 1, 1, 1, 2048),
    SizeRow("Accelerate's guide", "40B", "gpt3-39b", A100, 32, 4, 2, 1, 4, 2048),
    SizeRow("Accelerate's guide", "70B", "llama2-70b", A100, 64, 8, 2, 1, 8, 2048),
    SizeRow("Accelerate's guide", "175B", "gpt3-175b", A100, 128, 8, 4, 1, 16, 2048),
    SizeRow("Megatron's guide", "7B", "llama2-7b", A100, 8, 1, 1, 1, 4, 4096),
    SizeRow("Megatron's guide", "13B", "llama2-13b", A100, 8, 2, 1, 1, 4, 4096),
    SizeRow("Megatron's guide", "70B", "llama2-70b", A100, 32, 4, 2, 1, 8, 4096),
    SizeRow("Megatron's guide", "175B", "gpt3-175b", A100, 128, 8, 4, 1, 16, 2048),
    SizeRow("Megatron's guide", "405B", "llama3-405b", H100, 256, 8, 8, 1, 16, 4096, ENDS),
    SizeRow("Oumi's guide", "70B", "llama3-70b", A100, 16, 8, 2, 1, 8, 8192, SELECTIVE),
    SizeRow("Oumi's guide", "64 GPUs", "llama3-70b", A100, 64, 8, 4, 2, 16, 8192),
    SizeRow("Oumi's guide", "128 GPUs", "llama3-70b", A100, 128, 8, 8, 2, 32, 8192),
    SizeRow("Oumi's guide", "405B", "llama3-405b", H100, 256, 8, 16, 2, 32, 8192,
            dict(ENDS, **FULL, virtual_pipeline_model_parallel_size=2), HOST),
    SizeRow(GPT2, "one GPU", "gpt2-large", H200, 1, 1, 1, 1, 1, 1024),
    SizeRow(GPT2, "DP2", "gpt2-large", H200, 2, 1, 1, 1, 1, 1024),
    SizeRow(GPT2, "TP2 + SP", "gpt2-large", H200, 2, 2, 1, 1, 1, 1024),
    SizeRow(GPT2, "CP2", "gpt2-large", H200, 2, 1, 1, 2, 1, 1024),
    SizeRow(GPT2, "PP2", "gpt2-large", H200, 2, 1, 2, 1, 1, 1024),
]
# fmt: on
MICRO_BATCHES = (4, 8, 16, 32, 64)
BATCH = 512  # sequences per step, of the thresholds' table
NEARER = [  # what is added until a row fits, from the cheapest on
    (OPTIM, {}),
    (OPTIM | FULL, {}),
    (GRADS | FULL, {}),
    (OPTIM | FULL, HOST),
    (GRADS | FULL, HOST),
]


def layout_of(row: SizeRow, parallel: dict[str, Any], optim: dict[str, Any]) -> PlannedLayout:
    """Return the layout of a row with further settings."""
    return planned(config_of(row, parallel, optim), row.gpus, rates_of(row.device))


def config_of(row: SizeRow, parallel: dict[str, Any], optim: dict[str, Any]) -> RunConfig:
    dp = row.gpus // (row.tp * row.pp * row.cp)
    micro = {GPT2: 32 * row.tp * row.cp * row.pp}.get(row.guide, 1)
    heads = {"num_attention_heads": 16} if row.preset == "gpt2-large" else {}
    model = dict(preset=row.preset, hidden_dropout=0.0, attention_dropout=0.0, **heads)
    sizes = dict(
        tensor_model_parallel_size=row.tp, pipeline_model_parallel_size=row.pp, context_parallel_size=row.cp,
        sequence_parallel=row.tp > 1,
    )  # fmt: skip
    model["max_position_embeddings"] = max(row.seq, 2048)
    return RunConfig.from_tree(
        {
            "model": model,
            "data": dict(mock=True, seq_length=row.seq),
            "parallel": sizes | row.parallel | parallel,
            "optim": dict(lr=1e-4) | row.optim | optim,
            "train": dict(train_iters=1, precision="bf16", micro_batch_size=micro,
                          global_batch_size=micro * dp * row.micro_batches),
        }
    )  # fmt: skip


def line(row: SizeRow) -> str:
    """Return a row of the page."""
    sizes = f"{row.tp} / {row.pp} / {row.cp} / {row.gpus // (row.tp * row.pp * row.cp)}"
    cells = [
        row.guide,
        row.label,
        f"`{row.preset}`",
        f"{row.gpus} × {row.device}",
        sizes,
        str(row.micro_batches),
        f"{row.seq:,}",
    ]
    try:
        layout = layout_of(row, {}, {})
    except ConfigError as error:
        return "| " + " | ".join([*cells, f"refused: {error}", "", ""]) + " |"
    verdict = f"fits, {layout.bytes / 1e9:.1f} GB" if layout.fits else f"**no**, {layout.bytes / 1e9:.1f} GB"
    return (
        "| "
        + " | ".join([*cells, verdict, f"{1e3 * layout.time.seconds:,.0f}", _nearest(row, layout)])
        + " |"
    )


def _nearest(row: SizeRow, layout: PlannedLayout) -> str:
    if layout.fits:
        return ""
    for parallel, optim in NEARER:
        if row.gpus == row.tp * row.pp * row.cp and parallel != OPTIM | FULL:
            continue
        try:
            other = layout_of(row, parallel, optim)
        except ConfigError:
            continue
        if other.fits:
            added = [f"`{value}`" for name, value in parallel.items() if name != "recompute_granularity"]
            added += ["full recomputation"] * ("recompute_granularity" in parallel)
            added += ["optimizer state on the host"] * bool(optim)
            return f"{', '.join(added)}: {other.bytes / 1e9:.1f} GB, {1e3 * other.time.seconds:,.0f} ms"
    return "none in this layout"


def threshold_line(row: SizeRow) -> str:
    """Return a row with the planner's layout and the published one, whose optimizer state is sharded."""
    config = config_of(row, OPTIM, {}).with_settings({"train.global_batch_size": BATCH})
    result = plan(config, row.gpus, rates=rates_of(row.device), top=1).best[0]
    own = planned(config, row.gpus, rates_of(row.device))
    cells = [row.label, str(row.gpus), f"{row.tp} / {row.pp}", f"{1e3 * own.time.seconds:,.0f}"]
    name = result.name.replace("gathered again", "inputs re-gathered in backward")
    cells += [f"{name}: {result.bytes / 1e9:.1f} GB", f"{1e3 * result.time.seconds:,.0f}"]
    return f"| {' | '.join(cells)} |"


def micro_batch_line(row: SizeRow, micro_batches: int) -> str:
    """Return a row with a pipeline's bubble and speed with `micro_batches` micro-batches of one sequence."""
    layout = layout_of(row._replace(micro_batches=micro_batches), OPTIM, {})
    speed = f"{layout.speed.tokens_per_second_per_device:,.0f}"
    return f"| {micro_batches} | {layout.time.bubble:.1%} | {speed} | {layout.bytes / 1e9:.1f} |"


TEXT = """# Which model on which GPUs

`make sizes` writes this page from the planner's estimates. They are for bf16 and AdamW, with sequence parallelism if TP
is above 1, one sequence per micro-batch (32 per GPU in the rows of GPT-2-large, which are layouts of
[Megalith's benchmark](performance.md#gpt-2-large)), and the choices of `auto`.

Usable memory per GPU: {rooms}. Rates of
A100 and H100 are the H200's measured rates, scaled by the ratio of the datasheet values. Each row uses its guide's
settings: if the guide does not mention sharding of the optimizer state, the state is not sharded. The last column gives
the values of `data_parallel_sharding_strategy`, recomputation and offloading that make the layout fit, and the
memory and time that it then needs.

| Guide | Model or job | Preset | GPUs | TP/PP/CP/DP | Micro-batches | Sequence | Fits | ms per step | Change needed |
|---|---|---|---|---|---|---|---|---|---|
{lines}

The guides leave some points open. This page interprets them as follows:

- Without `use_distributed_optimizer`, every replica has the full optimizer state, and few rows fit in 80 GB. The guides
  imply `data_parallel_sharding_strategy: optim`.
- Llama-3-405B's 126 layers can be divided evenly over 8 or 16 stages with `account_for_embedding_in_pipeline_split` and
  `account_for_loss_in_pipeline_split`, which count the embedding and the loss as one layer each.
- `virtual_pipeline_model_parallel_size: 32` with 16 stages means 32 chunks in total in Oumi's guide. That is 2 per rank
  in Megalith.
- GPUs = TP × PP × CP × DP. Experts are distributed over the same ranks and do not add any.

## The guides' thresholds

The guides recommend these thresholds: TP 2 above 7B, 4 from 20B, 8 from 70B; PP 2 from 20B, 4 from 70B, 8 from 175B;
4 to 16 micro-batches. Accelerate's 20B, 70B and 175B rows use less PP than that. The table compares Accelerate's rows,
with `optim` and {batch} sequences per step, with the best layout that the planner finds. The planner chooses less
tensor parallelism at 20B and from 70B on, and virtual pipeline stages (VP). "Inputs re-gathered in backward" means
`save_gathered_inputs: false`:

| Model | GPUs | Guide's TP/PP | ms per step | Planner's layout | ms per step |
|---|---|---|---|---|---|
{thresholds}

More micro-batches make a pipeline's bubble smaller: it takes (PP − 1) / (VP · micro-batches) of the time of the
pipeline's work. Beyond PP micro-batches, memory stays constant. The table shows Accelerate's 175B with TP8 PP4 DP4 and
`optim`. The bubble is given as a share of the whole step, which also contains the bubble itself and work outside the
pipeline, such as the optimizer step:

| Micro-batches | Bubble, share of the step | tokens/s/GPU | GB |
|---|---|---|---|
{micro_batches}

For your own job, run `megalith plan PRESET --gpus N --explain`.
"""


def page() -> str:
    """Return the whole page."""
    rooms = ", ".join(f"{usable_bytes(rates_of(name)) / 1e9:.0f} GB ({name})" for name in (A100, H100, H200))
    return TEXT.format(
        lines="\n".join(map(line, ROWS)),
        rooms=rooms,
        batch=BATCH,
        thresholds="\n".join(map(threshold_line, ROWS[:6])),
        micro_batches="\n".join(micro_batch_line(ROWS[5], count) for count in MICRO_BATCHES),
    )


if __name__ == "__main__":
    print(page(), end="")
