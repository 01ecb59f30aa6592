"""Jobs for `megalith audit`: plain scripts as users write them, each with the faults that can be planted in it.

`train_fsdp2` and `train_tp` run on every rank of a process group; `train_plain` and `train_trainer` in one process.
The model of the scripts is a small decoder in plain PyTorch with Hugging Face's names: Llama, Qwen2 (biases) or Qwen3
(norms of queries and keys).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megalith.audit_hook import AuditHook

VOCAB, SEQ = 97, 16
SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, rms_norm_eps=1e-6, initializer_range=0.1,
    tie_word_embeddings=False, attention_dropout=0.0, hidden_act="silu", pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
ROPE = dict(rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": dict(SIZES, **ROPE, architectures=["LlamaForCausalLM"], model_type="llama"),
    "qwen2": dict(SIZES, **ROPE, architectures=["Qwen2ForCausalLM"], model_type="qwen2"),
    "qwen3": dict(SIZES, **ROPE, architectures=["Qwen3ForCausalLM"], model_type="qwen3", attention_bias=False),
    "tied": dict(SIZES, **ROPE, architectures=["LlamaForCausalLM"], model_type="llama", tie_word_embeddings=True),
    "gpt2": dict(architectures=["GPT2LMHeadModel"], model_type="gpt2", vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4,
                 n_positions=64, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=1, eos_token_id=2),
    "gemma2": dict(SIZES, architectures=["Gemma2ForCausalLM"], model_type="gemma2", tie_word_embeddings=True,
                   query_pre_attn_scalar=8, sliding_window=6, hidden_activation="gelu_pytorch_tanh"),
    "mixtral": dict(SIZES, **ROPE, architectures=["MixtralForCausalLM"], model_type="mixtral", num_local_experts=4,
                    num_experts_per_tok=2, router_aux_loss_coef=0.1),
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A job: its script, its model, how it is run and the fault that is planted; "" for a right one."""

    script: str
    fault: str = ""
    model: str = "llama"
    precision: str = "fp32"
    micro_batches: int = 2
    seed: int = 0
    packed: bool = False
    """Sequences hold several documents, with position_ids that restart."""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        words = [self.script, self.fault or "right", self.model, self.precision, f"seed{self.seed}"]
        return "-".join([*words, *(f"{key}={value}" for key, value in self.options.items())])


class RMSNorm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).to(
            x.dtype
        )


class Attention(nn.Module):
    def __init__(self, config: dict[str, Any]):
        super().__init__()
        self.size, hidden, bias = config["head_dim"], config["hidden_size"], config["model_type"] == "qwen2"
        queries, keys = (config[f"num_{kind}_heads"] * self.size for kind in ("attention", "key_value"))
        self.theta = config["rope_parameters"]["rope_theta"]
        self.q_proj = nn.Linear(hidden, queries, bias=bias)
        self.k_proj = nn.Linear(hidden, keys, bias=bias)
        self.v_proj = nn.Linear(hidden, keys, bias=bias)
        self.o_proj = nn.Linear(queries, hidden, bias=False)
        has_norms = config["model_type"] == "qwen3"
        self.q_norm = RMSNorm(self.size) if has_norms else nn.Identity()
        self.k_norm = RMSNorm(self.size) if has_norms else nn.Identity()

    def forward(self, x: Tensor, position_ids: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (proj(x).unflatten(-1, (-1, self.size)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (rotate(t, position_ids, self.theta) for t in (self.q_norm(q), self.k_norm(k)))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def rotate(x: Tensor, position_ids: Tensor, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    angles = position_ids[..., None, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class MLP(nn.Module):
    def __init__(self, config: dict[str, Any]):
        super().__init__()
        hidden, size = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, size, bias=False)
        self.up_proj = nn.Linear(hidden, size, bias=False)
        self.down_proj = nn.Linear(size, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any], dropout: float):
        super().__init__()
        self.input_layernorm = RMSNorm(config["hidden_size"])
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config["hidden_size"])
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, position_ids: Tensor, mask: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), position_ids, mask))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Stack(nn.Module):
    def __init__(self, config: dict[str, Any], dropout: float):
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config, dropout) for _ in range(config["num_hidden_layers"]))
        self.norm = RMSNorm(config["hidden_size"])

    def forward(self, input_ids: Tensor, position_ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, position_ids, mask)
        return self.norm(x)


class Decoder(nn.Module):
    """The scripts' model. Returns logits."""

    def __init__(self, config: dict[str, Any], dropout: float = 0.0, tied: bool | None = None):
        super().__init__()
        self.model = Stack(config, dropout)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1)
        if config["tie_word_embeddings"] and tied is not False:
            self.lm_head.weight = self.model.embed_tokens.weight
        elif config["tie_word_embeddings"]:
            self.lm_head.weight = nn.Parameter(self.model.embed_tokens.weight.detach().clone())

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, causal: bool = True) -> Tensor:
        batch, seq = input_ids.shape
        mask = torch.ones(seq, seq, dtype=torch.bool)
        mask = (mask.tril() if causal else mask).expand(batch, 1, seq, seq)
        if position_ids is None:
            position_ids = torch.arange(seq).expand(batch, seq)
        documents = (position_ids == 0).cumsum(1)
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
        return self.lm_head(self.model(input_ids, position_ids, mask))


def micro_batch(job: Job, step: int, rank: int, number: int) -> dict[str, Tensor]:
    """Return a micro-batch of two sequences, with prompts that have no loss, of another length in each."""
    generator = torch.Generator().manual_seed(job.seed + 1000 * step + 100 * rank + number)
    input_ids = torch.randint(3, VOCAB, (2, SEQ), generator=generator)
    labels = input_ids.clone()
    prompt = 1 + (3 * number + 5 * rank) % 8
    labels[0, :prompt] = -100
    labels[1, : prompt // 2] = -100
    batch = {"input_ids": input_ids, "labels": labels}
    if job.packed:
        end = 4 + number
        batch["position_ids"] = torch.cat([torch.arange(end), torch.arange(SEQ - end)]).expand(2, SEQ).clone()
        labels[:, end] = -100
    return batch


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the losses of Hugging Face's labels."""
    return F.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )


def valid_tokens(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def train_fsdp2(job: Job, folder: Path) -> None:
    """Train two steps with fully_shard over all ranks, or on a mesh of replicas and shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(job.seed)
    rank, ranks, fault = dist.get_rank(), dist.get_world_size(), job.fault
    model = Decoder(CONFIGS[job.model], dropout=0.1 if fault == "dropout" else 0.0, tied=fault != "untied")
    if job.precision == "pure-bf16":
        model.bfloat16()
    shape = (2, ranks // 2) if job.options.get("hybrid") else (ranks,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard")[-len(shape) :])
    kinds = dict(mesh=mesh)
    if job.precision == "bf16":
        kinds["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.model.layers:
        ignored = {layer.input_layernorm.weight} if fault == "ignored-norms" else set()
        fully_shard(layer, ignored_params=ignored, **kinds)
    ignored = (
        {layer.input_layernorm.weight for layer in model.model.layers} if fault == "ignored-norms" else set()
    )
    fully_shard(model, ignored_params=ignored, **kinds)
    if fault == "sum":
        for module in (*model.model.layers, model):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    clip = job.options.get("clip", 0.0)
    audit = AuditHook(model, folder, max_norm=clip)
    for step in range(2):
        source = 0 if fault == "same-data" else rank
        batches = [micro_batch(job, step, source, number) for number in range(job.micro_batches)]
        local = sum(map(valid_tokens, batches))
        total = torch.tensor(local)
        dist.all_reduce(total)
        for batch in batches:
            logits = call(model, batch, fault)
            loss = divide(
                fault, fault_loss(fault, logits, batch), batch, local, int(total), job.micro_batches, ranks
            )
            audit.batch(**batch, loss=loss.detach() if not job.options.get("no_loss") else None)
            loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        if fault == "clip-shards":
            gradients = [p.grad.to_local() for p in model.parameters()]
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
            for gradient in gradients:
                gradient.mul_((0.1 / norm).clamp(max=1))
        audit.step()
        optimizer.step()
        if fault != "no-zero-grad":
            optimizer.zero_grad()


def call(model: nn.Module, batch: dict[str, Tensor], fault: str) -> Tensor:
    position_ids = None if fault == "no-position-ids" else batch.get("position_ids")
    return model(batch["input_ids"], position_ids, causal=fault != "no-causal-mask")


def fault_loss(fault: str, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the sum of the token losses, as the fault computes it."""
    labels = batch["labels"]
    if fault == "no-loss-mask":
        labels = batch["input_ids"]
    if fault == "two-shifts":
        labels = F.pad(labels[:, 1:], (0, 1), value=-100)
    if fault == "no-shift":
        return F.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
        )
    if fault == "rows-lost":
        labels = labels.clone()
        labels[1, SEQ // 2 :] = -100
    return token_losses(logits, labels)


def divide(
    fault: str, loss: Tensor, batch: dict, local: int, total: int, micro_batches: int, ranks: int
) -> Tensor:
    """Return the loss to call backward on; the reduction of gradients takes their mean over the ranks."""
    if fault == "rank-mean":
        return loss / local
    if fault == "micro-batch-mean":
        return loss / valid_tokens(batch) / micro_batches
    if fault == "no-accumulation-divisor":
        return loss * micro_batches * ranks / total
    if fault == "twice":
        return loss / total
    if fault == "token-sum":
        return loss
    return loss * ranks / total


def train_tp(job: Job, folder: Path) -> None:
    """Train two steps with tensor parallelism by parallelize_module, with FSDP2 over it if there are four ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    torch.manual_seed(job.seed)
    ranks, fault = dist.get_world_size(), job.fault
    sequence_parallel = job.options.get("sequence_parallel", False)
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_coordinate()
    model = Decoder(CONFIGS[job.model])
    if job.precision == "pure-bf16":
        model.bfloat16()
    stream = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, Any] = {
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "self_attn.o_proj": RowwiseParallel(output_layouts=stream),
        "mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=stream),
    }  # fmt: skip
    if sequence_parallel:
        plan["self_attn"] = PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        )
        plan["mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        if fault != "plain-norms":
            plan |= {
                name: SequenceParallel(use_local_output=True)
                for name in ("input_layernorm", "post_attention_layernorm")
            }
    if fault == "row-not-reduced":
        del plan["mlp.down_proj"]
    if fault == "column-not-reduced":
        del plan["mlp.gate_proj"], plan["mlp.up_proj"]
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], plan)
        if fault == "row-not-reduced":
            cut(layer.mlp.down_proj, mesh["tp"], Shard(1))
        if fault == "column-not-reduced":
            cut(layer.mlp.gate_proj, mesh["tp"], Shard(0))
            cut(layer.mlp.up_proj, mesh["tp"], Shard(0))
    if sequence_parallel:
        parallelize_module(model.model, mesh["tp"], {
            "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
        })  # fmt: skip
    head = ColwiseParallel(input_layouts=stream, output_layouts=Replicate())
    parallelize_module(model, mesh["tp"], {"lm_head": head})
    if ranks > 2:
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh["dp"])
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    audit = AuditHook(model, folder, mesh={"dp": dp, "tp": tp})
    for step in range(2):
        batches = [micro_batch(job, step, dp, number) for number in range(job.micro_batches)]
        total = torch.tensor(sum(map(valid_tokens, batches)))
        dist.all_reduce(total, group=mesh["dp"].get_group())
        for batch in batches:
            logits = call(model, batch, fault)
            loss = token_losses(logits, batch["labels"]) * (ranks // 2) / total
            audit.batch(**batch, loss=loss.detach())
            loss.backward()
        if fault == "norms-summed":
            for layer in model.model.layers:
                for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                    dist.all_reduce(norm.weight.grad, group=mesh["tp"].get_group())
        if (
            job.model == "qwen3" and fault != "head-norms-not-reduced"
        ):  # a rank's heads have only a part of it
            for layer in model.model.layers:
                for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                    gradient = norm.weight.grad
                    dist.all_reduce(
                        gradient.to_local() if ranks > 2 else gradient, group=mesh["tp"].get_group()
                    )
        audit.step()
        optimizer.step()
        optimizer.zero_grad()


def cut(linear: nn.Linear, mesh: Any, shard: Any) -> None:
    """Shard a linear by hand and leave out its communication."""
    from torch.distributed.tensor import distribute_tensor

    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [shard]))
    linear.forward = lambda x: F.linear(x, linear.weight.to_local())


class Batches(torch.utils.data.Dataset):
    """The sequences of all micro-batches of a job in one process."""

    def __init__(self, job: Job, steps: int):
        self.rows = []
        for step in range(steps):
            for number in range(job.micro_batches):
                batch = micro_batch(job, step, 0, number)
                self.rows += [{name: value[row] for name, value in batch.items()} for row in range(2)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return self.rows[row]


def pad(batch: dict[str, Tensor], count: int, left: bool = True) -> dict[str, Tensor]:
    """Replace the first or last tokens of the second sequence by padding."""
    side = slice(None, count) if left else slice(-count, None)
    attention_mask = torch.ones_like(batch["input_ids"])
    attention_mask[1, side] = 0
    batch["input_ids"][1, side] = 0
    batch["labels"][1, side] = -100
    if left:
        batch["labels"][1, count] = -100  # predicted from padding
    return {**batch, "attention_mask": attention_mask}


def hugging_face_model(job: Job) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(job.seed)
    options = {k: v for k, v in CONFIGS[job.model].items() if k not in ("architectures", "model_type")}
    if job.fault == "dropout":
        options["attention_dropout"] = 0.1
    if job.fault == "router-loss":
        options["output_router_logits"] = True
    if job.fault == "rope-theta":
        options["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    config = AutoConfig.for_model(CONFIGS[job.model]["model_type"], **options)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager" if job.model == "gemma2" else "sdpa"
    ).train()
    return model.bfloat16() if job.precision == "pure-bf16" else model


def train_trainer(job: Job, folder: Path) -> None:
    """Train two steps with transformers' Trainer and gradient accumulation."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    model, fault = hugging_face_model(job), job.fault
    clip = job.options.get("clip", 0.0)
    audit = AuditHook(model, folder, max_norm=clip)

    class Audited(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            recorded = dict(inputs)
            if fault == "no-attention-mask":
                del inputs["attention_mask"]
            if fault in ("micro-batch-mean", "no-accumulation-divisor"):
                num_items_in_batch = None
            if fault == "two-shifts":
                inputs["labels"] = F.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
            outputs = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            audit.batch(**recorded, loss=outputs.detach())
            return outputs / job.micro_batches if fault == "micro-batch-mean" else outputs

    class BeforeStep(TrainerCallback):
        def on_pre_optimizer_step(self, *ignored: Any, **options: Any) -> None:
            audit.step()

    def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        if job.options.get("padding"):
            batch = pad(batch, 3, job.options["padding"] == "left")
        if fault == "padding-labels":
            batch["labels"] = batch["input_ids"].clone()
        return batch

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), per_device_train_batch_size=2, max_steps=2, save_strategy="no",
        gradient_accumulation_steps=job.micro_batches, max_grad_norm=clip or (0.5 if fault == "clip" else 0.0),
        report_to=[], disable_tqdm=True, use_cpu=True, learning_rate=1e-2, logging_strategy="no",
        bf16=job.precision == "bf16", seed=job.seed, remove_unused_columns=False,
    )  # fmt: skip
    trainer = Audited(
        model, arguments, train_dataset=Batches(job, 2), data_collator=collate, callbacks=[BeforeStep()]
    )
    trainer.train()


def train_plain(job: Job, folder: Path) -> None:
    """Train two steps of a transformers model in a plain loop in one process."""
    model, fault = hugging_face_model(job), job.fault
    if fault == "detached":
        layer = model.model.layers[0]
        forward = layer.mlp.forward
        layer.mlp.forward = lambda x: forward(x.detach())
    if fault == "frozen":
        model.model.layers[1].mlp.up_proj.weight.register_hook(torch.zeros_like)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    audit = AuditHook(model, folder)
    for step in range(2):
        batches = [micro_batch(job, step, 0, number) for number in range(job.micro_batches)]
        if job.options.get("padding"):
            batches = [pad(batch, 3, job.options["padding"] == "left") for batch in batches]
        total = sum(map(valid_tokens, batches))
        for batch in batches:
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            with torch.autocast("cpu", torch.bfloat16, enabled=job.precision == "bf16"):
                outputs = model(**inputs)
            loss = token_losses(outputs.logits, batch["labels"]) / total
            if fault == "router-loss":
                from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

                loss = loss + 0.1 * load_balancing_loss_func(outputs.router_logits, 4, 2) / job.micro_batches
            audit.batch(**batch, loss=token_losses(outputs.logits, batch["labels"]).detach() / total)
            loss.backward()
        if fault == "last-micro-batch":
            optimizer.zero_grad()
            token_losses(model(**inputs).logits, batch["labels"]).div(valid_tokens(batch)).backward()
        audit.step()
        optimizer.step()
        optimizer.zero_grad()
