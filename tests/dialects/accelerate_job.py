"""Small Hugging Face models trained by the loops of Accelerate's scripts, and the same by plain PyTorch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    ApertusConfig,
    ApertusForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForPreTraining,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCAB, SEQ, WIDTH, LAYERS = 96, 16, 32, 4
PADDING = 57  # the most frequent token of the samples
LLAMA = dict(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=64,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
)
GPT2 = dict(
    vocab_size=VOCAB,
    n_positions=32,
    n_embd=WIDTH,
    n_layer=LAYERS,
    n_head=4,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=0,
    eos_token_id=0,
)
BERT = dict(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=32,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    pad_token_id=None,  # of which transformers leaves the gradient out
)
OPT = dict(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    ffn_dim=64,
    word_embed_proj_dim=WIDTH,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=32,
    dropout=0.0,
)
T5 = dict(
    vocab_size=VOCAB,
    d_model=WIDTH,
    d_kv=8,
    d_ff=64,
    num_layers=2,
    num_heads=4,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=12,
    decoder_start_token_id=3,
    n_positions=32,
    dropout_rate=0.0,
)
BART = dict(
    vocab_size=VOCAB,
    d_model=WIDTH,
    encoder_layers=2,
    decoder_layers=2,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    max_position_embeddings=32,
    pad_token_id=1,
    decoder_start_token_id=3,
    dropout=0.0,
    attention_dropout=0.0,
    encoder_layerdrop=0.0,
    decoder_layerdrop=0.0,
)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
    # A padding token among the samples' tokens: transformers does not train its row of the embedding.
    "llama with padding": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, pad_token_id=PADDING)),
    "tied llama with padding": lambda: LlamaForCausalLM(
        LlamaConfig(**LLAMA, pad_token_id=PADDING, tie_word_embeddings=True)
    ),
    "bert": lambda: BertForPreTraining(BertConfig(**BERT)),
    "t5": lambda: T5ForConditionalGeneration(T5Config(**T5)),
    "bart": lambda: BartForConditionalGeneration(BartConfig(**BART)),
    "mbart": lambda: MBartForConditionalGeneration(MBartConfig(**BART)),
    "marian": lambda: MarianMTModel(MarianConfig(**BART | {"decoder_start_token_id": 1})),
    "opt": lambda: OPTForCausalLM(OPTConfig(**OPT)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**LLAMA, num_local_experts=4)),
    "apertus": lambda: ApertusForCausalLM(ApertusConfig(**LLAMA)),
    "olmo hybrid": lambda: OlmoHybridForCausalLM(
        OlmoHybridConfig(
            **LLAMA, linear_key_head_dim=6, linear_value_head_dim=8, pad_token_id=None, eos_token_id=None
        )
    ),
}
RATE = 1e4
BATCH, STEPS = 8, 3  # samples of an optimizer step's pass, and optimizer steps


def model_of(kind: str) -> nn.Module:
    """With biases and norms that are not all alike, as they are at first."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def samples(count: int) -> list[dict[str, Tensor]]:
    """Random tokens; the first labels and a fifth of the others are −100."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (count, SEQ), generator=draw)
    labels = ids.clone()
    labels[torch.rand(count, SEQ, generator=draw) < 0.2] = -100
    labels[:, :3] = -100
    return [{"input_ids": a, "labels": b} for a, b in zip(ids, labels)]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups of two rates. `eps` is no less than rounding: the gradient of GPT-2's key bias is that alone."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 2e-3}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), eps=1e-4)


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Of which one step shows the gradient: beside it the weights, and their rounding, are nothing."""
    return torch.optim.SGD(model.parameters(), lr=RATE)


OPTIMIZERS = {"adamw": adamw, "sgd": plain_sgd}


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS)


def reference(
    kind: str,
    accumulation: int = 1,
    optimizer: str = "adamw",
    steps: int = STEPS,
    clip: float = 1.0,
    data: list | None = None,
    batch: int = BATCH,
):
    """Losses of every pass and the weights behind them, by plain PyTorch in one process."""
    data = samples(batch * accumulation * steps) if data is None else data
    model = model_of(kind)
    adam = OPTIMIZERS[optimizer](model)
    schedule, losses = cosine(adam), []
    batches = iter(DataLoader(data, batch_size=batch))
    for _ in range(steps):
        adam.zero_grad()
        for _ in range(accumulation):
            loss = model(**next(batches)).loss
            losses.append(loss.item())
            (loss / accumulation).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        adam.step()
        schedule.step()
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def forget_accelerator() -> None:
    """Makes this process one that has had no Accelerator."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def fresh_accelerator(accumulation: int = 1, precision: str = "no", **given: Any) -> Any:
    """An Accelerator as of a process that has none, with these of its own options and fields of its plugin."""
    from megalith.accelerate import Accelerator, MegatronLMPlugin

    forget_accelerator()
    fields = {item.name for item in dataclasses.fields(MegatronLMPlugin)}
    return Accelerator(
        mixed_precision=precision,
        gradient_accumulation_steps=accumulation,
        megatron_lm_plugin=MegatronLMPlugin(**{name: given[name] for name in given if name in fields}),
        **{name: given[name] for name in given if name not in fields},
    )


def prepared(accelerator: Any, kind: str, data: list, optimizer: str = "adamw", batch: int = BATCH) -> Any:
    """Model, optimizer, loader of `batch` samples a turn over all replicas, and schedule, as `prepare` gives them."""
    plugin = accelerator.state.megatron_lm_plugin
    micro = batch // plugin.num_micro_batches // plugin.data_parallel_size_of(accelerator.num_processes)
    model = model_of(kind)
    own = OPTIMIZERS[optimizer](model)
    return accelerator.prepare(model, own, DataLoader(data, batch_size=micro), cosine(own))


def train(accelerator: Any, objects: Any, turns: Iterator | None = None) -> list[float]:
    """The documents' loop: the loss of every turn."""
    model, optimizer, loader, schedule = objects
    losses = []
    model.train()
    for batch in loader if turns is None else turns:
        with accelerator.accumulate(model):
            outputs = model(**batch)
            losses.append(outputs.loss.item())
            accelerator.backward(outputs.loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return losses


def run(
    kind: str,
    accumulation: int = 1,
    optimizer: str = "adamw",
    steps: int = STEPS,
    batch: int = BATCH,
    **plugin: Any,
):
    """As `reference`, by Megalith."""
    accelerator = fresh_accelerator(accumulation, **plugin)
    objects = prepared(accelerator, kind, samples(batch * accumulation * steps), optimizer, batch)
    return train(accelerator, objects), accelerator.get_state_dict(objects[0])


def check(found: tuple, wanted: tuple, tolerance: float = 1e-5) -> None:
    """Losses and weights of two runs are equal, relative to the losses and to each tensor's norm."""
    for one, other in zip(found[0], wanted[0], strict=True):
        assert abs(one - other) <= tolerance * abs(other), (found[0], wanted[0])
    assert found[1].keys() == wanted[1].keys()
    for name, weight in wanted[1].items():
        difference = (found[1][name] - weight).norm() / weight.norm().clamp(min=1e-6)
        assert difference <= tolerance, (name, float(difference))


def checked(
    wanted: tuple, kind: str, accumulation: int, layout: dict, optimizer: str = "adamw", steps: int = STEPS
) -> None:
    """`run`, and the comparison on every rank, so that no weights are sent."""
    check(run(kind, accumulation, optimizer, steps, **layout), wanted)


def stacked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch of these samples."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def close(one: Tensor, other: Tensor, tolerance: float = 1e-5) -> None:
    """They are equal, relative to the norm of the second."""
    assert (one - other).norm() <= tolerance * other.norm(), (one, other)


def one_step(kind="llama", optimizer="sgd", data=None, **plugin):
    """Accelerator, model and optimizer of one process, and the batch of a step."""
    plugin = {"gradient_clipping": 0.0, **plugin}
    accelerator = fresh_accelerator(**plugin)
    model, own, loader, _ = prepared(accelerator, kind, data or samples(BATCH), optimizer)
    model.train()
    return accelerator, model, own, next(iter(loader))


def gradients(accelerator, model, kind="llama"):
    """By one step of SGD."""
    before, after = model_of(kind).state_dict(), accelerator.get_state_dict(model)
    return {name: (before[name] - after[name]) / RATE for name in before}
