# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Fine-tune and chat
#
# Fine-tune a model on conversations, then talk to it. The model here is small and starts from random weights, so
# it needs no download. It takes a minute on two CPU cores. For a published model, replace the section `model` by
# `{"init_from": "models/Qwen3-0.6B"}` and leave out the tokenizer and the template, which come from that folder.
# [Fine-tuning](../../docs/sft.md) describes data and settings.

# %%
import json
import random
from pathlib import Path

import megalith
from megalith.data.tokenizers.train_tokenizer import train_tokenizer
from megalith.generation.requests import Sampling
from megalith.serve.chat_session import ChatSession
from megalith.training.loading import load_with_tokenizer

EPOCHS = 15
Path("data").mkdir(exist_ok=True)

# %% [markdown]
# **Data.** One conversation per line, as a list of messages.

# %%
rng = random.Random(0)
CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Peru": "Lima",
    "Egypt": "Cairo",
    "Norway": "Oslo",
}
QUESTIONS = ("What is the capital of {}?", "Name the capital of {}.", "Which city is the capital of {}?")


def conversation():
    messages = []
    for country in rng.sample(sorted(CAPITALS), 2):
        messages.append({"role": "user", "content": rng.choice(QUESTIONS).format(country)})
        messages.append({"role": "assistant", "content": f"The capital of {country} is {CAPITALS[country]}."})
    return messages


chats = [conversation() for _ in range(200)]
Path("data/chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
texts = ["\n".join(message["content"] for message in chat) for chat in chats]
Path("data/texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

# %% [markdown]
# **Tokenizer and chat template.** `{% generation %}` marks the text that the model learns: the assistant's turns.

# %%
train_tokenizer(["data/texts.jsonl"], 320, "data/chat_tokenizer", overwrite=True)
Path("data/chat.jinja").write_text(
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "A: {% generation %}{{ message.content + eos_token }}{% endgeneration %}\n"
    "{% else %}Q: {{ message.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A: {% endif %}"
)

# %% [markdown]
# **Fine-tuning.** Several conversations share a sequence of 128 tokens, without attention between them.

# %%
config = megalith.RunConfig.from_tree(
    {
        "model": {
            "num_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "position_embedding_type": "rope",
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "data": {
            "data_path": "data/chats.jsonl",
            "split": "100,0,0",
            "seq_length": 128,
            "tokenizer_type": "HuggingFaceTokenizer",
            "tokenizer_model": "data/chat_tokenizer",
        },
        "sft": {"enabled": True, "chat_template_path": "data/chat.jinja", "num_train_epochs": EPOCHS},
        "optim": {"lr": 5e-3, "lr_warmup_iters": 5},
        "train": {"micro_batch_size": 8, "global_batch_size": 8, "output_dir": "runs/chat"},
    }
)
result = megalith.train(config)
print(f"loss after {result.step} steps: {result.loss:.3f}")

# %% [markdown]
# **Chat.** The conversation so far is the prompt of each turn. In a terminal, `megalith chat runs/chat` does the
# same.

# %%
chat = ChatSession(*load_with_tokenizer("runs/chat"), Sampling(max_new_tokens=24, temperature=0))
for question in ("What is the capital of Italy?", "Name the capital of Peru."):
    print("Q:", question)
    print("A:", chat.say(question))
