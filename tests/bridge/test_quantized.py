"""Exports with one byte per weight: transformers computes with them as with the dequantized weights."""

import itertools
import json

import pytest
import torch
import transformers
from default_cases import by_default
from models.reference import CASES, random_reference
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import megalith
from megalith.bridge.exporter import export_hf
from megalith.bridge.importer import import_hf
from megalith.bridge.quantized import LARGEST, SUFFIX, notes_on_blocks, quantize
from megalith.cli.main import main
from megalith.errors import CheckpointError, ConfigError


def of_blocks(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]


@pytest.mark.parametrize("form", ["fp8", "int8"])
def test_codes_are_the_nearest_and_the_largest_of_a_scale_is_its_end(form):
    matrix = torch.randn(200, 300, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 2, 300)
    matrix[7] = 0.0
    codes, scale = quantize(matrix, form)
    spread = scale.expand(200, 300) if form == "int8" else of_blocks(scale, 200, 300)
    half = spread / 2
    if form == "fp8":  # of four bits of which the first is 1, and of the smallest numbers
        half = torch.maximum(matrix.abs() * 2**-4, spread * 2**-10)
    assert ((codes.float() * spread - matrix).abs() <= half * 1.0001).all()
    assert codes.float().abs().max() == LARGEST[form] and not codes[7].float().any()


def dequantized(folder) -> dict[str, torch.Tensor]:
    stored, found = load_file(folder / "model.safetensors"), {}
    for name, values in stored.items():
        if name.endswith(("_scale", "_scale_inv")):
            continue
        scale = stored.get(name + "_scale", torch.ones(()))
        if name + "_scale_inv" in stored:
            scale = of_blocks(stored[name + "_scale_inv"], *values.shape)
        found[name] = values.float() * scale
    return found


@pytest.mark.parametrize(
    ("form", "family"),
    by_default(itertools.product(["fp8", "int8"], ["llama", "qwen3"]), ("fp8", "llama"), ("int8", "qwen3")),
)
def test_transformers_computes_with_what_the_codes_stand_for(form, family, tmp_path):
    config = CASES[family][0]()
    random_reference(config).save_pretrained(tmp_path / "whole")
    import_hf(tmp_path / "whole", tmp_path / "run", show_progress=False)
    assert main(["export-hf", str(tmp_path / "run"), str(tmp_path / "small"), "--quantize", form]) == 0
    meant, whole = dequantized(tmp_path / "small"), load_file(tmp_path / "whole" / "model.safetensors")
    assert meant.keys() == whole.keys()
    changed = {name for name in whole if not torch.equal(meant[name], whole[name])}
    assert changed == {name for name in whole if name.endswith("_proj.weight")}
    assert all((meant[name] - whole[name]).norm() < 0.04 * whole[name].norm() for name in changed)
    import_hf(tmp_path / "small", tmp_path / "again", show_progress=False)
    again = export_hf(tmp_path / "again", tmp_path / "plain", show_progress=False).path
    assert load_file(again / "model.safetensors").keys() == meant.keys()
    assert all(
        torch.equal(values, meant[name]) for name, values in load_file(again / "model.safetensors").items()
    )
    assert json.loads((again / "config.json").read_text()) == json.loads(
        (tmp_path / "whole" / "config.json").read_text()
    )
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.float32)
    expected = type(found)(config).float()
    expected.load_state_dict(meant, strict=False)
    ids = torch.arange(40)[None] % config.vocab_size
    found = found if form == "int8" else found.float()
    torch.testing.assert_close(found(ids).logits, expected(ids).logits, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("form", ["fp8", "int8"])
def test_an_output_matrix_that_is_the_embedding_is_told_as_not_quantized(form, tmp_path):
    sizes = dict(
        vocab_size=97, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128
    )
    whole = transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).eval()
    whole.save_pretrained(tmp_path / "whole")
    import_hf(tmp_path / "whole", tmp_path / "run", show_progress=False)
    export_hf(tmp_path / "run", tmp_path / "small", quantize=form, show_progress=False)
    quantization = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    linears = {name for name, one in whole.named_modules() if isinstance(one, torch.nn.Linear)}
    kept = quantization.get("ignore") or quantization["modules_to_not_convert"]
    tensors = load_file(tmp_path / "small" / "model.safetensors")
    stored = {name for name in linears if f"{name}.weight{SUFFIX[form]}" in tensors}
    assert linears - set(kept) == stored
    found, info = type(whole).from_pretrained(
        tmp_path / "small", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    ids = torch.arange(40)[None]
    expected = whole(ids).logits
    found = found if form == "int8" else found.float()
    assert (found(ids).logits - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize(("form", "activation"), [("fp8", "gated-gelu"), ("int8", "relu")])
def test_both_stacks_of_an_encoder_decoder_become_codes(form, activation, tmp_path):
    config = transformers.T5Config(
        vocab_size=97, d_model=64, d_kv=16, d_ff=256, num_layers=1, num_decoder_layers=2, num_heads=4,
        feed_forward_proj=activation, decoder_start_token_id=0,
    )  # fmt: skip
    whole = transformers.T5ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path / "whole")
    import_hf(tmp_path / "whole", tmp_path / "run", show_progress=False)
    export_hf(tmp_path / "run", tmp_path / "small", quantize=form, show_progress=False)
    meant, before = dequantized(tmp_path / "small"), load_file(tmp_path / "whole" / "model.safetensors")
    changed = {name for name in before if not torch.equal(meant[name], before[name])}
    linears = {f"{name}.weight" for name, one in whole.named_modules() if isinstance(one, torch.nn.Linear)}
    kept = {name for name in linears if form == "fp8" and name.endswith(".wo.weight")}  # on a GPU, see T5
    assert changed == linears - kept - {"lm_head.weight"}
    found = type(whole).from_pretrained(tmp_path / "small", dtype=torch.float32)
    found = found if form == "int8" else found.float()
    whole.load_state_dict(meant, strict=False)
    read, written = torch.arange(40)[None] % 97, torch.arange(50, 80)[None]
    logits = [model(input_ids=read, decoder_input_ids=written).logits for model in (found, whole)]
    assert (logits[0] - logits[1]).norm() < (1e-5 if form == "fp8" else 2e-2) * logits[1].norm()


def test_blocks_that_are_not_whole_are_read_and_scales_of_another_shape_refused(tmp_path):
    config = CASES["llama"][0]()
    config.intermediate_size, config.dtype = 300, "bfloat16"
    random_reference(config).bfloat16().save_pretrained(tmp_path / "whole")
    import_hf(tmp_path / "whole", tmp_path / "run", show_progress=False)
    small = export_hf(tmp_path / "run", tmp_path / "small", quantize="fp8", show_progress=False).path
    name = "layers.1.mlp.linear_fc2.weight"
    found = megalith.load(small).get_parameter(name)
    assert torch.equal(found, dequantized(small)["model.layers.1.mlp.down_proj.weight"].bfloat16().float())
    tensors = load_file(small / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight_scale_inv"] = torch.ones(1, 2)
    save_file(tensors, small / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"its scales \[1, 2\] of F32, but fp8 needs one scale for each block"
    ):
        megalith.load(small)


def test_a_note_tells_of_blocks_that_transformers_takes_for_others():
    tensors = {"a": (torch.float32, (96, 256)), "b": (torch.float32, (160, 64))}
    (note,) = notes_on_blocks(tensors, {"a", "b"}, "fp8")
    assert note.startswith("b is [160, 64], which is not divisible by 128, and transformers without FP8")
    assert not notes_on_blocks(tensors, {"a"}, "fp8") and not notes_on_blocks(tensors, {"a", "b"}, "int8")


def test_what_cannot_be_is_refused(tmp_path):
    random_reference(CASES["gpt2"][0]()).save_pretrained(tmp_path / "gpt2")
    import_hf(tmp_path / "gpt2", tmp_path / "run", show_progress=False)
    random_reference(CASES["mixtral"][0]()).save_pretrained(tmp_path / "mixtral")
    import_hf(tmp_path / "mixtral", tmp_path / "experts", show_progress=False)
    with pytest.raises(ConfigError, match="int8 is not supported for experts"):
        export_hf(tmp_path / "experts", tmp_path / "small", quantize="int8", show_progress=False)
    with pytest.raises(ConfigError, match="remove --quantize"):
        export_hf(tmp_path / "run", tmp_path / "small", quantize="fp8", show_progress=False)
    assert not (tmp_path / "small").exists()
    assert (
        main(["export-hf", str(tmp_path / "run"), str(tmp_path / "small"), "--quantize", "fp8", "--verify"])
        == 2
    )


def test_experts_in_mxfp4_are_those_that_transformers_unpacks(tmp_path):
    """A gpt-oss folder as published: blocks and scales in the place of the experts' matrices."""
    config = CASES["gpt-oss"][0]()
    config.intermediate_size = 96
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config)
    model.save_pretrained(tmp_path)
    tensors = {name: x.bfloat16() for name, x in load_file(tmp_path / "model.safetensors").items()}
    generator, whole = torch.Generator().manual_seed(1), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        groups = -(-columns // 32)
        blocks = torch.randint(0, 256, (experts, rows, groups, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(118, 124, (experts, rows, groups), dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        whole[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    hf_config = json.loads((tmp_path / "config.json").read_text())
    hf_config["dtype"] = "bfloat16"
    hf_config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    model.load_state_dict({name: x.float() for name, x in {**tensors, **whole}.items()}, strict=False)
    ids = torch.randint(0, config.vocab_size, (2, 12), generator=generator)
    with torch.no_grad():
        expected = model(ids).logits
        found = megalith.load(tmp_path).float()(ids)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    import_hf(tmp_path, tmp_path / "run", show_progress=False)
    out = export_hf(tmp_path / "run", tmp_path / "out", show_progress=False).path
    again = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        assert (again(ids).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    tensors[next(name for name in tensors if name.endswith("_scales"))] = torch.zeros(3, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"its scales \[3\] of U8, but MXFP4 is uint8"):
        megalith.load(tmp_path)
