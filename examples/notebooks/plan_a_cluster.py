# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Plan a job before you rent GPUs
#
# The planner predicts time and memory of every layout. It needs no GPU. [Plan accuracy](../../docs/plan_accuracy.md)
# compares its predictions with measurements.

# %%
import megalith

config = megalith.RunConfig.from_tree(
    {
        "model": {"preset": "gpt2"},
        "data": {"mock": True, "seq_length": 1024},
        "optim": {"lr": 6e-4},
        "train": {"train_iters": 1, "global_batch_size": 64, "precision": "bf16"},
    }
)
result = megalith.plan(config, 8)

# %%
for layout in result.best[:3]:
    print(f"{layout.name}: {layout.bytes / 1e9:.1f} GB")
