"""What a workload's model costs elsewhere, on one GPU: Hugging Face under torch.compile, and plain PyTorch.

`python -m benchmarks.peers hf gpt2-large` prints one line of JSON; benchmarks/train.py calls it. Both train on random
tokens with fused AdamW, bf16 compute over fp32 weights and gradient clipping, as a user would write it in an evening:
`hf` is transformers' model for causal language modelling under autocast, `plain` a GPT-2 of 60 lines with a compiled
block, PyTorch's attention, and the logits whole.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.train import WORKLOADS
from megalith.bridge.families import family_for
from megalith.config import RunConfig
from megalith.config.model import ModelConfig


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=10)
    args = parser.parse_args()
    workload = WORKLOADS[args.workload]
    config = RunConfig.from_tree(
        {"model": {"vocab_size": 50257, **workload["model"]}, "data": {"seq_length": workload["seq_length"]}}
    ).model
    batch = args.batch or workload["batch"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    began = time.perf_counter()
    loss_of, parameters = PEERS[args.peer](config, workload["seq_length"], device)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    times = []
    for step in range(args.steps):
        ids = torch.randint(config.vocab_size, (batch, workload["seq_length"] + 1), device=device)
        synchronize()
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            loss = loss_of(ids[:, :-1], ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize()
        times.append(1e3 * (time.perf_counter() - start))
        if step == 0:
            first = time.perf_counter() - began
    print(
        json.dumps(
            {
                "step_time_ms": statistics.median(times[args.warmup :]),
                "max_memory_gb": torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None,
                "first_step_s": first,
            }
        )
    )


def hugging_face(
    config: ModelConfig, seq_length: int, device: str
) -> tuple[Callable[[Tensor, Tensor], Tensor], list[nn.Parameter]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.for_model(**family_for(config).write_config(config))
    model = AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa").to(device).train()
    compiled = torch.compile(model)

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = compiled(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    return loss, list(model.parameters())


class Block(nn.Module):
    """A layer of GPT-2 without dropout."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:  # [batch, seq, hidden]
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    def __init__(self, config: ModelConfig, seq_length: int):
        super().__init__()
        hidden = config.hidden_size
        self.tokens = nn.Embedding(config.padded_vocab_size, hidden)
        self.places = nn.Embedding(seq_length, hidden)
        self.blocks = nn.ModuleList(
            Block(hidden, config.num_attention_heads) for _ in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(hidden)
        nn.init.normal_(self.tokens.weight, std=0.02)
        for block in self.blocks:
            block.compile(fullgraph=True)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def plain(
    config: ModelConfig, seq_length: int, device: str
) -> tuple[Callable[[Tensor, Tensor], Tensor], list[nn.Parameter]]:
    if config.position_embedding_type != "learned_absolute":
        raise SystemExit("the plain peer is a GPT-2; choose a gpt2 workload, or --peer hf")
    model = PlainGPT(config, seq_length).to(device)
    return model, list(model.parameters())


PEERS = {"hf": hugging_face, "plain": plain}

if __name__ == "__main__":
    main()
