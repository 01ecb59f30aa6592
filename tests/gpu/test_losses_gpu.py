"""Log-probabilities and Muon on a GPU: compiled chunks, short types, and no wait for the device."""

import pytest
import torch

from megalith.config import OptimConfig
from megalith.ops import loss_chunks
from megalith.ops.cross_entropy import linear_cross_entropy, linear_token_losses
from megalith.ops.linear_logprobs import linear_logprobs
from megalith.optim import build_loss_scale, build_optimizer, optimizer_step
from megalith.optim.optimizer import Placement

VOCAB, PADDED, HIDDEN, TOKENS = 1000, 1024, 64, 700


def inputs(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).cuda().to(dtype).requires_grad_()
    weight = (0.2 * torch.randn(PADDED, HIDDEN, generator=generator)).cuda().requires_grad_()
    return hidden, weight, torch.randint(0, VOCAB, (TOKENS,), generator=generator).cuda()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_log_probabilities_entropies_and_gradients_equal_whole_logits(dtype, bound, monkeypatch):
    monkeypatch.setitem(
        loss_chunks.CHUNK_ELEMENTS, "cuda", 256 * PADDED
    )  # the last of three chunks is smaller
    results = []
    for chunked in (True, False):
        hidden, weight, targets = inputs(dtype)
        if chunked:
            logprobs, entropy = linear_logprobs(hidden, weight, targets, VOCAB, temperature=0.7, entropy=True)
        else:
            distribution = (hidden.float() @ weight.to(dtype).float()[:VOCAB].T / 0.7).log_softmax(-1)
            logprobs = distribution.gather(-1, targets[:, None])[:, 0]
            entropy = -(distribution.exp() * distribution).sum(-1)
        (logprobs.sin().sum() + 0.1 * entropy.square().sum()).backward()
        results.append((logprobs, entropy, hidden.grad.float(), weight.grad))
    for found, expected in zip(*results):
        assert (found - expected).norm() < bound * expected.norm()


def ratio_losses(logprobs, entropy, tokens):
    ratio = (logprobs - tokens["old"]).exp()
    return -torch.min(ratio, ratio.clamp(0.8, 1.2)) * tokens["advantages"] - 0.1 * entropy


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_losses_of_tokens_in_one_pass_equal_two_and_wait_for_nothing(dtype, bound, monkeypatch):
    monkeypatch.setitem(loss_chunks.CHUNK_ELEMENTS, "cuda", 256 * PADDED)
    asked, results = dict(temperature=0.7, entropy=True), []
    tokens = {name: torch.randn(TOKENS, device="cuda") for name in ("old", "advantages")}
    with torch.no_grad():
        tokens["old"] = 0.3 * tokens["old"] + linear_logprobs(*inputs(dtype), VOCAB, temperature=0.7)[0]
    for one_pass in (True, False, True, False):  # the second time all kernels are compiled
        hidden, weight, targets = inputs(dtype)
        torch.cuda.set_sync_debug_mode("error" if results[1:] else "default")
        try:
            if one_pass:
                found = linear_token_losses(hidden, weight, targets, ratio_losses, tokens, VOCAB, **asked)
                loss, logprobs, _entropy = found
            else:
                logprobs, entropy = linear_logprobs(hidden, weight, targets, VOCAB, **asked)
                loss = ratio_losses(logprobs, entropy, tokens).sum()
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append((loss.detach(), logprobs.detach(), hidden.grad.float(), weight.grad))
    for found, expected in zip(*results[2:]):
        assert (found - expected).norm() < bound * expected.norm()


def test_a_linear_loss_and_its_log_probabilities_agree_and_wait_for_nothing():
    hidden, weight, targets = inputs(torch.bfloat16)
    mask = torch.ones(TOKENS, device="cuda")
    for _ in range(2):  # the second time all kernels are compiled
        torch.cuda.set_sync_debug_mode("error" if _ else "default")
        try:
            linear = linear_cross_entropy(hidden, weight, targets, mask, VOCAB)
            logprobs, _unused = linear_logprobs(hidden, weight, targets, VOCAB)
            logprobs.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(-logprobs.sum(), linear, rtol=1e-5, atol=0)


def test_muon_steps_on_a_gpu_as_on_a_cpu_and_waits_for_nothing():
    weights = []
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(1)
        weight = torch.nn.Parameter(torch.randn(48, 16, generator=generator).to(device))
        config = OptimConfig(optimizer="muon", lr=0.02, muon_fp32_matmul_prec="highest")
        placements = {"w": Placement(matrices=(2, 1))}
        optimizer = build_optimizer([("w", weight)], config, placements=placements)
        scale = build_loss_scale("fp32", config, device)
        for step in range(3):
            weight.grad = torch.randn(48, 16, generator=generator).to(device)
            torch.cuda.set_sync_debug_mode("error" if step else "default")
            try:
                optimizer_step(optimizer, scale, 1.0)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        weights.append(weight.detach().cpu())
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)
