"""Every benchmark that is shipped runs in small on a CPU, so that a rename elsewhere cannot break it unnoticed."""

import importlib
import inspect
import json
import re
import signal
import subprocess
import sys
import types
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megalith.bench import (
    attention_speed,
    conversion_speed,
    corpus_text,
    fp8_speed,
    generation_speed,
    peers,
    preprocessing_speed,
    torchtitan_peer,
    training_speed,
)
from megalith.bench.bench_command import GPU_ONLY, OTHERS, TRAINING, run_command
from megalith.bench.fine_tuning_speed import RUNS
from megalith.bench.generation_speed import SHAPES
from megalith.bench.workloads import LAYOUTS, WORKLOADS, layout_of, run_tree
from megalith.config import RunConfig
from megalith.data.preprocessing.corpus import CorpusSummary
from megalith.errors import ConfigError
from megalith.generation.engine import Engine
from megalith.generation.requests import Sampling
from megalith.hardware import local_device_info
from megalith.ops import gemm
from megalith.ops import kernels as kernel_package
from megalith.training.build import prepare

SMALL = ["model.num_layers=1", "model.hidden_size=16", "model.num_attention_heads=2", "data.seq_length=16"]


pytestmark = pytest.mark.usefixtures("forked_programs")


@pytest.fixture
def bench(monkeypatch, capsys):
    """Call a benchmark's main, in this process, as `megalith bench` does; return what it prints."""

    def call(name: str, *words: object) -> str:
        module = importlib.import_module(f"megalith.bench.{OTHERS.get(name, TRAINING)}")
        words = [str(word) for word in ((name, *words) if name in WORKLOADS else words)]
        monkeypatch.setattr(sys, "argv", ["bench", *words])
        module.main(*([words] if inspect.signature(module.main).parameters else []))
        return capsys.readouterr().out

    handler = signal.getsignal(signal.SIGTERM)
    yield call
    signal.signal(signal.SIGTERM, handler)


def test_generation_is_measured_compared_with_transformers(bench, tmp_path):
    sizes = ("--batch", 2, "--prompt", 8, "--new-tokens", 8, "--room", 16, "--peer-tokens", 4)
    variety = ("--generations", 2, "--rounds", 2, "--spread", "--top-p", 0.9, "--vocab", 80)
    outputs = ("--device", "cpu", "--peer", "hf", "--trace", "trace.json")
    *table, ours, theirs = bench("generate", "tiny", *sizes, *variety, *outputs).splitlines()
    ours, theirs = json.loads(ours), json.loads(theirs)
    assert table
    assert ours["step_ms"] > 0 and ours["prefill_s"] > 0 and theirs["tokens_per_second"] > 0
    assert "aten::" in (tmp_path / "trace.json").read_text()


def test_generation_uses_what_the_engine_has():
    """CUDA graphs run on GPUs alone; a rename of theirs is noticed here."""
    engine = Engine(
        RunConfig.from_tree({"model": SHAPES["tiny"]}).model, "cpu", torch.float32, max_rows=1, max_tokens=2
    )
    engine.reset_state(Sampling(forced_lengths=[1]))
    used = {*re.findall(r"\bengine\.(\w+)", inspect.getsource(generation_speed))}
    assert {"_graph", "_decode_step", "generate"} <= used
    assert [name for name in used if not hasattr(engine, name)] == []


def test_weights_of_a_model_are_synced_to_an_engine(bench):
    result = json.loads(bench("generate", "tiny", "--sync", "--device", "cpu"))
    assert len(result["gb_per_second"]) == 4


@pytest.mark.parametrize("name", GPU_ONLY)
def test_benchmarks_of_kernels_need_a_gpu(name):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match="measures kernels of a GPU"):
        run_command([name])


class OnCpu(TorchFunctionMode):
    """Create on the CPU the tensors that a program creates on a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def run_once(work) -> tuple[float, float, list[str]]:
    work()
    return 1.0, 0.5, ["kernel"]


def test_the_code_of_the_attention_benchmark_runs(bench, monkeypatch):
    monkeypatch.setattr(attention_speed, "measure", run_once)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    with OnCpu():
        lines = bench("attention", 2, 1, 8, 128).splitlines()
    assert len(lines) == 20 and sum("target" in line for line in lines) == 2


def test_the_code_of_the_fp8_benchmark_runs(bench, monkeypatch):
    """Kernels' names are read from their source, because triton is not installed with a CPU build of torch."""
    kernels = Path(gemm.__file__).parent / "kernels" / "fp8_kernels.py"
    tile = re.search(r"^ROWS, COLUMNS, WARPS = (\d+), (\d+), (\d+)", kernels.read_text(), re.MULTILINE)
    stand_in = types.ModuleType("fp8_kernels")
    stand_in.ROWS, stand_in.COLUMNS, stand_in.WARPS = map(int, tile.groups())
    monkeypatch.setitem(sys.modules, "megalith.ops.kernels.fp8_kernels", stand_in)
    monkeypatch.setattr(kernel_package, "fp8_kernels", stand_in, raising=False)
    monkeypatch.setattr(fp8_speed, "LINEARS", {"linear_fc1": (128, 256)})
    monkeypatch.setattr(fp8_speed, "TILES", fp8_speed.TILES[2:3])
    monkeypatch.setattr(fp8_speed, "milliseconds", lambda function, total_ms=60.0: run_once(function)[0])
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(fp8_speed, "local_device_info", lambda kind: local_device_info("cpu"))
    with OnCpu():
        text = bench("fp8", "--tokens", 128)
    assert "used" in text and text.splitlines()[-1].startswith("blockwise")


@pytest.mark.parametrize("name", OTHERS)
def test_every_benchmark_has_help(name, capsys):
    with pytest.raises(SystemExit) as ended:
        run_command([name, "--help"])
    assert ended.value.code == 0 and "usage" in capsys.readouterr().out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_one_that_the_trainer_takes(layout, tmp_path):
    workload = (
        "qwen3-30b-a3b" if "ep" in layout else "gpt2-large" if layout.startswith("pp2-v") else "llama3-8b"
    )
    config = RunConfig.from_tree(run_tree(workload, layout, {"mock": True}, str(tmp_path), batch=32))
    prepare(config, LAYOUTS[layout]["processes"])


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_workload_is_one_that_the_trainer_takes(workload, tmp_path):
    prepare(RunConfig.from_tree(run_tree(workload, "one", {"mock": True}, str(tmp_path))), 1)


def test_layouts_are_described_by_degrees():
    layout = layout_of("tp=2,pp=2,dp=2,sequence_parallel=true")
    assert layout["processes"] == 8
    assert layout["parallel"] == {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "sequence_parallel": True,
    }
    assert layout_of("dp=8,ep=8")["processes"] == 8  # experts do not multiply the processes
    for name, said in (
        ("tp3", "unknown layout"),
        ("tp=0", "positive integer"),
        ("dp=two", "positive integer"),
    ):
        with pytest.raises(ConfigError, match=said):
            layout_of(name)


@pytest.mark.parametrize("name", ["hf", "plain", "peft"])
def test_a_peer_of_one_process_trains(name, monkeypatch, capsys):
    if name == "peft":
        pytest.importorskip("peft")
    workload = "gpt2" if name == "plain" else "tiny"
    words = [name, workload, "--batch", "1", "--steps", "2", "--warmup", "1", "--set", *SMALL]
    monkeypatch.setattr(sys, "argv", ["peers", *words])
    monkeypatch.setattr(torch, "compile", lambda model: model)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: None)
    peers.main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["step_time_ms"] > 0


@pytest.mark.parametrize("name", ["ligre", "hf:never", "liger:always", "liger:never,"])
def test_a_peer_that_there_is_not_is_refused(name, capsys):
    with pytest.raises(SystemExit):
        run_command(["tiny", "--peer", name])
    assert f"unknown peer {name!r}; use best, or one of" in capsys.readouterr().err


def test_a_peer_out_of_memory_is_tried_with_half_the_micro_batch(bench, monkeypatch):
    tried = []

    def run_peer(args, name, layout, batch, micro, options):
        tried.append((micro, *options))
        return {"failed": "failed with 1: out of memory; …"} if micro > 1 else {"step_time_ms": 5.0}

    monkeypatch.setattr(training_speed, "PACKAGES", {})
    monkeypatch.setattr(training_speed, "_run_peer", run_peer)
    monkeypatch.setattr(training_speed, "measure", lambda *given: {"step_time_ms": 4.0})
    text = bench("llama3-8b", "--batch", 4, "--set", "train.micro_batch_size=4", "--peer", "liger:never")
    assert tried == [(size, "--reshard", "never") for size in (4, 2, 1)]
    assert "liger:never runs out of memory with 4 sequences" in text and "micro_batch_size 1" in text


TINY = (
    "--steps",
    3,
    "--warmup",
    1,
    "--batch",
    2,
    "--set",
    *SMALL,
    "data.num_workers=0",
    "train.micro_batch_size=1",
)


@pytest.mark.full
def test_a_workload_is_trained_in_layouts_and_compared_with_a_sharded_peer(bench, tmp_path, monkeypatch):
    layouts = "one", "dp=2,data_parallel_sharding_strategy=optim"
    peer = "fsdp2:eager,never,micro=1"
    results = tmp_path / "results.jsonl"
    words = ("--layout", *layouts, "--losses", "--kernels", "--peer", peer, "--results", results)
    bench("tiny", *words, *TINY)
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [row["run"] for row in rows] == [*layouts, peer] and all(row["step_time_ms"] > 0 for row in rows)
    assert rows[0]["losses"].startswith("losses 1:")


@pytest.mark.skipif(find_spec("liger_kernel") is not None, reason="liger-kernel is installed")
def test_a_peer_that_is_not_installed_is_named_with_the_command_that_installs_it(bench, monkeypatch, capsys):
    monkeypatch.setattr(training_speed, "measure", lambda *given: {"step_time_ms": 4.0})
    with pytest.raises(SystemExit):
        bench("tiny", "--peer", "liger:never")
    assert "the peer liger needs liger-kernel; run: pip install liger-kernel" in capsys.readouterr().out


@pytest.mark.full
def test_fine_tuning_is_measured(bench):
    runs = ("--runs", *RUNS, "--quantize-base", "int8", "--micro", 1)
    text = bench("finetune", "tiny", *runs, *TINY, "data.seq_length=96")
    assert "failed" not in text, text
    for ratio in ("packed / pretrain", "grpo / pretrain", "packed / padded to 96", "qlora / lora"):
        assert ratio in text


@pytest.mark.full
def test_adapters_on_experts_are_measured(bench):
    sizes = (
        "num_layers=1",
        "hidden_size=32",
        "num_attention_heads=2",
        "num_query_groups=1",
        "kv_channels=16",
    )
    sizes += ("num_experts=4", "moe_ffn_hidden_size=16", "moe_router_topk=2", "vocab_size=128")
    words = ("--runs", "lora", "--steps", 3, "--warmup", 1, "--batch", 2, "--micro", 1, "--set")
    text = bench(
        "finetune", "qwen3-30b-a3b", *words, *(f"model.{size}" for size in sizes), "data.seq_length=32"
    )
    assert "failed" not in text and "qwen3-30b-a3b lora" in text, text


def test_dynamic_context_parallelism_is_compared_with_the_layout_that_it_replaces(bench):
    sizes = ("--seq-length", 256, "--median", 30, "--batch", 4, "--steps", 3, "--warmup", 1)
    small = (f"model.{name}" for name in ("num_layers=1", "hidden_size=32", "ffn_hidden_size=32"))
    text = bench(
        "dynamic-context", "tiny", "--layout", "dp=2", "cp=2", *sizes, "--set", *small, "runtime.device=cpu"
    )
    assert "expected by the cost model" in text and "ranks per group" in text
    assert float(re.search(r"losses differ by at most ([\d.e-]+)", text)[1]) < 1e-5


def test_post_training_is_compared_with_its_parts(bench):
    sizes = ("model.num_layers=1", "model.hidden_size=32", "model.ffn_hidden_size=32", "model.vocab_size=64")
    words = ("--batch", 4, "--rounds", 2, "--warmup", 1, "--set", *sizes, "data.seq_length=16")
    result = json.loads(bench("posttrain", "tiny", *words).splitlines()[-1])
    assert all(value > 0 for value in result["seconds"].values())
    assert (
        result["kto_tokens_per_second_over_sft"]
        < 1
        < result["seconds"]["distill"] / result["seconds"]["forward"]
    )
    assert result["reward_over_forward"] > 0 and result["orpo_tokens_per_second_over_sft"] > 0


@pytest.mark.full
def test_grpo_is_measured_by_phase(bench):
    sizes = "--nproc 1 --prompts 2 --generations 2 --prompt 4 --tokens 12 --packed 24 --micro 1 --steps 3 --spread"
    settings = (
        "model.num_layers=1",
        "model.hidden_size=32",
        "model.vocab_size=64",
        "model.ffn_hidden_size=32",
    )
    printed = bench("grpo", "tiny", *sizes.split(), "--precision", "fp32", "--set", *settings)
    result = json.loads(printed)
    assert result["training_share"] > 0 and result["grpo"]["time_generation"] > 0


def test_optimizers_are_compared(bench):
    sizes = ["model.num_layers=1", "model.hidden_size=16", "data.seq_length=8", "train.global_batch_size=2"]
    words = [*sizes, "train.micro_batch_size=2", "model.vocab_size=61"]
    heading, _, *rows = bench(
        "optimizers", "--steps", 3, "--only", "lion", "normuon", "--factors", 1, 2, "--", *words
    ).splitlines()
    assert heading == "| optimizer | lr | bytes of state per parameter | update, ms | share, % | loss |"
    cells = [row.strip("| ").split(" | ") for row in rows]
    assert [(name, lr) for name, lr, *_ in cells] == [
        ("lion", "0.0005"), ("lion", "0.001"), ("normuon", "0.003"), ("normuon", "0.006"),
    ]  # fmt: skip
    for *_, size, ms, share, loss in cells:
        assert float(size) > 3.9 and float(ms) > 0 and 0 < float(share) < 100 and float(loss) > 0
    assert float(cells[0][2]) == 4


@pytest.mark.parametrize("processes", [1, 2])
def test_checkpoints_are_saved_and_loaded(processes, tmp_path):
    settings = [
        "model.num_layers=1",
        "model.hidden_size=32",
        "model.num_attention_heads=2",
        "model.vocab_size=64",
    ]
    strategy = "parallel.data_parallel_sharding_strategy=optim"
    words = ["--nproc", str(processes), "--repeats", "1", "--folder", tmp_path / "saved", *settings, strategy]
    command = [sys.executable, "-m", "megalith.bench.checkpoint_speed", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line in (
        "Megalith, in the background",
        "torch.distributed.checkpoint.save",
        "load, checksums included",
    ):
        assert line in done.stdout


CONVERTED = (
    "model.hidden_size=32",
    "model.ffn_hidden_size=64",
    "model.num_attention_heads=2",
    "model.vocab_size=64",
)


def test_conversions_are_measured(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(conversion_speed, "WAIT", 0)
    settings = (*CONVERTED, "model.num_query_groups=1", "model.max_position_embeddings=32")
    folder = tmp_path / "converted"
    text = bench("convert", "--gb", 0.0001, "--turns", 1, "--folder", folder, "--set", *settings)
    assert re.findall("^1 (copy|import|export)", text, re.MULTILINE) == ["copy", "import", "export"]
    assert not folder.exists()


def test_sizes_and_folders_that_conversions_do_not_take_are_refused(bench, tmp_path):
    with pytest.raises(ConfigError, match=r"--gb 0.1 is less than the 0.35 GB of embeddings and one layer"):
        bench("convert", "--gb", 0.1, "--folder", tmp_path / "none")
    with pytest.raises(ConfigError, match=r"exists, .*choose a new folder"):
        bench("convert", "--folder", tmp_path)


def test_streaming_is_measured(bench, monkeypatch):
    monkeypatch.setattr(corpus_text, "write_stdlib_corpus", small_corpus)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    text = bench("data", "--megabytes", 0, "--seconds", 0.2, "--seq-length", 64, "--workers", 0)
    assert re.search(r"ratio \d\.\d{3}", text) and re.search(r"waited \d+\.\d{3} % of the time", text)


def test_preprocessing_is_measured(bench, monkeypatch):
    """In this process: the number of Rust threads, for which it starts programs, is fixed in a fork."""
    monkeypatch.setattr(preprocessing_speed, "run_alone", run_in_this_process)
    monkeypatch.setattr(corpus_text, "write_stdlib_corpus", small_corpus)
    text = bench("preprocess", "--megabytes", 0, "--repeats", 1, "--workers", 1)
    assert text.startswith("turn 1: encode_batch_fast") and "(medians of 1)" in text


def run_in_this_process(program, folder, workers):
    return preprocessing_speed.ALONE[program](folder, workers)


def small_corpus(path: Path) -> CorpusSummary:
    texts = [f"def function_{number}(argument):\n    return argument * {number}\n" for number in range(200)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return CorpusSummary(path, len(texts), sum(map(len, texts)))


def test_text_is_repeated_or_cut_to_its_size(monkeypatch, tmp_path):
    monkeypatch.setattr(corpus_text, "write_stdlib_corpus", small_corpus)
    whole = small_corpus(tmp_path / "small.jsonl").bytes
    for megabytes, expected in ((0, whole), (whole / 2e6, whole / 2), (3 * whole / 1e6, 3 * whole)):
        folder = tmp_path / f"{megabytes:.3f}"
        folder.mkdir()
        text, size = corpus_text.write_text(folder, megabytes, 300)
        assert size == sum(len(json.loads(line)["text"]) for line in text.open())
        assert expected <= size < expected + 100


def test_the_torchtitan_peer_is_configured_by_the_workload(monkeypatch):
    """With a stand-in for torchtitan, which needs GPUs."""
    sizes = types.SimpleNamespace(vocab_size=0, n_layers=0, attn_type="flex")
    package = types.ModuleType("torchtitan.models.llama3")
    package.get_train_spec = lambda: TrainSpec({"8B": sizes})
    train = types.ModuleType("torchtitan.train")
    train.train_spec_module = types.SimpleNamespace()
    train.Trainer = type("Trainer", (), {"train_step": lambda self, batches: None})
    train.main = lambda trainer: [trainer().train_step(None) for _ in range(3)]
    loaders = types.ModuleType("torchtitan.components.dataloader")
    loaders.BaseDataLoader = object
    names = "torchtitan", "torchtitan.models", "torchtitan.components"
    modules = {name: types.ModuleType(name) for name in names}
    modules["torchtitan"].train = train
    modules |= {each.__name__: each for each in (package, train, loaders)}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    read = []  # torchtitan's parser takes sys.argv when it is imported
    import_module = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name: read.append(sys.argv) or import_module(name))
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "argv", [])
    for name in ("is_available", "synchronize", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 1)
    words = "peer llama3-8b --batch 2 --steps 3 --warmup 1 --tp 2 --fp8 rowwise"
    words += " --set model.num_layers=3 data.seq_length=16"
    monkeypatch.setattr(sys, "argv", words.split())
    torchtitan_peer.main()
    options = dict(zip(read[0][1::2], read[0][2::2]))
    assert options["--parallelism.tensor_parallel_degree"] == "2" and sizes.n_layers == 3
    assert options["--training.global_batch_size"] == "4" and options["--training.seq_len"] == "16"
    assert options["--quantize.linear.float8.recipe_name"] == "rowwise"
    assert options["--quantize.linear.float8.filter_fqns"] == "output"
    job = types.SimpleNamespace(training=types.SimpleNamespace(local_batch_size=2, seq_len=16))
    loader = train.train_spec_module.get_train_spec("llama3").build_dataloader_fn(2, 0, None, job)
    inputs, labels = next(iter(loader))
    assert inputs["input"].shape == labels.shape == (2, 16)


@dataclass(frozen=True)
class TrainSpec:
    """The fields of torchtitan's that the peer replaces."""

    model_args: dict
    build_tokenizer_fn: object = None
    build_dataloader_fn: object = None
    build_validator_fn: object = None


@pytest.mark.parametrize("stream", [False, True])
def test_serving_is_measured_against_the_engines_batch(bench, stream):
    sizes = ("--clients", 3, "--rows", 2, "--prompt", 4, "--new-tokens", 6, "--vocab", 300, "--device", "cpu")
    result = json.loads(bench("serve", "tiny", *sizes, *(["--stream"] if stream else [])).splitlines()[-1])
    assert result["tokens_per_second"] > 0 and result["ratio"] > 0 and result["http_us_per_token"] > 0
    assert (result["first_token_ms"] is not None) == stream


def test_serving_is_measured_with_a_simulated_gpu(bench):
    sizes = ("--clients", 3, "--rows", 2, "--prompt", 4, "--new-tokens", 12, "--vocab", 300, "--step-ms", 1)
    result = json.loads(bench("serve", "tiny", *sizes).splitlines()[-1])
    assert result["steps"] >= result["batch_steps"] == 3 * 16  # windows of eight steps
    assert 0 < result["gpu_wait"] < 1 and result["direct_ratio"] > 0
