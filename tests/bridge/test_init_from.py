"""Training begins from a Hugging Face folder in any layout, and ends with one."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from default_cases import by_default, cases_that_run
from init_from_job import base_of, begin, export_from, hashed, reads
from models.reference import CASES, VOCAB, random_reference
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import megalith
from megalith.bridge.exporter import export_hf
from megalith.bridge.importer import import_hf
from megalith.bridge.load import tokenizer_notes, with_init_from
from megalith.bridge.verify import same_bits
from megalith.cli.main import main
from megalith.config import RunConfig
from megalith.data.tokenizers.open_tokenizer import build_tokenizer
from megalith.data.tokenizers.train_tokenizer import train_tokenizer
from megalith.errors import CheckpointError, ConfigError
from megalith.training.build import prepare

LAYOUTS = {
    "tp2-pp2": dict(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, decoder_first_pipeline_num_layers=1
    ),
    "tp2-sp-dp2-zero3": dict(
        tensor_model_parallel_size=2, sequence_parallel=True, data_parallel_sharding_strategy="optim_grads_params"
    ),
}  # fmt: skip


def run_config(source: Path, output: Path, parallel: dict | None = None, **sections: dict) -> RunConfig:
    tree = {
        "model": {"init_from": str(source)} | sections.pop("model", {}),
        "parallel": parallel or {},
        "data": {"mock": True, "seq_length": 16},
        "optim": {"lr": 1e-3},
        "train": {"train_iters": 2, "micro_batch_size": 1, "global_batch_size": 4, "output_dir": str(output)}
        | {"eval_iters": 0},
        "log": {"layout_report": False},
        **sections,
    }
    return RunConfig.from_tree(tree)


# One folder of each way that tensors are stored and cut: the families' names and orders test_import_export.py shows.
STORED = [
    "gpt2, untied",  # queries, keys and values in one transposed tensor, biases
    "bloom",  # those of a head beside each other
    "qwen3",  # grouped heads with norms
    "gemma2",  # four norms a layer, tied
    "olmo2",  # norms across the heads, which are cut
    "phi3, window",  # gate and up in one tensor
    "mixtral",  # a tensor an expert
    "falcon, new decoder",  # those of a group beside each other
    "falcon, multi-query",  # one head of keys and values, which two ranks have
    "gpt-j",  # pairs of rows side by side, a bias behind the output matrix
    "opt",  # rows of positions in another order
    "deepseek-v3",  # latent attention, a dense layer, shared experts
]
READ = [(name, "tp2-pp2") for name in STORED] + [("llama, biases", "tp2-sp-dp2-zero3")]
READ_BY_DEFAULT = (
    READ[-1],
    *((name, "tp2-pp2") for name in ("bloom", "gemma2", "phi3, window", "mixtral", "deepseek-v3")),
)


@pytest.fixture(scope="module")
def written(pool, hf_folder, request, tmp_path_factory) -> dict[tuple[str, str], Path]:
    """Each folder loaded in a layout, saved as a checkpoint by all ranks, and exported."""
    folders = {
        case: tmp_path_factory.mktemp("written") for case in cases_that_run(request, READ, "name", "layout")
    }
    cases = {
        (name, layout): (run_config(hf_folder(name), folder / "run", LAYOUTS[layout]), folder / "out")
        for (name, layout), folder in folders.items()
    }
    pool.run_cases(export_from, cases)
    return folders


@pytest.mark.parametrize(("name", "layout"), by_default(READ, *READ_BY_DEFAULT))
def test_any_layout_reads_its_slices_and_writes_the_same_bits_back(
    written, hf_folder, name: str, layout: str
) -> None:
    before, after = (
        load_file(path / "model.safetensors") for path in (hf_folder(name), written[name, layout] / "out")
    )
    assert before.keys() == after.keys()
    assert [key for key in before if not same_bits(before[key], after[key])] == []


def test_a_checkpoint_is_begun_from_as_a_folder_is(pool, hf_folder, tmp_path: Path) -> None:
    import_hf(hf_folder("qwen3"), tmp_path / "imported", show_progress=False)
    cases = {
        source: (run_config(source, tmp_path / "run", LAYOUTS["tp2-pp2"]),)
        for source in (hf_folder("qwen3"), tmp_path / "imported")
    }
    states = [ranks[0] for ranks in pool.run_cases(begin, cases).values()]
    assert states[0].keys() == states[1].keys()
    assert all(same_bits(states[0][name], states[1][name]) for name in states[0])


def test_a_base_has_one_fingerprint_in_every_layout(pool, hf_folder, tmp_path: Path) -> None:
    source, lora = hf_folder("gpt2"), {"rank": 2}
    alone = base_of(run_config(source, tmp_path / "run", lora=lora))
    cases = {name: (run_config(source, tmp_path / "run", LAYOUTS[name], lora=lora),) for name in LAYOUTS}
    assert len(alone) == 64
    assert pool.run_cases(base_of, cases) == {name: [alone, None, None, None] for name in LAYOUTS}


def test_the_ranks_of_a_machine_hash_a_checkpoint_that_they_begin_from_once(
    pool, hf_folder, tmp_path: Path
) -> None:
    import_hf(hf_folder("qwen3"), tmp_path / "imported", show_progress=False)
    config = run_config(tmp_path / "imported", tmp_path / "run", LAYOUTS["tp2-pp2"])
    names = [name for rank in pool.run(hashed, config) for name in rank if name.endswith(".safetensors")]
    assert names == ["model-00000-000.safetensors"]


def test_each_rank_reads_about_its_share_of_the_bytes(pool, tmp_path: Path) -> None:
    config = CASES["llama"][0]()
    config.hidden_size, config.intermediate_size = 256, 1024
    random_reference(config).save_pretrained(tmp_path / "hf")
    whole = (tmp_path / "hf/model.safetensors").stat().st_size
    shares = pool.run(reads, run_config(tmp_path / "hf", tmp_path / "run", LAYOUTS["tp2-pp2"]))
    assert sum(shares) < 1.1 * whole
    assert max(shares) < 0.4 * whole


def test_a_run_begins_there_trains_and_ends_with_a_folder_that_transformers_loads(
    hf_folder, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    config = run_config(hf_folder("llama"), tmp_path / "run", checkpoint={"export_hf": True})
    result = megalith.train(config)
    ids = torch.randint(0, VOCAB, (1, 16), generator=torch.Generator().manual_seed(0))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run/hf_model").eval()
    before = transformers.AutoModelForCausalLM.from_pretrained(hf_folder("llama")).eval()
    with torch.no_grad():
        ours, theirs = megalith.load(result.checkpoint)(ids), model(ids).logits
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
        assert (theirs - before(ids).logits).abs().max() > 1e-3
    resumed = run_config(
        hf_folder("llama"), tmp_path / "run", checkpoint={"export_hf": True, "load": str(tmp_path / "run")}
    )
    longer = resumed.with_settings({"train.train_iters": 3})
    assert megalith.train(longer).step == 3  # what was trained goes before the folder


def test_the_shape_comes_from_the_folder_and_what_training_may_choose_from_the_run(
    hf_folder, tmp_path: Path
) -> None:
    choices = {"hidden_dropout": 0.1, "rotary_base": 500000.0, "make_vocab_size_divisible_by": 8}
    model = with_init_from(run_config(hf_folder("qwen3"), tmp_path, model=choices)).model
    assert (model.num_layers, model.head_dim, model.qk_layernorm, model.padded_vocab_size) == (
        3,
        32,
        True,
        152,
    )
    assert (model.hidden_dropout, model.rotary_base) == (0.1, 500000.0)
    again = with_init_from(RunConfig.from_tree({"model": model.model_dump()}))
    assert again.model == model


def test_a_plan_of_a_run_file_has_the_shape_of_its_weights(hf_folder, tmp_path: Path, capsys) -> None:
    base = hf_folder("qwen3")
    bare = "data: {mock: true, seq_length: 16}\ntrain: {train_iters: 1, global_batch_size: 4}\n"
    bare += "optim: {lr: 0.001}\n"
    (tmp_path / "run.yaml").write_text(bare + f"model: {{init_from: {base}}}\n")
    assert main(["plan", str(tmp_path / "run.yaml"), "--gpus", "1"]) == 0
    assert "layouts tried" in capsys.readouterr().out
    (tmp_path / "bare.yaml").write_text(bare)
    for words in ([], ["show"], ["goodput"]):
        assert main(["plan", *words, str(tmp_path / "bare.yaml"), "--gpus", "1"]) == 2
        assert "model.num_layers is not set" in capsys.readouterr().err


def test_a_field_that_contradicts_the_weights_is_refused(hf_folder, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"section model has hidden_size 128, not 64 as the weights in "):
        with_init_from(run_config(hf_folder("llama"), tmp_path, model={"hidden_size": 128}))
    with pytest.raises(
        ConfigError,
        match=r"activation 'gelu_tanh', not 'silu'; gated_linear_unit False, not True as",
    ):
        with_init_from(run_config(hf_folder("llama"), tmp_path, model={"swiglu": False}))


def test_a_tokenizer_larger_than_the_vocabulary_and_an_empty_place_are_refused(
    hf_folder, tmp_path: Path
) -> None:
    config = run_config(hf_folder("llama"), tmp_path / "run").with_settings(
        {"data.tokenizer_type": "ByteTokenizer"}
    )
    with pytest.raises(ConfigError, match=r"the tokenizer has 257 entries, but model.vocab_size is 151"):
        prepare(config, 1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        CheckpointError, match=r"there is no checkpoint in .*empty, which model.init_from names"
    ):
        prepare(run_config(tmp_path / "empty", tmp_path / "run"), 1)


def test_a_tokenizer_that_is_not_that_of_the_weights_is_told(hf_folder, run, capsys, tmp_path: Path) -> None:
    folder, other = (shutil.copytree(hf_folder("llama"), tmp_path / name) for name in ("hf", "other"))
    for place, text in ((folder, "a cat sat on a mat"), (other, "to be or not to be")):
        (tmp_path / "text.jsonl").write_text(json.dumps({"text": text}) + "\n")
        train_tokenizer([tmp_path / "text.jsonl"], 260, place / "tokenizer.json", min_frequency=1)
    own, another = (build_tokenizer("HuggingFaceTokenizer", place) for place in (folder, other))
    config = run_config(folder, tmp_path / "run")
    assert tokenizer_notes(config.model, own) == tokenizer_notes(config.model, None) == []
    [note] = tokenizer_notes(config.model, another)
    assert f"{another.fingerprint[:12]}) is not that of the weights in {folder}" in note
    assert f"({own.vocab_size}, {own.fingerprint[:12]})" in note and "set data.tokenizer_type" in note
    (folder / "tokenizer.json").write_text("{")
    assert "cannot be compared" in tokenizer_notes(config.model, own)[0]
    (folder / "tokenizer.json").unlink()
    assert tokenizer_notes(config.model, own) == []  # it has none
    begun = str(run("begun", train=dict(train_iters=1)).checkpoint)
    capsys.readouterr()
    run("same", model=dict(init_from=begun), train=dict(train_iters=1))
    assert "is not that of the weights" not in capsys.readouterr().out
    null = dict(data_path=None, mock=True, tokenizer_type="NullTokenizer")
    run("null", model=dict(init_from=begun), train=dict(train_iters=1), data=null)
    assert f"is not that of the weights in {begun}" in " ".join(capsys.readouterr().out.split())


def test_an_export_has_the_tokenizer_of_the_run_where_its_weights_came_with_another_or_none(
    hf_folder, tmp_path: Path
) -> None:
    folder = shutil.copytree(hf_folder("llama"), tmp_path / "hf")
    own = tmp_path / "tokenizer.json"
    Tokenizer(WordLevel({"to": 0, "be": 1, "<unk>": 2}, unk_token="<unk>")).save(str(own))
    config = run_config(folder, tmp_path / "run").with_settings(
        {
            "data.tokenizer_type": "HuggingFaceTokenizer",
            "data.tokenizer_model": str(own),
            "train.train_iters": 1,
        }
    )
    run = megalith.train(config)
    for number, before in enumerate((None, "{}")):
        if before is not None:
            (folder / "tokenizer.json").write_text(before)
        export_hf(run.checkpoint, tmp_path / str(number), show_progress=False)
        assert (tmp_path / str(number) / "tokenizer.json").read_bytes() == own.read_bytes()


def test_a_model_without_a_family_is_refused_before_training_when_a_folder_is_asked_for(
    tmp_path: Path,
) -> None:
    tree = {
        "model": {"preset": "tiny-gpt", "embedding_layernorm": True, "vocab_size": 100},
        "data": {"mock": True, "seq_length": 16},
        "optim": {"lr": 1e-3},
        "train": {
            "train_iters": 2,
            "micro_batch_size": 1,
            "global_batch_size": 1,
            "output_dir": str(tmp_path),
        },
        "checkpoint": {"export_hf": True},
    }
    with pytest.raises(ConfigError, match="no model family of transformers can represent this model"):
        prepare(RunConfig.from_tree(tree), 1)
