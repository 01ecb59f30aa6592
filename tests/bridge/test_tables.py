"""The families' tables: every row goes both ways, and configurations mean the same on both sides."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from default_cases import by_default
from models.reference import CASES, first_of_each_kind
from transformers.models.auto import modeling_auto as auto

from megalith.bridge.exporter import _config_json
from megalith.bridge.families import FAMILIES, family_for, family_of
from megalith.bridge.megatron.table import family_of as core_family_of
from megalith.bridge.model_differences import differences
from megalith.bridge.origin import Origin
from megalith.bridge.rows import same
from megalith.bridge.transfer import to_ours, to_theirs
from megalith.bridge.unsupported import FURTHER, describe_types, markdown, reasons
from megalith.config import ModelConfig, RunConfig
from megalith.errors import ConfigError


def their_tree(name: str) -> dict:
    config = CASES[name][0]()
    return json.loads(config.to_json_string())


def model_of(name: str) -> ModelConfig:
    return family_named_by(name).read_config(their_tree(name))


def family_named_by(name: str):
    return family_of(their_tree(name), "the test")


@pytest.mark.parametrize("name", CASES)
def test_a_config_json_is_read_as_the_model_that_computes_the_same(name: str) -> None:
    assert differences(model_of(name), ModelConfig(**CASES[name][1])) == []


@pytest.mark.parametrize("name", CASES)
def test_a_written_config_json_means_the_same_to_transformers(name: str) -> None:
    kind = type(CASES[name][0]())
    written = kind(**family_named_by(name).write_config(model_of(name)))
    again = json.loads(written.to_json_string())
    if again.get("n_inner") == 4 * again.get("n_embd", 0):
        again["n_inner"] = None  # what null means
    for key, value in their_tree(name).items():
        if key == "rope_parameters":  # written with the defaults of its kind
            assert again[key] | value == again[key]
        else:
            assert again[key] == value, key


@pytest.mark.parametrize("name", CASES)
def test_runs_cover_each_row_of_both_sides_once(name: str) -> None:
    for group in family_named_by(name).groups(model_of(name)):
        ours = [run.ours + i * run.step for run in group.runs for i in range(run.count)]
        assert sorted(ours) == list(range(group.matrix_shape[0])), group.name
        for source, shape in enumerate(list(group.sources.values())[: len(group.rule.names)]):
            before, _ = group.rule.ones or (0, 0)
            if group.rule.flat:
                shape = (group.shape[0], shape[0] // group.shape[0], *shape[1:])
            rows = shape[-1] if group.rule.transposed else shape[group.rule.stacked or before]
            theirs = [run.theirs + i for run in group.runs if run.source == source for i in range(run.count)]
            assert sorted(theirs) == list(range(rows)), group.name


@pytest.mark.parametrize("name", CASES)
def test_tensors_go_there_and_back_bitwise_and_any_box_is_a_part_of_the_whole(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for group in family_named_by(name).groups(model_of(name)):
        theirs = {name: torch.randn(shape, generator=generator) for name, shape in group.sources.items()}
        whole = to_ours(group, theirs.__getitem__)
        assert whole.shape == group.shape
        again = dict(to_theirs(group, whole, {name: torch.float32 for name in theirs}))
        assert again.keys() == theirs.keys()
        assert all(torch.equal(again[name], theirs[name]) for name in theirs)
        offset = [size // 3 for size in group.shape]
        shape = [max(1, size // 2) for size in group.shape]
        box = tuple(slice(at, at + size) for at, size in zip(offset, shape))
        assert torch.equal(to_ours(group, theirs.__getitem__, offset, shape), whole[box])


@pytest.mark.parametrize(
    ("row", "their_name", "message"),
    [
        ("final_layernorm.bias", None, r"no tensor for final_layernorm\.bias; add a row for final_layernorm\.bias"),
        ("layers.{layer}.input_layernorm.bias", None, r"for layers\.1\..*; add a row for layers\.\{layer\}\.input_"),
        ("final_layernorm.bias", "h.{final}.ln_2.bias", "has the placeholder {final}; use {layer} or .* or {last}$"),
        ("layers.{layer}.pre_mlp_layernorm.bias", "h.{before}.ln_1.bias", "add a row for layers.0.pre_mlp_layernorm.b"),
    ],
)  # fmt: skip
def test_a_wrong_row_of_a_table_is_named(row: str, their_name: str | None, message: str) -> None:
    family = family_named_by("gpt1")
    tensors = {name: rule for name, rule in family.tensors.items() if name != row or their_name}
    if their_name:
        tensors[row] = same(their_name)
    with pytest.raises(ConfigError, match=message):
        [group.names() for group in replace(family, tensors=tensors).groups(model_of("gpt1"))]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            dict(ignored=r"\.masked_bias$"),
            r"has ignored '.*masked_bias\$', a str, but it is a tuple; write ignored=\(",
        ),
        (dict(ignored=[r"\.masked_bias$"]), "has ignored .*, a list, but it is a tuple"),
        (dict(other_model_types="gpt"), "has other_model_types 'gpt', a str, but it is a tuple"),
        (
            dict(other_model_types=("gpt", None)),
            "has None in other_model_types, but it is a tuple of strings",
        ),
        (
            dict(settings=family_named_by("gpt1").settings[0]),
            "has settings Field.*, a Field, but it is a tuple",
        ),
    ],
)
def test_a_field_of_a_family_that_is_not_a_tuple_is_named(fields: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=f"OpenAIGPTLMHeadModel {message}"):
        replace(family_named_by("gpt1"), **fields)


def test_the_name_of_a_tied_output_matrix_is_that_of_its_row() -> None:
    rows = {family.tied: family.tensors.get("output_layer.weight") for family in FAMILIES.values()}
    assert [tied for tied, rule in rows.items() if rule is not None and tied not in rule.names] == []


@pytest.mark.parametrize(
    ("preset", "model_type"),
    [
        ("gpt2", "gpt2"),
        ("gpt3-13b", "gpt2"),
        ("llama3-8b", "llama"),
        ("llama3.1-70b", "llama"),
        ("qwen3-0.6b", "qwen3"),
        ("mistral-7b", "mistral"),
        ("gemma2-9b", "gemma2"),
        ("gemma3-1b", "gemma3_text"),
        ("olmo2-7b", "olmo2"),
        ("gpt-neox-20b", "gpt_neox"),
        ("falcon-7b", "falcon"),
        ("falcon-40b", "falcon"),
        ("modernbert-large", "modernbert"),
        ("bart-base", "bart"),
        ("dbrx", "dbrx"),
    ],
)
def test_a_preset_is_written_in_the_family_that_it_was_published_in(preset: str, model_type: str) -> None:
    model = RunConfig.from_tree({"model": {"preset": preset}}).model
    assert family_for(model).model_type == model_type


def test_a_hybrid_without_experts_is_written_in_the_family_whose_models_have_none() -> None:
    model = ModelConfig(**CASES["qwen3.5"][1])
    assert family_for(model).model_type == "qwen3_5_text"
    assert family_for(ModelConfig(**CASES["qwen3.5-moe"][1])).model_type == "qwen3_next"
    for name in ("Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM", "MixtralForCausalLM"):
        with pytest.raises(
            ConfigError, match="num_experts is not set, but models of this family have experts"
        ):
            FAMILIES[name].write_config(model)


def test_a_model_that_no_family_can_say_is_refused_with_what_the_nearest_lack() -> None:
    model = ModelConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=100, max_position_embeddings=64,
        position_embedding_type="rope", qk_layernorm=True, normalization="RMSNorm", swiglu=True, attention_dropout=0.0,
        hidden_dropout=0.0, add_bias_linear=False, glu_linear_offset=1.0,
    )  # fmt: skip
    with pytest.raises(ConfigError) as error:
        family_for(model)
    assert "Qwen3ForCausalLM: it has glu_linear_offset 1.0, not 0.0" in str(error.value)
    assert str(error.value).count("ForCausalLM") == 3 and f"of {len(FAMILIES)}: " in str(error.value)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ("gemma2", {"hidden_activation": "swish"}, "hidden_activation 'swish'"),
        ("gemma", {"hidden_activation": "gelu"}, "model.activation both 'gelu_tanh' and 'gelu'"),
        ("llama", {"num_hidden_layers": "many"}, "num_hidden_layers 'many'"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "type 'dynamic'"),
        ("yarn rope", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}}, "mscale"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window True"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
        ("gpt2", {"activation_function": "swish"}, "activation_function 'swish'"),
        ("gpt-neox", {"hidden_act": "swish"}, "hidden_act 'swish'"),
        ("gpt-neox", {"rotary_pct": -1}, "rotary_pct -1"),
        ("falcon, multi-query", {"alibi": True}, "alibi True"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm True"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm True"),
        ("gpt-j", {"rotary_dim": None}, "rotary_dim None"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before False"),
        ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim 32 and hidden_size 64"),
        ("falcon, multi-query", {"parallel_attn": False}, "parallel_attn False"),
        ("phimoe", {"num_experts_per_tok": 1}, "num_experts_per_tok 1"),
        ("phimoe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (
            "phimoe",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "'linear' with short_mscale None",
        ),
        ("phimoe, longrope", {"original_max_position_embeddings": 32}, "32, but its rotary scaling has 64"),
        ("cohere2-moe", {"num_experts_per_tok": 1}, "num_experts_per_tok 1 and norm_topk_prob"),
        ("cohere2-moe", {"sliding_window": None}, "sliding_window null"),
        ("cohere2-moe", {"shared_expert_combination_strategy": "max"}, "'max'"),
        ("dbrx", {"ffn_config": {"moe_normalize_expert_weights": 2.0}}, "moe_normalize_expert_weights 2.0"),
        ("dbrx", {"ffn_config": {"uniform_expert_assignment": True}}, "uniform_expert_assignment true"),
        ("dbrx", {"ffn_config": {"ffn_act_fn": {"name": "gelu"}}}, "ffn_act_fn {'name': 'gelu'}"),
    ],
)
def test_a_config_json_that_asks_for_more_is_refused_by_its_key(
    name: str, change: dict, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        family_named_by(name).read_config(their_tree(name) | change)
    assert message in str(error.value)


def test_two_names_of_a_key_that_disagree_are_refused_and_a_changed_model_is_exported_with_one() -> None:
    theirs = their_tree("qwen3-moe, a dense layer")
    model, family = model_of("qwen3-moe, a dense layer"), family_named_by("qwen3-moe, a dense layer")
    assert "num_local_experts" in theirs
    with pytest.raises(ConfigError, match="num_experts 6 and num_local_experts 8, two"):
        family.read_config(theirs | {"num_experts": 6})
    fewer = model.model_copy(update={"num_experts": 6})
    out = _config_json(family, fewer, Origin(theirs), torch.float32, None)
    assert type(CASES["qwen3-moe, a dense layer"][0]())(**out).num_experts == 6


@pytest.mark.parametrize("name", CASES)
def test_the_config_json_of_a_model_without_an_origin_builds_in_transformers(name: str) -> None:
    family, kind = family_named_by(name), type(CASES[name][0]())
    tree = _config_json(family, model_of(name), Origin(), torch.float32, None)
    if model := getattr(transformers, family.transformers_class or family.architecture, None):
        with torch.device("meta"):
            model(kind(**tree))


def test_rows_of_positions_for_padding_are_positions_in_megatron() -> None:
    opt = ModelConfig(**{name: value for name, value in CASES["opt"][1].items() if name != "activation"})
    assert core_family_of(opt).write_config(opt)["max_position_embeddings"] == opt.position_rows == 66


def test_a_config_json_without_a_size_is_refused_by_its_key() -> None:
    theirs = their_tree("llama")
    del theirs["hidden_size"]
    with pytest.raises(ConfigError, match=r"no hidden_size, which determines model\.hidden_size"):
        family_named_by("llama").read_config(theirs)


@pytest.mark.parametrize("name", by_default(CASES, *first_of_each_kind()))
def test_a_key_that_config_json_leaves_out_has_the_default_of_transformers(name: str) -> None:
    """Each key of the class's defaults is removed in turn; missing sizes are reported."""
    family = family_named_by(name)
    defaults = json.loads(type(CASES[name][0]())().to_json_string(use_diff=False))
    if (
        defaults.get("num_experts_per_tok", 1) is None
    ):  # DeepSeek-V2's and dots.llm1's, of which none can be made
        defaults |= {"num_experts_per_tok": 6, "n_routed_experts": defaults["n_routed_experts"] or 64}
        defaults["norm_topk_prob"] = name == "dots1"
    if name == "bert-generation":
        defaults["is_decoder"] = True
    read = family.read_config(defaults)
    for key in defaults.keys() - {"architectures", "model_type"}:
        try:
            without = family.read_config({k: v for k, v in defaults.items() if k != key})
        except ConfigError as error:
            refused = (
                f"config.json has no {key}, which determines",
                f"config.json has {key} ",
            )  # its default is refused
            assert any(sentence in str(error) for sentence in refused)
        else:
            assert differences(without, read) == [], key


def test_the_adjusted_width_of_lfm2_is_that_of_transformers() -> None:
    theirs = their_tree("lfm2") | {"block_auto_adjust_ff_dim": True, "block_multiple_of": 16}
    read = family_named_by("lfm2").read_config(theirs)
    reference = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**theirs))
    assert read.ffn_size == reference.model.layers[0].feed_forward.w1.out_features == 80


def test_an_absent_window_is_the_default_of_mistral() -> None:
    theirs = their_tree("mistral")
    del theirs["sliding_window"]
    assert family_named_by("mistral").read_config(theirs).window_size == [4095, 0]


def test_gemma_3_as_older_versions_wrote_it_is_the_same_model() -> None:
    theirs = their_tree("gemma3")
    del theirs["rope_parameters"], theirs["layer_types"]
    theirs |= {"rope_theta": 1e6, "rope_local_base_freq": 2e4, "sliding_window_pattern": 3}
    theirs["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    read = family_named_by("gemma3").read_config(theirs)
    assert differences(read, model_of("gemma3")) == []


@pytest.mark.parametrize(
    "second", [{}, {"hidden_activation": None}, {"hidden_activation": "gelu_pytorch_tanh"}]
)
def test_gemma_s_gelu_is_the_tanh_approximation_as_transformers_takes_it(second: dict) -> None:
    theirs = their_tree("gemma") | {"hidden_act": "gelu"} | second
    assert type(CASES["gemma"][0]())(**theirs).hidden_act == "gelu_pytorch_tanh"
    assert family_named_by("gemma").read_config(theirs).mlp_activation == "gelu_tanh"


def test_a_longrope_without_a_factor_has_that_of_its_two_lengths() -> None:
    theirs = their_tree("llama, longrope")
    del theirs["rope_parameters"]["factor"]
    assert differences(family_named_by("llama").read_config(theirs), model_of("llama, longrope")) == []


def test_phi_3_as_older_versions_wrote_it_is_the_same_model() -> None:
    theirs = their_tree("phi3, long of longrope")
    scaling = theirs.pop("rope_parameters")
    theirs["rope_scaling"] = {"type": "su"} | {k: scaling[k] for k in ("short_factor", "long_factor")}
    theirs |= {"rope_theta": 10000.0, "partial_rotary_factor": 0.75}
    read = family_named_by("phi3, long of longrope").read_config(theirs)
    assert differences(read, model_of("phi3, long of longrope")) == []


def test_every_other_layer_of_qwen3_moe_has_experts_the_second_being_the_first() -> None:
    theirs = their_tree("qwen3-moe, a dense layer") | {"decoder_sparse_step": 2, "mlp_only_layers": []}
    assert family_named_by("qwen3-moe, a dense layer").read_config(theirs).moe_layer_freq == [0, 1, 0]


def test_the_documentation_lists_every_architecture() -> None:
    table = (Path(__file__).parents[2] / "docs/hugging_face.md").read_text()
    assert [name for name in FAMILIES if f"`{name}`" not in table] == []


def test_unknown_architectures_are_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError,
        match=r"DebertaForMaskedLM, which is not supported; supported: .*, BertModel, .*, LlamaForCausalLM, ",
    ):
        family_of({"architectures": ["DebertaForMaskedLM"]}, "x")


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("jamba", "needs state-space layers of Mamba-1"),
        ("whisper", "is out of scope: audio"),
        ("paligemma", "needs attention to the whole prompt"),
    ],
)
def test_a_model_type_of_transformers_is_refused_with_its_reason(model_type: str, reason: str) -> None:
    with pytest.raises(
        ConfigError, match=f"is not supported: model_type {model_type} {reason}.*; supported: "
    ):
        family_of({"architectures": ["Another"], "model_type": model_type}, "x")


def test_each_language_model_of_transformers_is_a_family_or_has_a_reason() -> None:
    every = {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}
    families = {
        kind for family in FAMILIES.values() for kind in (family.model_type, *family.other_model_types)
    }
    wrapped = {kind for kind, line in describe_types().items() if line.startswith("is read without")}
    if transformers.__version__ == "5.24.0":  # other versions have other models
        assert every - families - wrapped == reasons().keys() - set(FURTHER.values())
    assert not families & reasons().keys()
    assert markdown() in (Path(__file__).parents[2] / "docs/models.md").read_text()


def test_describe_types_of_transformers_has_a_line_with_what_is_known_about_it() -> None:
    lines = describe_types()
    assert (
        lines["dbrx"] == "is read as DbrxForCausalLM"
        and lines["t5"] == "is read as T5ForConditionalGeneration"
    )
    assert lines["gemma3"] == lines["qwen2_audio"] == "is read without its tower for images or audio"
    assert (
        lines["jetmoe"].startswith("needs attention whose query")
        and lines["whisper"] == "is out of scope: audio"
    )
    assert transformers.__version__ != "5.24.0" or "is unknown" not in lines.values()


def test_what_a_config_json_leaves_out_has_the_default_of_transformers() -> None:
    """Keys that older files lack: the value that transformers takes for them, at which it builds the same model."""
    for name, key, default in (
        ("gemma2", "query_pre_attn_scalar", 256),
        ("qwen3-moe, a dense layer", "decoder_sparse_step", 1),
        ("llama", "tie_word_embeddings", False),
        ("gemma3", "rope_local_base_freq", 10_000.0),
    ):
        tree = {
            other: value for other, value in their_tree(name).items() if other not in (key, "rope_parameters")
        }
        family = family_named_by(name)
        assert differences(family.read_config(tree), family.read_config(tree | {key: default})) == [], (
            name,
            key,
        )
