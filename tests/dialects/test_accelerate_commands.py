"""`megalith accelerate`: the launcher, the wizard, the hook; and what the plugin's fields mean."""

import copy
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from types import SimpleNamespace

import accelerate_script
import forked
import pytest
import torch
import yaml
from accelerate.commands.launch import launch_command_parser
from accelerate_job import fresh_accelerator, model_of
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import megalith.accelerate
from megalith.accelerate import MegatronLMPlugin
from megalith.cli.main import main
from megalith.dialects.accelerate import launch_door
from megalith.dialects.accelerate.plugin import FIELDS, environment_of
from megalith.dialects.accelerate.plugin_settings import ENCODER_FIELDS, NO_EFFECT, run_config
from megalith.dialects.accelerate.published_weights import family_of_module
from megalith.errors import ConfigError

SCRIPT = Path(__file__).parent / "accelerate_script.py"
TELLS = """from accelerate import Accelerator
from accelerate.utils import MegatronLMPlugin

accelerator = Accelerator()
degree = accelerator.state.megatron_lm_plugin.pp_degree
kind, rank = accelerator.distributed_type.value, accelerator.process_index
print(f"{MegatronLMPlugin.__module__} {kind} pp {degree} of rank {rank}\\n", end="", flush=True)
"""
OWN_PLUGIN = """import sys
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import MegatronLMPlugin

processes = int(sys.argv[1])
for given in ({}, {"megatron_lm_plugin": MegatronLMPlugin(tp_degree=processes)}):
    accelerator = Accelerator(**given)
    kind = accelerator.distributed_type.value
    print(f"{type(accelerator).__module__} {kind} rank {accelerator.process_index}\\n", end="", flush=True)
    AcceleratorState._reset_state(True)
"""
ANSWERS = ["This machine", "Multi-GPU", "1", "No", "Yes", "2", "No", "2", "2", "SELECTIVE", "SEQUENTIAL"]
TWO_MACHINES = ["", "multi-CPU", "2", *[""] * 13]  # up to the rank of this one
DOCUMENTED = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "MEGATRON_LM",
    "downcast_bf16": "no",
    "machine_rank": 0,
    "main_training_function": "main",
    "megatron_lm_config": {
        "megatron_lm_gradient_clipping": 1.0,
        "megatron_lm_learning_rate_decay_iters": 320000,
        "megatron_lm_num_micro_batches": 1,
        "megatron_lm_pp_degree": 2,
        "megatron_lm_recompute_activations": True,
        "megatron_lm_sequence_parallelism": False,
        "megatron_lm_tp_degree": 2,
    },
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}


def launched(folder, *words):
    """What the script printed, started by a command line of its own."""
    words = ["-m", *words[0].split(), "--main_process_port", str(forked.free_port()), *words[1:], str(folder)]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE", "MEGATRON", "RANK"))}
    clean |= {"OMP_NUM_THREADS": "1", "HF_HOME": str(folder)}
    done = forked.run(words, clean)
    found = [line for line in done.stdout.splitlines() if line.startswith("result")]
    assert len(found) == 1, done.stdout + done.stderr
    return found[0].split()


def plain_script():
    """What the script prints, by plain PyTorch in this process: two passes a step of 2 × 4 samples each."""
    torch.manual_seed(0)
    model, losses = accelerate_script.small_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
    for number, tokens in enumerate(accelerate_script.tokens().split(8)):
        loss = model(input_ids=tokens, labels=tokens).loss
        losses.append(loss.item())
        (loss / 2).backward()
        if number % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return [*losses, sum(weight.double().abs().sum().item() for weight in model.state_dict().values())]


def check_launched(folder, *way):
    result, kind, *figures = launched(folder, *way)
    assert (result, kind) == ("result", "MEGATRON_LM")
    assert [float(figure) for figure in figures] == pytest.approx(plain_script(), rel=1e-5)
    assert (folder / "checkpoint-epoch-0" / "megalith").is_dir()


@pytest.mark.processes
def test_an_untouched_script_trains_by_our_launcher_and_a_configuration_file(tmp_path):
    content = {**DOCUMENTED, "num_processes": 2, "mixed_precision": "no"}
    plugin = {"tp_degree": 1, "pp_degree": 2, "num_micro_batches": 4}
    content["megatron_lm_config"] = {f"megatron_lm_{name}": value for name, value in plugin.items()}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(content))
    check_launched(tmp_path, "megalith accelerate launch", "--config_file", str(file), str(SCRIPT), "env")


@pytest.mark.full
def test_an_untouched_script_trains_by_accelerates_launcher_with_our_module(tmp_path):
    options = ["--use_megatron_lm", "--num_processes", "2", "-m", "megalith.accelerate"]
    check_launched(tmp_path, "accelerate.commands.launch", *options, str(SCRIPT), "2,1")


@pytest.mark.full  # the launches before this one show the same in processes that are forked
@pytest.mark.processes
@pytest.mark.parametrize("trains", [False, True])
def test_enabled_plain_accelerate_launch_is_ours_though_a_flag_hides_the_files_type(tmp_path, trains):
    """In an environment of its own, where other processes see nothing of it and a missing megalith breaks nothing.

    Each launch imports PyTorch in the launcher and in its processes: two for the file and its flag, and for the plugin
    in a script one, two in the full suite.
    """
    venv.create(tmp_path / "env", symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "env")}))
    ours = Path(megalith.__file__).parents[1]
    (packages / "a.pth").write_text(f"{ours}\n{sysconfig.get_path('purelib')}\n")
    content = {**DOCUMENTED, "num_processes": 2, "mixed_precision": "no"}
    plugin = {"tp_degree": 1, "pp_degree": 2, "num_micro_batches": 4}
    content["megatron_lm_config"] = {f"megatron_lm_{name}": value for name, value in plugin.items()}
    file = tmp_path / "accelerate" / "default_config.yaml"
    file.parent.mkdir()
    file.write_text(yaml.safe_dump(content))
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE", "MEGATRON", "PYTHON"))}
    clean |= {"OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path)}

    def run(*words, **more):
        done = subprocess.run([python, *words], env=clean | more, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    run("-m", "megalith", "accelerate", "enable")
    script = tmp_path / "script.py"
    script.write_text(TELLS)
    printed = run(
        *("-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_processes", "2"),
        *("--main_process_port", "0", str(SCRIPT if trains else script), "env", str(tmp_path)),
    ).stdout
    if trains:
        assert (tmp_path / "checkpoint-epoch-0" / "megalith").is_dir()
    else:
        assert sorted(line for line in printed.splitlines() if "pp" in line) == [
            f"{MegatronLMPlugin.__module__} MEGATRON_LM pp 2 of rank {rank}" for rank in (0, 1)
        ]
    file.unlink()  # the plugin in the script is enough, and one without it is Accelerate's
    script.write_text(OWN_PLUGIN)
    processes = 2 if trains else 1
    printed = run(
        *("-m", "accelerate.commands.accelerate_cli", "launch", *["--multi_gpu"] * trains),
        *("--num_processes", str(processes), "--main_process_port", "0", str(script), str(processes)),
    ).stdout
    lines = [line for line in printed.splitlines() if "rank" in line]
    own = [line for line in lines if "MEGATRON_LM" in line]
    assert sorted(own) == [
        f"megalith.dialects.accelerate.accelerator MEGATRON_LM rank {rank}" for rank in range(processes)
    ]
    assert len(lines) == 2 * processes  # plain Accelerate's kinds and ranks differ between its versions
    seen = "import sys; print(sorted({'megalith', 'argparse', 'torch'} & set(sys.modules)))"
    assert run("-c", seen, "accelerate", "launch").stdout == "[]\n"
    assert (
        "torch" not in run("-c", seen, ACCELERATE_MIXED_PRECISION="no").stdout
    )  # of a process that a script starts
    (packages / "a.pth").unlink()  # as after an uninstallation: Python still starts
    message = run("-c", "pass", RANK="0", ACCELERATE_USE_MEGATRON_LM="true").stderr
    assert set(message.splitlines()) == {
        "megalith accelerate enable has no effect: No module named 'megalith'"
    }
    assert run("-c", "pass").stderr == ""
    (packages / "a.pth").write_text(f"{ours}\n{sysconfig.get_path('purelib')}\n")
    run("-m", "megalith", "accelerate", "disable")
    assert [found.name for found in packages.glob("*.pth")] == ["a.pth"]


def test_the_wizard_asks_the_guides_questions_and_writes_its_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "answers").write_text("\n".join(ANSWERS) + "\n")
    with open(tmp_path / "answers") as answers:
        monkeypatch.setattr(sys, "stdin", answers)
        assert main(["accelerate", "config"]) == 0
    assert yaml.safe_load((tmp_path / "accelerate" / "default_config.yaml").read_text()) == DOCUMENTED
    asked = [line for line in capsys.readouterr().out.splitlines() if line.endswith(("?", "]"))]
    assert asked[:3] == [
        "In which compute environment are you running?",
        "Which type of machine are you using?",
        "How many different machines will you use?",
    ]
    assert asked[9:11] == [
        "Where to perform activation checkpointing? ['SELECTIVE', 'FULL', 'NONE']",
        "Where to perform activation partitioning? ['SEQUENTIAL', 'UNIFORM']",
    ]


@pytest.mark.parametrize("answers, message", [
    (["This machine", "TPU"], "one of Multi-GPU"),
    (["", "", "", "yes"], "use `accelerate config` for that"),
    ([*TWO_MACHINES, "2"], "'2' is not a valid answer to .*rank of this machine.*from 0 to 1, because there are 2"),
    ([*TWO_MACHINES, "-1"], "'-1' is not a valid answer to .*rank of this machine"),
    ([*ANSWERS, "4", "no", "1.0", "7"], "7 processes are not tensor 2 × pipeline 2 × data 2 = 8"),
])  # fmt: skip
def test_the_wizard_refuses_what_cannot_be(tmp_path, monkeypatch, answers, message):
    (tmp_path / "answers").write_text("\n".join(answers) + "\n")
    with open(tmp_path / "answers") as lines:
        monkeypatch.setattr(sys, "stdin", lines)
        with pytest.raises(ConfigError, match=message):
            launch_door.run_command(["config", "--config_file", str(tmp_path / "file")])
    assert not (tmp_path / "file").exists()


def test_the_wizards_answer_without_gpus_says_what_it_does(tmp_path, monkeypatch, capsys):
    (tmp_path / "answers").write_text("\n".join([*TWO_MACHINES, "1"]) + "\n")
    with open(tmp_path / "answers") as answers:
        monkeypatch.setattr(sys, "stdin", answers)
        launch_door.run_command(["config", "--config_file", str(tmp_path / "file")])
    made = yaml.safe_load((tmp_path / "file").read_text())
    assert (made["machine_rank"], made["num_machines"], made["use_cpu"]) == (1, 2, False)
    assert "hide them from the script with CUDA_VISIBLE_DEVICES=" in capsys.readouterr().out


@pytest.mark.parametrize("flag, left", [
    ("--use_deepspeed", "use_deepspeed"), ("--use_fsdp", "use_fsdp"), ("--cpu", "cpu"), ("--multi_gpu", None),
])  # fmt: skip
def test_a_type_of_the_command_line_goes_before_the_files(tmp_path, monkeypatch, flag, left):
    (tmp_path / "file").write_text(yaml.safe_dump({**DOCUMENTED}))
    for name in [name for name in os.environ if name.startswith("MEGATRON_LM")]:
        monkeypatch.delenv(name)
    with monkeypatch.context() as kept:
        kept.setattr(os, "environ", dict(os.environ))
        words = [flag, "--config_file", str(tmp_path / "file"), "train.py"]
        args = launch_command_parser().parse_args(words)
        launch_door.choose_megatron(args)
        variables = [name for name in os.environ if name.startswith("MEGATRON_LM")]
    assert (args.use_megatron_lm, args.multi_gpu, bool(variables)) == (left is None, False, left is None)
    assert left is None or getattr(args, left)


def test_the_hook_is_written_and_removed_and_acts_in_launched_processes_alone(tmp_path, monkeypatch):
    patched = []
    monkeypatch.setattr(launch_door.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(megalith.accelerate, "patch", lambda: patched.append(True))
    launch_door.run_command(["enable"])
    (hook,) = tmp_path.iterdir()
    for name, value in (("RANK", None), ("ACCELERATE_USE_MEGATRON_LM", "false"), (None, None)):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
        if name is not None:
            monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
        exec(hook.read_text())
        assert bool(patched) == (name is None)
    launch_door.run_command(["disable"])
    assert not list(tmp_path.iterdir())


def settings(processes=1, kind="llama", **plugin):
    plugin = MegatronLMPlugin(**plugin)
    plugin.set_training_args(1, plugin.data_parallel_size_of(processes))
    return run_config(plugin, *family_of_module(model_of(kind)), "fp32", processes, "cpu")


RECOMPUTED = [
    ({}, (None, None, 1)),
    (dict(recompute_activations=True), ("selective", None, 1)),
    (dict(recompute_activations=True, checkpoint_num_layers=2), ("full", "uniform", 2)),
    (
        dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=3),
        ("full", "block", 3),
    ),
]


@pytest.mark.parametrize("given, wanted", RECOMPUTED)
def test_recomputation_is_what_was_asked_for_and_none_by_default(given, wanted):
    parallel = settings(**given)[0].parallel
    assert (
        parallel.recompute_granularity,
        parallel.recompute_method,
        parallel.recompute_num_layers,
    ) == wanted


def test_the_guides_plugin_blocks_can_all_be_made(monkeypatch):
    blocks = {
        8: dict(tp_degree=2, pp_degree=2, num_micro_batches=4, gradient_clipping=1.0, sequence_parallelism=False,
                recompute_activations=True, use_distributed_optimizer=True, custom_prepare_model_function=None),
        1: dict(recompute_activations=True, checkpoint_num_layers=1, distribute_checkpointed_activations=True,
                partition_activations=True, check_for_nan_in_loss_and_grad=True),
        16: dict(pp_degree=4, num_micro_batches=16),
        4: dict(tp_degree=4, sequence_parallelism=True),
        2: dict(use_distributed_optimizer=True),
    }  # fmt: skip
    made = {processes: settings(processes, **block) for processes, block in blocks.items()}
    assert made[8][0].parallel.data_parallel_sharding_strategy == "optim"
    assert any("partition_activations have no effect" in note for note in made[1][1])
    assert made[4][0].parallel.sequence_parallel
    assert made[16][0].train.global_batch_size == 16 * 4


def test_fields_come_from_the_environment_and_the_file(monkeypatch):
    section = {
        "megatron_lm_tp_degree": 2,
        "megatron_lm_learning_rate_decay_iters": 320000,
        "megatron_lm_legacy_bin": True,
    }
    for name, value in environment_of(section).items():
        monkeypatch.setenv(name, value)
    plugin = MegatronLMPlugin()
    assert (plugin.tp_degree, plugin.lr_decay_iters, plugin.legacy_bin) == (2, 320000, True)
    assert plugin.context_parallel_size == 1 and plugin.is_set("tp_degree") and not plugin.is_set("pp_degree")
    with pytest.raises(ConfigError, match="did you mean 'megatron_lm_tp_degree'"):
        environment_of({"megatron_lm_tp_degre": 2})
    with pytest.raises(ConfigError, match=r"has tp_degree, but .*; write megatron_lm_tp_degree"):
        environment_of({"tp_degree": 2})
    with pytest.raises(ConfigError, match="pass other_megatron_args to MegatronLMPlugin in the script"):
        environment_of({"megatron_lm_other_megatron_args": {"bf16": True}})
    for name, text, value in (
        ("LR_DECAY_STYLE", "cosine", "cosine"),
        ("MIN_LR", "1e-5", 1e-5),
        ("RETURN_LOGITS", "true", True),
        ("IS_TRAIN_BATCH_MIN", "false", False),
        ("EVAL_ITERS", "7", 7),
        ("HIDDEN_DROPOUT", "0.25", 0.25),
        ("SEQ_LENGTH", "many", "a whole number"),
        ("HIDDEN_DROPOUT", "", "a number"),
        ("SEQUENCE_PARALLELISM", "perhaps", "true or false"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(f"MEGATRON_LM_{name}", text)
            if text in ("many", "perhaps", ""):
                with pytest.raises(ConfigError, match=f"MEGATRON_LM_{name} is '{text}'; set it to {value}"):
                    MegatronLMPlugin()
            else:
                assert getattr(MegatronLMPlugin(), name.lower()) == value


def test_what_the_script_gives_goes_before_the_environment_though_it_be_the_default(monkeypatch):
    """As Accelerate's own fields, which ask the environment where they are None."""
    for name, text in {"TP_DEGREE": "2", "LR_DECAY_STYLE": "cosine", "EVAL_ITERS": "7", "IS_TRAIN_BATCH_MIN": "false",
                       "PP_DEGREE": "2"}.items():  # fmt: skip
        monkeypatch.setenv(f"MEGATRON_LM_{name}", text)
    plugin = MegatronLMPlugin(
        1, lr_decay_style="linear", eval_iters=100, is_train_batch_min=True, pp_degree=None
    )
    assert (plugin.tp_degree, plugin.lr_decay_style, plugin.eval_iters) == (1, "linear", 100)
    assert plugin.is_train_batch_min and plugin.pp_degree == 2  # None is no value
    assert plugin.is_set("lr_decay_style") and not plugin.is_set("hidden_dropout")
    again = copy.deepcopy(plugin)
    assert again == plugin and again.set_fields == plugin.set_fields
    assert MegatronLMPlugin().lr_decay_style == "cosine"


def test_every_field_is_told_and_one_without_effect_is_said_to_have_none():
    lines = (Path(__file__).parents[2] / "docs" / "accelerate.md").read_text().split("\n")
    table = {row.strip("| ").rpartition(" | ")[2]: row for row in lines if row.startswith("| `")}
    assert [name for name in FIELDS if not any(f"`{name}`" in row for row in table.values())] == []
    idle = set(re.findall(r"`(\w+)`", table["no effect; a note at the start says so"]))
    assert idle == {*NO_EFFECT, *ENCODER_FIELDS}
    (note,) = [note for note in settings(train_samples=7)[1] if "train_samples" in note]
    assert "has no effect in Megalith: schedules count steps" in note


def test_other_arguments_go_through_the_table_of_megatrons_flags():
    given = {
        "data_parallel_sharding_strategy": "optim_grads",
        "moe_aux_loss_coeff": 0.01,
        "no_rope_fusion": True,
    }
    config, notes = settings(kind="mixtral", other_megatron_args=given)
    assert config.model.moe_aux_loss_coeff == 0.01
    assert any("--no-rope-fusion" in note for note in notes)
    with pytest.raises(ConfigError, match="did you mean"):
        settings(other_megatron_args={"sequence_paralel": True})
    with pytest.raises(ConfigError, match="the Hugging Face model's config determines"):
        settings(kind="gpt2", other_megatron_args={"position_embedding_type": "rope"})


def test_the_models_dropout_and_positions_are_its_own():
    config = settings(kind="gpt2", use_rotary_position_embeddings=True)[0]
    assert config.model.position_embedding_type == "learned_absolute"
    assert settings(kind="gpt2", hidden_dropout=0.25)[0].model.hidden_dropout == 0.25


def test_a_process_that_fails_gives_its_exit_code_and_what_cannot_start_is_said(
    tmp_path, monkeypatch, capsys
):
    def fails(args):
        raise subprocess.CalledProcessError(3, ["python"])

    monkeypatch.chdir(tmp_path)
    Path("script.py").touch()
    monkeypatch.setattr("accelerate.commands.launch.launch_command", fails)
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", "/nowhere")
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    assert main(["accelerate", "launch", "--num_processes", "2", "script.py"]) == 3
    assert (
        "starts one process and ignores --num_processes; for 2 processes also set --multi_gpu"
        in capsys.readouterr().err
    )
    assert main(["accelerate", "launch", "--num_processes", "2", "--multi_gpu", "script.py"]) == 3
    assert main(["accelerate", "launch", "script.py"]) == 3
    assert capsys.readouterr().err == ""
    assert main(["accelerate", "launch", "nowhere.py"]) == 2
    assert capsys.readouterr().err.startswith("error: there is no script nowhere.py; pass")

    def several_fail(args):
        raise ChildFailedError("script", {1: ProcessFailure(1, 7, 5, "nowhere")})

    monkeypatch.setattr("accelerate.commands.launch.launch_command", several_fail)
    assert main(["accelerate", "launch", "script.py"]) == 5
    assert "rank      : 1" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert main(["accelerate", "launch", "--multi_gpu", "--num_processes", "1", "script.py"]) == 2
    assert "error: Accelerate's launcher: You need to use at least 2" in capsys.readouterr().err


def test_processes_that_do_not_divide_are_refused(monkeypatch):
    monkeypatch.setenv("MEGATRON_LM_PP_DEGREE", "2")
    with pytest.raises(
        ConfigError, match=r"; pp_degree comes from the configuration file or from MEGATRON_LM_"
    ):
        fresh_accelerator(tp_degree=2)
    monkeypatch.delenv("MEGATRON_LM_PP_DEGREE")
    with pytest.raises(ConfigError, match="the number of processes, 1, is not divisible by tp_degree 2"):
        fresh_accelerator(tp_degree=2)
    with pytest.raises(ConfigError, match="a whole number of at least 1"):
        MegatronLMPlugin(pp_degree=0)


@pytest.mark.parametrize("text", ["!!python/object/apply:os.system [echo]", "a: [", "\xff"])
def test_a_configuration_file_that_is_no_plain_yaml_is_a_sentence(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"Accelerate's configuration file .* cannot be read"):
        launch_door._file_of(SimpleNamespace(cpu=False, config_file=str(file)))
