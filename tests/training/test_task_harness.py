"""`megalith evaluate --tasks`: lm-evaluation-harness's figures, by its own model of transformers and by ours."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from default_cases import by_default
from harness_job import LONGEST, of_layout
from harness_job import figures as figures_of
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from megalith.cli.main import main
from megalith.config import RunConfig
from megalith.training.task_harness import HarnessModel

LAYOUTS = {
    "tp2-pp2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "cp2-zero3": {"context_parallel_size": 2, "data_parallel_sharding_strategy": "optim_grads_params"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama of random weights that write some tokens with certainty, and a tokenizer that puts <s> before a text."""
    path = tmp_path_factory.mktemp("tiny")
    entries = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={entry: n for n, entry in enumerate(entries)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(
        path
    )
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
    config = LlamaConfig(
        **shape, vocab_size=len(entries), num_key_value_heads=2, max_position_embeddings=128,
        initializer_range=0.3, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected(folder):
    """What the harness's own model finds, and tokens of which some continue as it would."""
    options = dict(pretrained=str(folder), dtype="float32", device="cpu", batch_size=1)
    model, writer = HFLM(**options, max_length=LONGEST), HFLM(**options)
    context = [0, 70, 80, 90]
    with torch.no_grad():
        likeliest = model.model(torch.tensor([context])).logits[0, -1].topk(2).indices.tolist()
    tokens = [(context, [token]) for token in likeliest]
    found = figures_of(model, tokens, writer)
    assert [greedy for _, greedy in found[0][-2:]] == [True, False]
    return found, tokens


@pytest.mark.parametrize("layout", by_default([None, "tp2-pp2", "cp2-zero3"], None))
def test_the_harness_finds_what_it_finds_of_transformers_model(folder, expected, pool, layout):
    (scores, rolling, texts), tokens = expected
    if layout is None:
        ranks = [of_layout(str(folder), {}, tokens)]
    else:
        ranks = pool.run(of_layout, str(folder), LAYOUTS[layout], tokens, size=4)
    for found in ranks:
        assert [logprob for logprob, _ in found[0]] == pytest.approx([x for x, _ in scores], rel=1e-5)
        assert [greedy for _, greedy in found[0]] == [greedy for _, greedy in scores]
        assert found[1] == pytest.approx(rolling, rel=1e-5)
        assert found[2] == texts


def test_rows_that_are_longer_than_what_longrope_calls_short_are_warned_of():
    rope = {"type": "longrope", "original_max_position_embeddings": 16, "factor": 2}
    config = RunConfig.from_tree({"model": {"rope_scaling": rope}, "data": {"seq_length": 32}})
    with pytest.warns(
        UserWarning, match="data.seq_length 32 is longer than the 16 tokens .* use long_factor"
    ):
        HarnessModel(None, SimpleNamespace(prefix=[0]), config)


def test_a_task_of_ones_own_from_the_command_line(folder, tmp_path, capsys, monkeypatch):
    documents = [
        {"q": f"{a} and {b} is", "choices": [f" {a + b}", f" {a * b}"], "gold": 0}
        for a, b in ((1, 2), (3, 4))
    ]
    data = tmp_path / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    task = {
        "task": "tiny_sums", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "choices",
        "doc_to_target": "gold", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    (tmp_path / "tiny.yaml").write_text(json.dumps(task))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    asked = [
        "--tasks",
        "tiny_sums",
        "--include-path",
        str(tmp_path),
        "--output",
        str(tmp_path / "results.json"),
    ]
    assert main(["evaluate", str(folder), *asked]) == 0
    assert "tiny_sums" in capsys.readouterr().out
    assert json.loads((tmp_path / "results.json").read_text())["results"]["tiny_sums"]["acc,none"] in (
        0,
        0.5,
        1,
    )
    shutil.copytree(folder, tmp_path / "encoder")
    shape = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=258
    )
    BertForMaskedLM(BertConfig(**shape)).save_pretrained(tmp_path / "encoder")
    assert main(["evaluate", str(tmp_path / "encoder"), *asked]) == 2
    assert "encoder is of model.model_type bert; evaluate a decoder" in capsys.readouterr().err.replace(
        "\n", " "
    )
    task["test_split"] = "nowhere"
    (tmp_path / "tiny.yaml").write_text(json.dumps(task))
    for wrong, told in (
        ([*asked[:3], str(tmp_path / "none")], "is not a folder; check the path"),
        (asked[:4], "cannot be read (KeyError: 'nowhere')"),
        ([*asked[:4], "--limit", "0"], "--limit is 0, but must be at least 1"),
        (["--limit", "2"], "--limit requires --tasks"),
    ):
        assert main(["evaluate", str(folder), *wrong]) != 0
        assert told in capsys.readouterr().err
