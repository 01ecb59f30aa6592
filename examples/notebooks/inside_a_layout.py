# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Look inside a layout
#
# A layout divides a model and its batch over ranks. This notebook shows, without any GPU, which rank has which
# layers, how much memory each stage takes, what is sent, and when pipeline ranks wait. The cells call `megalith`
# commands; in a shell, write them as usual. [Reading a run's layout](../../docs/parallelism/layout.md) explains
# the tables.

# %%
from pathlib import Path

from megalith.cli.main import main

# %% [markdown]
# **The run.** Sixteen GPUs: tensor parallelism 2 with sequence parallelism, pipeline parallelism 2, context
# parallelism 2. The rest is data parallelism 2.

# %%
Path("layout.yaml").write_text(
    """
model: {preset: gpt2-large}
data: {mock: true, seq_length: 1024}
parallel:
  tensor_model_parallel_size: 2
  sequence_parallel: true
  pipeline_model_parallel_size: 2
  context_parallel_size: 2
optim: {lr: 6.0e-4}
train: {train_iters: 10, micro_batch_size: 4, global_batch_size: 64, precision: bf16}
"""
)

# %% [markdown]
# **Ranks, stages and bytes.** A dry run prints what training would print at its start.

# %%
assert main(["train", "layout.yaml", "--dry-run", "--world-size", "16", "--device", "H100"]) == 0

# %% [markdown]
# **The pipeline.** Time goes from left to right. A digit is the forward pass of that micro-batch, a letter a backward
# pass, and a dot is waiting: the bubble. With two chunks of layers per rank, the bubble is about half as long.

# %%
assert main(["pipeline", "show", "--stages", "2", "--micro-batches", "8"]) == 0

# %%
assert main(["pipeline", "show", "--stages", "2", "--micro-batches", "8", "--virtual", "2"]) == 0

# %% [markdown]
# Next: `megalith plan gpt2-large --gpus 16` compares this layout with all others, and `megalith parity
# layout.yaml` trains a small version of the run in every layout and compares it with one process.
