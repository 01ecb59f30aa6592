"""Tables of GRPOConfig and RLOOConfig arguments: those that set Megalith's settings, and those without effect.

Any other argument that differs from its default raises an error. The tables are from TRL 1.16.0 and transformers
5.24.0. With other versions, arguments are compared with the defaults of the installed class.
"""

from __future__ import annotations

from megalith.config import RlConfig

RENAMED: dict[str, str] = {
    "learning_rate": "optim.lr",
    "weight_decay": "optim.weight_decay",
    "adam_beta1": "optim.adam_beta1",
    "adam_beta2": "optim.adam_beta2",
    "adam_epsilon": "optim.adam_eps",
    "max_grad_norm": "optim.clip_grad",
    "max_steps": "train.train_iters",
    "per_device_train_batch_size": "train.micro_batch_size",
    "output_dir": "train.output_dir",
    "seed": "train.seed",
    "save_total_limit": "checkpoint.keep_last",
    "max_prompt_length": "rl.max_prompt_length",
}
OURS = [  # settings of `rl`, most of which have TRL's name
    name
    for name in RlConfig.model_fields
    if name not in ("prompts", "eval_prompts", "rollouts", "reward_funcs")
]
NOT_RLOO = {  # settings and arguments of GRPO that would make RLOO another method; RLOOConfig has none of them
    "advantage_baseline", "advantage_deviation", "advantage_epsilon", "advantage_estimator", "clip_ratio_c",
    "delta", "entropy_coef", "entropy_coef_delta", "entropy_coef_max", "entropy_coef_min", "entropy_target",
    "use_adaptive_entropy", "importance_sampling_level", "kl_estimator", "kl_score_gradient", "loss_type",
    "multi_objective_aggregation", "off_policy_mask_threshold", "scale_rewards", "top_entropy_quantile",
    "use_bias_correction_kl", "use_decoupled_loss", "use_kl_in_reward", "vllm_importance_sampling_cap",
    "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min", "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode", "max_tool_calling_iterations", "whiten_advantages",
}  # fmt: skip
RLOO: dict[str, object] = {  # of TRL: ratios of sequences, and no weights for the engine's mismatch
    "rl.loss_type": "rloo", "rl.advantage_estimator": "rloo", "rl.kl_estimator": "k1",
    "rl.vllm_importance_sampling_correction": False,
}  # fmt: skip
TRANSLATED = (  # translated in grpo_settings.py
    "bf16", "ddp_timeout", "disable_dropout", "eval_steps", "eval_strategy", "fp16", "generation_batch_size",
    "generation_kwargs",
    "gradient_accumulation_steps", "logging_steps", "logging_strategy", "lr_scheduler_kwargs", "lr_scheduler_type",
    "max_tool_calling_iterations",
    "model_init_kwargs", "multi_objective_aggregation", "num_train_epochs", "optim", "report_to", "run_name",
    "save_only_model", "save_steps", "save_strategy", "steps_per_generation", "use_cpu", "use_vllm",
    "vllm_enable_sleep_mode", "vllm_importance_sampling_cap", "vllm_mode", "vllm_server_base_url",
    "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "warmup_ratio", "warmup_steps",
)  # fmt: skip

_RECOMPUTATION = (
    "recomputation does not change results; settings={'parallel.recompute_granularity': …} chooses"
)
_COMPILE = "compiling does not change results; settings={'runtime.compile': …} chooses"
_KERNELS = "Megalith has its own kernels, and the loss is always computed in chunks"
_LOADER = "prompts are in memory, and their order depends only on the seed"
_REPLICAS = "Megalith synchronizes replicas itself, without DistributedDataParallel"
_CONSOLE = "console and metrics.jsonl are the same for all runs"
_HUB = "nothing is pushed, because push_to_hub is off"
_ENGINE = "completions are sampled by Megalith's engine, vLLM or SGLang"
_EVALUATION = "held-out prompts are sampled like training prompts and scored together"
NO_EFFECT: dict[str, str] = {
    "activation_checkpointing": _RECOMPUTATION,
    "activation_checkpointing_kwargs": _RECOMPUTATION,
    "gradient_checkpointing": _RECOMPUTATION,
    "gradient_checkpointing_kwargs": _RECOMPUTATION,
    "torch_compile": _COMPILE,
    "torch_compile_backend": _COMPILE,
    "torch_compile_mode": _COMPILE,
    "torch_empty_cache_steps": "memory is freed when a run needs it",
    "use_liger_kernel": _KERNELS,
    "liger_kernel_config": _KERNELS,
    "use_cache": "generation always has a KV cache",
    "cache_implementation": "generation has a KV cache of its own",
    "use_transformers_continuous_batching": _ENGINE,
    "transformers_continuous_batching_config": _ENGINE,
    "use_transformers_paged": _ENGINE,
    "ds3_gather_for_generation": "there is no DeepSpeed",
    "pad_to_multiple_of": "rows have data.seq_length tokens",
    "trust_remote_code": "no code from a checkpoint is run; its architecture must be built in",
    "log_level": _CONSOLE,
    "log_level_replica": _CONSOLE,
    "log_on_each_node": _CONSOLE,
    "logging_dir": "TensorBoard's folder is settings={'log.tensorboard_dir': …}",
    "logging_first_step": _CONSOLE,
    "logging_nan_inf_filter": "a step with NaN or Inf is skipped and named",
    "include_num_input_tokens_seen": _CONSOLE,
    "disable_tqdm": _CONSOLE,
    "skip_memory_metrics": _CONSOLE,
    "log_multimodal": "there are no images",
    "log_unique_prompts": "completions.jsonl has every completion",
    "per_device_eval_batch_size": _EVALUATION,
    "eval_accumulation_steps": _EVALUATION,
    "eval_do_concat_batches": _EVALUATION,
    "eval_use_gather_object": _EVALUATION,
    "save_on_each_node": "each rank writes its share of a checkpoint",
    "enable_jit_checkpoint": "SIGTERM always ends a run with a checkpoint",
    "hub_token": _HUB,
    "hub_private_repo": _HUB,
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "hub_always_push": _HUB,
    "hub_revision": _HUB,
    "dataloader_num_workers": _LOADER,
    "dataloader_pin_memory": _LOADER,
    "dataloader_persistent_workers": _LOADER,
    "dataloader_prefetch_factor": _LOADER,
    "dataloader_multiprocessing_context": _LOADER,
    "dataloader_in_order": _LOADER,
    "dataloader_drop_last": "rollout batches are complete: prompts of the next epoch follow the last ones",
    "ddp_backend": _REPLICAS,
    "ddp_find_unused_parameters": _REPLICAS,
    "ddp_bucket_cap_mb": _REPLICAS,
    "ddp_broadcast_buffers": _REPLICAS,
    "ddp_static_graph": _REPLICAS,
    "local_rank": "the launcher sets the rank of a process",
    "do_train": "train() always trains",
    "do_eval": "eval_strategy decides",
    "do_predict": "there is no prediction",
    "vllm_group_port": "a free port is taken",
    "vllm_max_model_length": "vLLM's context is as long as data.seq_length needs",
}
UNSUPPORTED_DEFAULTS: dict[str, object] = {  # unsupported arguments: only these values are accepted
    "accelerator_config": None, "auto_find_batch_size": False, "average_tokens_across_devices": True,
    "batch_eval_metrics": False, "bf16_full_eval": False, "cast_lm_head_to_fp32": False, "chat_template_kwargs": None,
    "data_seed": None, "deepspeed": None, "eval_delay": 0, "eval_on_start": False, "fp16_full_eval": False,
    "fsdp": None, "fsdp_config": None, "full_determinism": False, "greater_is_better": None,
    "ignore_data_skip": False, "label_names": None, "label_smoothing_factor": 0.0, "load_best_model_at_end": False,
    "log_completions_hub_repo": None, "metric_for_best_model": None,
    "neftune_noise_alpha": None,
    "optim_args": None, "optim_target_modules": None, "parallelism_config": None, "prediction_loss_only": False,
    "push_to_hub": False, "remove_unused_columns": False,
    "restore_callback_states_from_checkpoint": False, "resume_from_checkpoint": None, "router_aux_loss_coef": None,
    "tf32": None,
    "vllm_model_impl": "vllm", "vllm_structured_outputs_regex": None, "vllm_tensor_parallel_size": 1,
}  # fmt: skip
REMEDIES: dict[str, str] = {  # what to do instead of an unsupported argument
    "auto_find_batch_size": "; set per_device_train_batch_size",
    "data_seed": "; the order of the prompts follows from seed",
    "deepspeed": "; layouts are settings={'parallel.…': …}",
    "fsdp": "; layouts are settings={'parallel.…': …}",
    "fsdp_config": "; layouts are settings={'parallel.…': …}",
    "full_determinism": "; settings={'train.deterministic': True} selects deterministic kernels",
    "parallelism_config": "; layouts are settings={'parallel.…': …}",
    "push_to_hub": "; push the exported folder",
    "resume_from_checkpoint": "; train(resume_from_checkpoint=folder) resumes a run",
    "router_aux_loss_coef": "; settings={'model.moe_aux_loss_coeff': …} sets it",
    "tf32": "; settings={'train.precision': …} chooses the precision",
    "vllm_tensor_parallel_size": "; vLLM in the trainer's processes uses parallel.tensor_model_parallel_size",
}
