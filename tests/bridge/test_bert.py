"""BERT in transformers' six shapes of it and ModernBERT: the same function, gradients too, and the same files there and
back."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from bert_reference import (
    KINDS,
    LOCAL,
    SIZES,
    VOCAB,
    assert_close,
    batch,
    reference,
    theirs,
)
from default_cases import by_default, in_full
from hostile import problems, spoiled
from safetensors.torch import load_file

import megalith
from megalith.bridge.exporter import export_hf
from megalith.bridge.families import FAMILIES
from megalith.bridge.importer import import_hf, open_hf_folder
from megalith.bridge.load import with_init_from
from megalith.bridge.transfer import to_theirs
from megalith.bridge.verify import certify, same_bits
from megalith.config import RunConfig
from megalith.config.rules.run_rules import check_training
from megalith.errors import ConfigError
from megalith.models.encoders.bert import Bert
from megalith.models.inputs import TokenInputs
from megalith.planner.counts import count_parameters
from megalith.training.loading import load_with_tokenizer


def assert_same_function(model: Bert, expected_model: torch.nn.Module, padded_by: str) -> None:
    tokens = batch()
    given = {name: tokens[name] for name in ("input_ids", "tokentype_ids")}
    given["token_inputs"] = TokenInputs(**{padded_by: tokens[padded_by]})
    real = tokens["padding_mask"]
    with torch.no_grad():
        expected, found = theirs(expected_model, tokens), model.encodings(**given)
        if "last_hidden_state" in expected:
            assert_close(found.hidden[real], expected.last_hidden_state[real])
            if found.pooled is not None or "pooler_output" in expected:
                assert_close(found.pooled, expected.pooler_output)
            return
        logits = expected.logits if "logits" in expected else expected.prediction_logits
        assert_close(model(**given)[real], logits[real])
        if "seq_relationship_logits" in expected:
            assert_close(found.order, expected.seq_relationship_logits)


@pytest.mark.parametrize(
    "kind",
    by_default(
        KINDS,
        "BertForPreTraining",
        "BertModel",
        "MegatronBertForMaskedLM",
        "ModernBertForMaskedLM",
        "RobertaForMaskedLM",
    ),
)
def test_there_and_back_is_bitwise_and_the_same_function(kind: str, tmp_path: Path) -> None:
    model = reference(kind, hidden_act="gelu_new" if kind == "BertForMaskedLM" else "gelu")
    model.save_pretrained(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "run")
    assert_same_function(megalith.load(tmp_path / "hf"), model, "padding_mask")
    assert_same_function(megalith.load(tmp_path / "run"), model, "document_ends")
    out = export_hf(tmp_path / "run", tmp_path / "out").path
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "hf", out))
    assert before.keys() == after.keys() and all(same_bits(before[name], after[name]) for name in before)
    assert json.loads((out / "config.json").read_text()) == json.loads(
        (tmp_path / "hf/config.json").read_text()
    )
    certificate = json.loads(certify(tmp_path / "run", out, tmp_path / "out").read_text())
    assert certificate["passed"] and certificate["tensors"]["compared"] == len(before)


@pytest.mark.parametrize(
    "settings",
    [
        dict(norm_bias=True, attention_bias=True, mlp_bias=True, classifier_bias=True, tie_word_embeddings=False),
        dict(layer_types=["sliding_attention"] * 3, hidden_activation="gelu_new", local_attention=2),
        dict(layer_types=["full_attention"] * 3, rope_parameters=dict(
            full_attention=dict(rope_type="yarn", rope_theta=1e4, factor=2.0, original_max_position_embeddings=8))),
        dict(global_attn_every_n_layers=2, local_attention=64, classifier_activation="gelu_new",
             global_rope_theta=5e3, local_rope_theta=2e3, norm_eps=1e-3),
    ],
)  # fmt: skip
def test_choices_of_modernbert_are_read_and_written(settings: dict, tmp_path: Path) -> None:
    model = reference("ModernBertForMaskedLM", **settings)
    model.save_pretrained(tmp_path / "hf")
    ours = megalith.load(tmp_path / "hf")
    assert_same_function(ours, model, "padding_mask")
    assert_same_function(ours, model, "document_ends")
    family = FAMILIES["ModernBertForMaskedLM"]
    written = family.write_config(ours.config)
    again, theirs = (
        transformers.ModernBertConfig(**tree).to_dict() for tree in (written, model.config.to_dict())
    )
    token_ids = {key for key in written if key.endswith("token_id")}
    for key in written.keys() - token_ids - {"architectures", "rope_parameters"}:
        assert again[key] == theirs[key], key
    for kind, rope in theirs["rope_parameters"].items():  # written with the defaults of its kind
        assert again["rope_parameters"][kind] | rope == again["rope_parameters"][kind]
    count = count_parameters(ours.config, padded_vocab=False).total
    assert count == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "RobertaForMaskedLM", "XLMRobertaXLForMaskedLM"])
def test_positions_of_padding_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """RoBERTa counts only real tokens, and its table has two rows for padding."""
    model = reference(kind, type_vocab_size=1, pad_token_id=1)
    model.save_pretrained(tmp_path / "hf")
    ours = megalith.load(tmp_path / "hf")
    room = 32 if kind.startswith("Bert") else 30
    ids = torch.randint(2, VOCAB, (4, 32), generator=torch.Generator().manual_seed(1))
    real = torch.ones(4, 32, dtype=torch.bool)
    real[:2, -9:] = real[2, :5] = real[3, 7:10] = real[2:, -1] = False
    ids[~real] = 1
    with torch.no_grad():
        expected = model(ids, attention_mask=real.long()).logits
        assert_close(ours(ids, padding_mask=real)[real], expected[real])
        full = ids.masked_fill(~real, 5)[:, :room]
        assert_close(ours(full), model(full).logits)
        longer = torch.randint(2, VOCAB, (1, room + 1))
        with pytest.raises((IndexError, RuntimeError)):
            model(longer)
        with pytest.raises(ConfigError, match=rf"has {room + 1} tokens.* has {room} learned positions"):
            ours(longer)
        if room == 30:
            with pytest.raises(ConfigError, match="has 31 tokens besides padding"):
                ours(
                    torch.cat([longer, torch.ones_like(longer)], 1), padding_mask=torch.arange(62)[None] < 31
                )
    tree = dict(model=dict(init_from=str(tmp_path / "hf")), data=dict(mock=True, seq_length=room + 1),
                train=dict(train_iters=1))  # fmt: skip
    with pytest.raises(
        ConfigError, match=f"seq_length {room + 1} is longer than model.max_position_embeddings {room}"
    ):
        check_training(with_init_from(RunConfig.from_tree(tree)))


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "RobertaForMaskedLM", "XLMRobertaXLForMaskedLM"])
@pytest.mark.parametrize("settings", by_default(
    [
        dict(type_vocab_size=1, hidden_act="relu", layer_norm_eps=1e-3),
        dict(tie_word_embeddings=False, hidden_act="gelu_new", num_attention_heads=2),
        dict(hidden_act="silu", type_vocab_size=5, hidden_dropout_prob=0.0, initializer_range=0.5),
        dict(num_hidden_layers=1, intermediate_size=24, attention_probs_dropout_prob=0.3),
        dict(hidden_size=48, num_attention_heads=8, num_hidden_layers=5, max_position_embeddings=26),
        dict(hidden_act="gelu", vocab_size=203, num_attention_heads=1, tie_word_embeddings=False),
    ],
    dict(type_vocab_size=1, hidden_act="relu", layer_norm_eps=1e-3),
))  # fmt: skip
def test_choices_of_bert_and_roberta_are_read_and_written(kind: str, settings: dict, tmp_path: Path) -> None:
    model = reference(kind, **settings)
    model.save_pretrained(tmp_path / "hf")
    ours = megalith.load(tmp_path / "hf")
    ids, real = batch()["input_ids"], batch()["padding_mask"]
    with torch.no_grad():
        assert_close(ours(ids, padding_mask=real)[real], model(ids, attention_mask=real.long()).logits[real])
    written, theirs = FAMILIES[kind].write_config(ours.config), model.config.to_dict()
    assert {key: theirs[key] for key in written.keys() & theirs.keys()} | {
        key: written[key] for key in ("architectures", "position_embedding_type")
    } == written
    count = count_parameters(ours.config, padded_vocab=False).total
    unused = ours.config.untie_embeddings_and_output_weights * ours.config.vocab_size  # one of two biases
    assert count == model.num_parameters() - unused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pad_token_id": 0}, "pad_token_id 0"),
        ({"is_decoder": True}, "is_decoder True"),
        ({"add_cross_attention": True}, "add_cross_attention True"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
    ],
)
def test_what_roberta_has_and_we_do_not_is_refused_by_its_key(change: dict, message: str) -> None:
    tree = transformers.RobertaConfig(**SIZES).to_dict()
    with pytest.raises(ConfigError, match=message):
        FAMILIES["RobertaForMaskedLM"].read_config(tree | change)
    with pytest.raises(ConfigError, match="use_task_id True"):
        FAMILIES["ErnieModel"].read_config(transformers.ErnieConfig(use_task_id=True, **SIZES).to_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"decoder_bias": False}, "decoder_bias False"),
        ({"local_attention": 1}, "local_attention 1; it must be 2"),
        ({"sliding_window": 9}, "sliding_window 9 and local_attention 8"),
        ({"layer_types": None, "global_attn_every_n_layers": 0}, "global_attn_every_n_layers 0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling, which scales"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "rope_parameters with rope_theta, rope",
        ),
    ],
)
def test_what_modernbert_has_and_we_do_not_is_refused_by_its_key(change: dict, message: str) -> None:
    tree = transformers.ModernBertConfig(**SIZES | LOCAL).to_dict()
    with pytest.raises(ConfigError, match=message):
        FAMILIES["ModernBertForMaskedLM"].read_config(tree | change)


@pytest.mark.parametrize(
    "kind",
    [
        "BertForPreTraining",
        "MegatronBertForPreTraining",
        "ModernBertForMaskedLM",
        *map(in_full, ("RobertaForMaskedLM", "XLMRobertaXLForMaskedLM", "RobertaPreLayerNormForMaskedLM")),
    ],
)
def test_loss_and_gradients_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    expected_model, tokens = reference(kind), batch()
    expected_model.save_pretrained(tmp_path)
    model = megalith.load(tmp_path).requires_grad_(True)
    labels = tokens["labels"].masked_fill(tokens["loss_mask"] == 0, -100)
    has_order = "MaskedLM" not in kind
    order = {"next_sentence_label": tokens["sentence_order"]} if has_order else {}
    expected = theirs(expected_model, tokens, labels=labels, **order).loss
    expected.backward()
    weights = tokens.pop("loss_mask") / (labels != -100).sum()
    del tokens["padding_mask"]
    inputs = TokenInputs(document_ends=tokens.pop("document_ends"))
    if not has_order:
        del tokens["sentence_order"]
    if kind.startswith("Modern"):
        del tokens["tokentype_ids"]
    loss = model(**tokens, token_inputs=inputs, loss_mask=weights)
    loss.backward()
    assert torch.allclose(loss, expected, rtol=1e-5)
    gradients, found = {name: p.grad for name, p in expected_model.named_parameters()}, {}
    for group in FAMILIES[kind].groups(model.config):
        ours = model.get_parameter(group.name).grad[: group.shape[0]]
        found |= dict(to_theirs(group, ours, dict.fromkeys(group.sources, torch.float32)))
    assert found.keys() == gradients.keys()
    whole = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for name, gradient in gradients.items():  # those of keys' biases are 0 but for rounding
        assert (found[name] - gradient).norm() <= 1e-5 * max(gradient.norm(), 1e-3 * whole), name


@pytest.mark.parametrize("lower", [True, False])
def test_word_pieces_come_with_the_model_and_go_with_it(lower: bool, tmp_path: Path) -> None:
    reference("BertForPreTraining").save_pretrained(tmp_path / "hf")
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "A", "b", "##c", "é", "."]
    (tmp_path / "hf/vocab.txt").write_text("\n".join(pieces), encoding="utf-8")
    if not lower:
        (tmp_path / "hf/tokenizer_config.json").write_text('{"do_lower_case": false}')
    import_hf(tmp_path / "hf", tmp_path / "run")
    ours = load_with_tokenizer(tmp_path / "run")[1]
    assert ours.tokenizer_type == ("BertWordPieceLowerCase" if lower else "BertWordPieceCase")
    out = export_hf(tmp_path / "run", tmp_path / "out").path
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    text = "A bc. Ab é"
    assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)
    assert ours.encode("A") == [pieces.index("a" if lower else "A")]


@pytest.mark.parametrize("stride", by_default([4, 1], 4))
def test_every_value_of_a_config_json_is_read_or_refused_in_a_sentence(tmp_path: Path, stride: int) -> None:
    reference("BertModel").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())

    def read(content: dict) -> None:
        (tmp_path / "config.json").write_text(json.dumps(content))
        open_hf_folder(tmp_path)

    count, refused, found = problems(spoiled(config, (), stride), read)
    assert not found and count > 500 / stride and refused > count / 3
