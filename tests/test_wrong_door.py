"""A file or a name that is for another command, or from another system, is answered with where it belongs."""

import json

import pytest
import yaml

from megalith.cli.main import main

RUN = {
    "model": {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 300},
    "data": {"seq_length": 32, "tokenizer_type": "ByteTokenizer", "num_workers": 0},
    "optim": {"lr": 1e-3},
    "train": {"train_iters": 2, "global_batch_size": 1, "output_dir": "out"},
    "runtime": {"device": "cpu"},
}
RECORDS = {
    "chat": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    "alpaca": {"instruction": "a", "output": "b"},
    "preferences": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "text": {"text": "once upon a time"},
    "prompts": {"prompt": "1+1=", "answer": "2"},
}
FOREIGN = {
    "oumi.yaml": "model: {model_name: x}\ntraining: {trainer_type: TRL_SFT}\n",
    "titan.toml": '[model]\nname = "llama3"\n',
    "axolotl.yml": "base_model: x\ndatasets: [{path: y}]\nadapter: lora\n",
    "trl.yaml": "model_name_or_path: x\ndataset_name: y\n",
    "titan.json": '{"job": {}, "model": {"name": "llama3"}, "training": {"steps": 10}}',
    "megatron_bridge.yaml": "recipe: {_target_: megatron.bridge.recipes.x}\ntrain: {train_iters: 3}\n",
    "container.yaml": "model: {}\ntrain: {}\noptimizer: {lr: 0.001}\nscheduler: {}\n",
    "torchtune.yaml": "tokenizer: {_component_: x}\ncheckpointer: {}\nmodel: {}\n",
    "litgpt.yaml": "checkpoint_dir: x\nout_dir: y\ntrain: {}\n",
    "ms_swift.yaml": "model: Qwen/x\ntrain_type: lora\ndataset: [y]\n",
}
SYSTEMS = {
    "oumi.yaml": "is a configuration of Oumi; run megalith oumi train -c oumi.yaml",
    "titan.toml": "is TOML, as torchtitan's configurations are",
    "axolotl.yml": "is a configuration of Axolotl",
    "trl.yaml": "is a configuration of TRL's",
    "titan.json": "is a configuration of torchtitan",
    "megatron_bridge.yaml": "is a configuration of Megatron-Bridge",
    "container.yaml": "is a configuration of Megatron-Bridge",
    "torchtune.yaml": "is a configuration of torchtune",
    "litgpt.yaml": "is a configuration of LitGPT",
    "ms_swift.yaml": "is a configuration of ms-swift",
}


@pytest.fixture
def refused(tmp_path, capsys):
    """`refused("train", "run.yaml", …)`: what the command says, which ends with a sentence."""
    for name, record in RECORDS.items():
        (tmp_path / f"{name}.jsonl").write_text(3 * f"{json.dumps(record)}\n")
        data = RUN["data"] | {"data_path": f"{name}.jsonl"}
        model = RUN["model"] | {"vocab_size": None}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(RUN | {"data": data, "model": model}))
    (tmp_path / "story.txt").write_text("A short story.")
    (tmp_path / "story.md").write_text("A short story about a river.\nIt has two lines.\n\nThe end.\n")
    for name, text in FOREIGN.items():
        (tmp_path / name).write_text(text)

    def refused(*words: str) -> str:
        assert main(list(words)) in (2, 3)
        err = capsys.readouterr().err
        assert err.startswith("error: ") and "Traceback" not in err
        return " ".join(err.split())

    return refused


@pytest.mark.parametrize(
    ("command", "records", "door"),
    [
        ("train", "chat", "conversations or instructions, which `megalith sft` trains on"),
        ("train", "alpaca", "`megalith sft`"),
        ("train", "preferences", "preferences, which `megalith dpo` trains on"),
        ("train", "prompts", "prompts, which `megalith grpo` takes as rl.prompts"),
        ("sft", "preferences", "`megalith dpo`"),
        ("sft", "text", "`megalith preprocess`"),
        ("sft", "prompts", "`megalith grpo`"),
        ("dpo", "chat", "`megalith sft`"),
        ("dpo", "text", "`megalith preprocess`"),
    ],
)
def test_records_of_another_command_name_it(refused, command, records, door):
    assert door in refused(command, f"{records}.yaml")


@pytest.mark.parametrize("command", ["train", "sft", "dpo"])
def test_a_run_file_with_prompts_is_for_grpo(refused, command):
    rl = "--rl.prompts prompts.jsonl --rl.reward_funcs arithmetic --rl.max_completion_length 4"
    batch = "--train.global_batch_size 8 --data.data_path null"
    assert "`megalith grpo`" in refused(command, "prompts.yaml", *rl.split(), *batch.split())


def test_an_indexed_dataset_is_for_train(refused, corpus):
    for command in ("sft", "dpo"):
        for path in (corpus, f"{corpus}.idx", f"{corpus}.bin"):
            told = refused(command, "chat.yaml", "--data.data_path", path)
            assert f"{corpus} is an indexed dataset, which `megalith train` reads" in told


@pytest.mark.parametrize(
    "words",
    [
        "tokenizer train --input story.md --vocab-size 300 --output tokenizer",
        "preprocess --input story.md --output-prefix o --tokenizer-type ByteTokenizer --workers 0",
        "preprocess --dataset story.md --output-prefix o --tokenizer-type ByteTokenizer",
        "train text.yaml --data.data_path story.md",
        "sft text.yaml --data.data_path story.md",
        "dpo text.yaml --data.data_path story.md",
        "grpo text.yaml --data.data_path null --rl.prompts story.md --rl.reward_funcs arithmetic"
        " --rl.max_completion_length 4 --train.global_batch_size 8",
    ],
)
def test_a_format_that_is_not_read_is_answered_with_the_form_that_is_read(refused, words):
    assert 'write JSON Lines, one {"text": "…"} per document' in refused(*words.split())


@pytest.mark.parametrize("command", ["sft", "dpo"])
def test_a_text_file_is_for_pre_training(refused, command):
    told = refused(command, "text.yaml", "--data.data_path", "story.txt")
    assert "story.txt line 1" in told and "`megalith train` and `megalith preprocess` read" in told


@pytest.mark.parametrize("file", FOREIGN)
@pytest.mark.parametrize(
    "words",
    [
        "train",
        "sft",
        "dpo",
        "grpo",
        "parity",
        "plan show {} --gpus 8",
        "launch slurm {} --nodes 1",
        "oumi train -c",
    ],
)
def test_another_systems_file_names_the_system_everywhere(refused, file, words):
    if words.startswith("oumi") and file == "oumi.yaml":
        return
    words = words if "{}" in words else f"{words} {{}}"
    assert SYSTEMS[file] in refused(*words.format(file).split())


def test_a_run_file_of_ours_is_none_of_oumis(refused):
    message = refused("oumi", "train", "-c", "text.yaml")
    assert "is a Megalith run file; run megalith train text.yaml" in message


@pytest.mark.parametrize(
    "words", ["plan {} --gpus 8", "plan show {} --gpus 8", "train {}", "launch slurm {} --nodes 1"]
)
@pytest.mark.parametrize("name", ["text.yam", "text.yml", "tex.yaml"])
def test_a_run_file_that_is_not_there_names_the_nearest_one(refused, words, name):
    assert "did you mean text.yaml?" in refused(*words.format(name).split())


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("--lora.r", "in Megalith, it is lora.rank"),
        ("--lora.lora_r", "in Megalith, it is lora.rank"),
        ("--lora.lora_alpha", "in Megalith, it is lora.alpha"),
        ("--lora.lora_dropout", "in Megalith, it is lora.dropout"),
        ("--lora.target_modules", "in Megalith, it is lora.targets"),
        ("--target_modules", "in Megalith, it is lora.targets"),
        ("--lora.bias", "biases stay frozen"),
        ("--lr", "did you mean optim.lr?"),
        ("--model_name_or_path", "in Megalith, it is model.init_from"),
        ("--batch_size", "train.global_batch_size"),
        ("--epochs", "sft.num_train_epochs"),
    ],
)
def test_a_name_of_another_system_is_answered_with_ours(refused, setting, hint):
    assert hint in refused("train", "text.yaml", setting, "8")
