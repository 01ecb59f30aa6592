# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # A first model on a CPU
#
# Train a small GPT on the bytes of a short text, and ask it for the next byte. Open this file as a notebook with
# [jupytext](https://jupytext.readthedocs.io), or run it with Python. It takes a minute.

# %%
import json
from pathlib import Path

import torch

import megalith

STEPS = 60
text = "def add(a, b):\n    return a + b\n\n\ndef double(a):\n    return add(a, a)\n"
Path("text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for _ in range(50)))

# %% [markdown]
# A run is one tree of settings. The same tree as YAML is a run file for `megalith train`.

# %%
config = megalith.RunConfig.from_tree(
    {
        "model": {"preset": "tiny-gpt", "hidden_size": 64, "num_attention_heads": 2},
        "data": {
            "data_path": "text.jsonl",
            "seq_length": 64,
            "split": "100,0,0",
            "tokenizer_type": "ByteTokenizer",
        },
        "optim": {"lr": 3e-3},
        "train": {
            "train_iters": STEPS,
            "micro_batch_size": 8,
            "global_batch_size": 8,
            "output_dir": "runs/first",
        },
    }
)
result = megalith.train(config)
print(f"loss after {result.step} steps: {result.loss:.3f}")

# %% [markdown]
# `metrics.jsonl` has a line per step.

# %%
losses = [json.loads(line)["loss"] for line in Path("runs/first/metrics.jsonl").read_text().splitlines()]
print(f"{losses[0]:.3f} at the first step, {losses[-1]:.3f} at the last")

# %% [markdown]
# The checkpoint loads as a PyTorch module, in one process, whatever layout it was trained in.

# %%
model = megalith.load(result.checkpoint)
prompt = torch.tensor([list(b"def ")])
logits = model(prompt)  # [batch, seq, vocab]
print("after 'def ' comes", repr(chr(int(logits[0, -1].argmax()))))
