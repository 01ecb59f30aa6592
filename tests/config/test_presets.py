"""Presets have the published shapes, written out here once more, and the parameter counts that follow."""

import pytest
import torch
import transformers
from transformers import AutoConfig

from megalith.bridge.families import family_for
from megalith.config import ModelConfig
from megalith.config.presets import PRESETS
from megalith.config.rules.model_rules import check_model
from megalith.planner.counts import count_parameters

# name: layers, width, heads, KV groups, head size, MLP width, vocabulary, positions, parameters (of which the GPT-3
# ones are the paper's table 2.1, and of gpt3-39b Narayanan et al. 2021's, in words)
PUBLISHED = {
    "gpt2": (12, 768, 12, 12, 64, 3072, 50257, 1024, 124_439_808),
    "gpt2-medium": (24, 1024, 16, 16, 64, 4096, 50257, 1024, 354_823_168),
    "gpt2-large": (36, 1280, 20, 20, 64, 5120, 50257, 1024, 774_030_080),
    "gpt2-xl": (48, 1600, 25, 25, 64, 6400, 50257, 1024, 1_557_611_200),
    "gpt3-1.3b": (24, 2048, 16, 16, 128, 8192, 50257, 2048, 1.3e9),
    "gpt3-2.7b": (32, 2560, 32, 32, 80, 10240, 50257, 2048, 2.7e9),
    "gpt3-6.7b": (32, 4096, 32, 32, 128, 16384, 50257, 2048, 6.7e9),
    "gpt3-13b": (40, 5120, 40, 40, 128, 20480, 50257, 2048, 13.0e9),
    "gpt3-175b": (96, 12288, 96, 96, 128, 49152, 50257, 2048, 175.0e9),
    "llama3-8b": (32, 4096, 32, 8, 128, 14336, 128256, 8192, 8_030_261_248),
    "llama3-70b": (80, 8192, 64, 8, 128, 28672, 128256, 8192, 70_553_706_496),
    "llama3.1-8b": (32, 4096, 32, 8, 128, 14336, 128256, 131072, 8_030_261_248),
    "llama3.1-70b": (80, 8192, 64, 8, 128, 28672, 128256, 131072, 70_553_706_496),
    "llama3-405b": (126, 16384, 128, 8, 128, 53248, 128256, 131072, 405_853_388_800),
    "qwen3-0.6b": (28, 1024, 16, 8, 128, 3072, 151936, 40960, 596_049_920),
    "qwen3-8b": (36, 4096, 32, 8, 128, 12288, 151936, 40960, 8_190_735_360),
    "mistral-7b": (32, 4096, 32, 8, 128, 14336, 32000, 32768, 7_241_732_096),
    "gemma2-2b": (26, 2304, 8, 4, 256, 9216, 256000, 8192, 2_614_341_888),
    "gemma2-9b": (42, 3584, 16, 8, 256, 14336, 256000, 8192, 9_241_705_984),
    "gemma3-1b": (26, 1152, 4, 1, 256, 6912, 262144, 32768, 999_885_952),
    "olmo2-7b": (32, 4096, 32, 32, 128, 11008, 100352, 4096, 7_298_617_344),
    "phi3-mini": (32, 3072, 32, 32, 96, 8192, 32064, 4096, 3_821_079_552),
    "mixtral-8x7b": (32, 4096, 32, 8, 128, 14336, 32000, 32768, 46_702_792_704),
    "qwen3-30b-a3b": (48, 2048, 32, 4, 128, 6144, 151936, 40960, 30_532_122_624),
    "deepseek-v2-lite": (27, 2048, 16, 16, 192, 10944, 102400, 163840, 15_706_484_224),
    "ministral3-3b": (26, 3072, 32, 8, 128, 9216, 131072, 262144, 3_429_006_336),
    "ministral3-8b": (34, 4096, 32, 8, 128, 14336, 131072, 262144, 8_489_553_920),
    "llama4-scout": (48, 5120, 40, 8, 128, 16384, 202048, 10485760, 107_769_861_120),
    "llama4-maverick": (48, 5120, 40, 8, 128, 16384, 202048, 1048576, 400_711_848_960),
    "ernie4.5-21b-a3b": (28, 2560, 20, 4, 128, 12288, 103424, 131072, 21_825_436_160),
    "olmoe-1b-7b": (16, 2048, 16, 16, 128, 1024, 50304, 4096, 6_919_161_856),
    "gpt3-345m": (12, 512, 8, 8, 64, 2048, 50257, 1024, 64_085_504),
    "gpt3-857m": (24, 1024, 16, 16, 64, 4096, 50257, 2048, 355_871_744),
    "gpt3-39b": (48, 8192, 64, 64, 128, 32768, 50257, 2048, 39.1e9),
    "llama2-7b": (32, 4096, 32, 32, 128, 11008, 32000, 4096, 6_738_415_616),
    "llama2-13b": (40, 5120, 40, 40, 128, 13824, 32000, 4096, 13_015_864_320),
    "llama2-70b": (80, 8192, 64, 8, 128, 28672, 32000, 4096, 68_976_648_192),
    "llama3.2-1b": (16, 2048, 32, 8, 64, 8192, 128256, 131072, 1_235_814_400),
    "llama3.2-3b": (28, 3072, 24, 8, 128, 8192, 128256, 131072, 3_212_749_824),
    "llama3.3-70b": (80, 8192, 64, 8, 128, 28672, 128256, 131072, 70_553_706_496),
    "qwen2.5-0.5b": (24, 896, 14, 2, 64, 4864, 151936, 32768, 494_032_768),
    "qwen2.5-1.5b": (28, 1536, 12, 2, 128, 8960, 151936, 32768, 1_543_714_304),
    "qwen2.5-3b": (36, 2048, 16, 2, 128, 11008, 151936, 32768, 3_085_938_688),
    "qwen2.5-7b": (28, 3584, 28, 4, 128, 18944, 152064, 131072, 7_615_616_512),
    "qwen2.5-14b": (48, 5120, 40, 8, 128, 13824, 152064, 131072, 14_770_033_664),
    "qwen2.5-32b": (64, 5120, 40, 8, 128, 27648, 152064, 131072, 32_763_876_352),
    "qwen2.5-72b": (80, 8192, 64, 8, 128, 29568, 152064, 131072, 72_706_203_648),
    "qwen3-1.7b": (28, 2048, 16, 8, 128, 6144, 151936, 40960, 1_720_574_976),
    "qwen3-4b": (36, 2560, 32, 8, 128, 9728, 151936, 40960, 4_022_468_096),
    "qwen3-14b": (40, 5120, 40, 8, 128, 17408, 151936, 40960, 14_768_307_200),
    "qwen3-32b": (64, 5120, 64, 8, 128, 25600, 151936, 40960, 32_762_123_264),
    "t5-base": (24, 768, 12, 12, 64, 3072, 32128, 512, 222_903_552),
    "t5-3b": (48, 1024, 32, 32, 128, 16384, 32128, 512, 2_851_598_336),
    # with the logits' constant bias, one per token, which transformers does not count
    "bart-base": (12, 768, 12, 12, 64, 3072, 50265, 1024, 139_420_416 + 50_265),
    "bart-large": (24, 1024, 16, 16, 64, 4096, 50265, 1024, 406_291_456 + 50_265),
    "bert-base": (12, 768, 12, 12, 64, 3072, 30522, 512, 110_106_428),
    "bert-large": (24, 1024, 16, 16, 64, 4096, 30522, 512, 336_226_108),
    "modernbert-base": (22, 768, 12, 12, 64, 1152, 50368, 8192, 149_655_232),
    "modernbert-large": (28, 1024, 16, 16, 64, 2624, 50368, 8192, 395_881_664),
    "dbrx": (40, 6144, 48, 8, 128, 10752, 100352, 32768, 131_596_523_520),
    "bloom-560m": (24, 1024, 16, 16, 64, 4096, 250880, 2048, 559_214_592),
    "bloom-7b1": (30, 4096, 32, 32, 128, 16384, 250880, 2048, 7_069_016_064),
    "bloom-176b": (70, 14336, 112, 112, 128, 57344, 250880, 2048, 176_247_271_424),
    "gemma3-270m": (18, 640, 4, 1, 256, 2048, 262144, 32768, 268_098_176),
    "gemma3-4b": (34, 2560, 8, 4, 256, 10240, 262208, 131072, 3_880_263_168),
    "gemma3-12b": (48, 3840, 16, 8, 256, 15360, 262208, 131072, 11_766_034_176),
    "gemma3-27b": (62, 5376, 32, 16, 128, 21504, 262208, 131072, 27_009_346_304),
    "gpt-oss-20b": (24, 2880, 64, 8, 64, 2880, 201088, 131072, 20_914_757_184),
    "gpt-oss-120b": (36, 2880, 64, 8, 64, 2880, 201088, 131072, 116_829_156_672),
    "qwen3-next-80b-a3b": (48, 2048, 16, 2, 256, 5120, 151936, 262144, 79_674_391_296),
    "mixtral-8x22b": (56, 6144, 48, 8, 128, 16384, 32000, 65536, 140_620_634_112),
    "qwen3-235b-a22b": (94, 4096, 64, 4, 128, 12288, 151936, 40960, 235_093_634_560),
    # of which 671_026_404_352 without the layer of multi-token prediction, whose embedding and head are the model's own
    "deepseek-v3": (61, 7168, 128, 128, 192, 18432, 129280, 163840, 682_636_472_320),
    "gpt-neox-20b": (44, 6144, 64, 64, 96, 24576, 50432, 2048, 20_554_567_680),
    "falcon-7b": (32, 4544, 71, 1, 64, 18176, 65024, 2048, 6_921_720_704),
    "falcon-40b": (60, 8192, 128, 8, 64, 32768, 65024, 2048, 41_303_293_952),
    "olmo3-7b": (32, 4096, 32, 32, 128, 11008, 100278, 65536, 7_298_011_136),
    "olmo-hybrid-7b": (32, 3840, 30, 30, 128, 11008, 100352, 65536, 7_430_870_688),
    "smollm3-3b": (36, 2048, 16, 4, 128, 11008, 128256, 65536, 3_075_098_624),
    "seed-oss-36b": (64, 5120, 80, 8, 128, 27648, 155136, 524288, 36_151_104_512),
    "exaone4-32b": (64, 5120, 40, 8, 128, 27392, 102400, 131072, 32_003_216_384),
    "glm4-9b": (40, 4096, 32, 2, 128, 13696, 151552, 32768, 9_400_279_040),
    # without the layers of multi-token prediction
    "glm4.5-air": (46, 4096, 96, 8, 128, 10944, 151552, 131072, 106_852_245_504),
    "glm4.5": (92, 5120, 96, 8, 128, 12288, 151552, 131072, 352_797_814_784),
    "kimi-k2": (61, 7168, 64, 64, 192, 18432, 163840, 131072, 1_026_408_209_408),
    "moonlight-16b-a3b": (27, 2048, 16, 16, 192, 11264, 163840, 8192, 15_960_108_544),
    "minimax-m2": (62, 3072, 48, 8, 128, 1536, 200064, 196608, 228_689_748_992),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_shape_and_size_are_the_published_ones(name):
    model = ModelConfig(**PRESETS[name])
    check_model(model)
    *shape, parameters = PUBLISHED[name]
    assert shape == [
        model.num_layers,
        model.hidden_size,
        model.num_attention_heads,
        model.query_groups,
        model.head_dim,
        model.ffn_size,
        model.vocab_size,
        model.max_position_embeddings,
    ]
    found = count_parameters(model, padded_vocab=False).total
    assert (
        found == parameters if isinstance(parameters, int) else found == pytest.approx(parameters, rel=0.02)
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_layer_of_each_kind_has_as_many_parameters_in_transformers(name):
    model = ModelConfig(**PRESETS[name])
    frequency = model.moe_layer_freq
    first = {
        "num_layers": 4,
        "mtp_num_layers": None,
        "moe_layer_freq": frequency[:4] if isinstance(frequency, list) else frequency,
    }
    model = model.model_copy(update=first)
    family = family_for(model)
    theirs = AutoConfig.for_model(**family.write_config(model))
    with torch.device("meta"):
        built = getattr(transformers, family.architecture)._from_config(theirs)
    built.tie_weights()
    constant = [b for n, b in built.named_buffers() if n == "final_logits_bias"]
    parameters = [p for n, p in built.named_parameters() if not n.endswith("e_score_correction_bias")]
    assert count_parameters(model, padded_vocab=False).total == sum(p.numel() for p in parameters + constant)


def test_every_preset_is_listed_here_or_a_tiny_one():
    assert {name for name in PRESETS if not name.startswith("tiny-")} == set(PUBLISHED)


TIED_QWEN = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b")


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in PRESETS
        if any(f in name for f in ("gpt", "llama", "qwen"))
        and not any(other in name for other in ("neox", "oss", "llama4"))
    ],
)
def test_features_are_those_of_the_family(name):
    model = ModelConfig(**PRESETS[name])
    gpt, llama, qwen = ("gpt" in name), ("llama" in name), ("qwen" in name)
    assert gpt + llama + qwen == 1
    assert (model.position_embedding_type == "learned_absolute") == gpt
    assert (model.normalization == "LayerNorm") == gpt
    assert model.add_bias_linear == gpt and model.add_qkv_bias == name.startswith("qwen2.5")
    assert model.swiglu == (not gpt) and model.qk_layernorm == (qwen and "2.5" not in name)
    assert model.hidden_dropout == model.attention_dropout == (0.1 if gpt else 0.0)
    tied = gpt or name == "tiny-qwen" or "llama3.2" in name or name in TIED_QWEN
    assert model.untie_embeddings_and_output_weights == (not tied)
    if "tiny" not in name:
        llama3 = llama and not name.startswith("llama2")
        of_qwen = 10000000.0 if "next" in name else 1000000.0
        assert model.rotary_base == (500000.0 if llama3 else of_qwen if qwen else 10000.0)
        coarse = name in ("qwen2.5-14b", "qwen2.5-32b", "qwen2.5-72b")
        assert model.layernorm_epsilon == (1e-6 if qwen and not coarse else 1e-5)
    scaled = "llama3." in name or name == "llama3-405b"
    assert (model.rope_scaling is not None) == scaled
    if scaled:
        scaling = model.rope_scaling
        assert (scaling.type, scaling.factor, scaling.original_max_position_embeddings) == (
            "llama3",
            32.0 if "llama3.2" in name else 8.0,
            8192,
        )
        assert (scaling.low_freq_factor, scaling.high_freq_factor) == (1.0, 4.0)


# name: window, layers with it of the first six, bases of rotary positions, caps, norms, epsilon
WINDOWS = {
    "mistral-7b": (4096, 6, (1e4, None), (None, None), "pre", 1e-5),
    "gemma2-2b": (4096, 3, (1e4, None), (50.0, 30.0), "sandwich", 1e-6),
    "gemma2-9b": (4096, 3, (1e4, None), (50.0, 30.0), "sandwich", 1e-6),
    "gemma3-270m": (512, 5, (1e6, 1e4), (None, None), "sandwich", 1e-6),
    "gemma3-1b": (512, 5, (1e6, 1e4), (None, None), "sandwich", 1e-6),
    "gemma3-4b": (1024, 5, (1e6, 1e4), (None, None), "sandwich", 1e-6),
    "gemma3-12b": (1024, 5, (1e6, 1e4), (None, None), "sandwich", 1e-6),
    "gemma3-27b": (1024, 5, (1e6, 1e4), (None, None), "sandwich", 1e-6),
    "olmo2-7b": (None, 0, (5e5, None), (None, None), "post", 1e-6),
    "olmo3-7b": (4096, 5, (5e5, 5e5), (None, None), "post", 1e-6),
    "exaone4-32b": (4096, 5, (1e6, None), (None, None), "post", 1e-5),
    "smollm3-3b": (None, 0, (5e6, None), (None, None), "pre", 1e-6),
    "seed-oss-36b": (None, 0, (1e7, None), (None, None), "pre", 1e-6),
    "glm4-9b": (None, 0, (1e4, None), (None, None), "sandwich", 1e-5),
    "phi3-mini": (2047, 6, (1e4, None), (None, None), "pre", 1e-5),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_caps_and_norms_are_those_of_the_family(name):
    model = ModelConfig(**PRESETS[name])
    windows = [model.window(layer) for layer in range(6)]
    caps = (model.attn_logit_softcapping, model.final_logit_softcapping)
    assert WINDOWS[name] == (
        windows[0],
        sum(window is not None for window in windows),
        (model.rotary_base, model.rotary_base_local),
        caps,
        model.norm_placement,
        model.layernorm_epsilon,
    )
    assert model.window(5) is None or "gemma" not in name
    gemma = "gemma" in name
    assert model.scale_embeddings == model.layernorm_zero_centered_gamma == gemma
    assert model.mlp_activation == ("gelu_tanh" if gemma else "silu") and model.gated
    assert model.untie_embeddings_and_output_weights != (gemma or name == "smollm3-3b")
    assert model.qk_layernorm == ("gemma3" in name or "olmo" in name or "exaone" in name)


# name: experts, layers with them, topk, widths of an expert and of the shared one, billions of parameters a token meets
EXPERTS = {
    "mixtral-8x7b": (8, 32, 2, 14336, None, 12.9),
    "mixtral-8x22b": (8, 56, 2, 16384, None, 39.2),
    "dbrx": (16, 40, 4, 10752, None, 36.5),
    "qwen3-30b-a3b": (128, 48, 8, 768, None, 3.3),
    "qwen3-235b-a22b": (128, 94, 8, 1536, None, 22.2),
    "deepseek-v3": (256, 59, 8, 2048, 2048, 38.2),  # with the layer of multi-token prediction
    "deepseek-v2-lite": (64, 26, 6, 1408, 2816, 2.7),
    "olmoe-1b-7b": (64, 16, 8, 1024, None, 1.3),
    "glm4.5-air": (128, 45, 8, 1408, 1408, 13.4),
    "glm4.5": (160, 89, 8, 1536, 1536, 33.6),
    "kimi-k2": (384, 60, 8, 2048, 2048, 32.9),
    "moonlight-16b-a3b": (64, 26, 6, 1408, 2816, 2.9),
    "minimax-m2": (256, 62, 8, 1536, None, 11.0),
    "llama4-scout": (16, 48, 1, 8192, 8192, 17.2),
    "llama4-maverick": (128, 24, 1, 8192, 8192, 17.2),
    "ernie4.5-21b-a3b": (64, 27, 6, 1536, 3072, 3.4),
}
BASES = {"glm4.5": 1e6, "glm4.5-air": 1e6, "kimi-k2": 5e4, "moonlight-16b-a3b": 5e4, "minimax-m2": 5e6,
         "llama4-scout": 5e5, "llama4-maverick": 5e5, "dbrx": 5e5, "ernie4.5-21b-a3b": 5e5}  # fmt: skip


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_those_of_the_family(name):
    model = ModelConfig(**PRESETS[name])
    *shape, active = EXPERTS[name]
    assert shape == [
        model.num_experts,
        len(model.expert_layers),
        model.moe_router_topk,
        model.expert_size,
        model.moe_shared_expert_intermediate_size,
    ]
    assert count_parameters(model, padded_vocab=False).active / 1e9 == pytest.approx(active, abs=0.06)
    assert model.moe_router_pre_softmax == (name in ("deepseek-v2-lite", "olmoe-1b-7b"))
    assert model.multi_latent_attention == name.startswith(("deepseek", "kimi", "moonlight"))
    assert model.rotary_base == BASES.get(name, 1e6 if name.startswith(("mixtral", "qwen")) else 1e4)


def test_a_tiny_preset_takes_its_vocabulary_from_elsewhere():
    for name in ("tiny-gpt", "tiny-llama", "tiny-qwen", "tiny-mixtral", "tiny-deepseek"):
        assert ModelConfig(**PRESETS[name]).vocab_size is None
        check_model(ModelConfig(**PRESETS[name], vocab_size=100))


@pytest.mark.parametrize(
    ("hidden_size", "width"), [(4096, 10880), (64, 128), (72, 192), (768, 2048), (16, 64)]
)
def test_a_gated_mlp_without_a_width_has_the_one_that_megatron_gives_it(hidden_size, width):
    model = dict(num_layers=1, hidden_size=hidden_size, num_attention_heads=1, vocab_size=8)
    assert ModelConfig(**model, swiglu=True).ffn_size == width
    assert ModelConfig(**model).ffn_size == 4 * hidden_size
