"""The same training in other libraries: `python -m megalith.bench.peers hf gpt2-large` prints one line of JSON.

All peers train on random tokens with fused AdamW, bf16 compute over fp32 weights, and gradient clipping:
- `hf`: transformers' model, compiled, under autocast. Rows of encoders and encoder-decoders are half to fully filled.
- `plain`: a GPT-2 of 60 lines, with compiled blocks, PyTorch's attention and materialized logits.
- `fsdp2`: transformers' model sharded by fully_shard, in the processes that torchrun starts.
- `liger`: the same with liger-kernel's patches of Llama (norms, RoPE, SwiGLU, fused loss).
- `peft`: PEFT's LoRA (rank 16 on every linear, frozen weights in bf16) on transformers' eager model.
- `peft-liger`: the same with liger-kernel.
`fsdp2` and `liger` have the options a careful user would try: `--reshard`, `--recompute` and `--compile`.
torchtitan is in torchtitan_peer.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from megalith.bench.timing import synchronize
from megalith.bench.workloads import WORKLOADS, lengths
from megalith.bridge.families import family_for
from megalith.config import RunConfig
from megalith.config.model import ModelConfig

MASKED = 0.15  # fraction of an encoder's tokens
Peer = tuple[Callable[[Tensor, Tensor], Tensor], nn.Module]
"""Pair of a loss, a function of tokens and labels [batch, seq], and the model."""


@record  # makes torchrun print the error
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--batch", type=int, help="sequences per process and step")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="section.key=value", help="settings of model and data"
    )
    add_switches(parser)
    args = parser.parse_args()
    workload = WORKLOADS[args.workload]
    run = model_run(args.workload, args.set)
    config, seq_length = run.model, run.data.seq_length
    device = init_processes()
    process_start = time.perf_counter()
    loss_function, model = PEERS[args.peer](run, device)
    if args.recompute == "selective":
        parser.error(
            f"{args.peer} recomputes every layer or none; use torchtitan for selective recomputation"
        )
    if args.fp8:
        parser.error(f"{args.peer} has no FP8 here; measure it with torchtitan:fp8")
    if args.recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if args.peer in SHARDED:
        shard(model, args)
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    times = []
    rows = (args.batch or workload["batch"]) // args.micro_batches
    for step in range(args.steps):
        ids = torch.randint(config.vocab_size, (args.micro_batches, rows, seq_length + 1), device=device)
        synchronize(device)
        start = time.perf_counter()
        for number, micro_batch in enumerate(ids):
            tokens, labels = micro_batch[:, :-1].contiguous(), micro_batch[:, 1:].contiguous()
            if (
                args.reshard == "never" and args.peer in SHARDED
            ):  # reduce gradients after the last micro-batch only
                model.set_requires_gradient_sync(number == len(ids) - 1)
            loss = loss_function(tokens, labels) / args.micro_batches
            loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
        if step == 0:
            first = time.perf_counter() - process_start
    time_ms = statistics.median(times[args.warmup :])
    result = {
        "step_time_ms": time_ms,
        "tokens_per_second_per_device": args.micro_batches * rows * seq_length / time_ms * 1e3,
        "max_memory_gb": torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None,
        "first_step_s": first,
    }
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(result), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def model_run(workload: str, settings: Sequence[str]) -> RunConfig:
    """Return a workload's model and sequence lengths, overridden by `section.key=value` settings."""
    overrides = {name: yaml.safe_load(value) for name, _, value in (each.partition("=") for each in settings)}
    defaults = WORKLOADS[workload]
    model = {"vocab_size": 50257, **defaults["model"]}
    return RunConfig.from_tree({"model": model, "data": lengths(defaults)}).with_settings(overrides)


def init_processes() -> str:
    """Join torchrun's process group, if there is one. Returns the device type."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if "RANK" in os.environ:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    return device


def under_autocast(
    loss: Callable[[Tensor, Tensor], Tensor], device: str
) -> Callable[[Tensor, Tensor], Tensor]:
    def autocast(tokens: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return loss(tokens, labels)

    return autocast


def build_hugging_face(config: ModelConfig, device: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    import transformers

    family = family_for(config)
    settings = transformers.AutoConfig.for_model(**family.write_config(config))
    settings.use_cache = False
    kind = getattr(transformers, family.architecture)
    with torch.device(device):
        return kind._from_config(settings, attn_implementation="sdpa", dtype=dtype).train()


def loss_by_logits(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = model(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    return loss


def loss_of_masked(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        rows, seq = tokens.shape
        real = half_filled(tokens)
        masked = (torch.rand(rows, seq, device=tokens.device) < MASKED) & real
        second = torch.arange(seq, device=tokens.device) > real.sum(1, keepdim=True) // 2
        return model(
            input_ids=tokens,
            attention_mask=real.long(),
            token_type_ids=second.long() * real,
            labels=labels.masked_fill(~masked, -100),
            next_sentence_label=torch.randint(2, (rows,), device=tokens.device),
        ).loss

    return loss


def loss_of_pairs(model: nn.Module, length: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return an encoder-decoder's loss. The encoder gets the tokens, and the decoder the first `length` labels."""

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        return model(
            input_ids=tokens,
            attention_mask=half_filled(tokens).long(),
            labels=labels[:, :length].masked_fill(~half_filled(labels[:, :length]), -100),
            use_cache=False,
        ).loss

    return loss


def half_filled(tokens: Tensor) -> Tensor:
    """Return a mask, bool [batch, seq], that is True for a random number of tokens at the start of each row, at least
    half.
    """
    rows, seq = tokens.shape
    lengths = torch.randint((seq + 1) // 2, seq + 1, (rows, 1), device=tokens.device)
    return torch.arange(seq, device=tokens.device) < lengths


def hugging_face(run: RunConfig, device: str) -> Peer:
    model = build_hugging_face(run.model, device)
    compiled = torch.compile(model)
    losses = {"bert": loss_of_masked, "t5": partial(loss_of_pairs, length=run.data.decoder_length)}
    return under_autocast(losses.get(run.model.model_type, loss_by_logits)(compiled), device), model


def fsdp2(run: RunConfig, device: str) -> Peer:
    model = build_hugging_face(run.model, device)
    return loss_by_logits(model), model


def liger(run: RunConfig, device: str) -> Peer:
    """Build transformers' Llama with liger-kernel's fused loss. Labels must already be shifted."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama()
    model = build_hugging_face(run.model, device)

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        return model(input_ids=tokens, labels=tokens, shift_labels=labels, use_cache=False).loss

    return loss, model


def peft(run: RunConfig, device: str, patched: bool = False) -> Peer:
    from peft import LoraConfig, get_peft_model

    if patched:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    targets = {"target_modules": "all-linear"}
    if run.model.num_experts:  # parameters in transformers, which all-linear leaves out
        targets = {
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        }
    adapters = LoraConfig(r=16, lora_alpha=32, task_type="CAUSAL_LM", **targets)
    settings = run.model.model_copy(
        update={"moe_router_force_load_balancing": False}
    )  # transformers has none
    model = get_peft_model(build_hugging_face(settings, device, torch.bfloat16), adapters)
    if not patched:
        return under_autocast(loss_by_logits(model), device), model

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        return model(input_ids=tokens, labels=tokens, shift_labels=labels, use_cache=False).loss

    return under_autocast(loss, device), model


def add_switches(parser: argparse.ArgumentParser) -> None:
    """Add FSDP2's options: resharding, recomputation, and compilation of the layers."""
    parser.add_argument(
        "--reshard",
        choices=("always", "never"),
        default="always",
        help="free gathered parameters after the forward pass",
    )
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    compiled = "compile each layer (default: all peers but liger, which is faster without)"
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help=compiled)
    parser.add_argument(
        "--fp8", choices=("tensorwise", "rowwise"), help="torchao's FP8 recipe (torchtitan only)"
    )


def shard(model: nn.Module, args: argparse.Namespace) -> None:
    """Compile the layers if requested, and shard the model with FSDP2: bf16 compute, fp32 weights and gradient
    reduction.
    """
    compiled = args.peer != "liger" if args.compile is None else args.compile
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        if compiled:
            layer.compile()
        fully_shard(layer, mp_policy=precision, reshard_after_forward=args.reshard == "always")
    fully_shard(model, mp_policy=precision)


class PlainBlock(nn.Module):
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
        self.positions = nn.Embedding(seq_length, hidden)
        self.blocks = nn.ModuleList(
            PlainBlock(hidden, config.num_attention_heads) for _ in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(hidden)
        nn.init.normal_(self.tokens.weight, std=0.02)
        for block in self.blocks:
            block.compile(fullgraph=True)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def plain(run: RunConfig, device: str) -> Peer:
    if run.model.position_embedding_type != "learned_absolute":
        raise SystemExit("the plain peer is a GPT-2; choose a gpt2 workload, or --peer hf")
    model = PlainGPT(run.model, run.data.seq_length).to(device)
    return under_autocast(model, device), model


SHARDED = "fsdp2", "liger"
PEERS = {
    "hf": hugging_face,
    "plain": plain,
    "fsdp2": fsdp2,
    "liger": liger,
    "peft": peft,
    "peft-liger": partial(peft, patched=True),
}

if __name__ == "__main__":
    main()
