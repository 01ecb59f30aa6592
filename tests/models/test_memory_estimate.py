"""The memory estimate: exact bytes a parameter, and activations near what was measured."""

import pytest

from megalith.config.model import ModelConfig
from megalith.config.presets import PRESETS
from megalith.models.flops import count_parameters
from megalith.models.memory import Share, expected_memory, layer_activations, layer_parameters, outside_parameters


def _gpt2_large():
    return ModelConfig(**PRESETS["gpt2-large"])


def test_mixed_precision_with_adam_takes_18_bytes_a_parameter():
    memory = expected_memory(_gpt2_large(), 1, 1024, "bf16", "adamw")
    assert memory.total - memory.activations == 18 * count_parameters(_gpt2_large()).total


def test_fp32_keeps_no_second_copy_and_sgd_one_moment():
    memory = expected_memory(_gpt2_large(), 1, 1024, "fp32", "sgd")
    assert memory.compute_copy == 0
    assert memory.total - memory.activations == 12 * count_parameters(_gpt2_large()).total


def test_gpt_layer_keeps_16_widths_a_token():
    config = ModelConfig(num_layers=10, hidden_size=64, num_attention_heads=4, vocab_size=100)
    assert activations_per_token(config) == 10 * 16 * 64 + 3 * 64


def test_estimate_is_near_a_measured_gpt2_large_at_batch_32():
    measured = 56.2 * 2**30  # plain PyTorch, bf16 with fp32 master weights, chunked loss, one H200
    memory = expected_memory(_gpt2_large(), 32, 1024, "bf16", "adamw")
    assert memory.total == pytest.approx(measured, rel=0.1)


def test_logits_count_in_full_for_a_small_batch_and_a_chunk_of_them_for_a_large_one():
    def logits(micro_batch_size):
        memory = expected_memory(_gpt2_large(), micro_batch_size, 1024, "bf16")
        return memory.activations - 2 * 1024 * micro_batch_size * activations_per_token(_gpt2_large())

    assert logits(1) == 8 * 1024 * 50304
    assert logits(2) == logits(32) == 8 * 2**26
