"""A small policy over numbers as tokens, its prompts, and runs of the loop on them."""

import json
from pathlib import Path

import numpy as np

from megalith.config import RunConfig
from megalith.training.training_job import train

VOCAB, SEQ = 17, 24  # numbers 0 to 14, 15 asks for the answer, 16 ends it
MODEL = dict(num_layers=2, hidden_size=48, ffn_hidden_size=96, num_attention_heads=4, vocab_size=VOCAB,
             make_vocab_size_divisible_by=1, max_position_embeddings=SEQ + 1, hidden_dropout=0.0,
             attention_dropout=0.0, normalization="RMSNorm", position_embedding_type="rope", swiglu=True,
             add_bias_linear=False)  # fmt: skip
DATA = dict(seq_length=SEQ, tokenizer_type="NullTokenizer")


def write_prompts(folder: Path, count: int = 64, numbers: int = 3, seed: int = 0, below: int = 10) -> Path:
    rng = np.random.default_rng(seed)
    path = Path(folder) / "prompts.jsonl"
    texts = [" ".join(map(str, rng.integers(0, below, numbers))) for _ in range(count)]
    path.write_text("".join(json.dumps({"id": f"q{n}", "prompt": t}) + "\n" for n, t in enumerate(texts)))
    return path


def tree(folder: Path, **sections) -> dict:
    """Of a run of the loop in `folder`, whose prompts.jsonl is written where it is absent."""
    folder = Path(folder)
    if not (folder / "prompts.jsonl").exists():
        write_prompts(folder)
    base = dict(
        model=MODEL | dict(init_method_std=0.2),
        data=DATA,
        optim=dict(lr=1e-2, lr_decay_style="constant"),
        train=dict(train_iters=4, micro_batch_size=2, global_batch_size=8, output_dir=str(folder / "run")),
        rl=dict(prompts=str(folder / "prompts.jsonl"), reward_funcs="length", num_generations=4,
                max_completion_length=8),
        runtime=dict(device="cpu", compile=False),
        log=dict(layout_report=False),
    )  # fmt: skip
    return {name: base.get(name, {}) | sections.get(name, {}) for name in base.keys() | sections.keys()}


def configuration(folder: Path, **sections) -> RunConfig:
    return RunConfig.from_tree(tree(folder, **sections))


def tuned(folder: Path, completions, seed: int = 0, steps: int = 60, below: int = 10, **model) -> str:
    """The run folder of a policy that was fine-tuned to answer as `completions(numbers, rng)` does."""
    rng, path = np.random.default_rng(seed), Path(folder) / "sft.jsonl"
    asked = rng.integers(0, below, (steps * 32, 3))
    lines = [{"prompt": " ".join(map(str, a)), "completion": " " + completions(a, rng)} for a in asked]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sections = dict(
        model=MODEL | model,
        data=DATA | dict(data_path=str(path), split="100,0,0"),
        sft=dict(enabled=True, packing=True),
        optim=dict(lr=1e-2, lr_warmup_iters=5),
        train=dict(train_iters=steps, micro_batch_size=16, global_batch_size=16, seed=seed,
                   output_dir=str(Path(folder) / "sft")),
        runtime=dict(device="cpu", compile=False),
        log=dict(layout_report=False),
    )  # fmt: skip
    train(RunConfig.from_tree(sections))
    return str(Path(folder) / "sft")


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
