"""Table of the keys of Oumi's training configurations, with Oumi's defaults and their meaning in Megalith.

Each key is one row: a Megalith setting (`Assigns`), a value that several settings are derived from (`Read`), a key
without effect (`Ignored`), or a key with one supported value (`MustBe`). Omitted keys have Oumi's default, not
Megalith's. `a.*` matches all keys below `a`. VERL lists the keys below `training.verl_config_overrides` that Oumi's
examples and verl's guides use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megalith.config import RlConfig
from megalith.config.rules.spellings.advantage_spellings import ESTIMATORS


@dataclass(frozen=True)
class Assigns:
    """The key sets one Megalith setting. `values` maps Oumi's choices to Megalith's where they differ."""

    path: str
    default: Any = None
    values: Mapping[Any, Any] | None = None


@dataclass(frozen=True)
class Read:
    """The key is one of several that settings are derived from.

    `kind` is int, count (above 0), float, bool, text, list or dict. Null is allowed.
    """

    kind: str
    default: Any = None


@dataclass(frozen=True)
class Ignored:
    """The key has no effect."""

    reason: str


@dataclass(frozen=True)
class MustBe:
    """Only `value` is supported."""

    value: Any
    reason: str


Key = Assigns | Read | Ignored | MustBe

ALWAYS = "always so, or chosen by the device"
UNUSED_HERE = "Megalith does not use it"
LOADER = "data.num_workers threads prepare batches ahead"
FSDP = "the data-parallel sharding strategy decides"
UNUSED = "the trainer does not read it"
PROFILE = "profile with `megalith train` and log.profile"
TEXT_ONLY = "only language models are trained"
AGENTS = "completions have one turn; for tools, write a run file of `megalith grpo` (docs/agents.md)"
LAUNCHER, ON_GPU = "the launcher decides", "parameters stay on the GPU"
EVALUATED = "evaluation samples from all tokens"
ENGINE = "the built-in engine samples with the trainer's weights and layout"

SPLIT: dict[str, Key] = {  # keys of data.train, data.validation and data.test
    "datasets[].dataset_name": Read("text"),
    "datasets[].dataset_path": Read("text"),
    "datasets[].subset": Read("text"),
    "datasets[].split": Read("text", "train"),
    "datasets[].dataset_kwargs": Read("dict", {}),
    "datasets[].sample_count": Read("count"),
    "datasets[].mixture_proportion": MustBe(
        None, "complete files are read, without weights; mix them beforehand"
    ),
    "datasets[].shuffle": Ignored("training data are shuffled by training.seed"),
    "datasets[].seed": Ignored("training data are shuffled by training.seed"),
    "datasets[].shuffle_buffer_size": Ignored(UNUSED_HERE),
    "datasets[].trust_remote_code": Ignored("code from a model or dataset repository is never run"),
    "datasets[].transform_num_workers": Ignored(LOADER),
    "collator_name": Read("text"),
    "collator_kwargs.*": Ignored("the chat template marks the tokens that are trained on"),
    "train_target": Read("text"),
    "pack": Read("bool", False),
    "stream": Ignored(LOADER),
    "target_col": MustBe(None, "for pre-training use `megalith preprocess`, then `megalith train`"),
    "mixture_strategy": Ignored("complete files are read"),
    "seed": Ignored("training data are shuffled by training.seed"),
    "use_torchdata": Ignored(LOADER),
}

KEYS: dict[str, Key] = {
    "model.model_name": Read("text"),
    "model.adapter_model": MustBe(None, "begin from merged weights: `megalith lora merge`"),
    "model.adapter_trainable": Ignored(UNUSED_HERE),
    "model.tokenizer_name": Read("text"),
    "model.tokenizer_pad_token": Ignored("padding is masked, whatever its token"),
    "model.tokenizer_kwargs.pad_token": Ignored("padding is masked, whatever its token"),
    "model.tokenizer_kwargs": MustBe({}, "the tokenizer follows its files"),
    "model.processor_kwargs": MustBe({}, TEXT_ONLY),
    "model.model_max_length": Read("count"),
    "model.load_pretrained_weights": MustBe(True, "train from initial weights with `megalith train`"),
    "model.trust_remote_code": Ignored("code from a model or dataset repository is never run"),
    "model.torch_dtype_str": Read("text", "auto"),
    "model.compile": MustBe(False, "set training.compile, as Oumi also requires"),
    "model.chat_template": Read("text"),
    "model.chat_template_kwargs": MustBe(None, "put chat_template_kwargs into the records"),
    "model.attn_implementation": Ignored("attention uses the device's fastest kernel"),
    "model.device_map": Ignored("the megatron section sets the layout"),
    "model.model_kwargs": Read("dict", {}),
    "model.enable_liger_kernel": Ignored("layers are compiled and the loss is computed in chunks"),
    "model.shard_for_eval": Ignored(UNUSED_HERE),
    "model.freeze_layers": MustBe([], "either all weights are trained, or LoRA adapters with training.use_peft"),
    "model.text_only": Ignored(TEXT_ONLY),
    "model.model_revision": MustBe(None, "name the folder of that revision as model.model_name"),
    "model.tool_call_parser": Ignored(UNUSED_HERE),
    **{f"data.{split}.{key}": row for split in ("train", "validation", "test") for key, row in SPLIT.items()},
    "training.use_peft": Read("bool", False),
    "training.trainer_type": Read("text", "HF"),
    "training.enable_gradient_checkpointing": Read("bool", False),
    "training.gradient_checkpointing_kwargs.*": Ignored("recomputation is not reentrant"),
    "training.output_dir": Assigns("train.output_dir", "output"),
    "training.per_device_train_batch_size": Read("count", 8),
    "training.per_device_eval_batch_size": Ignored("evaluation uses the training batch size"),
    "training.gradient_accumulation_steps": Read("count", 1),
    "training.max_steps": Read("int", -1),
    "training.num_train_epochs": Read("count", 3),
    "training.save_epoch": MustBe(False, "checkpoints are saved every training.save_steps steps"),
    "training.save_steps": Read("int", 500),
    "training.save_final_model": Read("bool", True),
    "training.seed": Assigns("train.seed", 42),
    "training.data_seed": Ignored("training data are shuffled by training.seed"),
    "training.use_deterministic": Read("bool", False),
    "training.full_determinism": Read("bool", False),
    "training.run_name": Assigns("log.wandb_name"),
    "training.metrics_function": MustBe(None, "evaluation measures the loss, and in GRPO the rewards"),
    "training.reward_functions": Read("list"),
    "training.reward_function_kwargs": MustBe({}, "set them in a reward function of yours, path.py:function"),
    "training.grpo.model_init_kwargs": MustBe({}, "the model follows its config.json"),
    "training.grpo.max_prompt_length": Read("count"),
    "training.grpo.max_completion_length": Read("count"),
    "training.grpo.num_generations": Read("count"),
    "training.grpo.temperature": Read("float", 0.9),
    "training.grpo.remove_unused_columns": Ignored("all columns are passed to the rewards"),
    "training.grpo.repetition_penalty": MustBe(1.0, "it would bias the importance ratio"),
    "training.grpo.use_vllm": Read("bool", False),
    "training.grpo.vllm_mode": Ignored("rl.engine and rl.engine_url decide"),
    "training.grpo.vllm_gpu_memory_utilization": Read("float", 0.9),
    "training.grpo.epsilon": Read("float", 0.2),
    "training.grpo.log_completions": Assigns("rl.log_completions", False),
    "training.grpo.rollout_function": MustBe(None, "only the engine samples completions"),
    "training.gkd.*": Ignored(UNUSED),
    "training.gold.*": Ignored(UNUSED),
    "training.log_level": Ignored(UNUSED_HERE),
    "training.dep_log_level": Ignored(UNUSED_HERE),
    "training.log_examples": Ignored(UNUSED_HERE),
    "training.enable_wandb": Assigns("log.wandb", False),
    "training.enable_mlflow": MustBe(False, "use TensorBoard or Weights & Biases"),
    "training.enable_tensorboard": Read("bool", True),
    "training.logging_strategy": Ignored("lines come every training.logging_steps"),
    "training.logging_dir": Assigns("log.tensorboard_dir"),
    "training.logging_steps": Assigns("log.log_interval", 50),
    "training.logging_first_step": Ignored("metrics.jsonl has every step, including the first"),
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
    "training.include_performance_metrics": Ignored("every step logs them"),
    "training.include_alternative_mfu_metrics": Ignored("every step logs them"),
    "training.log_model_summary": Ignored("printed at the start of the run"),
    "training.resume_from_checkpoint": Assigns("checkpoint.load"),
    "training.try_resume_from_last_checkpoint": Read("bool", False),
    "training.dataloader_num_workers": Ignored(LOADER),
    "training.dataloader_persistent_workers": Ignored(LOADER),
    "training.dataloader_prefetch_factor": Ignored(LOADER),
    "training.dataloader_main_process_only": Ignored(LOADER),
    "training.ddp_find_unused_parameters": Ignored(UNUSED_HERE),
    "training.max_grad_norm": Assigns("optim.clip_grad", 1.0, {None: 0.0}),
    "training.trainer_kwargs": Read("dict", {}),
    "training.profiler.save_dir": Ignored(UNUSED_HERE),
    "training.profiler.enable_cpu_profiling": MustBe(False, PROFILE),
    "training.profiler.enable_cuda_profiling": MustBe(False, PROFILE),
    "training.profiler.*": Ignored(UNUSED_HERE),
    "training.telemetry.*": Ignored("metrics.jsonl and the trackers have these metrics"),
    "training.empty_device_cache_steps": Ignored("the memory cache is kept between steps"),
    "training.nccl_default_timeout_minutes": Assigns("runtime.distributed_timeout_minutes", None, {None: 10}),
    "training.label_ignore_index": MustBe(None, "labels of −100 are ignored"),
    "peft.lora_r": Read("count", 8),
    "peft.lora_alpha": Read("count", 8),
    "peft.lora_dropout": Read("float", 0.0),
    "peft.lora_target_modules": Read("list"),
    "peft.lora_exclude_modules": Read("list"),
    "peft.lora_target_parameters": MustBe(None, "fused expert tensors have no adapters"),
    "peft.lora_modules_to_save": Read("list"),
    "peft.lora_bias": MustBe("none", "adapters have no biases"),
    "peft.lora_init_weights": Read("text", "DEFAULT"),
    "peft.lora_task_type": Ignored(ALWAYS),
    "peft.q_lora": MustBe(False, "weights are not quantized; with False and bf16 the base model takes 2 bytes per "
                                 "parameter"),
    "peft.q_lora_bits": Ignored(UNUSED),
    "peft.bnb_4bit_quant_type": Ignored(UNUSED),
    "peft.llm_int8_skip_modules": Ignored(UNUSED),
    "peft.use_bnb_nested_quant": Ignored(UNUSED),
    "peft.bnb_4bit_quant_storage": Ignored(UNUSED),
    "peft.bnb_4bit_compute_dtype": Ignored(UNUSED),
    "peft.peft_save_mode": Read("text", "ADAPTER_ONLY"),
    "fsdp.enable_fsdp": Read("bool", False),
    "fsdp.sharding_strategy": Read("text", "FULL_SHARD"),
    "fsdp.cpu_offload": Read("bool", False),
    "fsdp.mixed_precision": Ignored("model.torch_dtype_str decides"),
    "fsdp.*": Ignored(FSDP),
    "deepspeed.enable_deepspeed": Read("bool", False),
    "deepspeed.zero_stage": Read("text", "ZERO_0"),
    "deepspeed.offload_optimizer.device": Read("text", "NONE"),
    "deepspeed.offload_optimizer.*": Ignored(FSDP),
    "deepspeed.offload_param.*": Ignored(ON_GPU),
    "deepspeed.precision": Ignored("model.torch_dtype_str decides"),
    "deepspeed.*": Ignored(FSDP),
    "grpo.num_generations": Read("count"),
    "grpo.temperature": Read("float", 0.9),
    "grpo.epsilon": Read("float", 0.2),
    "grpo.max_prompt_length": Read("count"),
    "grpo.max_completion_length": Read("count"),
    "grpo.repetition_penalty": MustBe(1.0, "it would bias the importance ratio"),
    "grpo.use_vllm": Read("bool", False),
    "grpo.vllm_mode": Ignored("rl.engine and rl.engine_url decide"),
    "grpo.vllm_gpu_memory_utilization": Read("float", 0.9),
    "grpo.log_completions": Read("bool", False),
    "grpo.model_init_kwargs": MustBe({}, "the model follows its config.json"),
    "grpo.remove_unused_columns": Ignored("all columns are passed to the rewards"),
    "grpo.rollout_function": MustBe(None, "only the engine samples completions"),
    "megatron.tensor_model_parallel_size": Read("count", 1),
    "megatron.pipeline_model_parallel_size": Read("count", 1),
    "megatron.context_parallel_size": Read("count", 1),
    "megatron.expert_model_parallel_size": Read("count", 1),
    "megatron.expert_tensor_parallel_size": Read("count"),
    "megatron.virtual_pipeline_model_parallel_size": Read("count"),
    "megatron.micro_batch_size": Read("count", 1),
    "megatron.global_batch_size": Read("count"),
    "megatron.enable_sequence_packing": Read("bool", False),
    "megatron.ddp_config.grad_reduce_in_fp32": Ignored("gradients are always reduced in fp32"),
    "megatron.ddp_config.overlap_grad_reduce": Ignored("communication overlaps wherever that is faster"),
    "megatron.ddp_config.overlap_param_gather": Ignored("communication overlaps wherever that is faster"),
    "megatron.ddp_config.average_in_collective": Ignored("sums are divided by the global number of tokens"),
    "megatron.optimizer_config.optimizer_cpu_offload": Read("bool", False),
    "megatron.optimizer_config.optimizer_offload_fraction": Read("float", 0.0),
    "megatron.optimizer_config.overlap_cpu_optimizer_d2h_h2d": Read("bool", False),
    "megatron.optimizer_config.use_precision_aware_optimizer": MustBe(
        False, "for smaller moments set training.optimizer to adamw_8bit"
    ),
    "megatron.transformer_config.recompute_granularity": Read("text"),
    "megatron.transformer_config.recompute_method": Read("text"),
    "megatron.transformer_config.recompute_num_layers": Read("count"),
    "megatron.transformer_config.recompute_modules": Read("list"),
    "megatron.checkpoint_config.use_async_checkpoint": Assigns("checkpoint.async_save", False),
    "megatron.checkpoint_config.use_fully_parallel_strategy": Ignored("every rank writes its shard"),
    "megatron.checkpoint_config.async_persistent": Ignored("one thread writes checkpoints"),
    "megatron.enable_weight_sync": MustBe(True, "rollouts would keep using the initial weights"),
    "megatron.weight_sync_method": Read("text", "nccl"),
    "megatron.weight_sync_timeout": Read("float"),
    "megatron.inference_backend": Read("text", "vllm"),
    "megatron.vllm_weight_sync_interval": Read("count"),
    "megatron.sampling_config.temperature": Read("float", 0.7),
    "megatron.sampling_config.top_p": Read("float", 1.0),
    "megatron.sampling_config.top_k": Read("int", -1),
    "megatron.sampling_config.max_tokens": Read("count", 512),
    "megatron.sampling_config.repetition_penalty": MustBe(1.0, "it would bias the importance ratio"),
    "megatron.grpo_config.kl_beta": Read("float", 0.001),
    "megatron.grpo_config.entropy_weight": Read("float", 0.0),
    "megatron.grpo_config.clamp_eps_lower": Read("float", 0.2),
    "megatron.grpo_config.clamp_eps_upper": Read("float", 0.2),
    "megatron.grpo_config.normalize_advantages": Read("bool", True),
    "megatron.grpo_config.reference_update_interval": MustBe(None, "the reference keeps the run's initial weights"),
    "megatron.model_config_kwargs": MustBe({}, "the model follows its config.json; change that file"),
}  # fmt: skip

ENGINE_KEYS = {  # setting → key
    "rl.engine": "megatron.inference_backend",
    "rl.weight_sync_method": "megatron.weight_sync_method",
    "rl.max_staleness": "megatron.vllm_weight_sync_interval",
    "rl.weight_sync_timeout": "megatron.weight_sync_timeout",
}

# training.trainer_kwargs by trainer: the setting, or None for a key without effect.
TRAINER_KWARGS: dict[str, dict[str, str | None]] = {
    "sft": {
        "max_seq_length": "data.seq_length",
        "max_length": "data.seq_length",
        "packing": "sft.packing",
        "assistant_only_loss": "sft.assistant_only_loss",
        "completion_only_loss": "sft.completion_only_loss",
        "dataset_text_field": None,
        "dataset_kwargs": None,
        "remove_unused_columns": None,
        "use_liger_kernel": None,
    },
    "dpo": {
        "max_length": "data.seq_length",
        "max_prompt_length": None,
        "beta": "dpo.beta",
        "loss_type": "dpo.loss_type",
        "label_smoothing": "dpo.label_smoothing",
        "remove_unused_columns": None,
        "use_liger_kernel": None,
    },
    "grpo": {
        "vllm_server_base_url": "rl.engine_url",
        "vllm_server_timeout": "rl.weight_sync_timeout",
        **{
            name: f"rl.{name}"
            for name in RlConfig.model_fields
            if name not in ("prompts", "rollouts", "reward_funcs")
        },
        "vllm_mode": None,
        "remove_unused_columns": None,
        "use_liger_kernel": None,
    },
}
KWARGS_WITH_KEYS = (
    "num_generations",
    "temperature",
    "epsilon",
    "beta",
)  # must equal their keys in other sections

VERL_PREFIX = "training.verl_config_overrides."
ACTOR, ROLLOUT, REFERENCE = (
    f"{VERL_PREFIX}actor_rollout_ref.{part}." for part in ("actor", "rollout", "ref")
)
VERL: dict[str, Key] = {
    f"{VERL_PREFIX}data.train_batch_size": Read("count"),
    f"{VERL_PREFIX}data.max_prompt_length": Read("count"),
    f"{VERL_PREFIX}data.max_response_length": Read("count"),
    f"{VERL_PREFIX}data.shuffle": Assigns("rl.shuffle_dataset", True),
    f"{VERL_PREFIX}data.train_files": MustBe(None, "name the file as dataset_path in data.train.datasets"),
    f"{VERL_PREFIX}data.val_files": Ignored("data.validation names the evaluation prompts"),
    f"{VERL_PREFIX}data.val_max_samples": Read("int", -1),
    f"{VERL_PREFIX}data.val_batch_size": Ignored("evaluation uses the training batch size"),
    f"{VERL_PREFIX}data.filter_overlong_prompts": Ignored("longer prompts are dropped, and counted"),
    f"{VERL_PREFIX}data.filter_overlong_prompts_workers": Ignored(LOADER),
    f"{VERL_PREFIX}data.image_key": MustBe(None, TEXT_ONLY),
    f"{VERL_PREFIX}data.apply_chat_template_kwargs": MustBe({}, "put chat_template_kwargs into the records"),
    f"{VERL_PREFIX}data.truncation": MustBe("error", "prompts are not cut; longer ones are dropped, and counted"),
    f"{VERL_PREFIX}algorithm.adv_estimator": Assigns("rl.advantage_estimator", "grpo", ESTIMATORS),
    f"{VERL_PREFIX}algorithm.use_kl_in_reward": MustBe(False, "the KL term is part of the loss: set use_kl_loss"),
    f"{VERL_PREFIX}algorithm.kl_ctrl.*": Ignored("only use_kl_in_reward reads it"),
    f"{VERL_PREFIX}algorithm.norm_adv_by_std_in_grpo": Assigns("rl.scale_rewards", True,
                                                               {True: "group", False: "none"}),
    f"{ACTOR}ppo_mini_batch_size": Read("count"),
    f"{ACTOR}ppo_micro_batch_size_per_gpu": Read("count"),
    f"{ACTOR}ppo_epochs": Assigns("rl.num_iterations", 1),
    f"{ACTOR}use_dynamic_bsz": Ignored("micro-batches have a fixed number of sequences"),
    f"{ACTOR}use_kl_loss": Read("bool", False),
    f"{ACTOR}kl_loss_coef": Read("float", 0.001),
    f"{ACTOR}kl_loss_type": Assigns("rl.kl_estimator", "low_var_kl", {"kl": "k1", "mse": "k2", "low_var_kl": "k3",
                                                                    "k1": "k1", "k2": "k2", "k3": "k3"}),
    f"{ACTOR}clip_ratio": Read("float", 0.2),
    f"{ACTOR}clip_ratio_low": Read("float", 0.2),
    f"{ACTOR}clip_ratio_high": Read("float", 0.2),
    f"{ACTOR}clip_ratio_c": Assigns("rl.clip_ratio_c"),
    f"{ACTOR}entropy_coeff": Read("float", 0.0),
    f"{ACTOR}entropy_from_logits_with_chunking": Ignored("always on"),
    f"{ACTOR}loss_agg_mode": Assigns("rl.loss_type", "token-mean", {"token-mean": "dapo", "seq-mean-token-mean": "grpo",
                                     "seq-mean-token-sum": "luspo", "seq-mean-token-sum-norm": "dr_grpo",
                                     "token-sum": "token_sum"}),
    f"{ACTOR}optim.lr": Read("float"),
    f"{ACTOR}optim.weight_decay": Read("float"),
    f"{ACTOR}optim.lr_warmup_steps": Read("int"),
    f"{ACTOR}optim.lr_scheduler_type": Read("text"),
    f"{ACTOR}optim.min_lr_ratio": Read("float"),
    **dict.fromkeys((f"{ACTOR}{part}param_offload" for part in ("", "fsdp_config.", "megatron.")), Ignored(ON_GPU)),
    f"{ACTOR}optimizer_offload": Read("bool", False),
    f"{ACTOR}fsdp_config.optimizer_offload": Read("bool", False),
    f"{ACTOR}megatron.optimizer_offload": Read("bool", False),
    f"{ACTOR}megatron.tensor_model_parallel_size": Read("count", 1),
    f"{ACTOR}megatron.pipeline_model_parallel_size": Read("count", 1),
    f"{ACTOR}megatron.virtual_pipeline_model_parallel_size": Read("count"),
    f"{ACTOR}megatron.context_parallel_size": Read("count", 1),
    f"{ACTOR}megatron.expert_model_parallel_size": Read("count", 1),
    f"{ACTOR}megatron.expert_tensor_parallel_size": Read("count"),
    f"{ACTOR}megatron.sequence_parallel": Assigns("parallel.sequence_parallel"),
    f"{ACTOR}megatron.use_distributed_optimizer": Ignored("the optimizer state is always sharded"),
    f"{ACTOR}megatron.override_transformer_config.recompute_granularity": Read("text"),
    f"{ACTOR}megatron.override_transformer_config.recompute_method": Read("text"),
    f"{ACTOR}megatron.override_transformer_config.recompute_num_layers": Read("count"),
    f"{ACTOR}megatron.override_transformer_config.recompute_modules": Read("list"),
    f"{ACTOR}megatron.override_transformer_config.attention_backend": Ignored("attention uses the fastest kernel"),
    f"{ACTOR}megatron.override_ddp_config.*": Ignored("communication overlaps wherever that is faster"),
    f"{ACTOR}megatron.seed": Ignored("training.seed decides"),
    f"{ROLLOUT}name": Read("text"),
    f"{ROLLOUT}n": Read("count"),
    f"{ROLLOUT}temperature": Read("float", 1.0),
    f"{ROLLOUT}top_p": Read("float", 1.0),
    f"{ROLLOUT}top_k": Read("int", -1),
    f"{ROLLOUT}val_kwargs.n": Assigns("rl.num_generations_eval"),
    f"{ROLLOUT}val_kwargs.temperature": Assigns("rl.eval_temperature"),
    f"{ROLLOUT}val_kwargs.do_sample": Ignored("val_kwargs.temperature decides; 0 is greedy"),
    f"{ROLLOUT}val_kwargs.top_p": MustBe(1.0, EVALUATED), f"{ROLLOUT}val_kwargs.top_k": MustBe(-1, EVALUATED),
    f"{ROLLOUT}do_sample": MustBe(True, "greedy completions of a prompt would all be equal"),
    f"{ROLLOUT}ignore_eos": MustBe(False, "completions end at their end of text"),
    f"{ROLLOUT}repetition_penalty": MustBe(1.0, "the sampler's probabilities would differ from the trainer's"),
    f"{ROLLOUT}quantization": MustBe(None, "rollouts use the trainer's weights"),
    f"{ROLLOUT}multi_turn.enable": MustBe(False, AGENTS),
    f"{ROLLOUT}agent.default_agent_loop": MustBe("single_turn_agent", AGENTS),
    f"{ROLLOUT}*": Ignored(ENGINE),
    f"{REFERENCE}*": Ignored("the reference uses the trainer's layout and batches"),
    f"{VERL_PREFIX}actor_rollout_ref.model.use_remove_padding": Ignored("megatron.enable_sequence_packing decides"),
    f"{VERL_PREFIX}actor_rollout_ref.model.override_config.attn_implementation": Ignored(
        "attention uses the fastest kernel"),
    f"{VERL_PREFIX}actor_rollout_ref.model.enable_gradient_checkpointing": Read("bool", False),
    f"{VERL_PREFIX}reward.num_workers": Assigns("rl.reward_workers", 4),
    **dict.fromkeys((f"{VERL_PREFIX}trainer.n_gpus_per_node", f"{VERL_PREFIX}trainer.nnodes"), Ignored(LAUNCHER)),
    f"{VERL_PREFIX}trainer.total_epochs": Read("count"),
    f"{VERL_PREFIX}trainer.total_training_steps": Read("int"),
    f"{VERL_PREFIX}trainer.save_freq": Read("int"),
    f"{VERL_PREFIX}trainer.test_freq": Read("int", -1),
    f"{VERL_PREFIX}trainer.val_before_train": Ignored("the first evaluation is after the first interval"),
    f"{VERL_PREFIX}trainer.critic_warmup": MustBe(0, "GRPO has no critic"),
    f"{VERL_PREFIX}trainer.max_actor_ckpt_to_keep": Assigns("checkpoint.keep_last"),
    f"{VERL_PREFIX}trainer.logger": Ignored("training.enable_wandb and enable_tensorboard decide"),
    f"{VERL_PREFIX}trainer.project_name": Assigns("log.wandb_project", "megalith"),
    f"{VERL_PREFIX}trainer.experiment_name": Assigns("log.wandb_name"),
    f"{VERL_PREFIX}trainer.default_local_dir": Ignored("training.output_dir decides"),
}  # fmt: skip
ALL_KEYS = KEYS | VERL


def row_of(key: str) -> tuple[str, Key] | None:
    """Return the name and entry of a key in the table: the key itself, or the nearest `a.*` above it."""
    if key in ALL_KEYS:
        return key, ALL_KEYS[key]
    parts = key.split(".")
    for end in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:end])
        if f"{name}.*" in ALL_KEYS:
            return f"{name}.*", ALL_KEYS[f"{name}.*"]
    return None
