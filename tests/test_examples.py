"""The examples run as written, and what they say of other layouts is true."""

import importlib.util
import json
import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import forked
import pytest
import torch
from default_cases import in_full

import megalith
from megalith.cli.main import main
from megalith.errors import ConfigError
from megalith.parallel.mesh import build_mesh
from megalith.parity.differences import relative_error
from megalith.report.metrics import read_records

EXAMPLES = Path(__file__).parents[1] / "examples"
PAGES = EXAMPLES.with_name("docs")
CPU = torch.device("cpu")


def example(name: str):
    spec = importlib.util.spec_from_file_location("example_" + Path(name).stem, EXAMPLES / name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.processes
def test_the_loop_by_hand_trains_saves_and_goes_on_under_torchrun(tmp_path):
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = forked.run([*command, EXAMPLES / "train_loop.py", tmp_path / "saved"])
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 20 and losses[-1] < losses[9] < losses[0] - 0.5
    assert (tmp_path / "saved" / "step_00000010" / "manifest.json").exists()


@pytest.mark.full
@pytest.mark.processes
def test_the_accelerate_example_runs_by_the_commands_that_it_names(tmp_path):
    lines = (EXAMPLES / "accelerate" / "train.py").read_text().splitlines()
    commands = [line.partition("#")[0].split() for line in lines if "examples/accelerate/train.py" in line]
    assert [command[0] for command in commands] == ["python", "megalith"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE", "MEGATRON", "RANK"))}
    clean |= {"OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path)}
    port = ["--main_process_port", str(forked.free_port())]
    for words in (commands[0][1:], ["-m", *commands[1][:3], *port, *commands[1][3:]]):
        words = [str(EXAMPLES.parent / word) if word.startswith("examples/") else word for word in words]
        done = forked.run(words, clean)
        assert done.returncode == 0, done.stdout + done.stderr
        first, last = map(float, re.findall(r"loss (\d+\.\d+) → (\d+\.\d+) in 60 steps", done.stdout)[0])
        assert last < first - 2


def policy_losses(**parallel) -> list[float]:
    custom = example("seams/custom_loss.py")
    config = custom.configuration(**parallel)
    mesh = build_mesh(config.parallel, 4, "cpu") if parallel else megalith.Mesh.alone()
    return custom.losses(config, mesh, CPU)


def test_a_loss_of_ones_own_equals_one_process_in_tp2_pp2_and_in_cp2(pool):
    one = policy_losses()
    assert one[0] == -0.25 and one[2] < one[1] < -0.26
    tp = dict(tensor_model_parallel_size=2)
    for other in (
        dict(pipeline_model_parallel_size=2),
        dict(context_parallel_size=2, sequence_parallel=True),
    ):
        for found in pool.run(_policy, tp | other):
            assert relative_error(found, one) < 1e-5, other


def _policy(parallel: dict) -> list[float]:
    return policy_losses(**parallel)


def own_model(folder: Path, parallel: megalith.ParallelConfig, saves: bool) -> list[float]:
    """Ten steps' losses and then a save; or two steps' after loading it."""
    own = example("own_model.py")
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    mesh = build_mesh(parallel, size, "cpu")
    optimizer = own.start(mesh, CPU, parallel)
    if saves:
        losses = own.train(optimizer, mesh, range(10))
        megalith.save_checkpoint(folder, optimizer, step=10)
        return losses
    return own.train(optimizer, mesh, range(megalith.load_checkpoint(folder, optimizer).step, 12))


@pytest.mark.parametrize("strategy", ["optim_grads_params", in_full("optim")])
def test_a_model_of_ones_own_equals_one_process_and_loads_in_any_layout(pool, tmp_path, strategy):
    plain = megalith.ParallelConfig()
    spread = megalith.ParallelConfig(tensor_model_parallel_size=2, data_parallel_sharding_strategy=strategy)
    one = own_model(tmp_path / "one", plain, saves=True)
    assert one[-1] < one[0] - 0.4
    for found in pool.run(own_model, tmp_path / "spread", spread, True):
        assert relative_error(found, one) < 1e-5
    resumed = own_model(tmp_path / "one", plain, saves=False)
    for found in pool.run(own_model, tmp_path / "one", spread, False):
        assert relative_error(found, resumed) < 1e-5
    assert relative_error(own_model(tmp_path / "spread", plain, saves=False), resumed) < 1e-5


def test_a_model_of_ones_own_refuses_layouts_that_it_cannot_be_in():
    own, mesh = example("own_model.py"), megalith.Mesh.alone()
    for setting in ("sequence_parallel",):
        with pytest.raises(ConfigError, match=f"parallel.{setting} is True.*leave it out"):
            own.start(mesh, CPU, megalith.ParallelConfig(tensor_model_parallel_size=2, **{setting: True}))

    class Buffered(own.OwnModel):
        def __init__(self, mesh):
            super().__init__(mesh)
            self.register_buffer("table", torch.zeros(3))

    with pytest.raises(ConfigError, match=r"has buffers \(table\).*in forward"):
        megalith.parallelize(megalith.ModelSpec(Buffered), mesh, CPU)


SMALL = (
    "--train.train_iters",
    "2",
    "--optim.lr_warmup_iters",
    "0",
    "--train.eval_iters",
    "1",
    "--data.num_workers",
    "0",
)
SMALLER = (*SMALL, "--model.num_layers", "1", "--model.hidden_size", "64")
ONCE = ("--sft.num_train_epochs", "1", "--data.num_workers", "0")
# A run file with its command, what makes it small, and the processes that its first lines have it in.
GALLERY = {
    "quickstart.yaml": ("train", SMALLER, 1),
    "continued_pretraining.yaml": ("train", SMALL, 1),
    "lora_sft.yaml": ("sft", ONCE, 1),
    "moe.yaml": ("train", SMALLER, 2),
    "long_context.yaml": ("train", (*SMALL, "--data.seq_length", "512"), 2),
    "fp8.yaml": ("train", SMALLER, 1),
    "distill/run.yaml": ("distill", SMALL, 1),
    "first_hour/chat.yaml": ("sft", ONCE, 1),
    "first_hour/sums.yaml": ("grpo", (*SMALL, "--train.global_batch_size", "32"), 1),
    "first_hour/qwen3_0.6b.yaml": (
        "train",
        (*SMALLER, "--data.seq_length", "64", "--train.micro_batch_size", "2", "--train.precision", "fp32"),
        1,
    ),
    "grpo/arithmetic_sft.yaml": ("sft", SMALL, 1),
    "grpo/arithmetic.yaml": ("grpo", (*SMALL, "--train.global_batch_size", "32"), 1),
}


@pytest.mark.full
def test_the_run_files_of_the_gallery_train_and_fit_their_processes(tmp_path, monkeypatch):
    """One after the other, for most begin from the run of one before."""
    (tmp_path / "examples").symlink_to(EXAMPLES)
    for script, *options in (("sft/make_chat.py",), ("grpo/make_sums.py", "--count", "100")):
        monkeypatch.setattr(sys, "argv", [script, "data", *options])
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    sections = "".join(page.read_text() for page in sorted(PAGES.glob("[a-d]*.md"))).split("\n## ")
    long = (section for section in sections if len(section) > 1000)  # the last one is the validation's
    text = "".join(json.dumps({"text": section}) + "\n" for section in long)
    (tmp_path / "data" / "stdlib.jsonl").write_text(text)
    trained = ["--input", "data/stdlib.jsonl", "--vocab-size", "300", "--output", "data/tokenizer.json"]
    assert main(["tokenizer", "train", *trained]) == 0
    kind = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "data/tokenizer.json"]
    for source, prefix in (("data/stdlib.jsonl", "data/stdlib"), ("data/chat_text.jsonl", "data/own")):
        words = ["--input", source, "--output-prefix", prefix, "--append-eod", "--workers", "0"]
        assert main(["preprocess", *words, *kind]) == 0
    for name, (program, small, processes) in GALLERY.items():
        words = [program, f"examples/{name}", *small]
        layout = re.findall(r"\w+_parallel_size", (EXAMPLES / name).read_text()) if processes > 1 else []
        alone = [word for size in set(layout) for word in (f"--parallel.{size}", "1")]
        if name == "first_hour/chat.yaml":  # which begins from the folder of the first run
            assert main(["export-hf", "runs/quickstart", "models/first"]) == 0
        assert main([*words, *alone]) == 0, name
        output = tmp_path / re.search(r"output_dir: (\S+)", (EXAMPLES / name).read_text())[1]
        found = [record["loss"] for record in read_records(output / "metrics.jsonl")]
        assert len(found) >= 2 and None not in found, name
        assert processes == 1 or main([*words, "--dry-run", "--world-size", str(processes)]) == 0, name
    example("grpo/plot_reward.py").main(str(output))  # the last one's
    assert (output / "reward.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("script", "found"), [("slurm.sh", "#SBATCH --nodes=8"), ("kubernetes.sh", "numNodes: 8")]
)
def test_the_scripts_of_the_cluster_write_job_files_of_a_run_that_is_accepted(
    script, found, capsys, monkeypatch
):
    monkeypatch.chdir(EXAMPLES.parent)
    line = (EXAMPLES / "cluster" / script).read_text().strip().splitlines()[-1]
    assert main(shlex.split(line.replace('"$@"', ""))[1:]) == 0
    assert found in capsys.readouterr().out
