"""Rows of tokens trained beside adapters: PEFT's formula and files, layouts, merged, resumed, and in a reference."""

import itertools
from pathlib import Path

import pytest
import torch
from adapter_runs import (
    ExportedRun,
    check_engine,
    check_plan,
    check_resume,
    check_there_and_back,
    difference,
    run_config,
    stored_tensors,
)
from default_cases import by_default
from models.reference import CASES, VOCAB, random_reference
from peft_formula import PREFIX, random_adapters, save

import megalith
from megalith.bridge.adapters.adapter_folder import load_adapter_pairs
from megalith.bridge.adapters.merge_adapters import merge
from megalith.bridge.adapters.open_adapters import fingerprint_of
from megalith.errors import CheckpointError, ConfigError
from megalith.parity.check import LAYOUTS
from megalith.parity.differences import BOUND, compare
from megalith.parity.job import run_job, start
from megalith.rl.auxiliary_models.reference import without_adapters
from megalith.rl.engines.weight_stream import WeightStream
from megalith.rl.from_trl.tuning_trainers import SFTTrainer
from megalith.training.build import prepare
from megalith.training.loading import load_with_adapter

FIRST, LAST = 3, VOCAB - 1
# case: modules with adapters, and trainable_token_indices
TRAINED = {
    "llama": (["q_proj", "down_proj"], {"embed_tokens": [LAST, 5, FIRST], "lm_head": [9]}),
    "gemma": (["q_proj"], [7, LAST, FIRST]),  # tied, and scaled
    "gpt2": (["c_attn"], {"wte": [5]}),
    "mixtral": (["q_proj"], {"lm_head": [LAST, FIRST]}),
    "phi": (["q_proj"], {"embed_tokens": [7, 8]}),
}
ONE_MATRIX = {
    "gpt2": "wte",
    "phi": "embed_tokens",
}  # case: the input embedding, whose rows are written as a list
IDS = torch.randint(3, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
IDS[:, :3] = torch.tensor([FIRST, LAST, 7])
ROWS = {"embedding.word_embeddings.adapter.weight", "output_layer.adapter.weight"}


def lora_of(name: str) -> dict:
    targets, tokens = TRAINED[name]
    return {"rank": 2, "alpha": 3.0, "targets": targets, "trainable_token_indices": tokens}


@pytest.mark.parametrize("name", by_default(TRAINED, "llama", "gemma", "mixtral"))
def test_a_run_trains_the_rows_that_peft_trains_and_writes_what_peft_writes(
    hf_folder, tmp_path: Path, name: str
) -> None:
    base, tokens = hf_folder(name), TRAINED[name][1]
    run = ExportedRun(name, base, lora_of(name), IDS, tmp_path)
    written = tokens[ONE_MATRIX[name]] if name in ONE_MATRIX else tokens
    assert run.settings["trainable_token_indices"] == written
    assert run.error < 5e-7
    ours = {key: each for key, each in run.model.named_parameters() if key in ROWS}
    assert len(ours) == len(run.rows)
    for (module, index, _), each in zip(run.rows, ours.values(), strict=True):
        gradient = module.weight.grad[index]
        assert (each.grad - gradient).norm() < 5e-6 * gradient.norm() and gradient.norm() > 0
    run.check_merged(IDS)
    with torch.no_grad():
        for adapter in (run.peft, run.step):
            merged, _ = load_with_adapter(base, adapter, "cpu", False)
            assert difference(merged(IDS), run.logits) < 1e-6


@pytest.mark.parametrize("name", by_default(TRAINED, "llama", "gemma"))
def test_a_folder_goes_into_a_run_and_back_bitwise(hf_folder, tmp_path: Path, name: str) -> None:
    check_there_and_back(hf_folder(name), lora_of(name), tmp_path)


UNEVEN = {"pipeline_model_parallel_layout": "Ett|tL"}  # of three layers
LAYOUTS_OF = {
    **{name: {} for name in ("tp2-sp", "tp4", "tp4-sp", "cp4", "dp2", "dp2-zero2", "dp4-zero3", "cp2-dp2-zero3",
                             "tp2-sp-dp2-zero1", "tp2-sp-cp2-a2a")},
    **{name: UNEVEN for name in ("pp2", "pp2-zero_bubble", "tp2-pp2", "tp2-sp-pp2-zero_bubble")},
    "pp4-interleaved": {"pipeline_model_parallel_layout": "E|||t||t|t|L"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "name"),
    by_default(
        itertools.product(LAYOUTS_OF, ("llama", "gemma")),  # gemma's embedding is tied
        ("tp4-sp", "llama"), ("cp2-dp2-zero3", "gemma"), ("tp2-pp2", "gemma"),
    ),
)  # fmt: skip
def test_every_layout_trains_the_rows_of_one_process(
    hf_folder, pool, tmp_path: Path, layout: str, name: str
) -> None:
    lora = lora_of(name) | {"dropout": 0.1}
    training = {"optim.weight_decay": 0.1, "train.micro_batch_size": 1, "train.eval_iters": 1}
    config = run_config(hf_folder(name), tmp_path / "run", lora, training)
    one = run_job(config)
    assert ROWS & one.gradients.keys() and all(
        one.gradients[key].any() for key in ROWS & one.gradients.keys()
    )
    parallel = LAYOUTS[layout].parallel | LAYOUTS_OF[layout]
    settings = {f"parallel.{key}": value for key, value in parallel.items()}
    ranks = pool.run(run_job, config.with_settings(settings), size=LAYOUTS[layout].processes)
    errors = compare(ranks, one)
    assert errors.within(BOUND), errors


def test_a_run_resumes_bitwise_and_its_checkpoints_hold_only_what_is_trained(
    hf_folder, tmp_path: Path
) -> None:
    lora, other = lora_of("gemma") | {"dropout": 0.1}, {"lora.trainable_token_indices": [7, FIRST]}
    step = check_resume(hf_folder("gemma"), lora, other, r"lora\.trainable_token_indices", tmp_path)
    stored = stored_tensors(step)
    assert all(".adapter." in name for name in stored) and ROWS & stored


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_an_engine_receives_the_rows_and_generates_as_the_model(hf_folder, tmp_path: Path, name: str) -> None:
    model, _ = check_engine(run_config(hf_folder(name), tmp_path / "run", lora_of(name)))
    stream = WeightStream(
        model, prepare(run_config(hf_folder(name), tmp_path / "r", lora_of(name)), 1).config
    )
    sent = {name: x for bucket in stream.buckets("cpu") for name, x in zip(bucket.names, bucket.tensors)}
    rows = model.chunks[0].embedding.word_embeddings.adapter
    assert torch.equal(sent["model.embed_tokens.weight"][list(rows.tokens)], rows.weight)
    assert "which vLLM and SGLang do not load" in stream.lora_obstacle


def test_a_reference_has_the_base_s_rows(hf_folder, tmp_path: Path) -> None:
    run = start(run_config(hf_folder("gemma"), tmp_path / "run", lora_of("gemma")))
    (chunk,) = run.model.chunks
    base = megalith.load(hf_folder("gemma"))
    with torch.no_grad():
        before = run.model(IDS)
        assert difference(before, base(IDS)) < 1e-6
        chunk.embedding.word_embeddings.adapter.weight.add_(1.0)
        assert difference(run.model(IDS), before) > 1e-2
        with without_adapters(run):
            assert difference(run.model(IDS), before) < 1e-6
        assert difference(run.model(IDS), before) > 1e-2


def test_the_plan_counts_the_rows(hf_folder, tmp_path: Path) -> None:
    check_plan(run_config(hf_folder("gemma"), tmp_path / "run", lora_of("gemma")))


def test_a_server_of_several_adapters_names_the_way_out(hf_folder, tmp_path: Path) -> None:
    step = megalith.train(run_config(hf_folder("gemma"), tmp_path / "run", lora_of("gemma"))).checkpoint
    base = megalith.load(hf_folder("gemma"))
    with pytest.raises(ConfigError, match=r"trained embedding rows .* merge it into the base"):
        load_adapter_pairs(step, hf_folder("gemma"), base.config, fingerprint_of(base))


@pytest.mark.parametrize(
    ("name", "lora", "message"),
    [
        ("llama", {"trainable_token_indices": {"q_proj": [3]}}, "q_proj.*embeddings, the output matrix"),
        ("llama", {"trainable_token_indices": {"norm": [3]}}, "has norm, but only rows of an embedding"),
        (
            "llama",
            {"trainable_token_indices": {"embed_tokns": [3]}},
            "'embed_tokns', which this model does not have",
        ),
        (
            "llama",
            {"trainable_token_indices": [VOCAB]},
            rf"has token {VOCAB}, but the vocabulary has {VOCAB}",
        ),
        (
            "gemma",
            {"trainable_token_indices": {"lm_head": [3]}},
            "has only lm_head, .* list embed_tokens instead",
        ),
        ("gemma", {"trainable_token_indices": {"lm_head": [3], "embed_tokens": [4]}}, "different tokens"),
        (
            "phi",
            {"trainable_token_indices": {"lm_head": [3]}},
            "the output has a bias, which PEFT does not store",
        ),
        (
            "llama",
            {"trainable_token_indices": [3], "modules_to_save": ["embed_tokens"]},
            "both name embedding",
        ),
    ],
)
def test_what_cannot_be_trained_is_named(
    hf_folder, tmp_path: Path, name: str, lora: dict, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(run_config(hf_folder(name), tmp_path / "run", lora_of(name) | lora), 1)


def test_tied_matrices_with_the_same_tokens_have_one_set_of_rows(hf_folder, tmp_path: Path) -> None:
    lora = lora_of("gemma") | {"trainable_token_indices": {"embed_tokens": [4, 3], "lm_head": [4, 3]}}
    prepared = prepare(run_config(hf_folder("gemma"), tmp_path / "run", lora), 1).config
    assert prepared.lora.trainable_token_indices == {"embedding.word_embeddings": [4, 3]}


@pytest.mark.parametrize(
    ("tokens", "rows", "message"),
    [
        ([3, 4], 1, r"has the shape \[1, 64\], but .* must be \[2, 64\]"),
        ([VOCAB], 1, "resize_token_embeddings"),
        ("3", 1, "which is not a value that PEFT writes"),
        ([3, 4], None, "lacks .*trainable_tokens_delta"),
        (None, 1, "has .*trainable_tokens_delta"),
    ],
)
def test_damaged_folders_are_refused(hf_folder, tmp_path: Path, tokens, rows, message: str) -> None:
    tensors = random_adapters(random_reference(CASES["llama"][0]()), ["q_proj"], rank=3)
    if rows is not None:
        tensors[f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"] = torch.randn(rows, 64)
    given = save(tensors, tmp_path / "given", 5.0, target_modules=["q_proj"], trainable_token_indices=tokens)
    with pytest.raises(CheckpointError, match=message):
        merge(given, tmp_path / "merged", base=str(hf_folder("llama")), show_progress=False)


def test_a_trainer_with_trl_s_signature_takes_them(hf_folder, tmp_path: Path) -> None:
    records = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    peft = {"r": 2, "target_modules": ["q_proj"], "trainable_token_indices": [3, 4]}
    args = {"output_dir": str(tmp_path / "run"), "max_steps": 1}
    trainer = SFTTrainer(
        str(hf_folder("gemma")), args, records, settings={"data.seq_length": 16}, peft_config=peft
    )
    assert trainer.config.lora.trainable_token_indices == [3, 4]
