"""Oumi's configurations mean what the document says: keys, defaults, contradictions, machines, examples, migration."""

import copy
import dataclasses
import difflib
import json
import re
from contextlib import suppress
from pathlib import Path

import pytest
import vllm_stand_in
import yaml
from default_cases import by_default
from oumi_job import QUICK_START

from benchmarks import oumi_configurations
from megalith.cli.main import main
from megalith.config import RunConfig
from megalith.config.extensions import REWARDS
from megalith.dialects.oumi import oumi_command, oumi_errors, oumi_file, oumi_grpo, oumi_keys, oumi_params
from megalith.dialects.oumi.oumi_command import machines_of, planned_config
from megalith.dialects.oumi.oumi_errors import name_oumi_keys
from megalith.dialects.oumi.oumi_file import read_configuration
from megalith.dialects.oumi.oumi_keys import (
    ALL_KEYS,
    ENGINE_KEYS,
    KEYS,
    VERL_PREFIX,
    Assigns,
    Ignored,
    MustBe,
    Read,
)
from megalith.dialects.oumi.oumi_migration import with_key
from megalith.dialects.oumi.oumi_settings import translate_oumi
from megalith.errors import ConfigError
from megalith.planner.rates import rates_of
from megalith.planner.search import planned

ROOT = Path(__file__).parents[2]
SHAPE = {"preset": "llama3.1-70b"}


@pytest.fixture
def written(tmp_path):
    """A file of a text; the quick start of the document where none is given."""

    def write(text=None, **sizes):
        path = tmp_path / "x.yaml"
        sizes = dict(model="meta-llama/Llama-3.1-70B-Instruct", output="output/x", tp=8, pp=2) | sizes
        path.write_text(QUICK_START.format(**sizes) if text is None else text)
        return path

    return write


def translate(path, *overrides, world=16):
    return translate_oumi(read_configuration(path, overrides), world)


def refusal(path, *overrides, world=16) -> str:
    with pytest.raises(ConfigError) as raised:
        run = translate(path, *overrides, world=world)
        run.config(SHAPE)
    return str(raised.value)


def sft(**training) -> str:
    tree = {
        "model": {"model_name": "m", "model_max_length": 256},
        "data": {"train": {"datasets": [{"dataset_name": "text_sft", "dataset_path": "x.jsonl"}]}},
        "training": {"trainer_type": "TRL_SFT", **training},
    }
    return yaml.safe_dump(tree)


def test_the_quick_start_is_the_run_that_the_document_describes(written):
    run = translate(written())
    config = run.config(SHAPE)
    parallel, rl, train = config.parallel, config.rl, config.train
    assert (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size) == (8, 2)
    assert parallel.sequence_parallel and parallel.data_parallel_sharding_strategy == "no_shard"
    assert (train.train_iters, train.micro_batch_size, train.global_batch_size) == (2, 1, 4)
    assert (train.precision, train.seed, train.output_dir) == ("bf16", 42, "output/x")
    assert (rl.num_generations, rl.temperature, rl.epsilon, rl.packing) == (4, 0.9, 0.2, True)
    assert (rl.beta, rl.max_prompt_length, rl.max_completion_length) == (0.001, 512, 256)
    optim = config.optim
    assert (optim.optimizer, optim.lr, optim.weight_decay, optim.lr_decay_style) == (
        "adamw",
        5e-7,
        0.0,
        "linear",
    )
    assert run.rewards == ["gsm8k"] and run.exports_hf and run.model_parallel == 16
    message = "\n".join(run.notes)
    assert "1 prompt × 4 completions = 4 sequences per step" in message
    assert "reward: gsm8k, implied by the dataset gsm8k" in message
    assert "built-in engine" in message and "inference_backend" in message


REFERENCE = {  # the document's whole section, and what is set beside it
    "megatron.context_parallel_size": "2",
    "megatron.micro_batch_size": "1",
    "megatron.global_batch_size": "8",
    "megatron.optimizer_config.optimizer_cpu_offload": "True",
    "megatron.optimizer_config.optimizer_offload_fraction": "0.5",
    "megatron.transformer_config.recompute_granularity": "selective",
    "megatron.transformer_config.recompute_method": "uniform",
    "megatron.transformer_config.recompute_modules": "[core_attn, mlp]",
    "megatron.checkpoint_config.use_async_checkpoint": "True",
    "megatron.virtual_pipeline_model_parallel_size": "4",
    "megatron.grpo_config.clamp_eps_upper": "0.28",
    "megatron.grpo_config.kl_beta": "0",
    "megatron.grpo_config.normalize_advantages": "False",
    "training.gradient_accumulation_steps": "8",
    "training.lr_scheduler_type": "cosine_with_min_lr",
    "training.lr_scheduler_kwargs.min_lr_rate": "0.1",
    "training.learning_rate": "1e-6",
    "training.warmup_steps": "10",
    "training.optimizer": "paged_adamw_8bit",
    "training.save_steps": "0",
    "training.enable_wandb": "True",
    "training.run_name": "one",
}


def test_the_sections_of_the_reference_are_read(written):
    run = translate(written(), *(f"--{key}={value}" for key, value in REFERENCE.items()), world=32)
    config = run.config(SHAPE)
    parallel, optim, rl = config.parallel, config.optim, config.rl
    assert (parallel.context_parallel_size, parallel.virtual_pipeline_model_parallel_size) == (2, 2)
    assert parallel.data_parallel_sharding_strategy == "optim"
    assert (parallel.recompute_granularity, parallel.recompute_modules) == ("selective", ["core_attn", "mlp"])
    assert optim.optimizer_cpu_offload and optim.optimizer_offload_fraction == 0.5
    assert (optim.exp_avg_dtype, optim.lr_decay_style, optim.lr_warmup_iters) == ("fp32", "cosine", 10)
    assert optim.min_lr == pytest.approx(1e-7)
    assert (rl.epsilon_high, rl.beta, rl.scale_rewards) == (0.28, 0, "none")
    assert config.checkpoint.async_save and config.checkpoint.save_interval is None
    assert config.log.wandb_name == "one" and config.train.global_batch_size == 8
    message = "\n".join(run.notes)
    assert "4 / 2 pipeline ranks = 2 chunks of layers per rank" in message
    assert "recompute_method uniform has no effect with selective" in message


def test_every_way_out_of_too_little_memory_is_a_setting(written):
    """What the document says to do when memory runs out, and its aggressive recomputation."""
    section = "--megatron.transformer_config.recompute_"
    full = [f"{section}granularity=full", f"{section}num_layers=2", f"{section}modules=[core_attn, mlp]"]
    run = translate(written(), *full)
    parallel = run.config(SHAPE).parallel
    assert (parallel.recompute_method, parallel.recompute_num_layers) == ("uniform", 2)
    assert "recompute_modules ['core_attn', 'mlp'] has no effect with full" in "\n".join(run.notes)
    run = translate(
        written(),
        "--training.enable_gradient_checkpointing=True",
        "--megatron.optimizer_config.optimizer_cpu_offload=True",
        "--megatron.pipeline_model_parallel_size=4",
        world=32,
    ).config(SHAPE)
    assert (run.parallel.recompute_granularity, run.parallel.pipeline_model_parallel_size) == ("full", 4)
    assert run.optim.optimizer_cpu_offload and run.optim.optimizer_offload_fraction == 1.0


def test_grpo_has_three_places_and_verl_a_fourth(written):
    alone = QUICK_START.partition("grpo:\n  num")[0].format(model="m", output="o", tp=8, pp=2)
    for place in ("grpo", "training.grpo"):
        run = translate(written(alone), f"--{place}.num_generations=2", f"--{place}.temperature=1.0")
        assert (run.tree["rl"]["num_generations"], run.tree["rl"]["temperature"]) == (2, 1.0)
    assert "grpo.temperature is 0.9, megatron.sampling_config.temperature is 0.7" in refusal(
        written(), "--megatron.sampling_config.temperature=0.7"
    )
    assert "grpo.num_generations is 4, training.grpo.num_generations is 8" in refusal(
        written(), "--training.grpo.num_generations=8"
    )
    verl = {"actor_rollout_ref.rollout.n": 4, "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
            "data.train_batch_size": 8, "actor_rollout_ref.actor.use_kl_loss": "true",
            "actor_rollout_ref.actor.kl_loss_coef": 0.01, "data.max_response_length": 100,
            "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean",
            "actor_rollout_ref.actor.clip_ratio_high": 0.28}  # fmt: skip
    words = [f"--{VERL_PREFIX}{key}={value}" for key, value in verl.items()]
    rl = (run := translate(written(), "--training.gradient_accumulation_steps=8", *words)).config(SHAPE).rl
    assert (rl.mini_batches, rl.beta, rl.kl_estimator, rl.loss_type) == (4, 0.01, "k3", "grpo")
    assert (rl.max_completion_length, rl.epsilon, rl.epsilon_high) == (100, 0.2, 0.28)
    assert run.tree["train"]["global_batch_size"] == 8


CHUNKS = "virtual_pipeline_model_parallel_size"
REFUSED = {  # overrides of the quick start: what is said
    "--megatron.tensor_modl_parallel_size=2": r"Oumi has no key megatron\.tensor_modl_parallel_size.*did you mean "
    "'tensor_model_parallel_size'",
    "--megatrn.x=1": "Oumi has no section 'megatrn'.*did you mean 'megatron'",
    f"--{VERL_PREFIX}actor_rollout_ref.model.external_lib=x": "external_lib; docs/from_oumi",
    "--training.tensor_modl_parallel_size=2": "did you mean megatron.tensor_model_parallel_size",
    "--training.tensor_model_parallel_size=2": "did you mean megatron.tensor_model_parallel_size",
    "--megatron.global_batch_size=8": r"global_batch_size is 8, but micro_batch_size \(1\) × "
    r"training.gradient_accumulation_steps \(4\) × data parallel \(1\) = 4",
    "--megatron.micro_batch_size=2": "megatron.micro_batch_size is 2, training.per_device_train_batch_size is 1",
    "--training.gradient_accumulation_steps=3": r"3 sequences is not divisible by num_generations \(4\)",
    "--megatron.pipeline_model_parallel_size=4": r"world_size \(16\) must be divisible by the product of all model "
    r"parallel sizes \(32\)",
    "--megatron.virtual_pipeline_model_parallel_size=3": r"is 3, the virtual stages of all ranks, .*\(2\)",
    "--fsdp.enable_fsdp=True": "fsdp.enable_fsdp is True, which .*; set fsdp.enable_fsdp to False",
    "--fsdp.enable_fsdp=True --deepspeed.enable_deepspeed=True": "fsdp.enable_fsdp is True.*"
    "deepspeed.enable_deepspeed is True",
    "--deepspeed.enable_deepspeed=True": "deepspeed.enable_deepspeed is True.*set deepspeed.enable_deepspeed to False",
    "--megatron.enable_weight_sync=False": "enable_weight_sync is False.*initial weights",
    "--megatron.vllm_weight_sync_interval=4": "vllm_weight_sync_interval is 4, which is not supported",
    "--megatron.weight_sync_method=carrier": "use nccl, gloo, checkpoint or ipc",
    "--megatron.inference_backend=tgi": "use vllm, sglang or megatron",
    "--megatron.grpo_config.reference_update_interval=5": "reference_update_interval is 5",
    "--megatron.optimizer_config.optimizer_offload_fraction=0.5": "optimizer_cpu_offload is False and",
    "--megatron.transformer_config.recompute_granularity=some": "use full, selective or null",
    "--training.trainer_type=VERL_GRPO": "`megalith oumi migrate` converts it to MEGATRON_GRPO",
    "--training.trainer_type=TRL_KTO": "TRL_KTO, which is not supported; trainers: MEGATRON_GRPO",
    "--training.max_steps=many": "training.max_steps is 'many'; it must be a whole number",
    "--training.optimizer=adafactor": "use one of adamw",
    "--training.lr_scheduler_type=cosine_with_restarts": "use one of linear, cosine",
    "--training.reward_functions=[count_letters]": "has 'count_letters'.*path.py:function",
    "--training.trainer_kwargs.betta=1": "trainer_kwargs has 'betta'",
    "--data.train.datasets[0].mixture_proportion=0.5": r"datasets\[0\].mixture_proportion is 0.5",
    "--model.load_pretrained_weights=False": "load_pretrained_weights is False",
    "--megatron.sampling_config.top_p=0.8": "megatron.sampling_config.top_p",
    "--model.model_max_length=200": r"max_prompt_length \(1\) \+ max_completion_length \(256\) = 257 tokens",
    f"--{VERL_PREFIX}actor_rollout_ref.actor.use_kl_loss=True --megatron.grpo_config.kl_beta=0.01": "kl_beta is 0.01, "
    "but .* 0.001; make the two equal",
    f"--megatron.{CHUNKS}=4 --{VERL_PREFIX}actor_rollout_ref.actor.megatron.{CHUNKS}=4":
    "is 4 per rank, 8 in all",
    f"--{VERL_PREFIX}data.train_files=[a.parquet]": "name the file as dataset_path",
    f"--{VERL_PREFIX[:-1]}=x": "training.verl_config_overrides is 'x'; it must be a mapping of keys to values",
    f"--{VERL_PREFIX}data.truncation=left": "truncation is 'left', which is not supported: prompts are not cut",
    f"--{VERL_PREFIX}actor_rollout_ref.rollout.multi_turn.enable=True": "completions have one turn",
    f"--{VERL_PREFIX}actor_rollout_ref.rollout.agent.default_agent_loop=swe_agent": "completions have one turn",
    f"--{VERL_PREFIX}actor_rollout_ref.rollout.val_kwargs.top_p=0.7": "evaluation samples from all tokens",
    f"--{VERL_PREFIX}actor_rollout_ref.rollout.repetition_penalty=1.1": "the sampler's probabilities would differ",
    "--megatron.weight_sync_timeout=0": "weight_sync_timeout is 0.0, which is not supported",
    "--training.trainer_kwargs={engine: own, engine_url: http://h:1}": "engine is own, but engine_url is a server, 'http://h:1'",
    "--grpo.epsilon=-1": "grpo.epsilon",
    "--training.learning_rate=-1": "training.learning_rate",
}  # fmt: skip


@pytest.mark.parametrize("override", REFUSED)
def test_what_is_wrong_is_said_in_oumis_words(written, override):
    message = refusal(written(), *override.split(" --"))
    assert re.search(REFUSED[override], message, re.DOTALL), message


def test_what_nothing_reads_is_named(written):
    notes = translate(
        written(), "--training.warmup_steps=3", "--training.warmup_ratio=0.1", "--peft.lora_r=4"
    ).notes
    assert "training.warmup_ratio, peft.lora_r (not read by MEGATRON_GRPO" in "".join(notes)


def test_all_that_is_wrong_is_in_one_error(written):
    words = ["--megatron.x=1", "--fsdp.enable_fsdp=True", "--megatron.pipeline_model_parallel_size=3"]
    assert len(refusal(written(), *words).splitlines()) >= 3


def test_experts_print_both_world_sizes(written):
    words = ["--megatron.tensor_model_parallel_size=2", "--megatron.expert_model_parallel_size=4",
             "--megatron.pipeline_model_parallel_size=1"]  # fmt: skip
    run = translate(written(), *words, world=16)
    assert run.tree["parallel"]["expert_tensor_parallel_size"] == 2
    message = "\n".join(run.notes)
    assert "the dense layers have 8 replicas" in message and "counts 2 (world / TP·PP·CP·EP)" in message
    assert run.tree["train"]["global_batch_size"] == 32  # 1 × 4 × 8 replicas


def test_sft_and_dpo_are_ours(written, tmp_path, monkeypatch):
    text = sft(per_device_train_batch_size=2, gradient_accumulation_steps=8, max_steps=-1, use_peft=True,
               optimizer="adamw_torch_fused", enable_gradient_checkpointing=True, warmup_ratio=0.03,
               lr_scheduler_type="cosine", save_steps=800, logging_steps="${training.save_steps}")  # fmt: skip
    more = ["--peft.lora_r=16", "--peft.lora_target_modules=[q_proj, v_proj]", "--fsdp.enable_fsdp=True",
            "--peft.lora_modules_to_save=[lm_head]",
            "--data.train.collator_name=text_completions_only_with_padding"]  # fmt: skip
    run = translate(written(text), *more, world=4)
    config = run.config(SHAPE)
    assert config.sft.enabled and config.sft.num_train_epochs == 3 and config.train.global_batch_size == 64
    assert config.sft.assistant_only_loss and not config.sft.packing and config.data.seq_length == 256
    assert config.parallel.data_parallel_sharding_strategy == "optim_grads_params"
    assert config.parallel.recompute_granularity == "full" and config.log.log_interval == 800
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (16, 8, ["q_proj", "v_proj"])
    assert config.lora.modules_to_save == ["lm_head"]
    assert config.optim.lr_warmup_fraction == 0.03 and config.train.eval_iters == 0
    paged = translate(
        written(sft(optimizer="paged_adamw_8bit", eval_strategy=False)), *more[2:3], "--fsdp.cpu_offload=True"
    )
    assert paged.config(SHAPE).optim.exp_avg_dtype == "fp32" and "offloaded moments are fp32" in "\n".join(
        paged.notes
    )
    assert (
        translate(written(sft(optimizer="adamw_8bit")), world=1).config(SHAPE).optim.exp_avg_sq_dtype == "fp8"
    )
    plain = translate(written(sft()), world=1).config(SHAPE)
    assert not plain.sft.assistant_only_loss and plain.train.micro_batch_size == 8
    towers = ["--training.use_peft=True", "--peft.lora_target_modules=[q_proj]",
              "--peft.lora_exclude_modules=['.*vision_tower.*', q_proj]"]  # fmt: skip
    with pytest.raises(
        ConfigError,
        match=r"^peft\.lora_exclude_modules has 'q_proj', which excludes modules of the language model",
    ):
        translate(written(sft()), *towers, world=1)
    folder = tmp_path / "oumi" / "datasets" / "chat_templates"
    folder.mkdir(parents=True)
    for name in ("../../__init__.py", "mine.jinja"):
        (folder / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert translate(written(sft()), "--model.chat_template=mine").chat_template == str(folder / "mine.jinja")
    with pytest.raises(ConfigError, match="'other', a template of Oumi's package, which is not installed or"):
        translate(written(sft()), "--model.chat_template=other")
    codes = translate(written(sft()), "--model.model_kwargs.quantization_config.quant_method=mxfp4")
    assert "MXFP4 weights are dequantized" in "\n".join(codes.notes)
    zero = ["--deepspeed.enable_deepspeed=True", "--deepspeed.zero_stage=ZERO_3",
            "--deepspeed.offload_optimizer.device=cpu", "--deepspeed.overlap_comm=True"]  # fmt: skip
    staged = translate(written(sft()), *zero, world=4).config(SHAPE)
    assert staged.parallel.data_parallel_sharding_strategy == "optim_grads_params"
    assert staged.optim.optimizer_cpu_offload
    words = ["--training.trainer_type=trl_dpo", "--training.trainer_kwargs.beta=0.2"]
    assert translate(written(sft()), *words, world=1).config(SHAPE).dpo.beta == 0.2


def test_every_key_is_of_one_kind_and_what_it_sets_is_there():
    fields = {name: whole.annotation.model_fields for name, whole in RunConfig.model_fields.items()}
    paths = {row.path for row in ALL_KEYS.values() if isinstance(row, Assigns)} | {
        *oumi_errors.SETTING_TO_KEY
    }
    paths |= {path for table in oumi_keys.TRAINER_KWARGS.values() for path in table.values() if path}
    for path in paths:
        section, _, name = path.partition(".")
        assert name in fields[section], path
    assert all(isinstance(row, Assigns | Read | Ignored | MustBe) for row in ALL_KEYS.values())
    assert {*ENGINE_KEYS.values()} <= {*KEYS} and tuple(REWARDS) == oumi_grpo.KNOWN_REWARDS
    assert name_oumi_keys("train.global_batch_size is wrong") == "megatron.global_batch_size is wrong"
    message = "set training.trainer_kwargs.engine own, or training.trainer_kwargs.engine_url"
    assert name_oumi_keys("set rl.engine own, or rl.engine_url") == message


BRANCH = {"sampling_config.top_p", "sampling_config.top_k"}  # the key's default is ours where it is left out


def test_an_engine_that_serves_is_reached_by_the_settings_of_rl(written):
    words = ["--megatron.weight_sync_method=gloo", "--megatron.vllm_weight_sync_interval=2",
             "--megatron.weight_sync_timeout=30"]  # fmt: skip
    wanted = dict(engine="vllm", weight_sync_method="gloo", max_staleness=1, weight_sync_timeout=30.0)
    for name in ("engine_url", "vllm_server_base_url"):
        rl = translate(written(), *words, f"--training.trainer_kwargs.{name}=http://h:1").tree["rl"]
        assert rl | wanted | {"engine_url": "http://h:1"} == rl
    assert "weight_sync_timeout is 30.0, which is not supported" in refusal(written(), *words)


ENGINE, URL = "--training.trainer_kwargs.engine=", "--training.trainer_kwargs.engine_url=http://h:1"
BACKEND, METHOD = "--megatron.inference_backend=", "--megatron.weight_sync_method="


def test_the_keys_of_engines_say_the_same_or_are_refused(written):
    without = yaml.safe_load(written().read_text())
    del without["megatron"]["inference_backend"]
    rl = translate(written(yaml.safe_dump(without)), URL).tree["rl"]
    assert rl["engine"] == "vllm" and rl["weight_sync_method"] == "nccl"  # Oumi's defaults
    run = translate(written(), f"{ENGINE}sglang", f"{BACKEND}sglang", f"{METHOD}checkpoint")
    assert run.tree["rl"]["engine"] == "sglang" and run.tree["rl"]["weight_sync_method"] == "checkpoint"
    assert "built-in engine" not in "".join(run.notes)
    share = "--training.grpo.vllm_gpu_memory_utilization=0.4"
    assert translate(written(), f"{ENGINE}vllm", share).tree["rl"]["vllm_gpu_memory_utilization"] == 0.4
    assert "vllm_gpu_memory_utilization 0.4 has no effect" in "".join(translate(written(), share).notes)
    for words, message in (
        ((f"{ENGINE}sglang", f"{BACKEND}vllm"), "engine is sglang, but megatron.inference_backend is vllm"),
        (
            (URL, f"{BACKEND}megatron"),
            "engine_url is 'http://h:1', but megatron.inference_backend is megatron",
        ),
        (
            (URL, f"{METHOD}gloo", "--training.trainer_kwargs.weight_sync_method=nccl"),
            "trainer_kwargs.weight_sync_method is nccl, but megatron.weight_sync_method is gloo",
        ),
    ):
        assert message in refusal(written(), *words)


def test_the_backend_that_a_file_names_samples(written, monkeypatch):
    """SGLang's server at its usual address, vLLM in the trainer's processes, where it is installed."""
    rl = translate(written(), f"{BACKEND}sglang").tree["rl"]
    assert (rl["engine"], rl["weight_sync_method"], "engine_url" in rl) == ("sglang", "nccl", False)
    assert "engine" not in translate(written(), f"{BACKEND}megatron").tree["rl"]
    without = yaml.safe_load(written().read_text())
    del without["megatron"]["inference_backend"]
    for key in ("grpo.use_vllm", "training.grpo.use_vllm"):
        words = written(yaml.safe_dump(without)), f"--{key}=True"
        assert "use_vllm is true, but vLLM is not installed; install it, set" in refusal(*words)
        assert translate(*words, URL).tree["rl"]["engine"] == "vllm"
    vllm_stand_in.install(monkeypatch)
    assert translate(*words).tree["rl"]["engine"] == "vllm"
    run = translate(written(), "--training.grpo.vllm_gpu_memory_utilization=0.4")
    assert run.tree["rl"]["engine"] == "vllm" and run.tree["rl"]["vllm_gpu_memory_utilization"] == 0.4
    assert "built-in engine" not in "".join(run.notes)


ODD = [0, -1, 2.5, "x", "", [], {}, [{}], None, True, "1e999", "[1"]


@pytest.mark.parametrize("stride", by_default([6, 1], 6))
def test_no_value_of_any_key_ends_in_anything_but_a_sentence(written, stride):
    tree = read_configuration(written())
    for number, (key, row) in enumerate(ALL_KEYS.items()):
        name = key.replace(".*", ".x").replace("[]", "[0]")
        # Of a key's values every sixth, from another one on for each key.
        for value in ODD[number % stride :: stride] if isinstance(row, Read | Assigns) else ODD[:1]:
            copied = copy.deepcopy(tree)
            try:
                oumi_file._set_override(copied, name, value)
                translate_oumi(copied, 16).config(SHAPE)
            except ConfigError:
                pass
    for value in ODD:
        with suppress(ConfigError):
            kwargs = {
                "lr_scheduler_kwargs": {"min_lr": value, "min_lr_rate": value},
                "lr_scheduler_type": "cosine",
            }
            translate_oumi(tree | {"training": tree["training"] | kwargs}, 16)
    for section in [*tree, "peft"]:
        for value in ODD:
            with suppress(ConfigError):
                translate_oumi(tree | {section: value}, 16)


def test_the_counting_script_counts(written, tmp_path):
    (tmp_path / "y.yaml").write_text(sft(per_device_train_batch_size=1))
    (tmp_path / "z.yaml").write_text(sft(optimizer="lion", save_epoch=True))
    (tmp_path / "job.yaml").write_text("resources: {}")
    written()
    found = oumi_configurations.count(tmp_path)
    assert found["files"] == {"MEGATRON_GRPO": 1, "TRL_SFT": 2}
    assert found["taken"] == {"MEGATRON_GRPO": 1, "TRL_SFT": 1}
    assert found["refused_by_key"] == {"training.optimizer": 1, "training.save_epoch": 1}


def test_python_defaults_are_those_of_the_keys():
    def compare(params, prefix):
        for one in dataclasses.fields(params):
            value, key = getattr(params, one.name), f"{prefix}.{one.name}"
            if dataclasses.is_dataclass(value):
                compare(value, key)
            elif not isinstance(row := ALL_KEYS[key], Ignored) and key.partition(".")[2] not in BRANCH:
                assert value == (row.value if isinstance(row, MustBe) else row.default), key

    compare(oumi_params.MegatronParams(), "megatron")
    compare(oumi_params.GrpoParams(), "grpo")


def test_params_divide_and_refuse_as_the_document_says(written):
    params = oumi_params.MegatronParams(tensor_model_parallel_size=8, pipeline_model_parallel_size=4)
    assert params.get_data_parallel_size(64) == 2
    with pytest.raises(
        ConfigError,
        match=r"world_size \(16\) must be divisible by the product of all model parallel sizes \(32\)",
    ):
        params.get_data_parallel_size(16)
    params.validate_distributed_config(64, 80, 64, 8)
    with pytest.raises(ConfigError, match=r"^world_size is '16' and .*; each must be a whole number above 0"):
        params.get_data_parallel_size("16")
    for wrong in (oumi_params.MegatronParams(tensor_model_parallel_size=0), oumi_params.MegatronParams()):
        with pytest.raises(
            ConfigError, match=r"^world_size is 0 and .*tensor [01], .*; each must be a whole number above 0"
        ):
            wrong.validate_distributed_config(0, 4, 4)
    with pytest.raises(ConfigError) as raised:
        params.validate_distributed_config(48, 77, 36)
    assert len(str(raised.value).splitlines()) == 4
    config = oumi_params.TrainingConfig.from_yaml(
        written(), ["--megatron.ddp_config.overlap_grad_reduce=True"]
    )
    assert config.megatron.tensor_model_parallel_size == 8 and config.grpo.num_generations == 4
    tree = config.to_tree()
    assert tree["megatron"]["ddp_config"] == {"overlap_grad_reduce": True} and "fsdp" not in tree
    assert translate_oumi(tree, 16).tree == translate(written()).tree


def test_what_a_file_says_counts_in_python_though_it_is_the_default(written):
    """sampling_config's defaults are others than grpo's."""

    def in_python(word):
        return translate_oumi(oumi_params.TrainingConfig.from_yaml(written(), [word]).to_tree(), 16)

    long = in_python("--megatron.sampling_config.max_tokens=512").tree
    assert long == translate(written(), "--megatron.sampling_config.max_tokens=512").tree
    assert (
        long["rl"]["max_completion_length"] == 512 != translate(written()).tree["rl"]["max_completion_length"]
    )
    for word in ("--megatron.sampling_config.top_p=0.9", "--megatron.sampling_config.temperature=0.7"):
        with pytest.raises(ConfigError) as raised:
            in_python(word)
        assert str(raised.value) == refusal(written(), word)


EXAMPLES = {  # file: GPUs, the device that it is for, whether it fits
    "llama70b_16gpu": (16, "A100", False),
    "llama70b_16gpu_80gb": (16, "A100", True),
    "llama70b_64gpu": (64, "H100", True),
    "llama70b_128gpu": (128, "H100", True),
    "llama405b_256gpu": (256, "H100", True),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_are_valid_and_priced(name):
    gpus, device, fits = EXAMPLES[name]
    run = translate(ROOT / "examples" / "oumi" / f"{name}.yaml", world=gpus)
    assert run.model_parallel == gpus
    layout = planned(planned_config(run), gpus, rates_of(device), 8)
    assert layout.fits == fits, layout.bytes / 1e9
    if "405b" in name:
        assert any("126 layers are not divisible by 32 pipeline stages" in note for note in run.notes)


def test_the_plan_says_memory_and_time(capsys):
    file = ROOT / "examples" / "oumi" / "llama70b_16gpu.yaml"
    assert main(["oumi", "plan", "-c", str(file), "--gpus", "16", "--device", "A100"]) == 2
    assert "does NOT fit" in capsys.readouterr().out


ENVIRONMENTS = {
    "SkyPilot": (dict(SKYPILOT_NODE_RANK="1", SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2",
                      SKYPILOT_NUM_GPUS_PER_NODE="8"), (2, 1, 8, "10.0.0.1", 8007)),
    "Polaris": (dict(PBS_NODEFILE="nodes", PBS_JOBID="7", PMI_RANK="1"), (2, 1, 4, "x1", 8007)),
    "Slurm": (dict(SLURM_NODELIST="gpu[1-3]", SLURM_JOBID="7", SLURM_NODEID="2", MASTER_PORT="9000"),
              (3, 2, 6, "gpu1", 9000)),
    "this machine": ({}, (1, 0, 6, "127.0.0.1", 8007)),
}  # fmt: skip


@pytest.mark.parametrize("who", ENVIRONMENTS)
def test_machines_are_found_as_oumi_finds_them(who, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("nodes").write_text("x1\nx2\n")
    monkeypatch.setattr(oumi_command, "_gpus", lambda: 0)
    monkeypatch.setattr(oumi_command, "_slurm_hosts", lambda nodelist: ["gpu1", "gpu2", "gpu3"])
    environ, wanted = ENVIRONMENTS[who]
    assert dataclasses.astuple(machines_of(environ, {}, 6)) == wanted
    given = {"nnodes": "4", "node_rank": "3", "nproc_per_node": "2", "master_addr": "h"}
    found = machines_of(environ, given, 6)
    assert (found.nodes, found.rank, found.processes, found.address) == (4, 3, 2, "h")


def test_torchruns_words_are_taken(monkeypatch):
    monkeypatch.setattr(oumi_command, "_gpus", lambda: 8)
    given = {"nnodes": "2", "nproc_per_node": "gpu", "rdzv_endpoint": "h:29500"}
    assert dataclasses.astuple(machines_of({}, given, 4)) == (2, 0, 8, "h", 29500)
    assert machines_of({}, {"nproc_per_node": "auto"}, 4).processes == 8
    monkeypatch.setattr(oumi_command, "_gpus", lambda: 0)
    assert machines_of({}, {"nproc_per_node": "auto"}, 4).processes == 4
    with pytest.raises(ConfigError, match="--nproc-per-node is gpu, but this machine has no GPUs; set a"):
        machines_of({}, {"nproc_per_node": "gpu"}, 4)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"SKYPILOT_NODE_RANK": "0"}, "SkyPilot also sets SKYPILOT_NODE_IPS"),
        ({"PBS_NODEFILE": "absent", "PBS_JOBID": "1"}, "PBS_NODEFILE names absent"),
        ({"OUMI_NUM_NODES": "2"}, "OUMI_NUM_NODES is 2"),
        ({"OUMI_TOTAL_NUM_GPUS": "16"}, "OUMI_TOTAL_NUM_GPUS is 16"),
        ({"OUMI_MASTER_ADDR": "other", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "a",
          "SKYPILOT_NUM_GPUS_PER_NODE": "1"}, "not one of the machines a"),
        ({"MASTER_PORT": "x"}, "these must be whole numbers"),
    ],
)  # fmt: skip
def test_an_environment_that_contradicts_itself_is_refused(environ, message, monkeypatch):
    monkeypatch.setattr(oumi_command, "_gpus", lambda: 4)
    with pytest.raises(ConfigError, match=message):
        machines_of(environ, {}, 4)


VERL = """\
# a run of mine
model:
  model_name: "m"
data:
  train:
    datasets:
      - dataset_name: "openai/gsm8k"
training:
  trainer_type: "VERL_GRPO"  # on Ray
  per_device_train_batch_size: 4
  learning_rate: 1e-6

fsdp:
  enable_fsdp: True
  cpu_offload: True
"""


def test_a_configuration_of_verls_trainer_is_migrated_with_the_difference(tmp_path, capsys):
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(VERL)
    words = ["oumi", "migrate", str(old), "--output", str(new), "--megatron.tensor_model_parallel_size=8"]
    assert main(words) == 0
    out, message = capsys.readouterr()
    assert "8 processes have this batch" in message and "verl's default of 256 prompts" in message
    assert "megatron.optimizer_config.optimizer_cpu_offload: True to offload it again" in message
    assert (
        '-  trainer_type: "VERL_GRPO"  # on Ray' in out and "+  trainer_type: MEGATRON_GRPO  # on Ray" in out
    )
    text = new.read_text()
    tree = yaml.safe_load(text)
    assert text.startswith("# a run of mine") and "  cpu_offload: True" in text
    assert tree["megatron"]["tensor_model_parallel_size"] == 8 and tree["fsdp"]["enable_fsdp"] is False
    assert tree["deepspeed"] == {"enable_deepspeed": False}
    assert tree["training"]["per_device_train_batch_size"] == 1 == tree["megatron"]["micro_batch_size"]
    assert tree["training"]["gradient_accumulation_steps"] == 8 == tree["megatron"]["global_batch_size"]
    changed = [line for line in difflib.ndiff(VERL.splitlines(), text.splitlines()) if line[0] == "-"]
    assert len(changed) == 3  # the trainer, its batch, FSDP
    translate_oumi(tree, 8)
    assert main(["oumi", "migrate", str(new)]) == 2
    assert "only VERL_GRPO and TRL_GRPO can be migrated" in capsys.readouterr().err


def test_a_key_is_set_in_its_line_or_added_to_its_section():
    assert with_key("a:\n  b: 1  # x\nc:\n  d: 2\n", "a.b", 3) == "a:\n  b: 3  # x\nc:\n  d: 2\n"
    assert with_key("a:\n    b:\n      c: 1\n\nc:\n  d: 2\n", "a.e", True) == (
        "a:\n    b:\n      c: 1\n    e: true\n\nc:\n  d: 2\n"
    )
    assert with_key("a:\n  b: 1\n", "e.f", "x") == "a:\n  b: 1\n\ne:\n  f: x\n"
    assert with_key("a: {b: 1, c: {d: 2}}  # x\n", "a.b", 3) == "a:\n  b: 3\n  c:\n    d: 2  # x\n"
    assert with_key("a: {}\n'c':\n  \"d\": 2\n", "a.b", 3) == "a:\n  b: 3\n'c':\n  \"d\": 2\n"
    assert with_key("'c':\n  \"d\":\n    2\n", "c.d", 3) == "'c':\n  \"d\":\n    3\n"
    assert with_key("a: null\nc: # x\n", "a.b", 3) == "a:\n  b: 3\nc: # x\n"
    assert with_key("a: &a\n  b: |\n    c\n    # d\n", "a.e", 3) == "a: &a\n  b: |\n    c\n    # d\n  e: 3\n"


def test_a_file_that_cannot_be_changed_in_its_lines_is_not_written(tmp_path, capsys):
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    for before, after, message in (
        ('"VERL_GRPO"', '&t "VERL_GRPO"\n  run_name: *t', "undefined alias 't'"),
        (VERL[VERL.index("fsdp:") :], "deepspeed: &off {}\nfsdp: *off\n", "fsdp is a YAML alias"),
        (
            "size: 4",
            "size: four",
            "training.per_device_train_batch_size is 'four'; it must be a whole number above 0",
        ),
    ):
        old.write_text(VERL.replace(before, after, 1))
        assert main(["oumi", "migrate", str(old), "--output", str(new)]) == 2
        assert message in capsys.readouterr().err and not new.exists()


def test_a_file_in_braces_or_with_an_end_of_document_is_migrated(tmp_path):
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    for text in (json.dumps(yaml.safe_load(VERL)), f"---\n{VERL}...\n"):
        old.write_text(text)
        assert main(["oumi", "migrate", str(old), "--output", str(new)]) == 0
        translate_oumi(yaml.safe_load(new.read_text()), 1)


def test_the_commands_say_what_they_take(capsys):
    assert main(["oumi"]) == 0 and "distributed torchrun" in capsys.readouterr().out
    for words, message in (
        (["trian"], "did you mean 'train'"),
        (["distributed", "accelerate"], "use megalith oumi distributed torchrun"),
        (["distributed", "torchrun", "-m", "trl", "-c", "x"], "starts only `-m oumi train`"),
        (["train"], "required: -c"),
        (["train", "-c", "absent.yaml"], "absent.yaml cannot be read"),
    ):
        assert main(["oumi", *words]) == 2
        assert message in capsys.readouterr().err
