# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # GRPO with a reward in five lines
#
# A reward is a function of the completions. GRPO samples several completions per prompt and makes those with a
# reward above their group's mean more likely. The model here is small and starts from random weights, so it needs
# no download. It takes a minute on two CPU cores. [GRPO](../../docs/grpo.md) describes rewards, prompts and
# settings.

# %%
import json
from pathlib import Path

import megalith

STEPS = 40


# %% [markdown]
# **The reward.** The fraction of characters that are vowels. Other columns of the data set, such as `answer`, are
# passed by name.


# %%
def vowels(completions, **columns):
    rewards = []
    for text in completions:
        rewards.append(sum(character in "aeiou" for character in text) / 8)
    return rewards


# %% [markdown]
# **The run.** `model` is random here. For a published model, use `{"init_from": "models/Qwen3-0.6B"}` and leave
# out the tokenizer.

# %%
config = megalith.RunConfig.from_tree(
    {
        "model": {
            "num_layers": 1,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "position_embedding_type": "rope",
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "data": {"seq_length": 32, "tokenizer_type": "ByteTokenizer"},
        "rl": {"num_generations": 16, "max_completion_length": 8},
        "optim": {"lr": 2e-3, "lr_decay_style": "constant"},
        "train": {
            "train_iters": STEPS,
            "micro_batch_size": 16,
            "global_batch_size": 64,
            "output_dir": "runs/vowels",
        },
    }
)
prompts = [{"prompt": f"word {number}: "} for number in range(100)]
result = megalith.grpo(config, reward_funcs=vowels, train_dataset=prompts)

# %% [markdown]
# **The result.** The mean reward rises from 0.03 to 0.9.

# %%
lines = [json.loads(line) for line in Path("runs/vowels/metrics.jsonl").read_text().splitlines()]
first, last = lines[0]["rewards_mean"], lines[-1]["rewards_mean"]
print(f"mean reward: {first:.3f} at the first step, {last:.3f} at step {result.step}")
