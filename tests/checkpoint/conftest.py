"""A small run to save: a tied, padded model, its optimizer after two updates, and its record."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from megalith.checkpoint import RunRecord, TokenizerRecord, load_model, load_optimizer, save_checkpoint
from megalith.config import OptimConfig
from megalith.optim import build_loss_scale, build_optimizer, optimizer_step

VOCABULARY, PADDED = 13, 16


class TinyModel(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.embedding = nn.Embedding(PADDED, width)
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, PADDED, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("expert_bias", torch.zeros(3))
        self.register_buffer("angles", torch.arange(5.0), persistent=False)
        with torch.no_grad():
            self.embedding.weight[VOCABULARY:].zero_()

    def forward(self, tokens):
        return self.output(self.norm(self.embedding(tokens)))[..., :VOCABULARY]


@dataclass
class TinyRun:
    """What a trainer has in hand."""

    seed: int = 0
    optimizer_name: str = "adamw"
    sgd_momentum: float = 0.9
    width: int = 4

    def __post_init__(self):
        torch.manual_seed(self.seed)
        self.config = OptimConfig(
            lr=0.05,
            optimizer=self.optimizer_name,
            sgd_momentum=self.sgd_momentum,
            weight_decay=0.1,
            loss_scale_window=2,
        )
        self.model = TinyModel(self.width)
        self.optimizer = build_optimizer(self.model.named_parameters(), self.config)
        self.loss_scale = build_loss_scale("fp16", self.config, "cpu")
        self.step = 0

    rows = {"embedding.weight": VOCABULARY}

    def train(self, updates):
        for _ in range(updates):
            generator = torch.Generator().manual_seed(1000 + self.step)
            tokens = torch.randint(VOCABULARY, (3, 6), generator=generator)
            loss = nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten().flip(0))
            (loss * self.loss_scale.scale).backward()
            optimizer_step(self.optimizer, self.loss_scale, self.config.clip_grad)
            self.optimizer.zero_grad()
            self.model.expert_bias += 0.5
            self.step += 1
        return self

    def record(self):
        return RunRecord(
            step=self.step,
            consumed_samples=3 * self.step,
            config={"train": {"seed": self.seed}, "data": {"split": "99,1,0", "mock": True}},
            loss_scale=self.loss_scale.state(),
            counters={"skipped": 1, "nan_iterations": 0},
            tokenizer=TokenizerRecord(fingerprint="ab12", vocab_size=VOCABULARY),
        )

    def save(self, output: Path, with_optimizer=True, **options):
        optimizer = self.optimizer if with_optimizer else None
        return save_checkpoint(
            output / "checkpoints", self.record(), self.model, optimizer, unpadded_rows=self.rows, **options
        )

    def load(self, checkpoint):
        load_model(checkpoint, self.model, self.rows)
        load_optimizer(checkpoint, self.optimizer, self.rows)
        self.loss_scale.load_state(checkpoint.manifest.loss_scale)
        self.step = checkpoint.manifest.step
        return self

    def tensors(self):
        state = {
            f"{index}.{key}": value
            for index, parameter in enumerate(self.model.parameters())
            for key, value in self.optimizer.state[parameter].items()
        }
        return {**self.model.state_dict(), **state}

    def equals(self, other):
        mine, theirs = self.tensors(), other.tensors()
        return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.fixture
def tiny_run():
    """Makes runs: `tiny_run(seed=…, optimizer_name=…, width=…)`."""
    return TinyRun
