"""Ling 2.0, whose class is not in transformers, against Sarvam's, which computes the same under other keys."""

import json
from pathlib import Path

import pytest
import torch
from models.reference import CASES, random_reference

import megalith
from megalith.bridge.exporter import export_hf
from megalith.bridge.families import FAMILIES
from megalith.bridge.importer import import_hf
from megalith.bridge.model_differences import differences
from megalith.bridge.verify import certify
from megalith.errors import ConfigError

LING = "BailingMoeV2ForCausalLM"
KEYS = {
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "attention_bias": "use_qkv_bias",
}


def ling_config(folder: Path, **changes) -> dict:
    """Return Sarvam's config.json with Ling's keys: half of each head has RoPE, by its number of dimensions."""
    theirs = json.loads((folder / "config.json").read_text())
    theirs = {KEYS.get(key, key): value for key, value in theirs.items()}
    rope = theirs.pop("rope_parameters")
    named = {
        "architectures": [LING],
        "model_type": "bailing_moe",
        "rope_theta": rope["rope_theta"],
        "rotary_dim": 12,
    }
    return theirs | named | {"score_function": "sigmoid", "moe_router_enable_expert_bias": True} | changes


def test_ling_computes_what_sarvam_does_and_is_written_as_it_was_read(tmp_path: Path) -> None:
    config = CASES["sarvam-moe"][0]()
    config.rope_parameters["partial_rotary_factor"] = 0.5
    reference = random_reference(config)
    reference.save_pretrained(tmp_path / "hf")
    theirs = ling_config(tmp_path / "hf")
    (tmp_path / "hf/config.json").write_text(json.dumps(theirs))
    import_hf(tmp_path / "hf", tmp_path / "run", show_progress=False)
    ids = torch.randint(0, config.vocab_size, (2, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, logits = reference(ids).logits, megalith.load(tmp_path / "run")(ids)
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    certificate = json.loads(certify(tmp_path / "run", tmp_path / "hf", tmp_path / "run").read_text())
    assert certificate["passed"] and certificate["logits"]["against"] == "megalith"
    out = export_hf(tmp_path / "run", tmp_path / "out", show_progress=False).path
    assert json.loads((out / "config.json").read_text()) == theirs
    assert (out / "model.safetensors").stat().st_size == (tmp_path / "hf/model.safetensors").stat().st_size
    model = FAMILIES[LING].read_config(theirs)
    assert differences(FAMILIES[LING].read_config(FAMILIES[LING].write_config(model)), model) == []
    for key, value in (("score_function", "softmax"), ("use_bias", True), ("norm_topk_prob", False)):
        with pytest.raises(ConfigError, match=f"{key} {value!r}"):
            FAMILIES[LING].read_config(theirs | {key: value})
