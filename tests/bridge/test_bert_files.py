"""Files of encoders as older versions of transformers, other classes and other systems wrote them."""

import json
import re
from pathlib import Path

import pytest
import torch
from bert_reference import (
    KINDS,
    assert_close,
    batch,
    reference,
    theirs,
)
from default_cases import by_default
from safetensors.torch import load_file, save_file

import megalith
from megalith.bridge.families import FAMILIES
from megalith.bridge.verify import same_bits
from megalith.errors import CheckpointError


def test_files_of_the_first_bert_are_read(tmp_path: Path) -> None:
    """They say BertForMaskedLM, hold all heads, and call a norm's weight and bias gamma and beta."""
    model = reference("BertForPreTraining")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in tensors.items()
    }
    old["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
    save_file(old, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours, tokens = megalith.load(tmp_path), batch()
    assert not ours.config.bert_binary_head and ours.pooler is None
    with torch.no_grad():
        logits = ours(
            tokens["input_ids"], tokentype_ids=tokens["tokentype_ids"], padding_mask=tokens["padding_mask"]
        )
        assert_close(
            logits[tokens["padding_mask"]], theirs(model, tokens).prediction_logits[tokens["padding_mask"]]
        )


@pytest.mark.parametrize(
    "kind",
    [
        "BertForMaskedLM",
        "RobertaForMaskedLM",
        "DistilBertForMaskedLM",
        "ErnieForPreTraining",
        "BertGenerationDecoder",
        "ModernBertForMaskedLM",
        "XLMRobertaXLForMaskedLM",
    ],
)
def test_names_of_older_files_and_of_other_classes_are_read(kind: str, tmp_path: Path) -> None:
    """Norms named gamma and beta, no prefix before the encoder's names, and all heads in a file of the bare model."""
    settings = {"is_decoder": True} if "Decoder" in kind else {}
    reference(kind, **settings).save_pretrained(tmp_path)
    config, tensors = (
        json.loads((tmp_path / "config.json").read_text()),
        load_file(tmp_path / "model.safetensors"),
    )
    prefix = FAMILIES[kind].prefix
    expected = megalith.load(tmp_path).state_dict()
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

    def ours(architecture: str, rename, further: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
        (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
        renamed = {rename(name): value for name, value in tensors.items()}
        renamed |= {rename(name): torch.arange(32)[None] for name in further}
        save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
        return megalith.load(tmp_path).state_dict()

    def gamma(name: str) -> str:
        return next((name.removesuffix(end) + new for end, new in old.items() if name.endswith(end)), name)

    for rename in (gamma, lambda name: name.removeprefix(prefix)):
        found = ours(kind, rename, () if "Modern" in kind else (f"{prefix}embeddings.position_ids",))
        assert found.keys() == expected.keys()
        assert all(same_bits(found[name], value) for name, value in expected.items())
    if "Decoder" in kind:
        return
    has_pooler = any(".pooler." in name for name in tensors)
    bare = re.sub("For(MaskedLM|PreTraining)$", "Model", kind)
    if not has_pooler and FAMILIES[bare].read_config(config).pooler:
        with pytest.raises(CheckpointError, match="missing: pooler"):
            ours(bare, str)
        return
    found = ours(bare, str)
    assert all(same_bits(found[name], expected[name]) for name in found if not name.startswith("pooler"))


@pytest.mark.parametrize(
    "kind",
    by_default(
        [kind for kind in [*KINDS, "BertGenerationDecoder"] if not kind.endswith(("Model", "Encoder"))],
        "BertForMaskedLM",
        "RobertaForMaskedLM",
        "DistilBertForMaskedLM",
        "BertGenerationDecoder",
    ),
)
def test_an_output_matrix_or_bias_that_contradicts_config_json_is_not_dropped(
    kind: str, tmp_path: Path
) -> None:
    settings = {"is_decoder": True} if "Decoder" in kind else {}
    model = reference(kind, tie_word_embeddings=False, **settings)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for stated in ({"tie_word_embeddings": True}, {}):
        without = {key: value for key, value in config.items() if key != "tie_word_embeddings"}
        (tmp_path / "config.json").write_text(json.dumps(without | stated))
        with pytest.raises(
            CheckpointError, match=r"tie_word_embeddings, but .* set tie_word_embeddings to false"
        ):
            megalith.load(tmp_path)
    if "Modern" in kind or "Distil" in kind:  # one bias
        return
    # With an equal matrix transformers ties it, but adds the matrix's own bias.
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = next(name for name in tensors if name.endswith("word_embeddings.weight"))
    tensors[FAMILIES[kind].tied] = tensors[embedding].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    both = type(model).from_pretrained(tmp_path, attn_implementation="eager").eval()
    ids = batch()["input_ids"]
    with torch.no_grad():
        output = both(ids)
        expected = output.logits if "logits" in output else output.prediction_logits
        assert_close(megalith.load(tmp_path)(ids), expected)
