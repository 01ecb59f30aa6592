"""GRPOTrainer's arguments: whatever differs from its class's default is a setting, has no effect for a reason, or is
refused by name. The class is TRL's where TRL is installed, else transformers' with the fields that TRL 1.16 adds."""

import dataclasses
import os
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainingArguments

from megalith.errors import ConfigError
from megalith.rl.from_trl.grpo_arguments import NOT_RLOO
from megalith.rl.from_trl.grpo_settings import no_effect_notes, settings_of
from megalith.rl.from_trl.grpo_trainer import GRPOTrainer, RLOOTrainer, lora_settings

OF_TRL = dict(
    learning_rate=1e-6, logging_steps=10, gradient_checkpointing=True, model_init_kwargs=None,
    router_aux_loss_coef=None, disable_dropout=False, cast_lm_head_to_fp32=False, num_generations=8,
    num_generations_eval=None,
    max_completion_length=512, ds3_gather_for_generation=True, shuffle_dataset=True, pad_to_multiple_of=None,
    generation_batch_size=None, steps_per_generation=None, temperature=1.0, top_p=1.0, top_k=0, min_p=None,
    generation_kwargs=None, chat_template_kwargs=None, repetition_penalty=1.0, cache_implementation=None,
    use_vllm=False, vllm_mode="colocate", vllm_model_impl="vllm", vllm_enable_sleep_mode=False,
    vllm_structured_outputs_regex=None,
    vllm_server_base_url=None, vllm_server_host="0.0.0.0", vllm_server_port=8000, vllm_server_timeout=240.0,
    vllm_group_port=51216, vllm_gpu_memory_utilization=0.3, vllm_max_model_length=None, vllm_tensor_parallel_size=1,
    beta=0.0, num_iterations=1, epsilon=0.2, delta=None, epsilon_high=None, sapo_temperature_neg=1.05,
    sapo_temperature_pos=1.0, vespo_k_pos=2.0, vespo_lambda_pos=3.0, importance_sampling_level="token",
    reward_weights=None, multi_objective_aggregation="sum_then_normalize", scale_rewards="group", loss_type="dapo",
    mask_truncated_completions=False, sync_ref_model=False, ref_model_mixup_alpha=0.6, ref_model_sync_steps=512,
    top_entropy_quantile=1.0, entropy_coef=0.0, use_adaptive_entropy=False, entropy_target=0.2,
    max_tool_calling_iterations=None, vllm_importance_sampling_correction=True,
    vllm_importance_sampling_mode="sequence_mask", vllm_importance_sampling_clip_max=3.0,
    vllm_importance_sampling_clip_min=None, off_policy_mask_threshold=None, use_bias_correction_kl=True,
    log_completions=False, num_completions_to_print=None, log_completions_hub_repo=None,
    use_transformers_continuous_batching=False, vllm_importance_sampling_cap=None,
)  # fmt: skip
made = [(name, Any, field(default=value)) for name, value in OF_TRL.items()]
StandIn = dataclasses.make_dataclass("GRPOConfig", made, bases=(TrainingArguments,))
try:
    from trl import GRPOConfig
except ImportError:
    GRPOConfig = StandIn


def config_of(**given):
    return GRPOConfig(**dict(output_dir="o", use_cpu=True, bf16=False) | given)


def translated(**given):
    return settings_of(config_of(**given), 16, 1)


# Another value of each argument, where one of another kind would not be.
OTHER = {
    "lr_scheduler_type": "cosine", "optim": "adafactor", "logging_strategy": "no", "save_strategy": "no",
    "scale_rewards": "batch", "loss_type": "grpo", "importance_sampling_level": "sequence", "num_generations": 4,
    "vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_cap": 2.0, "steps_per_generation": 2,
    "generation_batch_size": 16, "report_to": ["wandb"], "warmup_steps": 0.25, "max_completion_length": 64,
    "reward_weights": [2.0], "fsdp_config": {"min_num_params": 7}, "accelerator_config": {"split_batches": True},
    "lr_scheduler_kwargs": {"num_cycles": 2}, "multi_objective_aggregation": "normalize_then_sum", "min_p": 0.1,
    "model_init_kwargs": {"dtype": "bfloat16"}, "vllm_mode": "server", "beta": 0.1,
    "max_steps": 10,
}  # fmt: skip


def another(name: str, value: Any) -> Any:
    if name in OTHER:
        return OTHER[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1 if isinstance(value, int) else value * 0.5 + 0.25
    return {"str": "other", "dict": {"a": 1}, "list": ["a"], "NoneType": 3}.get(type(value).__name__, "other")


NAMES = sorted({f.name for f in dataclasses.fields(GRPOConfig)} - {"use_cpu", "bf16", "eval_strategy"})


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_is_honoured_or_explained_or_refused_by_name(name):
    """The value is set on a finished object: what its class would refuse itself is refused or honoured here too."""
    plain, args = config_of(), config_of()
    object.__setattr__(args, name, another(name, getattr(plain, name)))
    assert getattr(args, name) != getattr(plain, name)
    try:
        found = settings_of(args, 16, 1)
    except ConfigError as error:
        assert f"args.{name}" in str(error) or name in str(error)
        return
    notes = [note for note in no_effect_notes(args) if note.startswith(f"args.{name} has no effect: ")]
    assert found != settings_of(plain, 16, 1) or notes, f"{name} is dropped"


def test_an_object_of_defaults_has_its_classs_values_and_nothing_to_note():
    found = translated()
    expected = {"optim.weight_decay": 0.0, "optim.adam_beta2": 0.999, "checkpoint.save_interval": 500,
                "train.precision": "fp32", "runtime.device": "cpu", "rl.max_completion_length": 512}  # fmt: skip
    assert found.items() >= expected.items()
    assert no_effect_notes(config_of()) == []


TRANSLATIONS = [
    (dict(sync_ref_model=True, ref_model_sync_steps=64), {"rl.sync_ref_model": True, "rl.ref_model_sync_steps": 64}),
    (dict(generation_kwargs={"stop": "</answer>"}), {"rl.stop_strings": "</answer>"}),
    (dict(repetition_penalty=1.1), {"rl.repetition_penalty": 1.1}),
    (dict(warmup_steps=0.1), {"optim.lr_warmup_iters": 5, "train.train_iters": 48}),
    (dict(warmup_steps=3), {"optim.lr_warmup_iters": 3}),
    (dict(logging_steps=0.25, save_steps=0.5), {"log.log_interval": 12, "checkpoint.save_interval": 24}),
    (dict(save_strategy="epoch", num_train_epochs=2), {"checkpoint.save_interval": 16, "train.train_iters": 32}),
    (dict(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.1}), {"optim.min_lr": 1e-7}),
    (dict(optim="sgd"), {"optim.optimizer": "sgd", "optim.sgd_momentum": 0.0}),
    (dict(fp16=True), {"train.precision": "fp16"}),
    (dict(loss_type="sapo", sapo_temperature_neg=2.0), {"rl.loss_type": "sapo", "rl.sapo_temperature_neg": 2.0}),
    (dict(loss_type="vespo", vespo_k_pos=1.5), {"rl.loss_type": "vespo", "rl.vespo_k_pos": 1.5}),
    (dict(top_entropy_quantile=0.2), {"rl.top_entropy_quantile": 0.2}),
    (dict(off_policy_mask_threshold=0.5), {"rl.off_policy_mask_threshold": 0.5}),
    (dict(multi_objective_aggregation="normalize_then_sum"), {"rl.advantage_estimator": "gdpo"}),
    (dict(gradient_accumulation_steps=2, steps_per_generation=4),
     {"rl.mini_batches": 2, "train.global_batch_size": 16}),
    (dict(gradient_accumulation_steps=4, steps_per_generation=2),
     {"rl.mini_batches": 1, "train.global_batch_size": 32}),
    (dict(steps_per_generation=4, num_iterations=2), {"train.train_iters": 96}),
    (dict(use_vllm=True), {"rl.engine": "vllm", "rl.vllm_sleep_level": 0}),
    (dict(use_vllm=True, vllm_mode="server", vllm_server_port=9), {"rl.engine_url": "http://127.0.0.1:9"}),
    (dict(vllm_importance_sampling_mode="token_mask", vllm_importance_sampling_clip_max=None),
     {"rl.vllm_importance_sampling_mode": "token_unbounded"}),
    (dict(save_only_model=True, disable_dropout=True), {"checkpoint.save_optim": False, "model.hidden_dropout": 0.0}),
    (dict(ddp_timeout=600), {"runtime.distributed_timeout_minutes": 10}),
    (dict(report_to=["wandb", "tensorboard"], run_name="a"), {"log.wandb_name": "a", "log.tensorboard": True}),
]  # fmt: skip


@pytest.mark.parametrize(("given", "expected"), TRANSLATIONS)
def test_what_they_mean(given, expected):
    found = translated(**given)
    assert {path: found[path] for path in expected} == pytest.approx(expected)


SPELT_OUT = dict(push_to_hub=False, remove_unused_columns=False, load_best_model_at_end=False, deepspeed=None,
                 data_seed=None)  # fmt: skip
IDLE = dict(tf32=False, ref_model_mixup_alpha=0.5, metric_for_best_model="reward", greater_is_better=True)


def test_what_changes_nothing_is_not_refused():
    assert settings_of(SPELT_OUT, 16, 1) == settings_of({}, 16, 1)
    assert no_effect_notes(SPELT_OUT) == []
    for args, plain in ((IDLE, {}), (config_of(**IDLE), config_of())):
        assert settings_of(args, 16, 1) == settings_of(plain, 16, 1)
        assert len(no_effect_notes(args)) == len(IDLE)
    args = config_of()
    args.tf32 = True
    with pytest.raises(ConfigError, match=r"args\.tf32 is True"):
        settings_of(args, 16, 1)
    assert "without TF32" in no_effect_notes({"bf16": True, "tf32": True})[0]
    with pytest.raises(ConfigError, match="push_to_hub is True"):
        settings_of({"push_to_hub": True}, 16, 1)


def test_an_epoch_is_trls_which_leaves_out_a_generation_batch_that_is_not_whole():
    args = config_of(steps_per_generation=4, num_train_epochs=1)  # 4 prompts for a generation batch
    assert settings_of(args, 10, 1)["train.train_iters"] == 8
    assert settings_of(args, 3, 1)["train.train_iters"] == 1


REFUSED = [
    (
        dict(gradient_accumulation_steps=2, steps_per_generation=3),
        "steps_per_generation is 3, which is not supported: an",
    ),
    (dict(gradient_accumulation_steps=4, steps_per_generation=2, num_iterations=2), "choose a multiple of 4"),
    (dict(lr_scheduler_type="linear", lr_scheduler_kwargs={"min_lr": 1e-7}), "linear supports none"),
    (dict(lr_scheduler_type="cosine_with_min_lr"), "supports min_lr or min_lr_rate"),
    (dict(loss_type="dppo"), "args.loss_type is 'dppo', which is not supported: choose among dapo, grpo"),
    (dict(loss_type="bnpo"), r"choose among dapo, .* \(bnpo divides by each micro-batch's tokens\)"),
    (dict(report_to=["mlflow"]), "only tensorboard and wandb are supported"),
    (dict(model_init_kwargs={"revision": "v2"}), r"model_init_kwargs\['revision'\] is 'v2'"),
    (dict(resume_from_checkpoint="x"), r"train\(resume_from_checkpoint=folder\) resumes"),
    (dict(max_completion_length=None), "a completion needs a maximum number of tokens"),
    (
        dict(save_strategy="best"),
        "save_strategy is 'best', which is not supported: choose among no, steps and epoch",
    ),
    (dict(optim="adamw_bnb_8bit"), "choose among adamw_torch"),
]


@pytest.mark.parametrize(("given", "sentence"), REFUSED)
def test_what_is_refused_says_what_to_do(given, sentence):
    with pytest.raises(ConfigError, match=sentence):
        translated(**given)


UNREAD = [
    (dict(eval_steps=5), "args.eval_steps has no effect: eval_strategy is no"),
    (dict(run_name="a"), "args.run_name has no effect: it is a name for Weights & Biases"),
    (dict(vllm_mode="server"), "args.vllm_mode has no effect: use_vllm is off"),
    (dict(use_vllm=True, vllm_server_port=9), "args.vllm_server_port has no effect: vllm_mode is colocate"),
    (
        dict(lr_scheduler_type="constant", warmup_steps=3),
        "args.warmup_steps has no effect: lr_scheduler_type is",
    ),
    (dict(save_strategy="no", save_steps=3), "args.save_steps has no effect: save_strategy is no"),
]


@pytest.mark.parametrize(("given", "note"), UNREAD)
def test_what_is_read_with_another_argument_alone_is_noted(given, note):
    args = config_of(**given)
    assert any(text.startswith(note) for text in no_effect_notes(args)), no_effect_notes(args)
    assert "optim.lr_warmup_iters" not in settings_of(args, 16, 1) or "lr_scheduler_type" not in given


def test_a_dict_takes_the_same_names():
    given = {"max_steps": 10, "use_liger_kernel": True, "report_to": "none", "gradient_checkpointing": True}
    assert settings_of(given, 16, 1)["train.train_iters"] == 10
    home = os.path.expanduser("~/run")
    assert settings_of({"output_dir": "~/run"}, 16, 1)["train.output_dir"] == home != "~/run"
    assert [note.partition(" ")[0] for note in no_effect_notes(given)] == [
        "args.gradient_checkpointing",
        "args.use_liger_kernel",
    ]
    assert (
        settings_of({"vllm_importance_sampling_cap": 4.0}, 16, 1)["rl.vllm_importance_sampling_clip_max"] == 4
    )
    with pytest.raises(ConfigError, match=r"data_seed is 3, which GRPOTrainer does not support; the order"):
        settings_of({"data_seed": 3}, 16, 1)
    with pytest.raises(ConfigError, match=r"args\.data_seed is 3, which GRPOTrainer does not support"):
        settings_of(SimpleNamespace(data_seed=3), 16, 1)


def test_the_trainer_notes_what_has_no_effect_and_refuses_at_once():
    given = dict(
        reward_funcs="length", train_dataset=[{"prompt": "a"}] * 2, settings={"data.seq_length": 768}
    )
    args = {"num_generations": 4, "use_liger_kernel": True}
    trainer = GRPOTrainer("m", args=args, optimizers=(None, None), **given)
    assert "args.use_liger_kernel has no effect: Megalith has its own kernels" in " ".join(
        trainer.config.notes
    )
    with pytest.raises(ConfigError, match=r"rl\.top_p is 0\.9"):
        GRPOTrainer("m", args=args | {"top_p": 0.9}, **given)
    with pytest.raises(
        ConfigError, match=r"the cap of its ratio, is not set, and epsilon \(0\.2\) would cap"
    ):
        GRPOTrainer("m", args=args | {"loss_type": "cispo"}, **given)


@dataclass
class Lora:
    """PEFT's LoraConfig in small."""

    r: int = 8
    lora_alpha: int = 8
    target_modules: Any = None
    task_type: Any = None
    exclude_modules: Any = None
    qalora_group_size: int = 16
    use_dora: bool = False


def test_lora_arguments_beyond_plain_lora_are_refused_by_name():
    assert lora_settings(Lora(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))["lora.rank"] == 4
    for config in (
        Lora(target_modules=["q_proj"], exclude_modules=["k_proj"]),
        dict(target_modules=["q_proj"], exclude_modules=["k_proj"]),
    ):
        with pytest.raises(
            ConfigError, match=r"peft_config has exclude_modules \['k_proj'\], which GRPOTrainer"
        ):
            lora_settings(config)
    assert "lora.targets" not in lora_settings(dict(target_modules="all-linear", exclude_modules=None))
    given = dict(
        target_modules=["q_proj"], modules_to_save=["lm_head"], layers_to_transform=1, fan_in_fan_out=True
    )
    settings = lora_settings(given | {"ensure_weight_tying": True})
    assert settings["lora.modules_to_save"] == ["lm_head"] and settings["lora.layers_to_transform"] == [1]
    loftq = {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 8, "loftq_iter": 3}}
    settings = lora_settings(given | loftq)
    assert (settings["lora.quantize_base"], settings["lora.loftq_iter"]) == ("int8", 3)
    with pytest.raises(ConfigError, match="loftq_bits 2, but PEFT supports only 4"):
        lora_settings(given | loftq | {"loftq_config": {"loftq_bits": 2}})
    with pytest.raises(
        ConfigError, match=r"peft_config has alora_invocation_tokens \[3\], but only plain LoRA"
    ):
        lora_settings(given | {"alora_invocation_tokens": [3]})


RLOO_OWN = dict(normalize_advantages=False, reward_clip_range=None, beta=0.05, num_generations=2, log_multimodal=True,
                log_unique_prompts=False, use_transformers_paged=False)  # fmt: skip
try:
    from trl import RLOOConfig
except ImportError:
    kept = {name: value for name, value in OF_TRL.items() if name not in NOT_RLOO} | RLOO_OWN
    kept |= {"transformers_continuous_batching_config": None, "trust_remote_code": False}
    for absent in ("cast_lm_head_to_fp32", "log_completions_hub_repo", "sapo_temperature_neg", "sapo_temperature_pos",
                   "vespo_k_pos", "vespo_lambda_pos"):  # fmt: skip
        del kept[absent]
    RLOOConfig = dataclasses.make_dataclass(
        "RLOOConfig",
        [(name, Any, field(default=value)) for name, value in kept.items()],
        bases=(TrainingArguments,),
    )


def rloo_of(**given):
    args = RLOOConfig(output_dir="o", use_cpu=True, bf16=False, **given)
    return settings_of(args, 16, 1, "RLOOTrainer")


def test_every_argument_of_rloo_is_honoured_or_explained_or_refused_by_name():
    plain, expected = RLOOConfig(output_dir="o", use_cpu=True, bf16=False), rloo_of()
    other = OTHER | {"reward_clip_range": [-1.0, 1.0], "beta": 0.1, "num_generations": 4}
    dropped = []
    for name in sorted(
        {f.name for f in dataclasses.fields(RLOOConfig)} - {"use_cpu", "bf16", "eval_strategy"}
    ):
        args = RLOOConfig(output_dir="o", use_cpu=True, bf16=False)
        object.__setattr__(args, name, other.get(name, another(name, getattr(plain, name))))
        try:
            found = settings_of(args, 16, 1, "RLOOTrainer")
        except ConfigError as error:
            assert name in str(error)
            continue
        notes = [note for note in no_effect_notes(args) if note.startswith(f"args.{name} has no effect: ")]
        if found == expected and not notes:
            dropped.append(name)
    assert dropped == []


def test_what_rloo_means():
    usual = {"rl.loss_type": "rloo", "rl.advantage_estimator": "rloo", "rl.use_kl_in_reward": True, "rl.beta": 0.05,
             "rl.num_generations": 2, "rl.whiten_advantages": False,
             "rl.vllm_importance_sampling_correction": False}  # fmt: skip
    assert (
        rloo_of().items() >= usual.items() and settings_of({}, 16, 1, "RLOOTrainer").items() >= usual.items()
    )
    assert rloo_of(beta=0.0)["rl.use_kl_in_reward"] is False
    assert rloo_of(normalize_advantages=True)["rl.whiten_advantages"] is True
    with pytest.raises(ConfigError, match="RLOOTrainer has no argument 'loss_type'"):
        settings_of({"loss_type": "grpo"}, 16, 1, "RLOOTrainer")
    sizes = {"data.seq_length": 768}
    args = {"max_steps": 2, "num_generations": 4}
    trainer = RLOOTrainer("m", "length", args, [{"prompt": "a"}] * 2, settings=sizes)
    assert trainer.config.rl.use_kl_in_reward and trainer.config.rl.loss_type == "rloo"
    with pytest.raises(ConfigError, match="RLOOTrainer takes no quantization_config"):
        RLOOTrainer("m", "length", args, [{"prompt": "a"}], settings=sizes, quantization_config=1)
