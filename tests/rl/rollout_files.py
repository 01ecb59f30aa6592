"""Rollouts of no model, and runs on them."""

from pathlib import Path

import numpy as np

from megalith.config import RunConfig
from megalith.rl.rollouts.rollouts import PromptGroup, RatedCompletion, Rollouts, save_rollouts

VOCAB, SEQ, GROUPS, EACH = 61, 32, 4, 4
MODEL = dict(num_layers=4, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, vocab_size=VOCAB,
             make_vocab_size_divisible_by=8, max_position_embeddings=SEQ, hidden_dropout=0.0, attention_dropout=0.0,
             init_method_std=0.2, normalization="RMSNorm", position_embedding_type="rope")  # fmt: skip


def rollouts(groups: int = GROUPS, each: int = EACH, seed: int = 3, logprobs: bool = True) -> Rollouts:
    """Prompts of 1 to 9 tokens, completions of 1 to 20: the first of one token; one reward of two is sometimes absent,
    the last completion has none, and the second group has no spread."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(groups):
        completions = []
        for k in range(each):
            tokens = 1 if number == k == 0 else int(rng.integers(1, 21))
            rewards = np.array([float(rng.integers(0, 2)), np.nan if rng.random() < 0.3 else rng.random()])
            if number == 1:
                rewards = np.array([1.0, np.nan])
            if number == groups - 1 and k == each - 1:
                rewards[:] = np.nan
            given = (-3 - 2 * rng.random(tokens)).astype(np.float32) if logprobs else None
            ids = rng.integers(0, VOCAB, tokens)
            completions.append(RatedCompletion(ids, rewards, given, np.array([7]), bool(tokens > 18)))
        made.append(PromptGroup(rng.integers(0, VOCAB, int(rng.integers(1, 10))), completions))
    return Rollouts(made, ["right", "style"])


def configuration(folder: Path, parallel=None, model=None, lora=None, train=None, lr=1e-2, **rl) -> RunConfig:
    """A run over folder/rollouts.jsonl, which is written where it is absent."""
    path = Path(folder) / "rollouts.jsonl"
    if not path.exists():
        save_rollouts(path, rollouts())
    return RunConfig.from_tree(
        {
            "model": MODEL | (model or {}),
            "parallel": parallel or {},
            "data": dict(seq_length=SEQ),
            "optim": dict(lr=lr, lr_decay_style="constant"),
            "lora": lora or {},
            "train": dict(train_iters=3, micro_batch_size=2, global_batch_size=8, output_dir=str(Path(folder) / "run"))
            | (train or {}),
            "rl": dict(rollouts=str(path), num_generations=EACH, max_completion_length=20) | rl,
            "runtime": dict(device="cpu", compile=False),
            "log": dict(layout_report=False),
        }
    )  # fmt: skip
