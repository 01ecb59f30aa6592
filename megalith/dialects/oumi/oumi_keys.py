"""Every key of Oumi's training configurations, with its default there and its meaning here: a literal row a key.

A row is a setting of ours (`Assigns`), a value that oumi_settings.py reads together with others (`Read`),
one on which nothing of the run depends (`Idle`), or one that is refused but for a value (`Only`). An omitted key has
Oumi's default, not ours. `a.*` stands for all keys below `a`. Of verl's overrides, `training.verl_config_overrides`,
those that Oumi's own examples and verl's guides set stand in VERL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Assigns:
    """A setting of ours, through `values` where these are written otherwise."""

    path: str
    default: Any = None
    values: Mapping[Any, Any] | None = None


@dataclass(frozen=True)
class Read:
    """A value that decides settings together with others. `kind`: int, count (above 0), float, bool, text, list or
    dict; null passes."""

    kind: str
    default: Any = None


@dataclass(frozen=True)
class Idle:
    """Nothing of the run depends on it here."""

    why: str


@dataclass(frozen=True)
class Only:
    """Refused where it is anything but `value`."""

    value: Any
    why: str


Key = Assigns | Read | Idle | Only

ALWAYS = "it always is so, or follows the device"
HERE = "nothing here depends on it"
LOADER = "batches are prepared ahead by data.num_workers threads"
FSDP = "the data-parallel strategy decides"
UNUSED = "the trainer does not read it"
PROFILE = "profile with `megalith train`'s log.profile"
VISION = "models of text alone are trained"
ENGINE = "Megalith's own engine samples with the trainer's weights and layout"

SPLIT: dict[str, Key] = {  # of data.train, data.validation and data.test
    "datasets[].dataset_name": Read("text"),
    "datasets[].dataset_path": Read("text"),
    "datasets[].subset": Read("text"),
    "datasets[].split": Read("text", "train"),
    "datasets[].dataset_kwargs": Read("dict", {}),
    "datasets[].sample_count": Read("count"),
    "datasets[].mixture_proportion": Only(None, "files are taken whole, without weights; mix them before"),
    "datasets[].shuffle": Idle("training data are shuffled by training.seed"),
    "datasets[].seed": Idle("training data are shuffled by training.seed"),
    "datasets[].shuffle_buffer_size": Idle(HERE),
    "datasets[].trust_remote_code": Idle("code of a repository is never run"),
    "datasets[].transform_num_workers": Idle(LOADER),
    "collator_name": Read("text"),
    "collator_kwargs.*": Idle("the chat template marks what is learned"),
    "train_target": Read("text"),
    "pack": Read("bool", False),
    "stream": Idle(LOADER),
    "target_col": Only(None, "it is of pre-training: `megalith preprocess`, then `megalith train`"),
    "mixture_strategy": Idle("files are taken whole"),
    "seed": Idle("training data are shuffled by training.seed"),
    "use_torchdata": Idle(LOADER),
}

KEYS: dict[str, Key] = {
    "model.model_name": Read("text"),
    "model.adapter_model": Only(None, "begin from merged weights: `megalith lora merge`"),
    "model.adapter_trainable": Idle(HERE),
    "model.tokenizer_name": Read("text"),
    "model.tokenizer_pad_token": Idle("padding is masked, whatever its token"),
    "model.tokenizer_kwargs.pad_token": Idle("padding is masked, whatever its token"),
    "model.tokenizer_kwargs": Only({}, "the tokenizer is as its files have it"),
    "model.processor_kwargs": Only({}, VISION),
    "model.model_max_length": Read("count"),
    "model.load_pretrained_weights": Only(True, "train from initial weights with `megalith train`"),
    "model.trust_remote_code": Idle("code of a repository is never run"),
    "model.torch_dtype_str": Read("text", "auto"),
    "model.compile": Only(False, "set training.compile, as Oumi says too"),
    "model.chat_template": Read("text"),
    "model.chat_template_kwargs": Only(None, "put chat_template_kwargs into the records"),
    "model.attn_implementation": Idle("attention takes the fastest kernel that the device has"),
    "model.device_map": Idle("the megatron section lays the model out"),
    "model.model_kwargs": Read("dict", {}),
    "model.enable_liger_kernel": Idle("layers are compiled and the loss is in chunks"),
    "model.shard_for_eval": Idle(HERE),
    "model.freeze_layers": Only([], "all weights are trained, or adapters with training.use_peft"),
    "model.text_only": Idle(VISION),
    "model.model_revision": Only(None, "name the folder of that revision as model.model_name"),
    "model.tool_call_parser": Idle(HERE),
    **{f"data.{split}.{key}": row for split in ("train", "validation", "test") for key, row in SPLIT.items()},
    "training.use_peft": Read("bool", False),
    "training.trainer_type": Read("text", "HF"),
    "training.enable_gradient_checkpointing": Read("bool", False),
    "training.gradient_checkpointing_kwargs.*": Idle("recomputation is not reentrant"),
    "training.output_dir": Assigns("train.output_dir", "output"),
    "training.per_device_train_batch_size": Read("count", 8),
    "training.per_device_eval_batch_size": Idle("an evaluation has the training's batches"),
    "training.gradient_accumulation_steps": Read("count", 1),
    "training.max_steps": Read("int", -1),
    "training.num_train_epochs": Read("count", 3),
    "training.save_epoch": Only(False, "checkpoints are saved by steps: training.save_steps"),
    "training.save_steps": Read("int", 500),
    "training.save_final_model": Read("bool", True),
    "training.seed": Assigns("train.seed", 42),
    "training.data_seed": Idle("the data's order follows from training.seed"),
    "training.use_deterministic": Read("bool", False),
    "training.full_determinism": Read("bool", False),
    "training.run_name": Assigns("log.wandb_name"),
    "training.metrics_function": Only(None, "the loss, and a policy's rewards, are what is measured"),
    "training.reward_functions": Read("list"),
    "training.reward_function_kwargs": Only({}, "write them into a reward function of your own, path.py:function"),
    "training.grpo.model_init_kwargs": Only({}, "the model is as its config.json has it"),
    "training.grpo.max_prompt_length": Read("count"),
    "training.grpo.max_completion_length": Read("count"),
    "training.grpo.num_generations": Read("count"),
    "training.grpo.temperature": Read("float", 0.9),
    "training.grpo.remove_unused_columns": Idle("columns go to the rewards"),
    "training.grpo.repetition_penalty": Only(1.0, "it would bias the ratio to the policy that samples"),
    "training.grpo.use_vllm": Read("bool", False),
    "training.grpo.vllm_mode": Idle("the engine's place follows from rl.engine"),
    "training.grpo.vllm_gpu_memory_utilization": Read("float", 0.9),
    "training.grpo.epsilon": Read("float", 0.2),
    "training.grpo.log_completions": Assigns("rl.log_completions", False),
    "training.grpo.rollout_function": Only(None, "completions are sampled by the engine alone"),
    "training.gkd.*": Idle(UNUSED),
    "training.gold.*": Idle(UNUSED),
    "training.log_level": Idle(HERE),
    "training.dep_log_level": Idle(HERE),
    "training.log_examples": Idle(HERE),
    "training.enable_wandb": Assigns("log.wandb", False),
    "training.enable_mlflow": Only(False, "there are TensorBoard and Weights & Biases"),
    "training.enable_tensorboard": Read("bool", True),
    "training.logging_strategy": Idle("lines come every training.logging_steps"),
    "training.logging_dir": Assigns("log.tensorboard_dir"),
    "training.logging_steps": Assigns("log.log_interval", 50),
    "training.logging_first_step": Idle("the first step's figures are in metrics.jsonl"),
    "training.eval_strategy": Read("text", "no"),
    "training.eval_steps": Read("count", 500),
    "training.learning_rate": Assigns("optim.lr", 5e-5),
    "training.lr_scheduler_type": Read("text", "linear"),
    "training.lr_scheduler_kwargs": Read("dict", {}),
    "training.warmup_ratio": Read("float"),
    "training.warmup_steps": Read("int"),
    "training.optimizer": Read("text", "adamw_torch"),
    "training.weight_decay": Assigns("optim.weight_decay", 0.0),
    "training.adam_beta1": Assigns("optim.adam_beta1", 0.9),
    "training.adam_beta2": Assigns("optim.adam_beta2", 0.999),
    "training.adam_epsilon": Assigns("optim.adam_eps", 1e-8),
    "training.sgd_momentum": Assigns("optim.sgd_momentum", 0.0),
    "training.mixed_precision_dtype": Read("text", "none"),
    "training.compile": Read("bool", False),
    "training.include_performance_metrics": Idle("every step's figures have them"),
    "training.include_alternative_mfu_metrics": Idle("every step's figures have them"),
    "training.log_model_summary": Idle("the start prints it"),
    "training.resume_from_checkpoint": Assigns("checkpoint.load"),
    "training.try_resume_from_last_checkpoint": Read("bool", False),
    "training.dataloader_num_workers": Idle(LOADER),
    "training.dataloader_persistent_workers": Idle(LOADER),
    "training.dataloader_prefetch_factor": Idle(LOADER),
    "training.dataloader_main_process_only": Idle(LOADER),
    "training.ddp_find_unused_parameters": Idle(HERE),
    "training.max_grad_norm": Assigns("optim.clip_grad", 1.0, {None: 0.0}),
    "training.trainer_kwargs": Read("dict", {}),
    "training.profiler.save_dir": Idle(HERE),
    "training.profiler.enable_cpu_profiling": Only(False, PROFILE),
    "training.profiler.enable_cuda_profiling": Only(False, PROFILE),
    "training.profiler.*": Idle(HERE),
    "training.telemetry.*": Idle("metrics.jsonl and the trackers have the figures"),
    "training.empty_device_cache_steps": Idle("memory is not given back in between"),
    "training.nccl_default_timeout_minutes": Assigns("runtime.distributed_timeout_minutes", None, {None: 10}),
    "training.label_ignore_index": Only(None, "labels that are −100 are left out, as everywhere"),
    "peft.lora_r": Read("count", 8),
    "peft.lora_alpha": Read("count", 8),
    "peft.lora_dropout": Read("float", 0.0),
    "peft.lora_target_modules": Read("list"),
    "peft.lora_exclude_modules": Read("list"),
    "peft.lora_target_parameters": Only(None, "experts' fused tensors have no adapters"),
    "peft.lora_modules_to_save": Only(None, "adapters alone are trained"),
    "peft.lora_bias": Only("none", "adapters have no biases"),
    "peft.lora_init_weights": Only("DEFAULT", "adapters begin as PEFT's default has them"),
    "peft.lora_task_type": Idle(ALWAYS),
    "peft.q_lora": Only(False, "weights are not quantized: set it False, and the base takes two bytes a parameter"
                              " with bf16"),
    "peft.q_lora_bits": Idle(UNUSED),
    "peft.bnb_4bit_quant_type": Idle(UNUSED),
    "peft.llm_int8_skip_modules": Idle(UNUSED),
    "peft.use_bnb_nested_quant": Idle(UNUSED),
    "peft.bnb_4bit_quant_storage": Idle(UNUSED),
    "peft.bnb_4bit_compute_dtype": Idle(UNUSED),
    "peft.peft_save_mode": Read("text", "ADAPTER_ONLY"),
    "fsdp.enable_fsdp": Read("bool", False),
    "fsdp.sharding_strategy": Read("text", "FULL_SHARD"),
    "fsdp.cpu_offload": Read("bool", False),
    "fsdp.mixed_precision": Idle("model.torch_dtype_str decides"),
    "fsdp.*": Idle(FSDP),
    "deepspeed.enable_deepspeed": Read("bool", False),
    "deepspeed.zero_stage": Read("text", "ZERO_0"),
    "deepspeed.offload_optimizer.device": Read("text", "NONE"),
    "deepspeed.offload_optimizer.*": Idle(FSDP),
    "deepspeed.offload_param.*": Idle("parameters stay on the GPU"),
    "deepspeed.precision": Idle("model.torch_dtype_str decides"),
    "deepspeed.*": Idle(FSDP),
    "grpo.num_generations": Read("count"),
    "grpo.temperature": Read("float", 0.9),
    "grpo.epsilon": Read("float", 0.2),
    "grpo.max_prompt_length": Read("count"),
    "grpo.max_completion_length": Read("count"),
    "grpo.repetition_penalty": Only(1.0, "it would bias the ratio to the policy that samples"),
    "grpo.use_vllm": Read("bool", False),
    "grpo.vllm_mode": Idle("the engine's place follows from rl.engine"),
    "grpo.vllm_gpu_memory_utilization": Read("float", 0.9),
    "grpo.log_completions": Read("bool", False),
    "grpo.model_init_kwargs": Only({}, "the model is as its config.json has it"),
    "grpo.remove_unused_columns": Idle("columns go to the rewards"),
    "grpo.rollout_function": Only(None, "completions are sampled by the engine alone"),
    "megatron.tensor_model_parallel_size": Read("count", 1),
    "megatron.pipeline_model_parallel_size": Read("count", 1),
    "megatron.context_parallel_size": Read("count", 1),
    "megatron.expert_model_parallel_size": Read("count", 1),
    "megatron.expert_tensor_parallel_size": Read("count"),
    "megatron.virtual_pipeline_model_parallel_size": Read("count"),
    "megatron.micro_batch_size": Read("count", 1),
    "megatron.global_batch_size": Read("count"),
    "megatron.enable_sequence_packing": Read("bool", False),
    "megatron.ddp_config.grad_reduce_in_fp32": Idle("gradients are always summed in fp32"),
    "megatron.ddp_config.overlap_grad_reduce": Idle("overlapped wherever that is faster"),
    "megatron.ddp_config.overlap_param_gather": Idle("overlapped wherever that is faster"),
    "megatron.ddp_config.average_in_collective": Idle("sums are divided by the global count of tokens"),
    "megatron.optimizer_config.optimizer_cpu_offload": Read("bool", False),
    "megatron.optimizer_config.optimizer_offload_fraction": Read("float", 0.0),
    "megatron.optimizer_config.overlap_cpu_optimizer_d2h_h2d": Read("bool", False),
    "megatron.optimizer_config.use_precision_aware_optimizer": Only(
        False, "moments in fewer bytes: training.optimizer adamw_8bit"
    ),
    "megatron.transformer_config.recompute_granularity": Read("text"),
    "megatron.transformer_config.recompute_method": Read("text"),
    "megatron.transformer_config.recompute_num_layers": Read("count"),
    "megatron.transformer_config.recompute_modules": Read("list"),
    "megatron.checkpoint_config.use_async_checkpoint": Assigns("checkpoint.async_save", False),
    "megatron.checkpoint_config.use_fully_parallel_strategy": Idle("every rank writes its share"),
    "megatron.checkpoint_config.async_persistent": Idle("one thread writes"),
    "megatron.enable_weight_sync": Only(True, "rollouts would be of the first step's weights for ever"),
    "megatron.weight_sync_method": Read("text", "nccl"),
    "megatron.weight_sync_timeout": Read("float"),
    "megatron.inference_backend": Read("text", "vllm"),
    "megatron.vllm_weight_sync_interval": Read("count"),
    "megatron.sampling_config.temperature": Read("float", 0.7),
    "megatron.sampling_config.top_p": Read("float", 1.0),
    "megatron.sampling_config.top_k": Read("int", -1),
    "megatron.sampling_config.max_tokens": Read("count", 512),
    "megatron.sampling_config.repetition_penalty": Only(1.0, "it would bias the ratio to the policy that samples"),
    "megatron.grpo_config.kl_beta": Read("float", 0.001),
    "megatron.grpo_config.entropy_weight": Read("float", 0.0),
    "megatron.grpo_config.clamp_eps_lower": Read("float", 0.2),
    "megatron.grpo_config.clamp_eps_upper": Read("float", 0.2),
    "megatron.grpo_config.normalize_advantages": Read("bool", True),
    "megatron.grpo_config.reference_update_interval": Only(None, "the reference is what the run began from"),
    "megatron.model_config_kwargs": Only({}, "the model is as its config.json has it; change that"),
}  # fmt: skip

ENGINE_KEYS = {  # ours → where it comes from
    "rl.engine": "megatron.inference_backend",
    "rl.weight_sync_method": "megatron.weight_sync_method",
    "rl.max_staleness": "megatron.vllm_weight_sync_interval",
    "rl.weight_sync_timeout": "megatron.weight_sync_timeout",
}

IN_VERL = "training.verl_config_overrides."
ACTOR, ROLLOUT, REFERENCE = (f"{IN_VERL}actor_rollout_ref.{part}." for part in ("actor", "rollout", "ref"))
VERL: dict[str, Key] = {
    f"{IN_VERL}data.train_batch_size": Read("count"),
    f"{IN_VERL}data.max_prompt_length": Read("count"),
    f"{IN_VERL}data.max_response_length": Read("count"),
    f"{IN_VERL}data.shuffle": Assigns("rl.shuffle_dataset", True),
    f"{IN_VERL}data.train_files": Only(None, "data.train.datasets names the prompts: give the file as dataset_path"),
    f"{IN_VERL}data.val_files": Idle("data.validation names the held-out prompts"),
    f"{IN_VERL}data.val_max_samples": Read("int", -1),
    f"{IN_VERL}data.val_batch_size": Idle("an evaluation has the training's batches"),
    f"{IN_VERL}data.filter_overlong_prompts": Idle("longer prompts are left out, and counted"),
    f"{IN_VERL}data.filter_overlong_prompts_workers": Idle(LOADER),
    f"{IN_VERL}data.image_key": Only(None, VISION),
    f"{IN_VERL}data.apply_chat_template_kwargs": Only({}, "put chat_template_kwargs into the records"),
    f"{IN_VERL}data.truncation": Idle("longer prompts are left out, and counted"),
    f"{IN_VERL}algorithm.adv_estimator": Only("grpo", "advantages are those of GRPO"),
    f"{IN_VERL}algorithm.use_kl_in_reward": Only(False, "the KL is a part of the loss: use_kl_loss"),
    f"{IN_VERL}algorithm.kl_ctrl.*": Idle("it is of use_kl_in_reward alone"),
    f"{IN_VERL}algorithm.norm_adv_by_std_in_grpo": Assigns("rl.scale_rewards", True, {True: "group", False: "none"}),
    f"{ACTOR}ppo_mini_batch_size": Read("count"),
    f"{ACTOR}ppo_micro_batch_size_per_gpu": Read("count"),
    f"{ACTOR}ppo_epochs": Assigns("rl.num_iterations", 1),
    f"{ACTOR}use_dynamic_bsz": Idle("micro-batches have a fixed number of rows"),
    f"{ACTOR}use_kl_loss": Read("bool", False),
    f"{ACTOR}kl_loss_coef": Read("float", 0.001),
    f"{ACTOR}kl_loss_type": Assigns("rl.kl_estimator", "low_var_kl", {"kl": "k1", "mse": "k2", "low_var_kl": "k3",
                                                                    "k1": "k1", "k2": "k2", "k3": "k3"}),
    f"{ACTOR}clip_ratio": Read("float", 0.2),
    f"{ACTOR}clip_ratio_low": Read("float", 0.2),
    f"{ACTOR}clip_ratio_high": Read("float", 0.2),
    f"{ACTOR}clip_ratio_c": Assigns("rl.clip_ratio_c"),
    f"{ACTOR}entropy_coeff": Read("float", 0.0),
    f"{ACTOR}entropy_from_logits_with_chunking": Idle("it always is so"),
    f"{ACTOR}loss_agg_mode": Assigns("rl.loss_type", "token-mean", {"token-mean": "dapo", "seq-mean-token-mean": "grpo",
                                     "seq-mean-token-sum": "luspo", "seq-mean-token-sum-norm": "dr_grpo"}),
    f"{ACTOR}optim.lr": Read("float"),
    f"{ACTOR}optim.weight_decay": Read("float"),
    f"{ACTOR}optim.lr_warmup_steps": Read("int"),
    f"{ACTOR}optim.lr_scheduler_type": Read("text"),
    f"{ACTOR}optim.min_lr_ratio": Read("float"),
    f"{ACTOR}param_offload": Idle("parameters stay on the GPU"),
    f"{ACTOR}optimizer_offload": Read("bool", False),
    f"{ACTOR}fsdp_config.param_offload": Idle("parameters stay on the GPU"),
    f"{ACTOR}fsdp_config.optimizer_offload": Read("bool", False),
    f"{ACTOR}megatron.param_offload": Idle("parameters stay on the GPU"),
    f"{ACTOR}megatron.optimizer_offload": Read("bool", False),
    f"{ACTOR}megatron.tensor_model_parallel_size": Read("count", 1),
    f"{ACTOR}megatron.pipeline_model_parallel_size": Read("count", 1),
    f"{ACTOR}megatron.virtual_pipeline_model_parallel_size": Read("count"),
    f"{ACTOR}megatron.context_parallel_size": Read("count", 1),
    f"{ACTOR}megatron.expert_model_parallel_size": Read("count", 1),
    f"{ACTOR}megatron.expert_tensor_parallel_size": Read("count"),
    f"{ACTOR}megatron.sequence_parallel": Assigns("parallel.sequence_parallel"),
    f"{ACTOR}megatron.use_distributed_optimizer": Idle("the optimizer's state is sharded"),
    f"{ACTOR}megatron.override_transformer_config.recompute_granularity": Read("text"),
    f"{ACTOR}megatron.override_transformer_config.recompute_method": Read("text"),
    f"{ACTOR}megatron.override_transformer_config.recompute_num_layers": Read("count"),
    f"{ACTOR}megatron.override_transformer_config.recompute_modules": Read("list"),
    f"{ACTOR}megatron.override_transformer_config.attention_backend": Idle("attention takes the fastest kernel"),
    f"{ACTOR}megatron.override_ddp_config.*": Idle("overlapped wherever that is faster"),
    f"{ACTOR}megatron.seed": Idle("training.seed decides"),
    f"{ROLLOUT}name": Read("text"),
    f"{ROLLOUT}n": Read("count"),
    f"{ROLLOUT}temperature": Read("float", 1.0),
    f"{ROLLOUT}top_p": Read("float", 1.0),
    f"{ROLLOUT}top_k": Read("int", -1),
    f"{ROLLOUT}val_kwargs.n": Assigns("rl.num_generations_eval"),
    f"{ROLLOUT}val_kwargs.temperature": Assigns("rl.eval_temperature"),
    f"{ROLLOUT}val_kwargs.do_sample": Idle("val_kwargs.temperature decides; 0 takes the likeliest token"),
    f"{ROLLOUT}*": Idle(ENGINE),
    f"{REFERENCE}*": Idle("the reference has the trainer's layout and batches"),
    f"{IN_VERL}actor_rollout_ref.model.use_remove_padding": Idle("megatron.enable_sequence_packing decides"),
    f"{IN_VERL}actor_rollout_ref.model.override_config.attn_implementation": Idle("attention takes the fastest kernel"),
    f"{IN_VERL}actor_rollout_ref.model.enable_gradient_checkpointing": Read("bool", False),
    f"{IN_VERL}reward.num_workers": Assigns("rl.reward_workers", 4),
    f"{IN_VERL}trainer.n_gpus_per_node": Idle("the launcher decides"),
    f"{IN_VERL}trainer.nnodes": Idle("the launcher decides"),
    f"{IN_VERL}trainer.total_epochs": Read("count"),
    f"{IN_VERL}trainer.total_training_steps": Read("int"),
    f"{IN_VERL}trainer.save_freq": Read("int"),
    f"{IN_VERL}trainer.test_freq": Read("int", -1),
    f"{IN_VERL}trainer.val_before_train": Idle("the first evaluation follows the first interval"),
    f"{IN_VERL}trainer.critic_warmup": Only(0, "GRPO has no critic"),
    f"{IN_VERL}trainer.max_actor_ckpt_to_keep": Assigns("checkpoint.keep_last"),
    f"{IN_VERL}trainer.logger": Idle("training.enable_wandb and enable_tensorboard decide"),
    f"{IN_VERL}trainer.project_name": Assigns("log.wandb_project", "megalith"),
    f"{IN_VERL}trainer.experiment_name": Assigns("log.wandb_name"),
    f"{IN_VERL}trainer.default_local_dir": Idle("training.output_dir decides"),
}  # fmt: skip
ALL = KEYS | VERL


def row_of(key: str) -> tuple[str, Key] | None:
    """The row of a key, and the name that it stands under: its own, `[]` in the place of a number, or `….*`."""
    if key in ALL:
        return key, ALL[key]
    parts = key.split(".")
    for end in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:end])
        if f"{name}.*" in ALL:
            return f"{name}.*", ALL[f"{name}.*"]
    return None
