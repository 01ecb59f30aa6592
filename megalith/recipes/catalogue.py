"""The catalogue of recipes, and the run files of their tasks before the planner adds a layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Tree = dict[str, dict[str, Any]]

MODELS = {  # preset: the folder on the Hugging Face hub with its weights and tokenizer
    "gpt2": "openai-community/gpt2",
    "llama3.2-1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama3.2-3b": "meta-llama/Llama-3.2-3B-Instruct",
    "llama3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama3.3-70b": "meta-llama/Llama-3.3-70B-Instruct",
    "llama3-405b": "meta-llama/Llama-3.1-405B",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-14b": "Qwen/Qwen3-14B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "deepseek-v2-lite": "deepseek-ai/DeepSeek-V2-Lite",
    "gpt-oss-20b": "openai/gpt-oss-20b",
}


@dataclass(frozen=True)
class Recipe:
    """A model, a task and the GPUs to run it on.

    Attributes:
        task: a key of TASKS.
        preset: a key of MODELS.
        gpus: number of H100 with 80 GB.
        settings: section → name → value, in place of the task's.
        reserve_gb: memory per GPU that the layout leaves free, for the planner's error and for memory that it does not
            count, such as the sampling engine or a teacher.
    """

    task: str
    preset: str
    gpus: int
    settings: Tree = field(default_factory=dict)
    reserve_gb: float = 5.0

    @property
    def name(self) -> str:
        return f"{self.preset}-{self.task}-{self.gpus}gpu"

    def tree(self, model: str | None = None) -> Tree:
        """Return the run file without a layout. `model`: a folder or hub name, in place of the preset's."""
        tree = TASKS[self.task].tree(self.preset, model or MODELS[self.preset])
        for section, values in self.settings.items():
            tree.setdefault(section, {}).update(values)
        return tree


@dataclass(frozen=True)
class RecipeTask:
    """A kind of run.

    Attributes:
        title: first line of the recipe's file; `{model}` is replaced with the model's name.
        command: megalith command that runs the recipe.
        data: one line that explains which data to put where.
        tree: builds the run file's settings, without a layout, from a preset and a hub name.
    """

    title: str
    command: str
    data: str
    tree: Callable[[str, str], Tree]


def _base(hub: str, seq_length: int, lr: float, batch: int) -> Tree:
    return {
        "model": {},
        "data": {
            "seq_length": seq_length,
            "tokenizer_type": "HuggingFaceTokenizer",
            "tokenizer_model": hub,
        },
        "optim": {"lr": lr, "min_lr": float(f"{lr / 10:.1e}")},
        "checkpoint": {"save_interval": 500},
        "train": {"precision": "bf16", "global_batch_size": batch},
    }


def _pretraining(preset: str, hub: str) -> Tree:
    tree = _base(hub, 8192, 3e-4, 128)
    tree["model"] = {"preset": preset}
    tree["data"] |= {"data_path": ["data/corpus.jsonl"], "split": "999,1,0"}
    tree["optim"] |= {
        "lr": 3e-4,
        "min_lr": 3e-5,
        "lr_warmup_iters": 2000,
        "adam_beta2": 0.95,
        "weight_decay": 0.1,
    }
    tree["checkpoint"]["save_interval"] = 1000
    tree["train"] |= {"train_iters": 100_000, "eval_interval": 1000, "eval_iters": 10}
    return tree


def _fine_tuning(preset: str, hub: str) -> Tree:
    tree = _base(hub, 8192, 1e-5, 16)
    tree["model"] = {"init_from": hub}
    tree["data"] |= {"data_path": "data/chat.jsonl", "split": "99,1,0"}
    tree["sft"] = {"num_train_epochs": 2, "truncation_mode": "drop"}
    tree["optim"] |= {"lr_warmup_iters": 20, "adam_beta2": 0.95}
    tree["checkpoint"]["export_hf"] = True
    return tree


def _lora(preset: str, hub: str) -> Tree:
    tree = _fine_tuning(preset, hub)
    tree["lora"] = {"rank": 16, "alpha": 32}
    tree["optim"] |= {"lr": 2e-4, "min_lr": 2e-5, "weight_decay": 0.0}
    del tree["checkpoint"]["export_hf"]  # `megalith lora export` writes adapters
    return tree


def _preferences(preset: str, hub: str) -> Tree:
    tree = _base(hub, 4096, 5e-7, 32)
    tree["model"] = {"init_from": hub}
    tree["data"] |= {"data_path": "data/preferences.jsonl", "split": "99,1,0"}
    tree["dpo"] = {"num_train_epochs": 1, "truncation_mode": "drop", "packing": True}
    tree["optim"] |= {"lr_warmup_iters": 20}
    tree["checkpoint"]["export_hf"] = True
    return tree


def _rewards(preset: str, hub: str) -> Tree:
    tree = _base(hub, 4096, 1e-6, 512)
    tree["model"] = {"init_from": hub}
    tree["data"] = {"seq_length": 4096}
    tree["rl"] = {
        "prompts": "data/gsm8k/main/train-00000-of-00001.parquet",
        "prompt_column": "question",
        "chat_prompts": True,
        "reward_funcs": "gsm8k_flexible",
        "num_generations": 8,
        "max_prompt_length": 512,
        "max_completion_length": 1024,
        "overlong_prompts": "drop",
        "packing": True,
        "beta": 0.001,
    }
    tree["optim"] = {"lr": 1e-6, "lr_decay_style": "constant"}
    tree["checkpoint"] |= {"save_interval": 50, "export_hf": True}
    tree["train"] |= {"train_iters": 500}
    return tree


def _distillation(preset: str, hub: str) -> Tree:
    tree = _base(hub, 4096, 1e-4, 64)
    tree["model"] = {"init_from": hub}
    tree["data"] |= {"data_path": ["data/corpus.jsonl"], "split": "999,1,0"}
    tree["distill"] = {"teacher": MODELS["llama3.1-8b"], "kd_ratio": 0.9}
    tree["optim"] |= {"lr_warmup_iters": 200, "adam_beta2": 0.95}
    tree["checkpoint"]["export_hf"] = True
    tree["train"] |= {"train_iters": 5000, "eval_interval": 500, "eval_iters": 10}
    return tree


CORPUS = (
    "data/corpus.jsonl: a JSON object with the field text per line. It is tokenized before the first step."
)
CHAT = "data/chat.jsonl: a JSON object with the field messages per line."
TASKS = {
    "pretrain": RecipeTask("Pre-trains {model} from random weights", "train", CORPUS, _pretraining),
    "sft": RecipeTask("Fine-tunes all weights of {model} on conversations", "sft", CHAT, _fine_tuning),
    "lora": RecipeTask("Fine-tunes LoRA adapters of {model} on conversations", "sft", CHAT, _lora),
    "dpo": RecipeTask(
        "Trains {model} on preference pairs",
        "dpo",
        "data/preferences.jsonl: a JSON object with the fields prompt, chosen and rejected per line.",
        _preferences,
    ),
    "grpo": RecipeTask(
        "Trains {model} with a reward on the problems of GSM8K",
        "grpo",
        "data/gsm8k: the data set openai/gsm8k. Write your own reward as path.py:function in rl.reward_funcs.",
        _rewards,
    ),
    "distill": RecipeTask("Distills Llama-3.1-8B-Instruct into {model}", "distill", CORPUS, _distillation),
}


def _batch(sequences: int, **more: Any) -> Tree:
    return {"train": {"global_batch_size": sequences, **more}}


# Learning rates of pre-training are the published ones of Llama 3.
RECIPES = [
    Recipe("pretrain", "gpt2", 1, _batch(480) | {"data": {"seq_length": 1024}, "optim": {"lr": 6e-4, "min_lr": 6e-5}}),
    Recipe("pretrain", "qwen3-0.6b", 1, _batch(64)),
    Recipe("pretrain", "llama3.2-1b", 1, _batch(64)),
    Recipe("pretrain", "llama3.2-1b", 2, _batch(64)),
    Recipe("pretrain", "llama3.2-1b", 8),
    Recipe("pretrain", "llama3.2-3b", 4, _batch(64)),
    Recipe("pretrain", "llama3.2-3b", 8),
    Recipe("pretrain", "llama3.1-8b", 8),
    Recipe("pretrain", "llama3.1-8b", 64, _batch(512)),
    Recipe("pretrain", "llama3.3-70b", 256, _batch(1024) | {"optim": {"lr": 1.5e-4, "min_lr": 1.5e-6}}),
    Recipe("pretrain", "llama3-405b", 1024, _batch(2048) | {"optim": {"lr": 8e-5, "min_lr": 8e-7}}),
    Recipe("pretrain", "deepseek-v2-lite", 16, _batch(512) | {"data": {"seq_length": 4096}}),
    Recipe("pretrain", "qwen3-30b-a3b", 32, _batch(512) | {"data": {"seq_length": 4096}}),
    Recipe("pretrain", "mixtral-8x7b", 64, _batch(512) | {"data": {"seq_length": 4096}}),
    Recipe("sft", "qwen3-0.6b", 1),
    Recipe("sft", "llama3.2-1b", 1),
    Recipe("sft", "qwen3-4b", 2),
    Recipe("sft", "llama3.1-8b", 4),
    Recipe("sft", "llama3.1-8b", 8),
    Recipe("sft", "qwen3-14b", 8),
    Recipe("sft", "qwen3-32b", 16),
    Recipe("sft", "qwen3-30b-a3b", 16, _batch(32)),
    Recipe("sft", "llama3.3-70b", 32, _batch(64)),
    Recipe("lora", "llama3.2-3b", 1),
    Recipe("lora", "llama3.1-8b", 1),
    Recipe("lora", "qwen3-14b", 1),
    Recipe("lora", "qwen3-32b", 2),
    Recipe("lora", "llama3.3-70b", 4),
    Recipe("dpo", "llama3.2-1b", 1),
    Recipe("dpo", "llama3.2-3b", 2),
    Recipe("dpo", "qwen3-4b", 4),
    Recipe("dpo", "llama3.1-8b", 8),
    Recipe("grpo", "qwen2.5-0.5b", 1, reserve_gb=20),
    Recipe("grpo", "qwen2.5-1.5b", 2, reserve_gb=20),
    Recipe("grpo", "qwen3-4b", 4, reserve_gb=25),
    Recipe("grpo", "llama3.1-8b", 8, reserve_gb=30),
    Recipe("distill", "llama3.2-1b", 1, reserve_gb=20),
    Recipe("distill", "llama3.2-1b", 2, reserve_gb=20),
    Recipe("distill", "llama3.2-3b", 8, reserve_gb=20),
]  # fmt: skip
