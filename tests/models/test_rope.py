"""Rotary tables of every kind of scaling are transformers' own, pair by pair, at lengths about the original one."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as turned_by_gpt_j

from megalith.config import ModelConfig
from megalith.models.rope import local_rotary_tables, rotary_tables
from megalith.ops.rotary import rotate

POSITIONS = torch.arange(0, 60, 7)[None]
PAIRS = 8  # of a head of 16 dimensions
LONG = dict(
    type="longrope",
    original_max_position_embeddings=32,
    factor=8.0,
    short_factor=[1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5],
    long_factor=[1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
)

# name: base, scaling, length of the sequence
CASES = {
    # by their turns over the original length: pair 0 is kept, 1 to 3 blended, 4 to 7 divided
    "llama3": (100.0, dict(type="llama3", factor=4.0, original_max_position_embeddings=40), 60),
    "llama3, other bounds": (
        50.0,
        dict(type="llama3", factor=8.0, original_max_position_embeddings=64, low_freq_factor=0.6, high_freq_factor=6.0),
        60,
    ),
    "yarn, both bounds among the pairs": (
        100.0,
        dict(type="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=4.0, beta_slow=0.5),
        60,
    ),
    "yarn, usual bounds": (1e4, dict(type="yarn", factor=16.0, original_max_position_embeddings=4096), 60),
    "yarn, from before the first pair": (1e4, dict(type="yarn", factor=4.0, original_max_position_embeddings=64), 60),
    "yarn, to behind the last pair": (
        20.0,
        dict(type="yarn", factor=4.0, original_max_position_embeddings=512, beta_fast=20.0, beta_slow=0.01),
        60,
    ),
    "yarn, one step": (
        1e4,
        dict(type="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=1.01, beta_slow=1.0),
        60,
    ),
    "yarn, equal bounds": (
        5e4,
        dict(type="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=1.0, beta_slow=1.0),
        60,
    ),
    "yarn, a factor of its own": (
        1e4,
        dict(type="yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=1.7),
        60,
    ),
    "yarn, mscale": (
        1e4,
        dict(type="yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=0.9),
        60,
    ),
    "yarn, nothing to stretch": (1e4, dict(type="yarn", factor=1.0, original_max_position_embeddings=256), 60),
    "longrope, shorter": (1e4, LONG, 31),
    "longrope, exactly the original length": (1e4, LONG, 32),
    "longrope, a token more": (1e4, LONG, 33),
    "longrope, a factor of its own": (1e4, LONG | dict(attention_factor=1.3), 60),
    "longrope, nothing to stretch": (1e4, LONG | dict(factor=1.0), 60),
    "linear": (1e4, dict(type="linear", factor=3.0), 60),
}  # fmt: skip


def model(**settings) -> ModelConfig:
    return ModelConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, position_embedding_type="rope", **settings
    )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_tables_are_those_of_transformers(name):
    base, scaling, length = CASES[name]
    given = (
        {"low_freq_factor": 1.0, "high_freq_factor": 4.0} | scaling
        if scaling["type"] == "llama3"
        else scaling
    )
    theirs = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": base, "rope_type": given["type"], **given},
    )
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[scaling["type"]](theirs, "cpu", seq_len=length)
    angles = POSITIONS[..., None, None].float() * frequencies
    cos, sin = rotary_tables(model(rotary_base=base, rope_scaling=scaling), POSITIONS, length)
    assert cos.shape == (1, POSITIONS.shape[1], 1, PAIRS)
    torch.testing.assert_close(cos, angles.cos() * magnitude, rtol=0, atol=1e-5)
    torch.testing.assert_close(sin, angles.sin() * magnitude, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [8, 16])
def test_neighbours_turn_as_in_gpt_j(size):
    x = torch.randn(2, POSITIONS.shape[1], 4, 16, generator=torch.Generator().manual_seed(0))
    tables = rotary_tables(model(rotary_percent=size / 16), POSITIONS, 60)
    cos, sin = (table[:, :, 0] for table in tables)
    expected = torch.cat((turned_by_gpt_j(x[..., :size], sin, cos), x[..., size:]), -1)
    torch.testing.assert_close(rotate(x, *tables, interleaved=True), expected, rtol=1e-6, atol=1e-6)


def test_layers_with_a_window_have_a_base_of_their_own_and_no_scaling():
    config = model(
        rotary_base=1e6, rotary_base_local=300.0, window_size=[3, 0], rope_scaling=dict(type="linear")
    )
    plain = rotary_tables(model(rotary_base=300.0), POSITIONS, 60)
    assert all(torch.equal(a, b) for a, b in zip(local_rotary_tables(config, POSITIONS), plain))
