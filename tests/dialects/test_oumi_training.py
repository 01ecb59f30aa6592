"""The document's quick start trains on a CPU, in every layout alike, from Python and behind an installed Oumi too."""

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
import transformers
import vllm_stand_in
import yaml
from default_cases import by_default
from engine_stand_ins import served
from oumi_job import SIZES, gsm8k, quick_start, tiny_llama, write_letters
from safetensors.torch import load_file

from megalith.cli.main import main
from megalith.dialects.oumi import oumi_patch
from megalith.dialects.oumi.oumi_file import read_configuration
from megalith.dialects.oumi.oumi_run import open_run
from megalith.dialects.oumi.oumi_settings import translate_oumi
from megalith.errors import ConfigError, DataError
from megalith.oumi import OumiMegatronGrpoTrainer, TrainingConfig
from megalith.parallel.mesh import build_mesh
from megalith.parity.differences import BOUND
from megalith.rl.grpo import PolicyTask
from megalith.training.build import prepare
from megalith.training.run_state import Run

JUDGED = ["--training.reward_functions=[length]", "--model.torch_dtype_str=float32"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the model and the data."""
    folder = tmp_path_factory.mktemp("oumi")
    tiny_llama(folder / "llama")
    gsm8k(folder)
    gsm8k(folder, 5, "held_out")
    return folder


@pytest.fixture
def here(home, tmp_path, monkeypatch):
    """A working folder of a test, with the model and the data in it."""
    for name in ("llama", "gsm8k"):
        (tmp_path / name).symlink_to(home / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_quick_start_trains_and_its_model_loads_in_transformers(here, capsys):
    words = ["oumi", "train", "-c", str(quick_start(here)), "--format", "bin", *SIZES]
    assert main(words) == 0
    out, run = capsys.readouterr().out, here / "run"
    assert "1 prompt × 4 completions = 4 sequences per step" in out and "reward: gsm8k" in out
    assert [step["step"] for step in metrics(run)] == [1, 2]
    assert (run / "checkpoints" / "step_00000002").is_dir()
    assert json.loads((run / "megatron_checkpoint" / "source.json").read_text())["model_name"].endswith(
        "llama"
    )
    hf, kept = run / "hf_model", json.loads((here / "llama" / "config.json").read_text())
    written = json.loads((hf / "config.json").read_text())
    assert written["eos_token_id"] == kept["eos_token_id"] and written["dtype"] == "bfloat16"
    for folder in (hf, hf / "tokenizer"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(hf)
    begun = transformers.AutoModelForCausalLM.from_pretrained(here / "llama")
    prompt = tokenizer("What is 2+2?", return_tensors="pt").input_ids
    generated = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, pad_token_id=0
    )
    assert generated.shape[1] > prompt.shape[1]
    whole = torch.load(hf / "pytorch_model.bin", weights_only=True)
    for name, value in begun.state_dict().items():  # rewards were all 0: no gradient, but bf16
        assert whole[name].shape == value.shape and torch.allclose(whole[name], value, atol=1e-3), name

    assert main([*words, "--training.try_resume_from_last_checkpoint=true", "--training.max_steps=3"]) == 0
    assert [step["step"] for step in metrics(run)] == [1, 2, 3]
    words[3] = str(quick_start(here))
    other = here / "other"
    other.mkdir()
    tiny_llama(other / "llama")
    assert main([*words, f"--model.model_name={other / 'llama'}", "--training.max_steps=4"]) == 2
    assert "was converted from" in capsys.readouterr().err


def losses(folder: str, path: Path, world: int) -> tuple[list[list[float]], dict[str, float]]:
    """Losses and gradient norms of two steps, in fp32, judged by length; and what is said of data.validation."""
    words = [
        *SIZES,
        *JUDGED,
        "--training.max_steps=2",
        "--training.learning_rate=1e-3",
        f"--data.train.datasets[0].dataset_path={folder}/gsm8k",
        f"--data.validation.datasets=[{{dataset_name: gsm8k, dataset_path: {folder}/gsm8k, split: held_out, "
        "sample_count: 4}]",
    ]
    opened = open_run(translate_oumi(read_configuration(path, words), world), world)
    config = opened.config.with_settings({"rl.prompts": "train_dataset", "rl.reward_funcs": ["length"]})
    config, tokenizer, _ = prepare(config, world)
    config = config.with_settings({"rl.eval_prompts": "eval_dataset"})
    task = PolicyTask(["length"], opened.records, opened.eval_records)
    mesh = build_mesh(config.parallel, world, "cpu")
    run = Run(config, tokenizer, mesh, torch.device("cpu"), task)
    with run.data.train_loader(0, 0, run.device) as batches:
        found = [run.train_step(batches) for _ in range(2)]
    figures = task.evaluate(run, lambda done, total: None, lambda: None)
    task.close()
    del figures["seconds"]
    return [[float(step.loss), float(step.grad_norm)] for step in found], figures


@pytest.mark.full
def test_tp2_pp2_and_one_process_are_the_same_run(home, pool):
    steps, judged = losses(str(home), quick_start(home, "one"), 1)
    one = np.array(steps)
    assert np.abs(one).max() > 0.1 and judged["prompts"] == 4
    for mine, evaluated in pool.run(losses, str(home), quick_start(home, "four", 2, 2), 4, size=4):
        assert np.abs(np.array(mine) - one).max() / np.abs(one).max() < BOUND
        assert evaluated == judged


@pytest.mark.full
@pytest.mark.processes
def test_distributed_torchrun_starts_the_ranks(here):
    path = quick_start(here, "four", 2, 2)
    words = [
        "oumi",
        "distributed",
        "torchrun",
        "--nnodes=1",
        "-m",
        "oumi",
        "train",
        "-c",
        path,
        *SIZES,
        *JUDGED,
    ]
    done = forked.run(["-m", "megalith", *words])
    assert done.returncode == 0, done.stderr
    assert (here / "four" / "hf_model" / "config.json").exists() and len(metrics(here / "four")) == 2
    words[3:4] = ["--nproc_per_node=6"]
    done = forked.run(["-m", "megalith", *words])
    assert done.returncode == 2
    assert "world_size (6) must be divisible by the product of all model parallel sizes (4)" in done.stderr


def with_engine(folder: Path, **kwargs) -> Path:
    """The quick start with these of training.trainer_kwargs, weights in fp32 and rewards that differ."""
    path = quick_start(folder)
    tree = yaml.safe_load(path.read_text())
    tree["training"] |= dict(trainer_kwargs=kwargs, reward_functions=["length"])
    tree["model"]["torch_dtype_str"] = "float32"
    tree["megatron"]["weight_sync_method"] = "gloo"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.parametrize("servers", by_default([1, 2], 2))
def test_a_server_that_the_file_names_samples(here, capsys, servers):
    """Weights by gloo, of a Llama whose stand-in is made of the policy's own config.json."""
    config = json.loads((here / "llama" / "config.json").read_text())
    with ExitStack() as stack:
        made = [stack.enter_context(served("vllm 0.29", config)) for _ in range(servers)]
        path = with_engine(here, engine_url=[one.url for one in made])
        assert main(["oumi", "train", "-c", str(path), *SIZES]) == 0
        assert all(one.bodies and one.received for one in made)
    out = capsys.readouterr().out
    assert "built-in engine" not in out and "4 sequences per step" in out
    assert all(step["drift_canary"] < 1.0001 for step in metrics(here / "run"))
    tensors = load_file(here / "run" / "hf_model" / "model.safetensors")
    assert tensors.keys() == made[0].received.keys()


def test_vllm_in_the_trainers_processes_is_asked_for_by_its_name(here, monkeypatch):
    vllm = vllm_stand_in.install(monkeypatch)
    assert main(["oumi", "train", "-c", str(with_engine(here, engine="vllm")), *SIZES]) == 0
    assert vllm.made and all(step["drift_canary"] < 1.0001 for step in metrics(here / "run"))


def test_where_no_vllm_is_the_file_is_refused_with_what_installs_it(here, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert main(["oumi", "train", "-c", str(with_engine(here, engine="vllm")), *SIZES]) == 2
    assert "vLLM cannot be imported" in capsys.readouterr().err


def test_the_tokenizer_may_be_of_another_folder(here):
    (here / "words").mkdir()
    write_letters(here / "words")
    asked = translate_oumi(
        read_configuration(quick_start(here), [f"--model.tokenizer_name={here / 'words'}"]), 1
    )
    data = open_run(asked, 1).config.data
    assert (data.tokenizer_type, data.tokenizer_model) == ("HuggingFaceTokenizer", str(here / "words"))


def shouting(completions, question, **columns):
    assert len(completions) == len(question)
    return [float(sum(map(str.isupper, str(one)))) for one in completions]


def test_the_trainer_of_oumis_names_trains_and_says_its_figures(here):
    words = [*SIZES, "--training.max_steps=2", "--training.eval_strategy=steps", "--training.eval_steps=1"]
    config = TrainingConfig.from_yaml(quick_start(here), words)
    records = [{"prompt": f"{n}?", "question": str(n)} for n in range(8)]
    trainer = OumiMegatronGrpoTrainer(None, config, [shouting], records, records[:3])
    with pytest.raises(ConfigError, match=r"call train\(\) first"):
        trainer.save_model(config)
    assert trainer.get_last_eval_metrics() == {}
    trainer.train()
    trainer.save_state()
    trainer.save_model(config, final=True)
    figures = trainer.get_last_eval_metrics()
    evaluations = [json.loads(line) for line in (here / "run" / "evaluations.jsonl").read_text().splitlines()]
    assert [one["step"] for one in evaluations] == [1, 2] and figures["eval/prompts"] == 3
    assert figures["eval/reward_mean"] == evaluations[1]["validation_rewards_mean"] > 0
    assert figures["eval/reward_max"] >= figures["eval/reward_median"] >= figures["eval/reward_min"]
    assert figures["eval/completion_length"] > 1 and figures["eval/reward_std"] > 0
    assert (here / "run" / "hf_model" / "tokenizer" / "tokenizer.json").exists()
    with pytest.raises(ConfigError, match="with a processor"):
        OumiMegatronGrpoTrainer(None, config, [shouting], records, None, processor=object())
    with pytest.raises(ConfigError, match="does not support teacher"):
        OumiMegatronGrpoTrainer(None, config, [shouting], records, teacher=1)
    with pytest.raises(ConfigError, match="reward_funcs has 3; use names or functions"):
        OumiMegatronGrpoTrainer(None, config, [shouting, 3], records)
    with pytest.raises(ConfigError, match=r"train_dataset has 'a\.jsonl'; it needs records"):
        OumiMegatronGrpoTrainer(None, config, shouting, "a.jsonl")
    config.training["trainer_type"] = "TRL_SFT"
    with pytest.raises(ConfigError, match="is TRL_SFT, but OumiMegatronGrpoTrainer trains with GRPO"):
        OumiMegatronGrpoTrainer(None, config, [shouting], records)


STAND_IN = {  # of the package oumi, by what the patch asks of it
    "__init__": "def train(config):\n    import oumi.train\n    return oumi.train.train(config)\n",
    "train": "from oumi.builders import build_trainer\n\n\ndef train(config):\n    return 'theirs'\n",
    "builders/__init__": "from oumi.builders.training import build_trainer\n",
    "builders/training": (
        "def build_trainer(trainer_type, processor, verbose=False):\n"
        "    raise NotImplementedError(f'Trainer type {trainer_type} not supported.')\n"
    ),
    "cli/__init__": "",
    "cli/main": "import sys\n\n\ndef run():\n    print('their command line', *sys.argv)\n    sys.exit(3)\n",
    "core/__init__": "",
    "core/trainers/__init__": "",
    "core/configs/__init__": (
        "import dataclasses\nimport enum\n\n\n"
        "class TrainerType(enum.Enum):\n    TRL_SFT = 'trl_sft'\n    HF = 'hf'\n\n\n"
        "@dataclasses.dataclass\nclass TrainingParams:\n"
        "    trainer_type: TrainerType = TrainerType.HF\n    max_steps: int = -1\n    output_dir: str = 'output'\n"
        "    per_device_train_batch_size: int = 8\n    gradient_accumulation_steps: int = 1\n"
        "    learning_rate: float = 5e-5\n    resume_from_checkpoint: str | None = None\n"
        "    reward_functions: list | None = None\n\n\n"
        "@dataclasses.dataclass\nclass TrainingConfig:\n    model: dict = dataclasses.field(default_factory=dict)\n"
        "    data: dict = dataclasses.field(default_factory=dict)\n"
        "    training: TrainingParams = dataclasses.field(default_factory=TrainingParams)\n"
    ),
}


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A package `oumi` in this process, gone afterwards."""
    for name, text in STAND_IN.items():
        path = tmp_path / "packages" / "oumi" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "oumi"]:
        del sys.modules[name]


def test_an_installed_oumi_reaches_us_by_its_trainer_type(here, stand_in, monkeypatch, capsys):
    oumi_patch.patch()
    oumi_patch.patch()
    import oumi
    from oumi.core.configs import TrainerType, TrainingConfig, TrainingParams
    from oumi.core.trainers.megatron.bridge_utils import check_megatron_bridge_available

    check_megatron_bridge_available()
    kind = TrainerType["MEGATRON_GRPO"]
    assert kind is TrainerType.MEGATRON_GRPO is TrainerType("megatron_grpo") and kind in list(TrainerType)
    assert oumi.builders.training.build_trainer(kind, None) is OumiMegatronGrpoTrainer
    with pytest.raises(NotImplementedError):
        oumi.builders.build_trainer(TrainerType.TRL_SFT, None)
    assert oumi.train(TrainingConfig()) == "theirs"
    tree = read_configuration(quick_start(here), [*SIZES, "--training.max_steps=1"])
    training = TrainingParams(kind, 1, str(here / "run"), 1, 4, reward_functions=["length"])
    config = TrainingConfig(tree["model"], tree["data"], training, megatron=tree["megatron"],
                            grpo=tree["grpo"] | {"max_completion_length": 10, "max_prompt_length": 150})  # fmt: skip
    assert oumi.train(config) is None
    assert len(metrics(here / "run")) == 1 and (here / "run" / "hf_model" / "config.json").exists()
    monkeypatch.setattr(sys, "argv", sys.argv)
    assert oumi_patch.run_oumi(["train", "-c", "x"]) == 3
    assert "their command line oumi train -c x" in capsys.readouterr().out


def test_the_bridge_that_is_not_available_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(
        ImportError, match=r"^megatron-bridge is not available: .*needs safetensors.*pip install"
    ):
        oumi_patch.check_megatron_bridge_available()
    with pytest.raises(ConfigError, match=r"Oumi cannot be imported.*megalith oumi train"):
        oumi_patch.patch()


SFT = """\
model: {{model_name: {here}/llama, model_max_length: 128, torch_dtype_str: auto, trust_remote_code: True}}
data:
  train:
    datasets: [{{dataset_name: text_sft, dataset_path: {here}/{data}}}]
    collator_name: text_with_padding
training: {{trainer_type: {trainer}, max_steps: 2, per_device_train_batch_size: 2, output_dir: {here}/out,
  learning_rate: 1e-3, optimizer: adamw_torch_fused, lr_scheduler_type: cosine, warmup_ratio: 0.5,
  save_steps: 0, enable_gradient_checkpointing: True, dataloader_num_workers: auto}}
"""


@pytest.mark.parametrize("trainer", ["TRL_SFT", "TRL_DPO"])
def test_fine_tuning_and_preferences_are_trained(here, trainer):
    if trainer == "TRL_SFT":
        records = [{"instruction": f"say {n}", "output": f"number {n}"} for n in range(6)]
    else:
        records = [{"prompt": f"say {n}", "chosen": f" yes {n}", "rejected": " no"} for n in range(6)]
    (here / "chat.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    (here / "x.yaml").write_text(SFT.format(here=here, data="chat.jsonl", trainer=trainer))
    held_out = f"--data.validation.datasets=[{{dataset_name: text_sft, dataset_path: {here}/chat.jsonl}}]"
    words = [held_out, "--training.eval_strategy=steps", "--training.eval_steps=1"]
    assert main(["oumi", "train", "-c", "x.yaml", *words]) == 0
    found = metrics(here / "out")
    assert len(found) == 2 and found[-1]["global_batch_size"] == 2
    evaluations = [json.loads(line) for line in (here / "out" / "evaluations.jsonl").read_text().splitlines()]
    assert [one["step"] for one in evaluations] == [1, 2] and evaluations[1]["validation_loss"] < evaluations[
        0
    ]["validation_loss"]
    transformers.AutoModelForCausalLM.from_pretrained(here / "out" / "hf_model")


def test_adapters_are_left_in_pefts_format_or_merged(here):
    (here / "chat.jsonl").write_text(json.dumps({"prompt": "say 1", "completion": "number 1"}) + "\n")
    (here / "x.yaml").write_text(SFT.format(here=here, data="chat.jsonl", trainer="TRL_SFT"))
    words = ["--training.use_peft=true", "--peft.lora_r=4", "--peft.lora_target_modules=[q_proj, v_proj]"]
    assert main(["oumi", "train", "-c", "x.yaml", *words]) == 0
    written = json.loads((here / "out" / "hf_model" / "adapter_config.json").read_text())
    assert written["r"] == 4 and Path(written["base_model_name_or_path"]) == here / "llama"
    assert (here / "out" / "hf_model" / "tokenizer" / "tokenizer.json").exists()
    words += ["--peft.peft_save_mode=MERGED", f"--training.output_dir={here / 'whole'}"]
    assert main(["oumi", "train", "-c", "x.yaml", *words]) == 0
    whole = transformers.AutoModelForCausalLM.from_pretrained(here / "whole" / "hf_model").state_dict()
    begun = transformers.AutoModelForCausalLM.from_pretrained(here / "llama").state_dict()
    changed = {name for name, value in whole.items() if not torch.equal(value, begun[name])}
    assert changed and all("q_proj" in name or "v_proj" in name for name in changed)
    words[-2:] = [f"--training.output_dir={here / 'saved'}", "--peft.lora_modules_to_save=[norm]"]
    assert main(["oumi", "train", "-c", "x.yaml", *words]) == 0
    written = json.loads((here / "saved" / "hf_model" / "adapter_config.json").read_text())
    assert written["modules_to_save"] == ["input_layernorm", "norm", "post_attention_layernorm"]


def test_a_dataset_that_is_not_here_is_asked_of_the_hubs_library(here, monkeypatch):
    run = translate_oumi(read_configuration(quick_start(here), SIZES), 1)
    (here / "gsm8k").unlink()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"'gsm8k' is not a local file or folder; set .*dataset_path"):
        open_run(run, 1)

    class Library:
        def load_dataset(self, name, subset, split):
            assert (name, subset, split) == ("gsm8k", "main", "train")
            return [{"question": "1+1?", "answer": "#### 2"}]

    monkeypatch.setitem(sys.modules, "datasets", Library())
    record = open_run(run, 1).records[0]
    assert record["prompt"][0]["content"].startswith("1+1? ") and "####" in record["prompt"][0]["content"]
    assert (here / "run" / "datasets" / "gsm8k-train.jsonl").exists()
