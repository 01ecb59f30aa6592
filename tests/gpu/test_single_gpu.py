"""One GPU: compiled blocks, fused attention, precision, and a training run, against fp32 without compilation."""

import json
from pathlib import Path

import pytest
import torch

import megalith
from megalith.config import ModelConfig, RunConfig
from megalith.data.batch import document_ends
from megalith.models.init import initialize
from megalith.models.inputs import TokenInputs
from megalith.models.transformer import Transformer
from megalith.ops.attention_core import attention
from megalith.ops.cross_entropy import linear_cross_entropy
from megalith.ops.dropout import attention_keep_mask, column_keys, counter_dropout, token_keys

GPT = dict(num_layers=3, hidden_size=256, num_attention_heads=4, vocab_size=1000, max_position_embeddings=256)
QWEN = dict(num_layers=3, hidden_size=256, num_attention_heads=8, num_query_groups=2, kv_channels=64,
            vocab_size=1000, max_position_embeddings=256, position_embedding_type="rope", swiglu=True,
            normalization="RMSNorm", add_bias_linear=False, qk_layernorm=True, hidden_dropout=0.1,
            attention_dropout=0.0, untie_embeddings_and_output_weights=True)  # fmt: skip
SCALE = 2.0**14  # so that fp16's small gradients do not vanish, as in a run
GEMMA = dict(QWEN, hidden_dropout=0.0, swiglu=False, gated_linear_unit=True, norm_placement="sandwich",
             window_size=[99, 0], window_attn_skip_freq=2, attn_logit_softcapping=5.0, final_logit_softcapping=3.0,
             query_pre_attn_scalar=50, layernorm_zero_centered_gamma=True, scale_embeddings=True)  # fmt: skip
MISTRAL = dict(QWEN, hidden_dropout=0.0, qk_layernorm=False, window_size=[99, 0])
BLOOM = dict(
    GPT, hidden_dropout=0.0, attention_dropout=0.0, position_embedding_type="alibi", embedding_layernorm=True
)
FAMILIES = {
    "gpt": dict(GPT, attention_dropout=0.0),
    "bloom": BLOOM,
    "qwen": QWEN,
    "mistral": MISTRAL,
    "gemma": GEMMA,
}


def loss_and_gradients(fields: dict, dtype: torch.dtype, compiled: bool, ids: torch.Tensor, documents=None):
    config = ModelConfig(**fields)
    model = Transformer(config, compute_dtype=dtype, seed=3, device="cuda").train()
    initialize(model, config, seed=1)
    if compiled:
        for layer in model.layers.values():
            layer.compile(fullgraph=True)
    loss = model(ids, labels=ids.roll(-1, 1), token_inputs=TokenInputs(document_ends=documents)) / ids.numel()
    (loss * SCALE).backward()
    return loss, {name: p.grad / SCALE for name, p in model.named_parameters()}


@pytest.mark.parametrize("has_documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_compiled_blocks_give_the_gradients_of_fp32_eager(
    family: str, dtype: torch.dtype, has_documents: bool
) -> None:
    ids = torch.randint(0, 1000, (4, 256), device="cuda")
    documents = document_ends((ids < 20).cpu().numpy()).cuda() if has_documents else None
    expected, reference = loss_and_gradients(FAMILIES[family], torch.float32, False, ids, documents)
    loss, gradients = loss_and_gradients(FAMILIES[family], dtype, True, ids, documents)
    bound = 1e-5 if dtype == torch.float32 else 3e-2
    assert (loss - expected).abs() <= (1e-5 if dtype == torch.float32 else 2e-3) * expected
    everything = torch.cat([g.flatten() for g in reference.values()]).norm()
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32, name
        wrong = (gradient - reference[name]).norm()
        assert wrong <= bound * max(reference[name].norm(), 1e-2 * everything), name


def test_dropout_masks_are_the_same_on_cpu_gpu_and_compiled() -> None:
    keys = token_keys(7, torch.arange(8) + 2**33, torch.arange(100))
    x = torch.ones(8, 100, 192)
    columns = column_keys(192, "cpu")
    expected = counter_dropout(x, 0.1, keys, columns)
    places = torch.arange(100)
    expected_attention = attention_keep_mask(keys, 4, places, 0.1)
    assert expected_attention.shape == (8, 4, 100, 100)
    on_gpu = x.cuda(), 0.1, keys.cuda(), column_keys(192, "cuda")
    assert torch.equal(counter_dropout(*on_gpu).cpu(), expected)
    assert torch.equal(torch.compile(counter_dropout)(*on_gpu).cpu(), expected)
    compiled = torch.compile(attention_keep_mask)(keys.cuda(), 4, places.cuda(), 0.1)
    assert torch.equal(compiled.cpu(), expected_attention)
    on_gpu = torch.compile(token_keys)(7, (torch.arange(8) + 2**33).cuda(), torch.arange(100).cuda())
    assert torch.equal(on_gpu.cpu(), keys)


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_causal_attention_runs_on_cudnn(head_dim: int) -> None:
    q, k, v = (torch.randn(2, 512, 8, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        attention(q, k, v)
        torch.cuda.synchronize()
    kernels = [event.key for event in profile.key_averages()]
    assert any("cudnn" in kernel for kernel in kernels), "\n".join(kernels)


@pytest.mark.parametrize("seq", [192, 256, 320])  # seq % 128 == 64 is where cuDNN's masked kernel gives NaN
def test_documents_do_not_see_each_other_and_gradients_are_finite(seq: int) -> None:
    documents = torch.tensor([[100, seq]] * 2, dtype=torch.int32, device="cuda")
    q, k, v = (
        torch.randn(2, seq, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    out = attention(q, k, v, documents=documents)
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    alone = attention(q[:, 100:], k[:, 100:], v[:, 100:])
    assert torch.allclose(out[:, 100:].float(), alone.float(), atol=2e-2)


def test_chunked_loss_equals_cross_entropy() -> None:
    hidden = torch.randn(3000, 64, device="cuda", requires_grad=True)
    weight = torch.randn(50304, 64, device="cuda", requires_grad=True)
    labels = torch.randint(0, 50257, (3000,), device="cuda")
    mask = torch.rand(3000, device="cuda")
    loss = linear_cross_entropy(hidden, weight, labels, mask, 50257)
    loss.backward()
    got = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    logits = (hidden @ weight.T)[:, :50257]
    expected = (torch.nn.functional.cross_entropy(logits, labels, reduction="none") * mask).sum()
    expected.backward()
    assert torch.allclose(loss, expected, rtol=1e-5)
    for a, b in zip(got, (hidden.grad, weight.grad)):
        assert (a - b).norm() <= 1e-5 * b.norm()


PRESETS = pytest.mark.parametrize("preset", ["tiny-gpt", "tiny-llama"])


def run(output: Path, preset: str, *overrides: str) -> list[dict]:
    settings = ["--model.preset", preset, "--model.hidden_size", "128", "--model.vocab_size", "512",
                "--data.mock", "true", "--data.seq_length", "128", "--train.micro_batch_size", "4",
                "--train.global_batch_size", "8", "--train.train_iters", "40", "--optim.lr", "3e-3",
                "--train.eval_interval", "20", "--train.eval_iters", "2",
                "--train.output_dir", str(output)]  # fmt: skip
    megalith.train(RunConfig.load(None, [*settings, *overrides]))
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@PRESETS
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_learns(tmp_path: Path, precision: str, preset: str) -> None:
    steps = run(
        tmp_path / "run", preset, "--train.precision", precision, "--optim.initial_loss_scale", "65536"
    )
    assert len(steps) == 40
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    assert all(step["tokens_per_second_per_device"] > 0 and step["max_memory_gb"] > 0 for step in steps)


@PRESETS
def test_resuming_is_bitwise_going_on(tmp_path: Path, preset: str) -> None:
    options = (preset, "--train.precision", "bf16", "--train.deterministic", "true")
    whole = run(tmp_path / "whole", *options)
    parts = ("--checkpoint.load", str(tmp_path / "parts"))
    run(tmp_path / "parts", *options, *parts, "--train.exit_interval", "23")
    resumed = run(tmp_path / "parts", *options, *parts)
    assert [s["loss"] for s in resumed] == [s["loss"] for s in whole]
    first, second = (megalith.load(tmp_path / name).state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(first[name], second[name]) for name in first)


@PRESETS
def test_steps_between_log_lines_never_wait_for_the_device(tmp_path: Path, monkeypatch, preset: str) -> None:
    from megalith.training.run_state import Run

    inner = Run.train_step

    def watched(self, *given):
        quiet = self.step > 5 and (self.step + 1) % 10 != 0  # compiled by then, and not the step that logs
        torch.cuda.set_sync_debug_mode("error" if quiet else "default")
        try:
            return inner(self, *given)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Run, "train_step", watched)
    for precision in ("bf16", "fp16"):
        assert len(run(tmp_path / precision, preset, "--train.precision", precision)) == 40
