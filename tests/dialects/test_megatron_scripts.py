"""Megatron-LM's scripts: what each of ours means as a run file, and that a script runs as it is, by any path."""

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from bos_tokenizer import bos_tokenizer
from default_cases import by_default, in_full
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megalith.cli.main import main
from megalith.config import RunConfig
from megalith.data.tokenizers.train_tokenizer import train_tokenizer
from megalith.dialects.megatron.door import FILES, install, run_command, run_script
from megalith.dialects.megatron.translate import translate
from megalith.errors import ConfigError
from megalith.parity.job import start
from megalith.report.metrics import read_records
from megalith.training.trainer import Trainer

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
SCRIPTS = {
    "gpt3_345m": ("gpt3/00_train_gpt3_345m.sh", []),
    "gpt2_large_baseline": ("gpt3/01_baseline_gpt2_large.sh", []),
    "gpt2_large_dp2": ("gpt3/02_dp2_gpt2_large.sh", []),
    "gpt2_large_tp2": ("gpt3/03_tp2_gpt2_large.sh", []),
    "gpt2_large_sp2": ("gpt3/04_sp2_gpt2_large.sh", []),
    "gpt2_large_cp2": ("gpt3/05_cp2_gpt2_large.sh", []),
    "gpt2_large_pp2": ("gpt3/06_pp2_gpt2_large.sh", []),
    "gpt3_175b": ("gpt3/train_gpt3_175b_distributed.sh", ["ckpt", "tb", "vocab.json", "merges.txt", "data"]),
    "llama_7b": ("llama/pretrain_llama.sh", []),
    "llama3_8b_fp8": ("llama/train_llama3_8b_h100_fp8.sh", ["ckpt", "tb"]),
    "t5_220m": ("t5/train_t5_220m_distributed.sh", ["ckpt", "tb", "vocab.txt", "data"]),
    "bert_340m": ("bert/train_bert_340m_distributed.sh", ["ckpt", "tb", "vocab.txt", "data"]),
    "mixtral_8x7b": ("mixtral/train_mixtral_8x7b_distributed.sh", ["ckpt", "tokenizer.model", "data"]),
}
LINE = re.compile(
    r"^ \[[\d-]+ [\d:.]+\] iteration +\d+/ +\d+ \| consumed samples: +\d+ \| "
    r"elapsed time per iteration \(ms\): \d+\.\d \| learning rate: \d\.\d{6}E[+-]\d\d \| "
    r"global batch size: +\d+ \| lm loss: \d\.\d{6}E[+-]\d\d \| "
    r"(?:[a-z_]+: \d\.\d{6}E[+-]\d\d \| )*loss scale: \d+\.\d \| grad norm: \d+\.\d{3} \| "
    r"number of skipped iterations: +\d+ \| number of nan iterations: +\d+ \|$",
    re.MULTILINE,
)
SHRUNK = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr-decay-iters 2 --eval-interval 10 --eval-iters 1"
)


def words_of(script: str, arguments: list[str], tmp_path: Path) -> list[str]:
    """Return the arguments that a script passes to torchrun, which is replaced by one that records them."""
    (tmp_path / "torchrun").write_text('#!/bin/bash\nprintf "%s\\n" "$@" > "$WORDS"\n')
    (tmp_path / "torchrun").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "WORDS": str(tmp_path / "words")}
    subprocess.run(["bash", str(ROOT / "examples" / script), *arguments], env=environment, check=True)
    return (tmp_path / "words").read_text().splitlines()


def of_program(words: list[str]) -> tuple[list[str], str]:
    """The flags that a script gives, and the program that gets them."""
    flags = words[words.index("megalith.dialects.megatron") + 1 :]
    return (flags, "pretrain-gpt") if flags[0].startswith("-") else (flags[1:], flags[0])


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_means_its_golden_run_file(name, tmp_path, monkeypatch):
    words = words_of(*SCRIPTS[name], tmp_path)
    monkeypatch.chdir(tmp_path)
    at = words.index("megalith.dialects.megatron")
    sizes = dict(re.findall(r"--(nproc_per_node|nnodes)[ =](\d+)", " ".join(words[:at])))
    flags, program = of_program(words)
    world_size = int(sizes["nproc_per_node"]) * int(sizes["nnodes"])
    result = translate(flags, world_size, program=program)
    assert result.to_yaml() == (GOLDEN / f"{name}.yaml").read_text(), "\n".join(result.notes)
    assert RunConfig.load(GOLDEN / f"{name}.yaml") == result.config()


def trained_as(words: list[str], folder: str, program: str = "pretrain-gpt") -> str:
    """Train with a script's arguments in a folder with its data and return the output. Every rank calls it."""
    os.chdir(folder)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    config = translate(words, world_size, program=program).config()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        Trainer(start(config)).train()
    return out.getvalue()


OF_THE_NOTES = [name for name in SCRIPTS if name.startswith(("gpt3_345m", "gpt2_large"))]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("names", "counts"),
    [(["gpt2_large_sp2", "gpt2_large_pp2"], [0, 2]), in_full(OF_THE_NOTES, [2, 5])],
    ids=["some", "all"],
)
def test_every_script_of_the_notes_trains_two_steps_shrunk(pool, tmp_path, monkeypatch, names, counts):
    """With the data that `make prepare-ds-openwebtext-10k` writes, here of a small file, and the flags as they are."""
    data = tmp_path / "owt-ds"
    data.mkdir()
    lines = [json.dumps({"text": " ".join(map(str, range(n, n + 40)))}) for n in range(1000)]
    (data / "openwebtext-10k.jsonl").write_text("\n".join(lines))
    train_tokenizer([data / "openwebtext-10k.jsonl"], 300, data)
    model = json.loads((data / "tokenizer.json").read_text())["model"]
    (data / "gpt2-vocab.json").write_text(json.dumps(model["vocab"]))
    (data / "gpt2-merges.txt").write_text("".join(f"{a} {b}\n" for a, b in model["merges"]))
    monkeypatch.chdir(tmp_path)
    made = (
        "--output-prefix owt-ds/openwebtext-10k --tokenizer-type GPT2BPETokenizer --append-eod --overwrite "
        "--vocab-file owt-ds/gpt2-vocab.json --merge-file owt-ds/gpt2-merges.txt --workers 0"
    )
    assert main(["preprocess", "--dataset", "owt-ds/openwebtext-10k.jsonl", *made.split()]) == 0
    cases: dict[int, dict[str, tuple]] = {1: {}, 2: {}}
    for name in names:
        words = words_of(*SCRIPTS[name], tmp_path)
        processes = int(words[words.index("--nproc_per_node") + 1])
        flags = words[words.index("megalith.dialects.megatron") + 1 :]
        own = ["--save", name, "--load", name, "--tensorboard-dir", f"{name}/tb", "--log-interval", "1"]
        cases[processes][name] = (
            [*flags, *SHRUNK.split(), *own, "--initial-loss-scale", "1024"],
            str(tmp_path),
        )
    assert sorted(few for few in map(len, cases.values())) == counts
    for size, jobs in ((size, jobs) for size, jobs in cases.items() if jobs):
        for name, (printed, *_) in pool.run_cases(trained_as, jobs, size=size).items():
            assert len(LINE.findall(printed)) == 2, name
            assert "[before the start of training step]" in printed
            assert (tmp_path / name / "checkpoints" / "step_00000002").is_dir()


@pytest.mark.processes
def test_the_scripts_for_bert_and_t5_train_two_steps_shrunk(pool, tmp_path, monkeypatch):
    """On text that is split into sentences; its loss of masked words is evaluated too."""
    monkeypatch.chdir(tmp_path)
    words = [f"w{n}" for n in range(60)]
    Path("vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "w", ".", *words]))
    texts = [" ".join(f"W{(n + k) % 60}." for k in range(20)) for n in range(100)]
    Path("text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    made = (
        "--input text.jsonl --output-prefix bert --tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt "
        "--split-sentences --workers 0"
    )
    assert run_command(["preprocess", *made.split()]) == 0
    flags, program = of_program(
        words_of(
            "bert/train_bert_340m_distributed.sh", ["out", "tb", "vocab.txt", "bert_text_sentence"], tmp_path
        )
    )
    own = [
        "--log-interval",
        "1",
        "--tensor-model-parallel-size",
        "2",
        "--eval-interval",
        "2",
        "--split",
        "8,1,1",
    ]
    more = [*flags, *SHRUNK.split(), *own, "--initial-loss-scale", "1024", "--mask-prob", "0.3"]
    for folder in ("out", "t5"):
        (tmp_path / folder).mkdir()
    printed, *_ = pool.run(trained_as, more, str(tmp_path), program, size=2)
    assert len(LINE.findall(printed)) == 2 and "validation loss at iteration 2" in printed
    config = RunConfig.load(tmp_path / "out" / "config.yaml")
    assert config.model.vocab_size == 5 + 2 + 60 + 2 and config.data.mask_prob == 0.3
    flags, program = of_program(
        words_of("t5/train_t5_220m_distributed.sh", ["t5", "tb", "vocab.txt", "bert_text_sentence"], tmp_path)
    )
    sizes = "--encoder-num-layers 2 --decoder-num-layers 1 --encoder-seq-length 32 --decoder-seq-length 20"
    few = (
        SHRUNK.replace("--num-layers 2 ", "").replace("--seq-length 32 ", "")
        + " --kv-channels 16 --ffn-hidden-size 96"
    )
    more = [*flags, *few.split(), *sizes.split(), *own, "--vocab-extra-ids", "10"]
    printed, *_ = pool.run(trained_as, more, str(tmp_path), program, size=2)
    assert len(LINE.findall(printed)) == 2 and "validation loss at iteration 2" in printed
    config = RunConfig.load(tmp_path / "t5" / "config.yaml")
    assert config.model.vocab_size == 5 + 2 + 60 + 2 + 10 and config.model.encoder_num_layers == 2


def test_emit_writes_the_run_file_and_trains_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = f"pretrain-gpt {SHRUNK} --mock-data --vocab-size 60 --lr 1e-3 --save out --bf16 --emit"
    assert main([*shlex.split(flags), "run.yaml"]) == 0
    assert main([*shlex.split(flags), "-"]) == 0
    assert (tmp_path / "run.yaml").read_text() == capsys.readouterr().out and not (tmp_path / "out").exists()
    config = RunConfig.load("run.yaml")
    assert (config.train.precision, config.optim.lr, config.model.vocab_size) == ("bf16", 1e-3, 60)


def test_a_run_in_one_process_logs_megatrons_lines_and_goes_on_from_its_folder(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    flags = shlex.split(
        f"{SHRUNK} --mock-data --vocab-size 60 --lr 1e-3 --save out --load out --log-interval 1"
    )
    assert run_command(flags) == 0
    out = capfd.readouterr().out
    assert len(LINE.findall(out)) == 2 and "note: CUDA_DEVICE_MAX_CONNECTIONS=1" in out
    assert re.search(r"^\[before the start of training step\] datetime: [\d-]+ [\d:]+ $", out, re.MULTILINE)
    assert (tmp_path / "out" / "checkpoints" / "step_00000002").is_dir()
    assert run_command([*flags, "--train-iters", "3", "--use-checkpoint-args", "--hidden-size", "32"]) == 0
    assert [line.split("|")[0].split()[-1] for line in LINE.findall(capfd.readouterr().out)] == ["3"]


def test_losses_of_experts_and_further_tokens_stand_in_the_line(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    flags = (
        f"{SHRUNK} --mock-data --vocab-size 60 --lr 1e-3 --log-interval 2 --position-embedding-type rope "
        "--mtp-num-layers 1 --num-experts 4 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01 "
        "--moe-z-loss-coeff 0.001 --tensorboard-dir tb"
    )
    assert run_command(shlex.split(flags)) == 0
    records = read_records(tmp_path / "output" / "metrics.jsonl")
    means = {
        name: sum(record[key] for record in records) / 2
        for name, key in (
            ("lm loss", "loss"),
            ("seq_load_balancing_loss", "moe_aux_loss"),
            ("z_loss", "moe_z_loss"),
            ("mtp_1 loss", "mtp_1_loss"),
        )
    }
    fields = " | ".join(f"{name}: {value:.6E}" for name, value in means.items())
    assert f" | {fields} | loss scale: " in capfd.readouterr().out
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert {*means, "lm loss vs samples"} <= {*events.Tags()["scalars"]}


@pytest.mark.processes
@pytest.mark.full  # the tests before it train as the scripts do, those behind it run scripts by bash
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_script_runs_as_it_is(tmp_path, monkeypatch, capfd, processes):
    """It names ../../pretrain_gpt.py, which is nowhere, and nccl, which is not there without GPUs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.sh").write_text(
        "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"
        "ARGS=(--tensor-model-parallel-size $1 --sequence-parallel --distributed-backend nccl --fp16 --lr 6e-5)\n"
        "torchrun --nproc_per_node $1 --master_addr localhost --master_port 0 --rdzv_backend c10d "
        "--rdzv_endpoint localhost:0 ../../pretrain_gpt.py ${ARGS[@]} --mock-data --vocab-size 60 --num-layers 96 "
        "--log-interval 1 --tensorboard-dir tb\n"
    )
    assert run_script("train.sh", [processes], override=SHRUNK + " --initial-loss-scale 1024") == 0
    out = capfd.readouterr().out
    assert len(LINE.findall(out)) == 2 and ("tensor 2" in out) == (processes == "2")
    assert list((tmp_path / "tb").glob("events*")) and not (tmp_path / "output" / "checkpoints").exists()


@pytest.mark.parametrize(
    "command",
    by_default(
        [
            "uv run --no-sync --extra mlm env A=1 python -m torch.distributed.run",
            "uv --directory . run -p 3.12 torchrun",
            "uv run -m torch.distributed.run",
            "uv run --",
            "uv run",
        ],
        "uv run --no-sync --extra mlm env A=1 python -m torch.distributed.run",
    ),
)
def test_uv_run_starts_our_programs_and_uv_itself_all_others(command, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "uv").write_text('#!/bin/bash\necho "uv itself: $@"\n')
    (tmp_path / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run = "" if command.endswith(("run", "--")) and "torch" not in command else "--nproc_per_node 1 "
    (tmp_path / "train.sh").write_text(
        "uv run python other.py\nuv pip list\n"
        f"{command} {run}a/b/pretrain_gpt.py --mock-data --vocab-size 60 --lr 1e-3\n"
    )
    assert run_script("train.sh", [], override=f"{SHRUNK} --emit run.yaml") == 0
    assert capfd.readouterr().out == "uv itself: run python other.py\nuv itself: pip list\n"
    assert RunConfig.load(tmp_path / "run.yaml").model.hidden_size == 64


def test_a_restarted_script_finds_megatrons_tracker_and_a_finetuning_one_is_told_the_way(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    flags = f"{SHRUNK} --mock-data --vocab-size 60 --lr 1e-3 --save-interval 1 --save out"
    assert run_command([*shlex.split(flags), "--exit-interval", "1"]) == 20  # stopped before its end
    tracker = tmp_path / "out" / "latest_checkpointed_iteration.txt"
    assert tracker.read_text() == "1"
    for load in ("out", "other"):
        shutil.copytree("out", "other", dirs_exist_ok=True)
        with pytest.raises(ConfigError, match=re.escape(
            f"and --finetune --load {load} starts a new run at step 0; to resume that run leave --finetune out and "
            "set --load to out, to start a new one set --save to another folder"
        )):  # fmt: skip
            run_command([*shlex.split(flags), "--finetune", "--load", load])
    without = flags.replace("--seq-length 32 ", "").replace("--hidden-size 64 ", "")
    assert run_command([*shlex.split(without), "--load", "out", "--use-checkpoint-args"]) == 0
    assert tracker.read_text() == "2"
    config = RunConfig.load(tmp_path / "out" / "config.yaml")
    assert (config.data.seq_length, config.model.hidden_size) == (32, 64)


def test_without_a_checkpoint_use_checkpoint_args_takes_the_models_flags(tmp_path):
    flags = (
        SHRUNK.replace("--seq-length 32 ", "")
        + " --mock-data --vocab-size 60 --lr 1e-3 --use-checkpoint-args"
    )
    with pytest.raises(ConfigError, match="--seq-length is missing"):
        translate([*shlex.split(flags), "--load", str(tmp_path / "nothing")])


def test_a_script_that_looks_for_the_file_itself_is_told_of_install(tmp_path, monkeypatch, capfd):
    """As NVIDIA's Llama script does, which ends where examples/classes/pretrain_gpt.py is not there."""
    monkeypatch.chdir(tmp_path)
    file = "examples/classes/pretrain_gpt.py"
    (tmp_path / "train.sh").write_text(
        f'ARGS=("--fp8-format bad" --bf16)\n[ -f {file} ] || exit 3\npython {file} ${{ARGS[@]}}'
    )
    assert run_script("train.sh", []) == 3
    assert "before it started any of pretrain_gpt.py" in capfd.readouterr().err
    install(tmp_path)
    assert run_script("train.sh", []) not in (0, 3)
    err = capfd.readouterr().err
    assert "--fp8-format is bad" in err and "megatron install" not in err


def test_a_launcher_that_is_not_installed_is_told_and_pythons_of_this_version_are_ours(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.sh").write_text("no_such_launcher --num_gpus 8 pretrain_gpt.py --bf16\n")
    assert run_script("train.sh", []) == 127
    assert "because a command of the script is not installed" in capfd.readouterr().err
    python = f"python3.{sys.version_info.minor}"
    (tmp_path / "train.sh").write_text(
        f"{python} pretrain_gpt.py {SHRUNK} --mock-data --vocab-size 60 --lr 1e-3\n"
    )
    assert run_script("train.sh", [], override="--emit run.yaml") == 0
    assert (tmp_path / "run.yaml").exists()


def test_what_is_installed_hands_over_to_us_and_replaces_nothing(tmp_path, monkeypatch, capsys):
    assert main(["megatron", "install", str(tmp_path)]) == 0
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.py")} == set(FILES)
    install(tmp_path)  # again, over its own
    (tmp_path / "pretrain_t5.py").write_text("print()")
    (tmp_path / "pretrain_gpt.py").unlink()
    with pytest.raises(ConfigError, match=r"pretrain_t5.py exists and was not written by Megalith"):
        install(tmp_path)
    assert not (tmp_path / "pretrain_gpt.py").exists()
    with pytest.raises(ConfigError, match=r"there is no script nowhere\.sh"):
        run_command(["run", "nowhere.sh"])
    (tmp_path / "windows.sh").write_bytes(b"ARGUMENTS=(--num-layers 2)\r\npython pretrain_gpt.py\r\n")
    with pytest.raises(ConfigError, match=r"windows\.sh has Windows line endings.*: sed -i 's/\\r\$//' "):
        run_command(["run", str(tmp_path / "windows.sh")])


def test_preprocess_data_writes_what_megatrons_tool_would(tmp_path, monkeypatch):
    from megalith.data.indexed import IndexedDataset

    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"text": "5 6 7"}\n{"text": "8"}\n')
    words = "--input in.jsonl --output-prefix out --tokenizer-type NullTokenizer --vocab-size 9 --workers 0"
    assert run_command(["preprocess", *words.split(), "--append-eod", "--log-interval", "1000"]) == 0
    assert run_command(["preprocess", *words.split(), "--append-eod"]) == 0  # over what is there
    data = IndexedDataset("out_text_document")
    assert [data.get(number).tolist() for number in range(2)] == [[5, 6, 7, 9], [8, 9]]
    with pytest.raises(
        ConfigError, match="--tiktoken-pattern v1 is not supported, because other values than v2"
    ):
        run_command(
            [
                "preprocess",
                *words.replace("Null", "Tik").split(),
                "--tokenizer-model",
                "x",
                "--tiktoken-pattern",
                "v1",
            ]
        )
    with pytest.raises(
        ConfigError, match="MultimodalTokenizer is not supported; use one of GPT2BPETokenizer"
    ):
        run_command(["preprocess", *words.replace("NullTokenizer", "MultimodalTokenizer").split()])


def test_preprocess_data_adds_the_special_tokens_of_a_hugging_face_tokenizer(tmp_path, monkeypatch, capsys):
    from transformers import AutoTokenizer

    from megalith.data.indexed import IndexedDataset

    monkeypatch.chdir(tmp_path)
    bos_tokenizer(tmp_path / "tokenizer", "")
    reference = AutoTokenizer.from_pretrained("tokenizer")
    texts = ["hello world", "<s>twice", "x"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = "--input in.jsonl --output-prefix out --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer"
    for more, adds in ((), True), (("--tokenizer-hf-no-include-special-tokens",), False):
        assert run_command(["preprocess", *words.split(), "--workers", "0", "--append-eod", *more]) == 0
        data = IndexedDataset("out_text_document")
        assert [data.get(number).tolist() for number in range(3)] == [
            [*reference(text, add_special_tokens=adds).input_ids, reference.eos_token_id] for text in texts
        ]
        assert (
            "each text gets the tokenizer's special tokens, [256] before it" in capsys.readouterr().out
        ) == adds


def test_the_installed_convert_goes_from_hugging_face_to_megatron_and_back(tmp_path, monkeypatch):
    from transformers import GPT2Config, GPT2LMHeadModel

    monkeypatch.chdir(tmp_path)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=4))
    model.save_pretrained("hf")
    install(tmp_path)
    for words in (
        "--source hf --target megatron --input-path hf --output-path megatron_dir --tensor-model-parallel-size 2",
        "--source megatron --target hf --input-path megatron_dir --output-path hf2 --source-tp 2 --trust",
    ):
        monkeypatch.setattr(sys, "argv", ["convert.py", *words.split()])
        with pytest.raises(SystemExit, match=r"^0$"):
            runpy.run_path(str(tmp_path / "megatron/bridge/convert.py"), run_name="__main__")
    old, new = model.state_dict(), GPT2LMHeadModel.from_pretrained("hf2").state_dict()
    assert old.keys() == new.keys() and all(value.equal(new[name]) for name, value in old.items())


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_the_counter_of_scripts_names_flags_and_keeps_quoted_values_whole(tmp_path):
    counter = runpy.run_path(str(ROOT / "benchmarks" / "megatron_scripts.py"))
    (tmp_path / "model_config.yaml").write_text(
        "MODEL_ARGS:\n  --step-batch-size-schedule: 0:8 1K:16\n  --bf16: true\n"
        "  --recompute-modules: '[mlp layernorm]'\n  --cp-comm-type: [p2p a2a]\n"
        "  --pipeline-model-parallel-layout: Et*2|(tt|)*3L\n"
    )
    assert counter["flags_of_yaml"](tmp_path / "model_config.yaml") == [
        *("--step-batch-size-schedule", "0:8 1K:16", "--bf16", "--recompute-modules", "mlp", "layernorm"),
        *("--cp-comm-type", "p2p", "a2a", "--pipeline-model-parallel-layout", "Et*2|(tt|)*3L"),
    ]
    (tmp_path / "train.sh").write_text(
        "case $1 in\n  --data)\n  ;;\nesac\nARGS=\"--lr 1e-4 --step-batch-size-schedule '0:8 1K:16' \\\n    --bf16\"\n"
        "DATA=(\n  \"--split '99,1,0'\"\n  --swiglu\n)\npython pretrain_gpt.py $ARGS ${DATA[@]}\n"
    )
    assert counter["flags_of_script"](tmp_path / "train.sh") == [
        *(
            "--lr",
            "1e-4",
            "--step-batch-size-schedule",
            "0:8 1K:16",
            "--bf16",
            "--split",
            "'99,1,0'",
            "--swiglu",
        ),
    ]
    for problem, subject in (
        ("there is no flag --frob; did you mean --fp16?", "there is no flag --frob"),
        (
            "--moe-token-dispatcher-type flex is refused: choose among alltoall",
            "--moe-token-dispatcher-type flex",
        ),
        ("--a and --b contradict each other; leave one out", "--a and --b contradict each other"),
    ):
        assert counter["subject"](problem) == subject


def test_every_target_of_the_notes_runs_its_script():
    targets = (
        "install-dependencies prepare-ds-openwebtext-10k train-gpt3-345m-1gpu-x-model-parallelism "
        "train-baseline-gpt2-large-1gpu train-dp2-gpt2-large-2gpu train-tp2-gpt2-large-2gpu train-sp2-gpt2-large-2gpu "
        "train-cp2-gpt2-large-2gpu train-pp2-gpt2-large-2gpu"
    )
    folder = ROOT / "examples" / "gpt3"
    shown = subprocess.run(
        ["make", "-n", *targets.split()], cwd=folder, text=True, capture_output=True, check=True
    )
    scripts = re.findall(r"\./(\w+\.sh)", shown.stdout)
    assert scripts == sorted(path.name for path in folder.glob("0*.sh"))
