"""T5 against transformers: the same function, loss and gradients, and the same files there and back."""

import json
from pathlib import Path

import pytest
import torch
from default_cases import by_default
from models.reference import random_parameters
from safetensors.torch import load_file
from transformers import (
    MT5Config,
    MT5ForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

import megalith
from megalith.bridge.exporter import _config_json, export_hf
from megalith.bridge.families import FAMILIES
from megalith.bridge.importer import import_hf
from megalith.bridge.origin import Origin
from megalith.bridge.transfer import to_theirs
from megalith.bridge.verify import certify, same_bits
from megalith.config import ParallelConfig, RunConfig
from megalith.config.rules.model_rules import check_model
from megalith.config.rules.run_rules import check_training
from megalith.errors import ConfigError
from megalith.generation.sampling import generate
from megalith.launch.pool import Pool
from megalith.parity.check import LAYOUTS
from megalith.parity.differences import compare
from megalith.parity.job import run_job, start

VOCAB, ENCODER_SEQ, SEQ = 151, 40, 31
# Heads that are not hidden / heads wide, stacks of two depths, and sequences that reach beyond the farthest bucket.
SIZES = dict(vocab_size=VOCAB, d_model=64, d_kv=12, d_ff=96, num_layers=2, num_decoder_layers=3, num_heads=4,
             relative_attention_num_buckets=8, relative_attention_max_distance=20, decoder_start_token_id=0,
             n_positions=64)  # fmt: skip
KINDS = {
    "v1.0": dict(feed_forward_proj="relu"),
    "v1.1": dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "mT5": dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "UMT5": dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
}


def reference(kind: str, folder: Path) -> T5ForConditionalGeneration:
    """A random model in evaluation mode, and in `folder` its files as published ones are: in 1.1 and mT5 the output
    matrix is one of its own, which the configuration says."""
    classes = {
        "mT5": (MT5ForConditionalGeneration, MT5Config),
        "UMT5": (UMT5ForConditionalGeneration, UMT5Config),
    }
    family, config = classes.get(kind, (T5ForConditionalGeneration, T5Config))
    model = family._from_config(config(**SIZES | KINDS[kind]), attn_implementation="eager")
    if kind != "v1.0":
        model.lm_head.weight = torch.nn.Parameter(torch.empty(VOCAB, SIZES["d_model"]))
    random_parameters(model).save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": kind == "v1.0"}
    (folder / "config.json").write_text(json.dumps(settings, indent=2))
    return model


LENGTHS = [40, 27, 9]  # of what the encoder reads
ENDS = torch.tensor([[length, ENCODER_SEQ] for length in LENGTHS], dtype=torch.int32)


def batch() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return dict(
        input_ids=torch.randint(0, VOCAB, (3, SEQ), generator=random),
        encoder_input_ids=torch.randint(0, VOCAB, (3, ENCODER_SEQ), generator=random),
        encoder_padding_mask=torch.arange(ENCODER_SEQ) < torch.tensor(LENGTHS)[:, None],
        labels=torch.randint(0, VOCAB, (3, SEQ), generator=random),
        loss_mask=(torch.arange(SEQ) < torch.tensor([31, 12, 20])[:, None]).float(),
    )


def theirs(model: T5ForConditionalGeneration, tokens: dict[str, torch.Tensor], **more):
    mask = tokens["encoder_padding_mask"].long()
    return model(
        tokens["encoder_input_ids"], attention_mask=mask, decoder_input_ids=tokens["input_ids"], **more
    )


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_is_bitwise_and_the_same_function(kind: str, tmp_path: Path) -> None:
    model, tokens = reference(kind, tmp_path / "hf"), batch()
    import_hf(tmp_path / "hf", tmp_path / "run")
    del tokens["labels"], tokens["loss_mask"]
    for folder in ("hf", "run"):
        with torch.no_grad():
            ours, expected = megalith.load(tmp_path / folder), theirs(model, tokens).logits
            for padding in ({}, {"encoder_padding_mask": None, "encoder_document_ends": ENDS}):
                found = ours(**tokens | padding)
                assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    out = export_hf(tmp_path / "run", tmp_path / "out").path
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "hf", out))
    assert before.keys() == after.keys() and all(same_bits(before[name], after[name]) for name in before)
    again, first = (json.loads((folder / "config.json").read_text()) for folder in (out, tmp_path / "hf"))
    assert again == first
    assert (kind != "v1.0") == ("lm_head.weight" in after)
    certificate = json.loads(certify(tmp_path / "run", out, tmp_path / "out").read_text())
    assert certificate["passed"] and certificate["tensors"]["compared"] == len(before)


@pytest.mark.parametrize("kind", by_default(KINDS, "v1.0", "v1.1", "UMT5"))
def test_loss_and_gradients_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    expected_model, tokens = reference(kind, tmp_path), batch()
    labels = tokens["labels"].masked_fill(tokens["loss_mask"] == 0, -100)
    expected = theirs(expected_model, tokens, labels=labels).loss
    expected.backward()
    model = megalith.load(tmp_path).requires_grad_(True)
    loss = model(**tokens | {"loss_mask": tokens["loss_mask"] / tokens["loss_mask"].sum()})
    loss.backward()
    assert torch.allclose(loss, expected, rtol=1e-5)
    gradients, found = {name: p.grad for name, p in expected_model.named_parameters()}, {}
    for group in FAMILIES[type(expected_model).__name__].groups(model.config):
        ours = model.get_parameter(group.name).grad[: group.shape[0]]
        found |= dict(to_theirs(group, ours, dict.fromkeys(group.sources, torch.float32)))
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("kind", by_default(KINDS, "v1.1", "UMT5"))
def test_greedy_answers_are_those_of_transformers_and_samples_follow_their_own_number(
    kind: str, tmp_path: Path
) -> None:
    model, count = reference(kind, tmp_path), 30  # beyond the farthest bucket
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 8, 4, 7, 6, 3, 1, 2, 4, 9, 5, 6], [42]]
    ours = megalith.load(tmp_path)
    for prompt, found in zip(prompts, generate(ours, prompts, max_new_tokens=count, temperature=0)):
        sizes = dict(
            use_cache=False, do_sample=False, max_new_tokens=count, min_new_tokens=count, pad_token_id=0
        )
        assert [[0, *found]] == model.generate(torch.tensor([prompt]), eos_token_id=None, **sizes).tolist()
    sampled = generate(ours, prompts, max_new_tokens=count, seed=5)
    assert sampled[0] == generate(ours, prompts[:1], max_new_tokens=count, seed=5)[0]
    assert sampled != generate(ours, prompts, max_new_tokens=count, seed=6)
    stopped = generate(ours, prompts, max_new_tokens=count, seed=5, eod=sampled[0][7])
    assert stopped[0] == sampled[0][: sampled[0].index(sampled[0][7])]


RUN = {
    "model": dict(model_type="t5", num_layers=5, encoder_num_layers=2, hidden_size=64, ffn_hidden_size=96,
                  kv_channels=12, num_attention_heads=4, vocab_size=31, position_embedding_type="relative",
                  normalization="RMSNorm",
                  relative_attention_num_buckets=8, relative_attention_max_distance=20, add_bias_linear=False,
                  activation="relu", query_pre_attn_scalar=1, scale_decoder_outputs=True, hidden_dropout=0.0,
                  attention_dropout=0.0, max_position_embeddings=64, layernorm_epsilon=1e-6, init_method_std=0.1),
    "data": dict(mock=True, seq_length=24, decoder_seq_length=10, num_workers=0),
    "optim": dict(lr=1e-2),
    "train": dict(micro_batch_size=8, global_batch_size=16, train_iters=30, eval_iters=1),
    "runtime": dict(device="cpu", compile=False),
}  # fmt: skip


@pytest.mark.parametrize("layout", by_default(["tp2-sp-pp2", "cp2-a2a", "tp2-sp-dp2-zero3"], "cp2-a2a"))
def test_layers_with_positions_of_their_own_train_in_a_layout_as_in_one_process(
    pool: Pool, tmp_path: Path, layout: str
) -> None:
    reference("UMT5", tmp_path)
    cut = {"pipeline_model_parallel_layout": "Et|ttttL"} if "pp2" in layout else {}  # in the encoder
    train = {"train_iters": 2, "micro_batch_size": 2, "global_batch_size": 4, "eval_iters": 1}
    data = RUN["data"] | {"decoder_seq_length": 12}
    one = RunConfig.from_tree(RUN | {"model": {"init_from": str(tmp_path)}, "data": data, "train": train})
    several = one.model_copy(update={"parallel": ParallelConfig(**LAYOUTS[layout].parallel, **cut)})
    errors = compare(pool.run(run_job, several, size=LAYOUTS[layout].processes), run_job(one))
    assert errors.within(), errors


@pytest.mark.full
def test_a_run_learns_pairs_and_its_loss_is_that_of_transformers(tmp_path: Path) -> None:
    tree = RUN | {"train": RUN["train"] | {"output_dir": str(tmp_path / "run")}}
    trainer = start(RunConfig.from_tree(tree))

    with trainer.data.train_loader(0, 0, trainer.device) as batches:
        trainer.train_step(batches)
        trainer.save()
        losses = [trainer.train_step(batches).loss.item() for _ in range(29)]
    assert losses[-1] < losses[0] - 0.5
    model = T5ForConditionalGeneration.from_pretrained(export_hf(tmp_path / "run", tmp_path / "hf").path)
    with trainer.data.train_loader(1, 16, trainer.device) as batches:
        parts = [next(batches) for _ in range(2)]
    labels = torch.cat([part.labels.masked_fill(part.loss_mask == 0, -100) for part in parts])
    names = ("input_ids", "encoder_input_ids", "encoder_document_ends")
    tokens = {name: torch.cat([part[name] for part in parts]) for name in names}
    real = tokens.pop("encoder_document_ends")[:, :1]
    tokens["encoder_padding_mask"] = torch.arange(tokens["encoder_input_ids"].shape[1]) < real
    assert not tokens["encoder_padding_mask"].all() and (labels == -100).any()
    with torch.no_grad():
        expected = theirs(model.eval(), tokens, labels=labels).loss
    assert losses[0] == pytest.approx(expected.item(), rel=1e-5)


def test_a_matrix_of_its_own_is_the_models_whatever_the_configuration_says(tmp_path: Path) -> None:
    """Return what transformers 5 saves after loading T5 1.1 or Flan-T5."""
    model, tokens = reference("v1.1", tmp_path), batch()
    settings = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    del tokens["labels"], tokens["loss_mask"]
    with pytest.warns(
        UserWarning, match="lm_head.weight is not shared.weight, so the model gets a separate output matrix"
    ):
        ours = megalith.load(tmp_path)
    with torch.no_grad():
        found, expected = ours(**tokens), theirs(model, tokens).logits
    assert ours.config.untie_embeddings_and_output_weights
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"encoder_num_layers": 4},
            r"num_layers counts encoder and decoder layers and is 4, but model\.encoder_num_layers is 4; set model",
        ),
        ({"model_type": "gpt"}, "relative, which only encoder-decoders support"),
        ({"num_experts": 4}, "layers with cross-attention"),
        ({"attn_logit_softcapping": 3.0}, "both change the scores"),
        ({"relative_attention_max_distance": 16}, "16 must be larger than 16, the number of distances"),
        (
            {"decoder_seq_length": 12},
            "has tokens of a micro-batch in the decoder 24; change these sizes",
        ),
    ],
)
def test_what_an_encoder_decoder_cannot_be_or_do_is_refused(fields: dict, message: str) -> None:
    shape = dict(model_type="t5", num_layers=4, hidden_size=32, num_attention_heads=4, vocab_size=VOCAB,
                 position_embedding_type="relative", max_position_embeddings=16)  # fmt: skip
    train = dict(micro_batch_size=2, global_batch_size=2, train_iters=1)
    if "decoder_seq_length" in fields:
        train["fp8_format"] = "hybrid"
    of_data = {name: value for name, value in fields.items() if name == "decoder_seq_length"}
    data = dict(seq_length=8, mock=True) | of_data
    model = shape | {name: value for name, value in fields.items() if name not in of_data}
    tree = {"model": model, "data": data, "train": train, "optim": {"lr": 1e-3}}
    config = RunConfig.from_tree(tree)
    with pytest.raises(ConfigError, match=message):
        check_model(config.model)
        check_training(config)


def test_the_mlp_that_files_name_twice_has_to_be_one_and_follows_a_model_that_was_changed() -> None:
    family = FAMILIES["T5ForConditionalGeneration"]
    theirs = json.loads(T5Config(**SIZES, feed_forward_proj="gated-gelu").to_json_string(use_diff=False))
    theirs["architectures"] = ["T5ForConditionalGeneration"]
    model = family.read_config(theirs)
    assert theirs["dense_act_fn"] == "gelu_new" and model.mlp_activation == "gelu_tanh"
    for name, value in (("dense_act_fn", "relu"), ("is_gated_act", False)):  # transformers takes these
        with pytest.raises(ConfigError, match=f"{name} {value!r}.*which contradict it"):
            family.read_config(theirs | {name: value})
    silu = model.model_copy(update={"activation": "silu"})
    out = T5Config(**_config_json(family, silu, Origin(theirs), torch.float32, None))
    assert (out.dense_act_fn, out.is_gated_act) == ("silu", True)
