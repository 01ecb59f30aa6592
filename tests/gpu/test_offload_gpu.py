"""Copies between device and host on their own streams, made late on purpose, never show in the results."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import megalith
from megalith.config import ModelConfig, OptimConfig, ParallelConfig, RunConfig
from megalith.models.init import initialize
from megalith.models.pass_context import Context, PassLayout
from megalith.models.transformer import Transformer
from megalith.optim import build_loss_scale, build_optimizer, offload, optimizer_step
from megalith.optim.offload import OffloadedOptimizer
from megalith.parallel.memory.activation_offload import (
    ActivationOffload,
    _CopyStreams,
    apply_activation_offload,
)
from megalith.parallel.memory.recompute import apply_recompute
from megalith.planner.counts import MetaModel
from megalith.planner.saved_activations import saved_activations

LATE = 2_000_000  # cycles: about a millisecond
OPTIMIZERS = {
    "adamw": OptimConfig(optimizer="adamw", lr=0.1, weight_decay=0.1),
    "adam": OptimConfig(optimizer="adam", lr=0.1, weight_decay=0.1),
    "sgd": OptimConfig(optimizer="sgd", lr=0.1, weight_decay=0.1),
}


def parameters(device: str) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    shapes = {"embedding": (300, 257), "fc1": (512, 130), "bias": (512,), "fc2": (130, 512), "norm": (130,)}
    return {n: nn.Parameter(torch.randn(s, generator=generator).to(device)) for n, s in shapes.items()}


def offloading(config: OptimConfig, fraction: float, overlap: bool) -> OptimConfig:
    settings = dict(optimizer_cpu_offload=True, optimizer_offload_fraction=fraction)
    return config.model_copy(update=settings | dict(overlap_cpu_optimizer_d2h_h2d=overlap))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("config", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_offloaded_share_is_bitwise_what_a_cpu_gives_and_the_rest_what_the_gpu_gives(
    config, fraction, overlap, monkeypatch
):
    monkeypatch.setattr(offload, "SLICE", 10_000)
    fetch, send = OffloadedOptimizer._fetch, OffloadedOptimizer._send

    def late(copy, stream):
        def copy_late(self, part, slot):
            with torch.cuda.stream(getattr(self, stream)):
                torch.cuda._sleep(LATE)
            copy(self, part, slot)

        return copy_late

    monkeypatch.setattr(OffloadedOptimizer, "_fetch", late(fetch, "_down"))
    monkeypatch.setattr(OffloadedOptimizer, "_send", late(send, "_up"))
    ours, on_cpu, on_gpu = parameters("cuda"), parameters("cpu"), parameters("cuda")
    optimizer = build_optimizer(ours.items(), offloading(config, fraction, overlap))
    assert isinstance(optimizer, OffloadedOptimizer)
    references = [build_optimizer(on_cpu.items(), config), build_optimizer(on_gpu.items(), config)]
    squares = [
        9.0,
        0.01,
        float("nan"),
        25.0,
        1.0,
    ]  # of the gradient: the same for all, the third step is skipped
    for step, square in enumerate(squares):
        generator = torch.Generator().manual_seed(step)
        for name, parameter in ours.items():
            gradient = torch.randn(parameter.shape, generator=generator)
            on_cpu[name].grad, on_gpu[name].grad = gradient.clone(), gradient.cuda()
            torch.cuda._sleep(LATE)  # the gradient comes late
            parameter.grad = gradient.cuda().clone()
        for one, device in ((optimizer, "cuda"), (references[0], "cpu"), (references[1], "cuda")):
            total = torch.tensor(square, device=device)
            optimizer_step(one, build_loss_scale("bf16", config, device), 1.0, lambda given, t=total: t)
        for parameter in ours.values():
            parameter.grad.fill_(float("nan"))  # who still reads it would show it
            parameter.grad = None
    hosted = 0
    for name, parameter in ours.items():
        state = optimizer.state[parameter]
        is_hosted = next(iter(state.values())).device.type == "cpu"
        hosted += is_hosted * parameter.numel()
        expected, reference = (on_cpu, references[0]) if is_hosted else (on_gpu, references[1])
        assert torch.equal(parameter.cpu(), expected[name].cpu()), name
        for key, value in reference.state[expected[name]].items():
            assert torch.equal(state[key].cpu(), value.cpu()), (name, key)
    total = sum(parameter.numel() for parameter in ours.values())
    assert 0.7 * fraction * total < hosted <= fraction * total


def test_moments_leave_the_device() -> None:
    big = [("weight", nn.Parameter(torch.zeros(4096, 4096, device="cuda")))]
    used = []
    for config in (OPTIMIZERS["adamw"], offloading(OPTIMIZERS["adamw"], 1.0, True)):
        before = torch.cuda.memory_allocated()
        optimizer = build_optimizer(big, config)
        used.append(torch.cuda.memory_allocated() - before)
        del optimizer
    assert used[0] >= 8 * 4096 * 4096
    assert used[1] < 2**20


class Wave(nn.Module):
    """Saves three large tensors, one of them its input; its results are the same on every run."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 1024, device="cuda"))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(x * self.weight) * torch.cos(x)


class Waves(nn.Module):
    def __init__(self, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(Wave() for _ in range(layers))


def run_waves(layers, x, context):
    for layer in layers:
        x = layer(x)
    return x


@pytest.mark.parametrize("offloaded", [3, 6])
def test_activations_come_back_as_they_went_however_late(offloaded, monkeypatch) -> None:
    copied = _CopyStreams.copied

    def copied_late(self, target, source, stream):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LATE)
        return copied(self, target, source, stream)

    monkeypatch.setattr(_CopyStreams, "copied", copied_late)
    x = torch.randn(4096, 1024, device="cuda")
    gradients, held = [], []
    for layers in (0, offloaded):
        model = Waves(6)
        runner = ActivationOffload(run_waves, layers) if layers else run_waves
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            inputs = [(x * factor).requires_grad_() for factor in (1.0, -0.5)]
            outputs = [runner(list(model.layers), each, Context(1, PassLayout())) for each in inputs]
            held.append(torch.cuda.memory_allocated() - before)
            for output in outputs:  # two micro-batches in flight
                output.sum().backward()
        gradients.append([each.grad for each in inputs] + [p.grad for p in model.parameters()])
        del outputs, output, model
    assert all(torch.equal(a, b) for a, b in zip(*gradients))
    assert held[-1] < held[0] * (0.75 if offloaded == 3 else 0.5)


GPT = dict(num_layers=8, hidden_size=1024, num_attention_heads=16, vocab_size=1000, max_position_embeddings=1024,
           hidden_dropout=0.1, attention_dropout=0.0)  # fmt: skip
LLAMA = dict(GPT, num_query_groups=4, ffn_hidden_size=2816, swiglu=True, normalization="RMSNorm",
             add_bias_linear=False, position_embedding_type="rope", hidden_dropout=0.0)  # fmt: skip


@pytest.mark.parametrize("fields", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recompute", [{}, {"recompute_granularity": "full"}], ids=["kept", "recomputed"])
def test_a_models_gradients_and_peak_memory(compiled, recompute, fields) -> None:
    config = ModelConfig(**fields)
    ids = torch.randint(0, 1000, (8, 1024), device="cuda")
    peaks, results = [], []
    for layers in (0, 6):
        model = Transformer(config, compute_dtype=torch.bfloat16, seed=3, device="cuda").train()
        initialize(model, config, seed=1)
        parallel = ParallelConfig(cpu_offloading_num_layers=layers, **recompute)
        apply_recompute(model, parallel, compiled=compiled)
        if compiled:
            for layer in model.layers.values():
                layer.compile(fullgraph=True)
        apply_activation_offload(model, parallel)
        for _ in range(2):
            model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            loss = model(ids, labels=ids.roll(-1, 1)) / ids.numel()
            held = torch.cuda.memory_allocated() - before
            loss.backward()
        peaks.append((held, torch.cuda.max_memory_allocated() - before))
        results.append((loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
        del model, loss
    (expected, reference), (loss, gradients) = results
    assert torch.equal(loss, expected)
    everything = torch.cat([g.flatten() for g in reference.values()]).norm()
    for name, gradient in gradients.items():  # attention's backward kernel adds up in no fixed order
        assert (gradient - reference[name]).norm() <= 1e-2 * everything, name
    print(f"held, peak: {peaks[0]} without, {peaks[1]} with offloading")
    assert peaks[1][0] < (0.8 if recompute else 0.5) * peaks[0][0]
    assert recompute or peaks[1][1] < 0.8 * peaks[0][1]
    stream = ids.numel() * config.hidden_size * 2
    last = (
        2 * ids.numel() * saved_activations(MetaModel(config), compiled=compiled)
    )  # kept whole; of the others their inputs
    assert not recompute or peaks[0][0] < last + 2 * config.num_layers * stream


@pytest.mark.parametrize(
    "modules", [["mlp_act"], ["layernorm"], ["mlp"], ["layernorm", "mlp"], ["core_attn"]], ids="+".join
)
@pytest.mark.parametrize("fields", [GPT, LLAMA], ids=["gpt", "llama"])
def test_a_compiled_layer_that_recomputes_modules_holds_less_by_what_the_planner_counts(
    fields, modules
) -> None:
    config = ModelConfig(**fields | {"hidden_dropout": 0.0})
    ids, held = torch.randint(0, 1000, (8, 1024), device="cuda"), []
    for recomputed in ([], modules):
        model = Transformer(config, compute_dtype=torch.bfloat16, seed=3, device="cuda").train()
        initialize(model, config, seed=1)
        selective = dict(recompute_granularity="selective", recompute_modules=modules) if recomputed else {}
        apply_recompute(model, ParallelConfig(**selective), compiled=True)
        for layer in model.layers.values():
            layer.compile(fullgraph=True)
        for _ in range(2):
            model.zero_grad()
            before = torch.cuda.memory_allocated()
            loss = model(ids, labels=ids.roll(-1, 1)) / ids.numel()
            held.append(torch.cuda.memory_allocated() - before)
            loss.backward()
        del model, loss
    meta = MetaModel(config)
    counted = saved_activations(meta) - saved_activations(meta, recomputed=modules)
    if "mlp" in modules:  # the weights in bf16 are made again too, which a run has once and for all
        weights = meta.layer(0).mlp.named_parameters()
        counted += sum(p.numel() for name, p in weights if name.endswith("weight")) / ids.numel()
    if "core_attn" in modules:
        counted += 2 * config.num_attention_heads  # the logarithms of its sums, in fp32
    saved = (held[1] - held[3]) / (2 * ids.numel() * config.num_layers)
    print(f"{modules}: {saved:.0f} elements a token and layer, counted {counted:.0f}")
    assert saved == pytest.approx(counted, rel=0.05, abs=0.02 * config.hidden_size)


def run(output: Path, preset: str, *overrides: str) -> None:
    settings = ["--model.preset", preset, "--model.hidden_size", "128", "--model.vocab_size", "512",
                "--data.mock", "true", "--data.seq_length", "128", "--train.micro_batch_size", "4",
                "--train.global_batch_size", "8", "--train.train_iters", "20", "--optim.lr", "3e-3",
                "--train.eval_iters", "0", "--train.precision", "bf16", "--train.deterministic", "true",
                "--runtime.compile", "false", "--parallel.cpu_offloading_num_layers", "1",
                "--train.output_dir", str(output)]  # fmt: skip
    megalith.train(RunConfig.load(None, [*settings, *overrides]))


@pytest.mark.parametrize(
    "preset, fraction", [("tiny-gpt", "1.0"), ("tiny-gpt", "0.5"), ("tiny-llama", "0.5")]
)
def test_resuming_with_offloading_is_bitwise_going_on(tmp_path: Path, preset: str, fraction: str) -> None:
    options = (
        preset,
        "--optim.optimizer_cpu_offload",
        "true",
        "--optim.optimizer_offload_fraction",
        fraction,
    )
    run(tmp_path / "whole", *options)
    parts = ("--checkpoint.load", str(tmp_path / "parts"))
    run(tmp_path / "parts", *options, *parts, "--train.exit_interval", "13")
    run(tmp_path / "parts", *options, *parts)
    first, second = (megalith.load(tmp_path / name).state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(first[name], second[name]) for name in first)
