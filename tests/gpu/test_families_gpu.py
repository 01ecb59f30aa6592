"""Models that are no plain GPT on a GPU: encoders, encoder-decoders, sinks, delta nets and scaled residuals, compiled,
against one process in fp32 on the CPU."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import megalith
from megalith.config import RunConfig
from megalith.models.init import initialize
from megalith.models.inputs import TokenInputs
from megalith.models.model_types import make_model
from megalith.models.transformer import layers_of
from megalith.ops.attention_core import attention

BATCH, SEQ, VOCAB = 2, 192, 512
SIZES = dict(num_layers=2, hidden_size=256, num_attention_heads=4, vocab_size=VOCAB, max_position_embeddings=SEQ,
             hidden_dropout=0.0, attention_dropout=0.0)  # fmt: skip
DENSE = dict(SIZES, ffn_hidden_size=512)
ROUTED = dict(
    SIZES, num_query_groups=2, num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=128, kv_channels=64
)
FAMILIES = {
    "bert": dict(DENSE, preset="bert-large"),
    "modernbert": dict(DENSE, preset="bert-large", position_embedding_type="rope", rotary_base_local=1e3,
                       window_size=[40, 40], window_attn_skip_freq=2, embedding_layernorm=True, gated_linear_unit=True,
                       add_first_input_layernorm=False, add_lm_head_dense_bias=False, add_norm_bias=False,
                       add_bias_linear=False, apply_residual_connection_post_layernorm=False, bert_binary_head=False,
                       num_tokentypes=2),
    "t5": dict(DENSE, preset="t5-3b", num_layers=4, kv_channels=64),
    "gpt-oss": dict(ROUTED, preset="gpt-oss-20b", ffn_hidden_size=128, window_size=[99, 0]),
    "qwen3-next": dict(ROUTED, preset="qwen3-next-80b-a3b", num_layers=4, moe_shared_expert_intermediate_size=128),
    "granite": dict(DENSE, preset="tiny-llama", residual_multiplier=0.22, embedding_multiplier=12.0,
                    logits_scaling=8.0, softmax_scale=0.015625),
    "gptj": dict(DENSE, preset="tiny-llama", rotary_interleaved=True, parallel_attn_mlp=True, rotary_percent=0.5),
    "mpt": dict(DENSE, preset="bloom-560m", embedding_layernorm=False, add_norm_bias=False, add_bias_linear=False,
                activation="gelu"),
    "biogpt": dict(DENSE, preset="gpt2", activation="gelu", scale_embeddings=True),
    "minicpm3": dict(DENSE, preset="tiny-llama", num_query_groups=0, multi_latent_attention=True, q_lora_rank=64,
                     kv_lora_rank=64, qk_head_dim=32, qk_pos_emb_head_dim=32, v_head_dim=64, embedding_multiplier=12.0,
                     residual_multiplier=0.3, logits_scaling=2.0),
    "exaone4": dict(DENSE, preset="exaone4-32b", kv_channels=64, num_query_groups=2, window_size=[99, 0],
                    rope_scaling=None),
    "glm4.5": dict(ROUTED, preset="glm4.5", moe_layer_freq=[0, 1], moe_shared_expert_intermediate_size=128,
                   ffn_hidden_size=256),
    "apertus": dict(DENSE, preset="tiny-llama", swiglu=False, activation="xielu", qk_layernorm=True),
    "nanochat": dict(DENSE, preset="tiny-llama", swiglu=False, activation="squared_relu", add_norm_weight=False,
                     embedding_layernorm=True, qk_l2_norm=True),
    "olmo": dict(DENSE, preset="tiny-llama", normalization="LayerNorm", add_norm_weight=False, add_norm_bias=False,
                 clip_qkv=0.5),
    "phimoe": dict(ROUTED, preset="mixtral-8x7b", ffn_hidden_size=128, normalization="LayerNorm", add_qkv_bias=True,
                   add_proj_bias=True, add_output_bias=True, moe_router_score_function="sparsemixer",
                   moe_sparsemixer_jitter_eps=0.2),
    "cohere2-moe": dict(ROUTED, preset="mixtral-8x7b", ffn_hidden_size=256, normalization="LayerNorm",
                        moe_layer_freq=[0, 1], add_norm_bias=False, parallel_attn_mlp=True, shared_layernorm=True,
                        rotary_interleaved=True,
                        moe_shared_expert_intermediate_size=128, moe_average_shared_expert=True,
                        moe_router_score_function="sigmoid", window_size=[99, 0], no_rope_freq=[0, 1]),
    "gpt-neox-japanese": dict(DENSE, preset="tiny-llama", normalization="LayerNorm", swiglu=False, activation="gelu",
                              add_proj_bias=True, proj_bias_in_last_layer_only=True),
    "minimax-m2": dict(ROUTED, preset="minimax-m2"),
}  # fmt: skip
# Where rounding may send a token elsewhere, or an element of OLMo's queries across the bound that it is clamped to.
ROUTES = {"gpt-oss", "qwen3-next", "glm4.5", "minimax-m2", "phimoe", "cohere2-moe", "olmo"}
BF16 = {"t5": 8e-2}  # whose scores are not scaled; of the others 4e-2
SCALE = 2.0**10


def loss_and_gradients(family: str, device: str, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    config = RunConfig.from_tree({"model": FAMILIES[family]}).model
    model = make_model(config, compute_dtype=dtype, seed=3, device=device).train()
    initialize(model, config, seed=1)
    if device == "cuda":
        for layer in layers_of(model).values():
            layer.compile(fullgraph=not layer.has_experts)
    random = torch.Generator().manual_seed(7)
    ids = torch.randint(1, VOCAB, (BATCH, SEQ), generator=random)
    given, ends = {"labels": ids.roll(-1, 1)}, None
    if family in ("bert", "modernbert"):
        given["tokentype_ids"] = (torch.arange(SEQ) > 80).long().expand(BATCH, SEQ)
        if family == "bert":
            given["sentence_order"] = torch.tensor([0, 1])
        ends = torch.tensor([[150, SEQ], [SEQ, SEQ]], dtype=torch.int32)
    if family == "t5":
        given["encoder_input_ids"] = torch.randint(1, VOCAB, (BATCH, 160), generator=random)
        given["encoder_padding_mask"] = torch.arange(160) < torch.tensor([[100], [160]])
    inputs = TokenInputs(document_ends=None if ends is None else ends.to(device))
    given = {name: x.to(device) for name, x in given.items()}
    loss = model(ids.to(device), token_inputs=inputs, **given) / ids.numel()
    (loss * SCALE).backward()
    return loss.detach().cpu(), {name: p.grad.cpu() / SCALE for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_on_a_gpu_it_is_one_process_on_the_cpu(family: str) -> None:
    expected, reference = loss_and_gradients(family, "cpu", torch.float32)
    everything = torch.cat([g.flatten() for g in reference.values()]).norm()
    for dtype, of_loss, of_gradients in (
        (torch.float32, 1e-5, 1e-4),
        (torch.bfloat16, 3e-3, BF16.get(family, 4e-2)),
    ):
        loss, gradients = loss_and_gradients(family, "cuda", dtype)
        assert (loss - expected).abs() <= of_loss * expected, dtype
        if dtype == torch.bfloat16 and family in ROUTES:
            continue
        for name, gradient in gradients.items():
            wrong = (gradient - reference[name]).norm()
            assert wrong <= of_gradients * max(reference[name].norm(), 1e-2 * everything), (dtype, name)


@pytest.mark.parametrize("family, less", [("t5", 0.2), ("gpt-oss", 0.5), ("qwen3-next", 0.5)])
def test_a_run_learns(tmp_path: Path, family: str, less: float) -> None:
    model = {f"--model.{name}": value for name, value in FAMILIES[family].items()}
    settings = {**model, "--data.mock": True, "--data.seq_length": SEQ, "--train.precision": "bf16",
                "--train.micro_batch_size": 4, "--train.global_batch_size": 8, "--train.train_iters": 100,
                "--train.eval_iters": 0, "--optim.lr": 5e-4, "--train.output_dir": tmp_path / "run"}  # fmt: skip
    words = [
        json.dumps(value) if isinstance(value, (list, bool)) else str(value) for value in settings.values()
    ]
    given = [word for pair in zip(settings, words) for word in pair]
    megalith.train(RunConfig.load(None, given))
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 100 and not any(step["skipped"] for step in steps)
    assert steps[-1]["loss"] < steps[0]["loss"] - less


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_learned_bias_has_its_gradient(dtype: torch.dtype, causal: bool, compiled: bool) -> None:
    heads, size = 6, 64
    random = torch.Generator("cuda").manual_seed(3)
    made = [torch.randn(BATCH, SEQ, heads, size, device="cuda", generator=random).to(dtype) for _ in range(4)]
    grad, tensors = made[3], [x.requires_grad_() for x in made[:3]]
    bias = torch.randn(1, heads, SEQ, SEQ, device="cuda", generator=random, requires_grad=True)
    real = torch.arange(SEQ, device="cuda") < torch.tensor([[100], [SEQ]], device="cuda")
    mask = None if causal else real[:, None, None].expand(-1, 1, SEQ, -1).contiguous()

    def ours(*given: Tensor) -> Tensor:
        return attention(*given[:3], causal=causal, mask=mask, scale=1 / 8, bias=given[3])

    exact = [x.detach().double().requires_grad_() for x in (*tensors, bias)]
    query, key, value = (x.transpose(1, 2) for x in exact[:3])
    scores = query @ key.mT / 8 + exact[3]
    seen = torch.ones(SEQ, SEQ, dtype=torch.bool, device="cuda").tril() if causal else mask
    out = (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value).transpose(1, 2)
    expected = [out, *torch.autograd.grad(out, exact, grad.double())]
    found = (torch.compile(ours, fullgraph=True) if compiled else ours)(*tensors, bias)
    found = [found, *torch.autograd.grad(found, [*tensors, bias], grad)]
    rounding = 2e-3 if dtype == torch.float32 else 2e-2  # flex_attention multiplies fp32 by TF32
    for name, a, b in zip(("out", "query", "key", "value", "bias"), found, expected, strict=True):
        assert (a.double() - b).norm() <= rounding * b.norm(), name


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_sink_has_its_gradient(dtype: torch.dtype, window: int | None, compiled: bool) -> None:
    heads, groups, size = 8, 2, 64
    random = torch.Generator("cuda").manual_seed(3)
    counts = (heads, groups, groups, heads)
    made = [torch.randn(BATCH, SEQ, n, size, device="cuda", generator=random).to(dtype) for n in counts]
    grad, tensors = made[3], [x.requires_grad_() for x in made[:3]]
    sink = torch.randn(heads, device="cuda", generator=random, requires_grad=True)

    def ours(*given: Tensor) -> Tensor:
        return attention(*given[:3], window=window, sink=given[3])

    exact = [x.detach().double().requires_grad_() for x in (*tensors, sink)]
    query, key, value = (x.transpose(1, 2) for x in exact[:3])
    key, value = (x.repeat_interleave(heads // groups, 1) for x in (key, value))
    distance = torch.arange(SEQ, device="cuda")[:, None] - torch.arange(SEQ, device="cuda")
    seen = (distance >= 0) & (distance < (window or SEQ))
    scores = (query @ key.mT / 8).masked_fill(~seen, -torch.inf)
    beside = torch.cat([scores, exact[3][:, None, None].expand(BATCH, heads, SEQ, 1)], -1)
    out = (beside.softmax(-1)[..., :-1] @ value).transpose(1, 2)
    expected = [out, *torch.autograd.grad(out, exact, grad.double())]
    found = (torch.compile(ours, fullgraph=True) if compiled else ours)(*tensors, sink)
    found = [found, *torch.autograd.grad(found, [*tensors, sink], grad)]
    rounding = 1e-4 if dtype == torch.float32 else 2e-2
    for name, a, b in zip(("out", "query", "key", "value", "sink"), found, expected, strict=True):
        assert (a.double() - b).norm() <= rounding * b.norm(), name
