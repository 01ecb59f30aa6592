"""Parameter and FLOP counts: published figures, the two conventions, and an independent count by PyTorch."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import T5ForConditionalGeneration, UMT5ForConditionalGeneration

from megalith.config.lora import LoraConfig
from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.presets import PRESETS
from megalith.models.model_types import make_model
from megalith.parallel.pipeline.stages import assign_layers, split_stages
from megalith.planner.counts import MetaModel, count_parameters, layers_of
from megalith.planner.flops import flops_per_token, throughput


def _preset(name, **fields):
    return ModelConfig(**{**PRESETS[name], **fields})


QWEN2_HALF_BILLION = dict(
    num_layers=24,
    hidden_size=896,
    ffn_hidden_size=4864,
    num_attention_heads=14,
    num_query_groups=2,
    vocab_size=151936,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    add_qkv_bias=True,
)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
    ],
)
def test_parameter_count_is_the_published_one(name, published):
    assert count_parameters(_preset(name), padded_vocab=False).total == published


def test_biases_of_the_qkv_projection_alone_are_counted():
    assert count_parameters(ModelConfig(**QWEN2_HALF_BILLION), padded_vocab=False).total == 494_032_768


def test_padding_adds_rows_to_the_embedding_and_an_untied_head():
    config = _preset("gpt2", untie_embeddings_and_output_weights=True)
    plain, padded = count_parameters(config, padded_vocab=False), count_parameters(config)
    rows = 50304 - 50257
    assert padded.embedding - plain.embedding == padded.head - plain.head == rows * 768
    assert padded.non_embedding == plain.non_embedding


def test_llama3_8b_costs_what_both_conventions_say():
    cost = flops_per_token(_preset("llama3-8b"), seq_length=8192)
    assert cost.causal / 1e9 == pytest.approx(51.5, abs=0.05)
    assert cost.full / 1e9 == pytest.approx(57.9, abs=0.05)


def test_gpt2_large_at_425_ms_a_batch_of_32_is_379_tflops():
    cost = flops_per_token(_preset("gpt2-large"), seq_length=1024)
    speed = throughput(tokens=32 * 1024, seconds=0.425, devices=1, flops=cost.causal, peak=989.4e12)
    assert speed.tflops_per_device == pytest.approx(379, abs=0.5)
    assert speed.mfu == pytest.approx(0.383, abs=0.001)


def test_throughput_is_per_device_and_has_no_mfu_without_a_peak():
    speed = throughput(tokens=1000, seconds=0.5, devices=4, flops=2_000_000, peak=None)
    assert speed.tokens_per_second_per_device == 500
    assert speed.tflops_per_device == pytest.approx(0.001)
    assert speed.mfu is None


class PlainTransformer(nn.Module):
    """A decoder as a textbook has it, with every matmul written out, for PyTorch's FLOP counter."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        query = config.num_attention_heads * config.head_dim
        key_value = config.query_groups * config.head_dim
        bias = config.add_bias_linear
        up = config.ffn_size * (2 if config.swiglu else 1)
        norm = nn.LayerNorm if config.normalization == "LayerNorm" else nn.RMSNorm
        self.tokens = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        self.learned = config.position_embedding_type == "learned_absolute"
        if self.learned:
            self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": norm(config.hidden_size),
                    "q": nn.Linear(config.hidden_size, query, bias=bias or config.add_qkv_bias),
                    "k": nn.Linear(config.hidden_size, key_value, bias=bias or config.add_qkv_bias),
                    "v": nn.Linear(config.hidden_size, key_value, bias=bias or config.add_qkv_bias),
                    "out": nn.Linear(query, config.hidden_size, bias=bias),
                    "norm2": norm(config.hidden_size),
                    "up": nn.Linear(config.hidden_size, up, bias=bias),
                    "down": nn.Linear(config.ffn_size, config.hidden_size, bias=bias),
                    "q_norm": norm(config.head_dim) if config.qk_layernorm else nn.Identity(),
                    "k_norm": norm(config.head_dim) if config.qk_layernorm else nn.Identity(),
                }
            )
            for _ in range(config.num_layers)
        )
        self.norm = norm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.padded_vocab_size, bias=False)
        if not config.untie_embeddings_and_output_weights:
            self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids)
        if self.learned:
            x = x + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = x + self.attention(layer, layer["norm1"](x))
            hidden = layer["up"](layer["norm2"](x))
            if self.config.swiglu:
                gate, hidden = hidden.chunk(2, dim=-1)
                hidden = nn.functional.silu(gate) * hidden
            x = x + layer["down"](hidden)
        return self.head(self.norm(x))

    def attention(self, layer, x):
        batch, seq, _ = x.shape
        repeats = self.config.num_attention_heads // self.config.query_groups
        heads = [
            layer[name](x).view(batch, seq, -1, self.config.head_dim).transpose(1, 2)
            for name in ("q", "k", "v")
        ]
        q, k, v = layer["q_norm"](heads[0]), layer["k_norm"](heads[1]), heads[2]
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        probabilities = (q @ k.transpose(-1, -2)).softmax(dim=-1)
        return layer["out"]((probabilities @ v).transpose(1, 2).reshape(batch, seq, -1))


FAMILIES = {
    "gpt": dict(PRESETS["tiny-gpt"], max_position_embeddings=24),
    "llama": dict(PRESETS["tiny-llama"], num_layers=3, ffn_hidden_size=160),
    "qwen": dict(PRESETS["tiny-qwen"]),
    "qwen2": dict(QWEN2_HALF_BILLION, num_layers=1, hidden_size=56, ffn_hidden_size=72),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_agree_with_a_plain_model_and_pytorchs_flop_counter(family):
    config = ModelConfig(**{**FAMILIES[family], "vocab_size": 100})
    model = PlainTransformer(config)
    assert count_parameters(config).total == sum(p.numel() for p in model.parameters())

    batch, seq = 2, 24
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(batch, seq, dtype=torch.long)).sum().backward()
    assert counter.get_total_flops() == batch * seq * flops_per_token(config, seq).full


T5 = dict(model_type="t5", num_layers=5, encoder_num_layers=2, hidden_size=64, kv_channels=12, ffn_hidden_size=96,
          num_attention_heads=4, vocab_size=104, make_vocab_size_divisible_by=1, position_embedding_type="relative",
          normalization="RMSNorm", add_bias_linear=False)  # fmt: skip


@pytest.mark.parametrize("per_layer", [False, True])
def test_an_encoder_decoder_counts_as_transformers_has_it(per_layer):
    kind = UMT5ForConditionalGeneration if per_layer else T5ForConditionalGeneration
    model = kind._from_config(
        kind.config_class(vocab_size=104, d_model=64, d_kv=12, d_ff=96, num_layers=2, num_decoder_layers=3, num_heads=4,
                 decoder_start_token_id=0, feed_forward_proj="relu"),
        attn_implementation="eager",
    )  # fmt: skip
    config = ModelConfig(**T5, relative_attention_per_layer=per_layer)
    assert count_parameters(config).total == sum(p.numel() for p in model.parameters())
    batch, encoder_seq, seq = 2, 24, 16
    ids, labels = (torch.zeros(batch, length, dtype=torch.long) for length in (encoder_seq, seq))
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=labels).loss.backward()
    cost = flops_per_token(config, encoder_seq, decoder_length=seq)
    assert counter.get_total_flops() == pytest.approx(batch * encoder_seq * cost.full, rel=1e-6)


def test_t5_base_has_its_published_number_of_parameters():
    base = T5 | dict(num_layers=24, encoder_num_layers=12, hidden_size=768, kv_channels=64, ffn_hidden_size=3072,
                     num_attention_heads=12, vocab_size=32128)  # fmt: skip
    assert count_parameters(ModelConfig(**base)).total == 222_903_552


@pytest.mark.parametrize("stages", ["E|tt|tttL", "Et|tttt|L", "Ett|t|ttL", "Ettt|t|tL"])
def test_a_stage_of_an_encoder_decoder_has_what_is_counted(stages):
    config = ModelConfig(**T5)
    parallel = ParallelConfig(pipeline_model_parallel_size=3, pipeline_model_parallel_layout=stages)
    assignment, meta = assign_layers(config, parallel), MetaModel(config)
    for rank, chunks in enumerate(assignment):
        counted = meta.in_layers(layers_of(config, chunks)) + meta.outside(chunks)
        (held,) = split_stages(make_model(config, device="meta"), assignment, rank)
        assert counted.total() == sum(p.numel() for p in held.parameters())


BIASED_EXPERTS = {"add_mlp_bias": True, "moe_shared_expert_intermediate_size": 48}


def test_biases_of_experts_are_counted_and_cost_no_flops():
    plain, biased = (
        ModelConfig(**{**PRESETS["tiny-mixtral"], "vocab_size": 100, "add_mlp_bias": biases})
        for biases in (False, True)
    )
    more = count_parameters(biased), count_parameters(plain)
    layers, hidden, width = plain.num_layers, plain.hidden_size, plain.expert_size
    assert more[0].total - more[1].total == layers * plain.num_experts * (2 * width + hidden)
    active = more[0].active - more[1].active
    assert active == layers * plain.moe_router_topk * (2 * width + hidden)
    assert flops_per_token(biased, 64) == flops_per_token(plain, 64)


@pytest.mark.parametrize("name", [*PRESETS, "qwen2", "experts with biases"])
def test_parameter_count_is_the_models_own(name):
    shapes = {"qwen2": QWEN2_HALF_BILLION, "experts with biases": PRESETS["tiny-mixtral"] | BIASED_EXPERTS}
    shape = (PRESETS | shapes)[name]
    config = ModelConfig(**{"vocab_size": 1000, "max_position_embeddings": 64, **shape, "num_layers": 2})
    model = make_model(config, device="meta")
    assert count_parameters(config).total == sum(p.numel() for p in model.parameters())


def test_a_token_costs_its_own_experts_the_router_and_the_shared_expert():
    fields = {**PRESETS["tiny-mixtral"], "vocab_size": 100, "moe_router_topk": 3, "moe_ffn_hidden_size": 40}
    model = ModelConfig(**fields, moe_shared_expert_intermediate_size=24, moe_shared_expert_gate=True)
    weights = 64 * 4 + 3 * (3 * 64 * 40) + 3 * 64 * 24 + 64
    assert flops_per_token(model, 32).mlp == 6 * 2 * weights


def test_each_further_layer_costs_a_head_a_layer_and_the_join_of_its_inputs():
    plain, further = (
        ModelConfig(**{**PRESETS["tiny-llama"], "vocab_size": 100, "mtp_num_layers": n}) for n in (None, 2)
    )
    costs, layers = (flops_per_token(plain, 32), flops_per_token(further, 32)), plain.num_layers
    assert costs[1].head == 3 * costs[0].head
    assert costs[1].attention_matrix * layers == costs[0].attention_matrix * (layers + 2)
    joins = 6 * 2 * 2 * plain.hidden_size**2
    assert (costs[1].mlp - joins) * layers == costs[0].mlp * (layers + 2)


def test_frozen_weights_cost_two_products_and_adapters_three():
    model = ModelConfig(**{**PRESETS["tiny-llama"], "vocab_size": 100})
    lora = LoraConfig(rank=4)
    plain, adapted = flops_per_token(model, 32), flops_per_token(model, 32, lora)
    assert 3 * adapted.mlp == 2 * plain.mlp and 3 * adapted.head == 2 * plain.head
    assert adapted.attention_matrix == plain.attention_matrix
    assert adapted.adapters == 6 * count_parameters(model, lora=lora).adapters


def test_a_window_counts_with_the_keys_that_it_leaves():
    fields = dict(PRESETS["tiny-gpt"], num_layers=3, vocab_size=100, max_position_embeddings=1000)
    whole = flops_per_token(ModelConfig(**fields), 1000)
    some = flops_per_token(ModelConfig(**fields, window_size=[99, 0], window_attn_skip_freq=3), 1000)
    one_layer = whole.attention_matrix // 3
    seen = sum(min(query + 1, 100) for query in range(1000)) / sum(range(1, 1001))
    assert some.attention_matrix == pytest.approx((1 + 2 * seen) * one_layer, rel=1e-3)
    assert some.mlp == whole.mlp
