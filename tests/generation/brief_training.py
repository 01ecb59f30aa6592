"""A model that has been trained for seconds, so that its probabilities are far from even."""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.config import ModelConfig
from megalith.generation.requests import Completion
from megalith.models.init import initialize
from megalith.models.inputs import LossInputs
from megalith.models.mtp import make_mtp_targets
from megalith.models.transformer import Transformer
from megalith.ops.linear_logprobs import linear_logprobs

VOCAB = 96
LLAMA = dict(
    num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=128, vocab_size=VOCAB,
    make_vocab_size_divisible_by=64, max_position_embeddings=256, position_embedding_type="rope",
    normalization="RMSNorm", swiglu=True, add_bias_linear=False, add_qkv_bias=True, hidden_dropout=0.0,
    attention_dropout=0.0,
)  # fmt: skip


def chains(rows: int, length: int, seed: int) -> Tensor:
    """Tokens int64 [rows, length], each one of four that follow the one before, or now and then any."""
    generator = torch.Generator().manual_seed(seed)
    follows = torch.randint(0, VOCAB, (VOCAB, 4), generator=torch.Generator().manual_seed(7))
    tokens = torch.randint(0, VOCAB, (rows, length), generator=generator)
    choice = torch.randint(0, 4, (rows, length), generator=generator)
    free = torch.rand(rows, length, generator=generator) < 0.1
    for at in range(1, length):
        next_ = follows[tokens[:, at - 1], choice[:, at]]
        tokens[:, at] = torch.where(free[:, at], tokens[:, at], next_)
    return tokens


def trained_model(steps: int = 40, device: str = "cpu", **changes) -> tuple[Transformer, float]:
    """A model in fp32, and its last loss."""
    config = ModelConfig(**(LLAMA | changes))
    model = Transformer(config, device="meta")
    model.to_empty(device=device)
    initialize(model, config, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(steps):
        ids = chains(16, 33, step).to(device)
        labels, inputs = ids[:, 1:], LossInputs()
        if layers := len(config.mtp_layers):
            targets = make_mtp_targets(labels.cpu(), torch.ones(labels.shape), None, layers)
            inputs = LossInputs(mtp_targets=targets.to(labels.device))
        loss = model(ids[:, :-1], labels=labels, loss_inputs=inputs) / labels.numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), loss.item()


@torch.no_grad()
def scored(
    model: Transformer, prompts: list[list[int]], done: list[Completion], temperature: float
) -> Tensor:
    """The model's own log-probabilities of all completions, one after the other: float32 [tokens]."""
    whole = [[*prompts[each.prompt], *each.ids] for each in done]
    longest = max(map(len, whole))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in whole], device=model.device)
    hidden: dict[str, Tensor] = {}
    handle = model.final_layernorm.register_forward_hook(lambda *given: hidden.update(out=given[-1]))
    model(tokens[:, :-1])
    handle.remove()
    sizes = model.config.vocab_size, model.config.final_logit_softcapping
    found, _ = linear_logprobs(
        hidden["out"],
        model.output_weight,
        tokens[:, 1:],
        *sizes,
        temperature=temperature,
        entropy=False,
        bias=model.output_bias,
    )
    rows = [row[len(prompts[each.prompt]) - 1 :][: len(each.ids)] for row, each in zip(found.cpu(), done)]
    return torch.cat(rows)
