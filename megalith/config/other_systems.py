"""Suggestions for names and files of other systems, which are rejected.

Files are recognized by their top-level keys or their extension.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

# fmt: off
OTHER_NAMES: dict[str, str] = {
    # Hugging Face: Accelerate, Trainer, model configurations
    "tp_degree":                     "parallel.tensor_model_parallel_size",
    "pp_degree":                     "parallel.pipeline_model_parallel_size",
    "sequence_parallelism":          "parallel.sequence_parallel",
    "partition_activations":         "parallel.distribute_saved_activations",
    "checkpoint_num_layers":         "parallel.recompute_num_layers",
    "gradient_checkpointing":        "parallel.recompute_granularity: full",
    "num_micro_batches":             "train.global_batch_size, which is train.micro_batch_size × data parallel × their number",
    "gradient_accumulation_steps":   "train.global_batch_size, which is train.micro_batch_size × data parallel × accumulation",
    "per_device_train_batch_size":   "train.micro_batch_size",
    "mixed_precision":               "train.precision",
    "max_steps":                     "train.train_iters",
    "gradient_clipping":             "optim.clip_grad",
    "max_grad_norm":                 "optim.clip_grad",
    "learning_rate":                 "optim.lr",
    "learning_rate_decay_iters":     "optim.lr_decay_iters",
    "lr_scheduler_type":             "optim.lr_decay_style",
    "warmup_steps":                  "optim.lr_warmup_iters",
    "warmup_ratio":                  "optim.lr_warmup_fraction",
    "save_steps":                    "checkpoint.save_interval",
    "save_total_limit":              "checkpoint.keep_last",
    "resume_from_checkpoint":        "checkpoint.load",
    "logging_steps":                 "log.log_interval",
    "n_layer":                       "model.num_layers",
    "n_embd":                        "model.hidden_size",
    "n_head":                        "model.num_attention_heads",
    "num_hidden_layers":             "model.num_layers",
    "num_key_value_heads":           "model.num_query_groups",
    "intermediate_size":             "model.ffn_hidden_size",
    "rope_theta":                    "model.rotary_base",
    "tie_word_embeddings":           "model.untie_embeddings_and_output_weights, inverted",
    "num_processes":                 "--nproc, the processes per machine",
    "num_machines":                  "--nnodes",
    # Oumi
    "model_name":                    "model.init_from",
    "model_name_or_path":            "model.init_from",
    "base_model":                    "model.init_from",
    "torch_dtype_str":               "train.precision",
    "enable_gradient_checkpointing": "parallel.recompute_granularity: full",
    "include_performance_metrics":   "always on: metrics.jsonl has them",
    "use_async_checkpoint":          "checkpoint.async_save",
    "use_fully_parallel_strategy":   "always on: every rank writes its shard of a checkpoint",
    "enable_sequence_packing":       "data.reset_attention_mask: samples are always packed, this separates their documents",
    "enable_fsdp":                   "parallel.data_parallel_sharding_strategy: optim_grads_params",
    "dataset_name":                  "data.data_path, the prefix that `megalith preprocess` wrote",
    # torchtitan
    "dump_folder":                   "train.output_dir",
    "local_batch_size":              "train.micro_batch_size",
    "seq_len":                       "data.seq_length",
    "steps":                         "train.train_iters",
    "max_norm":                      "optim.clip_grad",
    "mixed_precision_param":         "train.precision",
    "min_lr_factor":                 "optim.min_lr, which is optim.lr × the factor",
    "decay_ratio":                   "optim.lr_decay_style: WSD, and optim.lr_wsd_decay_iters",
    "hf_assets_path":                "data.tokenizer_model",
    "data_parallel_shard_degree":    "parallel.data_parallel_sharding_strategy: optim_grads_params, over the ranks that the other axes leave",
    "data_parallel_replicate_degree": "parallel.num_distributed_optimizer_instances",
    "tensor_parallel_degree":        "parallel.tensor_model_parallel_size",
    "enable_async_tensor_parallel":  "parallel.tp_comm_overlap",
    "pipeline_parallel_degree":      "parallel.pipeline_model_parallel_size",
    "pipeline_parallel_schedule":    "parallel.pipeline_schedule",
    "context_parallel_degree":       "parallel.context_parallel_size",
    "expert_parallel_degree":        "parallel.expert_model_parallel_size",
    "initial_load_path":             "model.init_from",
    "last_save_in_hf":               "checkpoint.export_hf",
    "keep_latest_k":                 "checkpoint.keep_last",
    "log_freq":                      "log.log_interval",
    "flavor":                        "model.preset",
    "enable_cpu_offload":            "optim.optimizer_cpu_offload",
    "context_parallel_rotate_method": "parallel.cp_comm_type",
    "expert_tensor_parallel_degree": "parallel.expert_tensor_parallel_size",
    "module_fqns_per_model_part":    "parallel.pipeline_model_parallel_layout",
    "fsdp_reshard_after_forward":    "parallel.data_parallel_sharding_strategy: optim_grads_params, or optim_grads for never",
    "load_step":                     "checkpoint.load: RUN/checkpoints/step_…",
    "train_timeout_seconds":         "runtime.distributed_timeout_minutes",
    "enable_profiling":              "log.profile",
    # TRL, verl, NeMo-RL: what counts prompts, or steps of a rollout batch
    "num_prompts_per_step":          "train.global_batch_size × rl.mini_batches / rl.num_generations",
    "train_batch_size":              "train.global_batch_size × rl.mini_batches / rl.num_generations, because it counts prompts",
    "ppo_mini_batch_size":           "train.global_batch_size / rl.num_generations, because it counts prompts",
    "steps_per_generation":          "rl.mini_batches × accumulation",
    "generation_batch_size":         "train.global_batch_size × rl.mini_batches",
    "overlong_buffer":               "rl.overlong_buffer_len and rl.overlong_penalty_factor",
    # OpenRLHF, slime
    "pretrain":                      "model.init_from",
    "hf_checkpoint":                 "model.init_from",
    "reward_pretrain":               "rl.reward_models",
    "remote_rm_url":                 "rl.reward_models for an address, rl.reward_funcs for a file",
    "custom_rm_path":                "rl.reward_funcs",
    "rm_type":                       "rl.reward_funcs",
    "prompt_data":                   "rl.prompts",
    "input_key":                     "rl.prompt_column",
    "rollout_batch_size":            "train.global_batch_size × rl.mini_batches / rl.num_generations, because it counts prompts",
    "micro_train_batch_size":        "train.micro_batch_size",
    "n_samples_per_prompt":          "rl.num_generations",
    "prompt_max_len":                "rl.max_prompt_length",
    "generate_max_len":              "rl.max_completion_length",
    "rollout_max_response_len":      "rl.max_completion_length",
    "rollout_temperature":           "rl.temperature",
    "actor_learning_rate":           "optim.lr",
    "critic_learning_rate":          "rl.critic_lr",
    "init_kl_coef":                  "rl.beta, with rl.use_kl_in_reward unless use_kl_loss is set",
    "eps_clip":                      "rl.epsilon",
    "eps_clip_high":                 "rl.epsilon_high",
    "eps_clip_low_high":             "rl.epsilon and rl.epsilon_high",
    "lambd":                         "rl.lam",
    "dynamic_filtering":             "rl.filter_zero_std",
    "packing_samples":               "rl.packing",
    "zero_stage":                    "parallel.data_parallel_sharding_strategy",
    "adam_offload":                  "optim.optimizer_cpu_offload",
    # PEFT, Axolotl, LLaMA-Factory
    "r":                             "lora.rank",
    "lora_r":                        "lora.rank",
    "lora_rank":                     "lora.rank",
    "lora_alpha":                    "lora.alpha",
    "lora_dropout":                  "lora.dropout",
    "target_modules":                "lora.targets",
    "lora_target_modules":           "lora.targets",
    "lora_target":                   "lora.targets",
    "target_parameters":             "lora.targets, with names such as experts.gate_up_proj",
    "lora_target_linear":            "lora.targets, a list of names",
    "lora_modules_to_save":          "lora.modules_to_save",
    "additional_target":             "lora.modules_to_save",
    "adapter_name_or_path":          "lora.load",
    "load_in_4bit":                  "lora.quantize_base: nf4",
    "load_in_8bit":                  "lora.quantize_base: int8",
    "bnb_4bit_quant_type":           "lora.quantize_base",
    "quantization_bit":              "lora.quantize_base: nf4 for 4, int8 for 8",
    "use_peft":                      "lora.rank, which turns adapters on",
    # short names
    "batch_size":                    "train.global_batch_size, or train.micro_batch_size per device",
    "epochs":                        "sft.num_train_epochs, dpo.num_train_epochs or, counted in steps, train.train_iters",
    "num_epochs":                    "sft.num_train_epochs, dpo.num_train_epochs or, counted in steps, train.train_iters",
    "max_seq_length":                "data.seq_length",
    "model_max_length":              "data.seq_length",
    "cutoff_len":                    "data.seq_length",
    "sequence_len":                  "data.seq_length",
    "num_gpus":                      "--nproc, the processes per machine",
    # Megatron-LM
    "group_query_attention":         "model.num_query_groups above 0",
}
PLAIN_LORA = "adapters are plain LoRA on the matrices in lora.targets"
UNSUPPORTED_NAMES: dict[str, str] = {
    "bias":                PLAIN_LORA + ", and biases stay frozen",
    "task_type":           "leave it out: the model and the command decide the task",
    "peft_type":           PLAIN_LORA,
}  # fmt: skip
"""Other systems' names without an equivalent, and the reason."""


def hint_of_other_name(key: str) -> str:
    """Return a suggestion for the error about `key`, or "" if no known system has the name."""
    if key in UNSUPPORTED_NAMES:
        return f"; {UNSUPPORTED_NAMES[key]}"
    setting = OTHER_NAMES.get(key)
    return f"; in Megalith, it is {setting}" if setting else ""


IN_OURS = "copy its values into a run file"
# (system, top-level keys of its files, advice); `{file}` is the file.
OTHER_FORMATS: tuple[tuple[str, str, str], ...] = (
    ("torchtitan", "job training", f"{IN_OURS}: docs/first_hour/torchtitan.md has the names"),
    ("Megatron-Bridge", "recipe",
     f"{IN_OURS} for megalith train or sft: docs/configuration.md; megalith recipes lists planned run files"),
    ("Megatron-Bridge", "train optimizer scheduler",
     f"{IN_OURS} for megalith train or sft, in which sections optimizer and scheduler are optim: docs/configuration.md"),
    ("torchtune", "tokenizer checkpointer", f"{IN_OURS} for megalith sft, dpo or grpo: docs/sft.md"),
    ("LitGPT", "checkpoint_dir out_dir", f"{IN_OURS} for megalith train or sft: docs/sft.md"),
    ("ms-swift", "model train_type", f"{IN_OURS} for megalith sft, dpo or grpo (model is model.init_from): docs/sft.md"),
    ("ms-swift", "model tuner_type", f"{IN_OURS} for megalith sft, dpo or grpo (model is model.init_from): docs/sft.md"),
    ("Oumi", "training model", "run megalith oumi train -c {file}"),
    ("Accelerate's launcher", "compute_environment", "run megalith accelerate launch --config_file {file} SCRIPT.py"),
    ("verl", "actor_rollout_ref", f"{IN_OURS} for megalith grpo, whose section rl takes verl's names: docs/grpo.md"),
    ("NeMo-RL", "dpo policy cluster", f"{IN_OURS} for megalith dpo: docs/preference.md"),
    ("NeMo-RL", "sft policy cluster", f"{IN_OURS} for megalith sft: docs/sft.md"),
    ("NeMo-RL", "defaults policy",
     f"{IN_OURS}, with those of the files that defaults names, for megalith grpo, sft or dpo: docs/grpo.md"),
    ("NeMo-RL", "policy cluster", f"{IN_OURS} for megalith grpo, whose section rl takes NeMo-RL's names: docs/grpo.md"),
    ("SkyRL", "trainer generator", f"{IN_OURS} for megalith grpo: docs/grpo.md; docs/agents.md has its environments"),
    ("AReaL", "experiment_name trial_name", f"{IN_OURS} for megalith grpo: docs/grpo.md"),
    ("ROLL", "actor_train actor_infer", f"{IN_OURS} for megalith grpo: docs/grpo.md"),
    ("Axolotl", "base_model datasets",
     f"{IN_OURS} for megalith sft (base_model is model.init_from, datasets data.data_path): docs/sft.md"),
    ("TRL's or LLaMA-Factory's commands", "model_name_or_path",
     f"{IN_OURS} for megalith sft, dpo or grpo (model_name_or_path is model.init_from): docs/sft.md; a script with a "
     "trainer of transformers' is run by megalith accelerate launch SCRIPT.py"),
    ("NeMo", "trainer model", f"{IN_OURS} for megalith train or sft: docs/configuration.md; a "
".nemo checkpoint is not a model folder, so first export it to "
"Hugging Face's format with NeMo"),
    ("Megatron-LM", "MODEL_ARGS", "pass its flags to megalith pretrain-gpt: docs/from_megatron.md"),
    ("Megatron-LM", "language_model model_parallel",
     "pass the corresponding flags to megalith pretrain-gpt: docs/from_megatron.md"),
    ("DeepSpeed", "zero_optimization",
     f"{IN_OURS}; its stages are parallel.data_parallel_sharding_strategy: docs/parallelism.md"),
    ("Hugging Face, a model's", "architectures", "name its folder as model.init_from in a run file"),
)  # fmt: skip
OTHER_ENDINGS = {
    ".toml": f"is TOML, as torchtitan's configurations are; {IN_OURS}: docs/first_hour/torchtitan.md has the names",
    ".sh": "is a script; run it with megalith megatron run {file} where it is Megatron-LM's",
    ".py": "is a script; run it with megalith accelerate launch {file} where it trains by Accelerate or the Trainer",
}


def override_hint(path: str | Path) -> str:
    """Return a suggestion for the error about a missing run file that is an override; "" for other names."""
    if "=" not in str(path):
        return ""
    return (
        "; overrides as in Hydra (verl, SkyRL, NeMo-RL) are not read: set Megalith's settings by --section.name value, "
        "such as --rl.num_generations 8"
    )


def extension_error(path: str | Path) -> str:
    """Return the error for a file that is not a run file by its extension; "" for run files."""
    advice = OTHER_ENDINGS.get(Path(path).suffix)
    return f"{path} {advice.format(file=path)}" if advice else ""


def format_error(path: str | Path, content: Mapping[Any, Any], expected: str | None = None) -> str:
    """Return the error for another system's configuration file, unless it is `expected`; "" for run files."""
    for system, keys, advice in OTHER_FORMATS:
        if system != expected and content.keys() >= set(keys.split()):
            return f"{path} is a configuration of {system}; {advice.format(file=path)}"
    return ""
