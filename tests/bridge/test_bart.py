"""BART and its kin against transformers: the same function, loss and gradients, and the same files there and back."""

import json
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from bart_reference import CLASSES, SIZES, VOCAB, reference
from default_cases import by_default
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import megalith
from megalith.bridge.exporter import export_hf
from megalith.bridge.families import FAMILIES
from megalith.bridge.importer import import_hf
from megalith.bridge.transfer import to_theirs
from megalith.bridge.verify import certify, same_bits
from megalith.cli.main import main
from megalith.errors import CheckpointError, ConfigError
from megalith.generation.sampling import generate

ENCODER_SEQ, SEQ = 40, 31
# Every activation, one layer per stack, one head, other special tokens and lengths.
UNUSUAL = {
    "scaled": dict(scale_embedding=True, activation_function="relu", init_std=0.3),
    "unscaled, one head": dict(scale_embedding=False, activation_function="gelu_new", encoder_attention_heads=1,
                               decoder_attention_heads=1, encoder_layers=1, decoder_layers=1),
    "other tokens": dict(pad_token_id=5, decoder_start_token_id=5, eos_token_id=7, activation_function="silu",
                         max_position_embeddings=ENCODER_SEQ, encoder_layers=3, decoder_layers=1),
    "wide mlp": dict(encoder_ffn_dim=104, decoder_ffn_dim=104, activation_function="quick_gelu", d_model=40,
                     encoder_attention_heads=2, decoder_attention_heads=2, decoder_start_token_id=0),
}  # fmt: skip
LENGTHS = torch.tensor([40, 27, 9])  # of what the encoder reads


def batch(pad: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1)
    mask = torch.arange(ENCODER_SEQ) < LENGTHS[:, None]
    encoder_input_ids = torch.randint(8, VOCAB, (3, ENCODER_SEQ), generator=random).masked_fill(~mask, pad)
    return dict(
        input_ids=torch.randint(8, VOCAB, (3, SEQ), generator=random),
        encoder_input_ids=encoder_input_ids,
        encoder_padding_mask=mask,
    )


def theirs(model: nn.Module, tokens: dict[str, Tensor], **more):
    mask = tokens["encoder_padding_mask"].long()
    return model(
        tokens["encoder_input_ids"], attention_mask=mask, decoder_input_ids=tokens["input_ids"], **more
    )


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= 1e-5 * expected.abs().max())


@torch.no_grad()
def assert_same_logits(model: nn.Module, folder: Path) -> None:
    """Compare logits without padding, with padding at the end, in both forms, and at the start."""
    ours, tokens = megalith.load(folder), batch(model.config.pad_token_id)
    expected = theirs(model, tokens).logits
    assert close(ours(**tokens), expected)
    ends = torch.stack([LENGTHS, torch.full_like(LENGTHS, ENCODER_SEQ)], 1).int()
    assert close(ours(**tokens | {"encoder_padding_mask": None}, encoder_document_ends=ends), expected)
    at_start = {name: value.flip(1) if "encoder" in name else value for name, value in tokens.items()}
    assert close(ours(**at_start), theirs(model, at_start).logits)
    whole = {name: value[:1] for name, value in tokens.items()}
    assert close(ours(whole["input_ids"], encoder_input_ids=whole["encoder_input_ids"]), expected[:1])


@pytest.mark.parametrize("kind", CLASSES)
def test_there_and_back_is_bitwise_and_the_same_function(kind: str, tmp_path: Path) -> None:
    model = reference(kind, tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "run", show_progress=False)
    for folder in ("hf", "run"):
        assert_same_logits(model, tmp_path / folder)
    out = export_hf(tmp_path / "run", tmp_path / "out").path
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "hf", out))
    assert before.keys() == after.keys() and all(same_bits(before[name], after[name]) for name in before)
    again, first = (json.loads((folder / "config.json").read_text()) for folder in (out, tmp_path / "hf"))
    assert again == first
    certificate = json.loads(certify(tmp_path / "run", out, tmp_path / "out").read_text())
    assert certificate["passed"] and certificate["tensors"]["compared"] >= len(before) - 2


@pytest.mark.parametrize(
    ("kind", "name"),
    by_default(
        [(kind, name) for kind in CLASSES for name in UNUSUAL],
        ("Bart", "other tokens"), ("Marian", "scaled"), ("M2M100", "other tokens"), ("MBart", "wide mlp"),
        ("BlenderbotSmall", "unscaled, one head"),
    ),
)  # fmt: skip
def test_unusual_configurations_are_the_same_function(kind: str, name: str, tmp_path: Path) -> None:
    assert_same_logits(reference(kind, tmp_path, **UNUSUAL[name]), tmp_path)


@pytest.mark.parametrize("kind", by_default(CLASSES, "Bart", "M2M100"))
def test_loss_and_gradients_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """transformers makes the decoder's input of the labels, except in mBART's way, which wraps the last token."""
    expected_model, tokens = reference(kind, tmp_path), batch(1)
    lengths = torch.tensor([[31], [12], [20]])
    real = torch.arange(SEQ) < lengths
    labels = torch.randint(8, VOCAB, (3, SEQ), generator=torch.Generator().manual_seed(4))
    labels = labels.masked_fill(~real, -100)
    expected = expected_model(
        tokens["encoder_input_ids"], attention_mask=tokens["encoder_padding_mask"].long(), labels=labels
    ).loss
    expected.backward()
    model = megalith.load(tmp_path).requires_grad_(True)
    last = labels.gather(1, lengths - 1)
    wraps = kind in ("MBart", "PLBart")
    start = last if wraps else torch.full_like(last, model.config.decoder_start_token_id)
    decoder_ids = torch.cat([start, labels[:, :-1]], 1).masked_fill(
        torch.cat([~real[:, :1], ~real[:, :-1]], 1), 1
    )
    loss = model(
        **tokens | {"input_ids": decoder_ids}, labels=labels.clamp(min=0), loss_mask=real.float() / real.sum()
    )
    loss.backward()
    assert torch.allclose(loss, expected, rtol=1e-5)
    gradients, found = {}, {}
    for group in FAMILIES[type(expected_model).__name__].groups(model.config):
        if group.name != "vocabulary.bias":
            ours = model.get_parameter(group.name).grad[: group.shape[0]]
            found |= dict(to_theirs(group, ours, dict.fromkeys(group.sources, torch.float32)))
    for name, parameter in expected_model.named_parameters():
        if parameter.requires_grad:
            gradients[name] = parameter.grad
    assert found.keys() == gradients.keys()
    largest = max(gradient.norm() for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert (found[name] - gradient).norm() <= 1e-5 * max(gradient.norm(), 1e-3 * largest), name


@pytest.mark.parametrize("kind", by_default(CLASSES, "Bart", "MBart", "M2M100", "BlenderbotSmall"))
def test_greedy_answers_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model, count = reference(kind, tmp_path, std=0.3), 20
    prompts = [[13, 21, 14, 31, 25], [9, 22, 16, 15, 23, 45, 8, 19, 7, 9, 33], [42]]
    ours = megalith.load(tmp_path)
    sizes = dict(
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        eos_token_id=None,
        forced_eos_token_id=None,
    )
    for prompt, found in zip(prompts, generate(ours, prompts, max_new_tokens=count, temperature=0)):
        assert [[2, *found]] == model.generate(torch.tensor([prompt]), **sizes).tolist()
    forced = generate(ours, prompts[:1], max_new_tokens=count, temperature=0, forced_bos_token_id=77)
    expected = model.generate(torch.tensor(prompts[:1]), **sizes, forced_bos_token_id=77)
    assert forced[0][0] == 77 and [[2, *forced[0]]] == expected.tolist()
    with pytest.raises(
        ConfigError, match="forced_bos_token_id is 151, but the model has the tokens 0 to 150"
    ):
        generate(ours, prompts, max_new_tokens=count, forced_bos_token_id=VOCAB)


def test_generate_begins_with_the_forced_token_of_the_files_or_of_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = reference("Bart", tmp_path, std=0.3)
    words = {f"w{number}": number for number in range(VOCAB)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 2, "forced_bos_token_id": 77})
    )
    command = ["generate", str(tmp_path), "--prompt", "w13 w21 w14", "--json", "--temperature", "0"]
    sizes = dict(do_sample=False, max_new_tokens=6, forced_eos_token_id=None)
    for words, forced in (([], 77), (["--forced-bos-token-id", "91"], 91)):
        assert main([*command, "--max-new-tokens", "6", "--device", "cpu", *words]) == 0
        ids = json.loads(capsys.readouterr().out)["ids"]
        expected = model.generate(torch.tensor([[13, 21, 14]]), **sizes, forced_bos_token_id=forced)
        assert ids == expected[0, 1:].tolist() and ids[0] == forced


@pytest.mark.parametrize("kind", ["Bart", "Pegasus"])
def test_files_without_the_constant_bias_are_read_and_written(kind: str, tmp_path: Path) -> None:
    model = reference(kind, tmp_path / "hf")
    stored = load_file(tmp_path / "hf/model.safetensors")
    del stored["final_logits_bias"]
    save_file(stored, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    model.final_logits_bias.zero_()
    assert_same_logits(model, tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "run", show_progress=False)
    after = load_file(export_hf(tmp_path / "run", tmp_path / "out").path / "model.safetensors")
    assert after.keys() == stored.keys() and all(same_bits(stored[name], after[name]) for name in stored)


def test_the_constant_bias_is_not_trained(tmp_path: Path) -> None:
    reference("Bart", tmp_path)
    model = megalith.models.model_types.make_model(megalith.load(tmp_path).config)
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["vocabulary.bias"]


def test_copies_of_the_embedding_have_to_be_the_embedding(tmp_path: Path) -> None:
    model = reference("Bart", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    names = ["model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"]
    copies = {name: stored["model.shared.weight"].clone() for name in names}
    save_file(stored | copies, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same_logits(model, tmp_path)
    words = stored.pop("model.shared.weight")  # as safetensors stores one of several tied matrices
    save_file(stored | {names[1]: words}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same_logits(model, tmp_path)
    other = {"model.shared.weight": words, names[0]: words + 1}
    save_file(stored | other, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"encoder\.embed_tokens\.weight differs from model\.shared\.weight"
    ):
        megalith.load(tmp_path)


@pytest.mark.parametrize("kind", ["Pegasus", "Marian"])
def test_tables_that_are_not_sinusoids_are_refused(kind: str, tmp_path: Path) -> None:
    model = reference(kind, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.decoder.embed_positions.weight"
    table = dict(model.named_parameters())[name].clone()
    save_file(stored | {name: table}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same_logits(model, tmp_path)
    table[3, 4] += 0.1
    save_file(stored | {name: table}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"embed_positions\.weight that differs by 0\.1 from the sinusoids"
    ):
        megalith.load(tmp_path)
    save_file(stored | {name: table[1:]}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"shape \[63, 24\], but it must be .* of shape \[64, 24\]"):
        megalith.load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "keys", "message"),
    [
        ("Bart", {"encoder_ffn_dim": 48}, r"model\.ffn_hidden_size both 48 and 40"),
        ("Bart", {"decoder_attention_heads": 2}, r"model\.num_attention_heads both 4 and 2"),
        ("Bart", {"tie_word_embeddings": False}, "tie_word_embeddings False, but models of this family"),
        ("Mvp", {"use_prompt": True}, "use_prompt True"),
        ("Marian", {"decoder_vocab_size": 99}, r"model\.vocab_size both 151 and 99"),
        ("Marian", {"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings False"),
        ("M2M100", {"pad_token_id": None}, "pad_token_id None, but positions are counted"),
        ("M2M100", {"hidden_size": 25}, "two names of one setting with different values"),
        ("Bart", {"activation_function": "tanh"}, "activation_function 'tanh', which is not supported"),
    ],
)
def test_other_models_are_refused_by_key(kind: str, keys: dict, message: str, tmp_path: Path) -> None:
    tree = CLASSES[kind].config_class(**SIZES).to_dict() | keys
    with pytest.raises(ConfigError, match=message):
        FAMILIES[CLASSES[kind].__name__].read_config(tree)


def test_dropout_that_is_left_out_is_named() -> None:
    tree = transformers.BartConfig(**SIZES, activation_dropout=0.1, encoder_layerdrop=0.2).to_dict()
    with pytest.warns(
        UserWarning, match=r"activation_dropout 0\.1, encoder_layerdrop 0\.2: transformers drops"
    ):
        FAMILIES["BartForConditionalGeneration"].read_config(tree)
