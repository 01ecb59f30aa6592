"""Arguments of TRL's SFTConfig, DPOConfig, ORPOConfig, KTOConfig, RewardConfig and GKDConfig: some set Megalith's
settings, others have no effect.

Any other argument that differs from its default raises an error. The tables are from TRL 1.16.0.
"""

from __future__ import annotations

from megalith.rl.from_trl import grpo_arguments as grpo

RENAMED = {name: path for name, path in grpo.RENAMED.items() if not path.startswith("rl.")}
TRANSLATED = {
    "bf16", "chat_template_path", "dataloader_drop_last", "ddp_timeout", "disable_dropout", "eval_steps",
    "eval_strategy", "fp16", "gradient_accumulation_steps", "logging_steps", "logging_strategy", "lr_scheduler_kwargs",
    "lr_scheduler_type", "max_length", "model_init_kwargs", "num_train_epochs", "optim", "packing_strategy",
    "report_to", "run_name", "save_only_model", "save_steps", "save_strategy", "use_cpu", "warmup_ratio",
    "warmup_steps",
}  # fmt: skip
OURS: dict[str, dict[str, str]] = {  # settings by the section's trainer, with their names in TRL
    "sft": {"completion_only_loss": "sft.completion_only_loss", "assistant_only_loss": "sft.assistant_only_loss",
            "packing": "sft.packing", "truncation_mode": "sft.truncation_mode"},
    "dpo": {"loss_type": "dpo.loss_type", "loss_weights": "dpo.loss_weights", "beta": "dpo.beta",
            "label_smoothing": "dpo.label_smoothing", "discopop_tau": "dpo.discopop_tau",
            "use_weighting": "dpo.use_weighting", "ld_alpha": "dpo.ld_alpha",
            "f_divergence_type": "dpo.f_divergence_type",
            "f_alpha_divergence_coef": "dpo.f_alpha_divergence_coef",
            "truncation_mode": "dpo.truncation_mode", "sync_ref_model": "dpo.sync_ref_model",
            "ref_model_sync_steps": "dpo.ref_model_sync_steps", "ref_model_mixup_alpha": "dpo.ref_model_mixup_alpha"},
    "orpo": {"beta": "dpo.beta", "truncation_mode": "dpo.truncation_mode"},
    "kto": {"loss_type": "kto.loss_type", "beta": "kto.beta", "desirable_weight": "kto.desirable_weight",
            "undesirable_weight": "kto.undesirable_weight", "sync_ref_model": "kto.sync_ref_model",
            "ref_model_sync_steps": "kto.ref_model_sync_steps", "ref_model_mixup_alpha": "kto.ref_model_mixup_alpha"},
    "reward": {"center_rewards_coefficient": "reward.center_rewards_coefficient"},
    "gkd": {"packing": "sft.packing", "truncation_mode": "sft.truncation_mode", "lmbda": "distill.on_policy_fraction",
            "temperature": "distill.sampling_temperature", "max_new_tokens": "distill.max_completion_length"},
}  # fmt: skip
DEFAULTS: dict[str, dict[str, object]] = {  # of a dict: TRL's, where Megalith's differ or have none
    "sft": {"learning_rate": 2e-5, "assistant_only_loss": False, "packing": False, "truncation_mode": "keep_start"},
    "dpo": {"learning_rate": 1e-6, "truncation_mode": "keep_start"},
    "orpo": {"learning_rate": 1e-6, "truncation_mode": "keep_start"},
    "kto": {"learning_rate": 1e-6},
    "reward": {"learning_rate": 1e-4},
    "gkd": {"learning_rate": 2e-5, "packing": False, "truncation_mode": "keep_start", "lmbda": 0.5, "beta": 0.5,
            "temperature": 0.9, "max_new_tokens": 128, "disable_dropout": True},
}  # fmt: skip

GKD_TRANSLATED = {"beta", "seq_kd", "teacher_model_name_or_path", "teacher_model_init_kwargs"}

_ORDER = "samples are in memory, and their order depends only on the seed"
_LENGTHS = "a batch has random samples, whatever their lengths"
_PADDING = "rows have data.seq_length tokens"
_REFERENCE = "the reference model computes a step's log-probabilities at once"
_GENERATION = (
    "ds3_gather_for_generation", "cache_implementation", "use_transformers_continuous_batching",
    "transformers_continuous_batching_config", "use_transformers_paged", "log_multimodal", "log_unique_prompts",
    "vllm_group_port", "vllm_max_model_length",
)  # fmt: skip
NO_EFFECT = {name: reason for name, reason in grpo.NO_EFFECT.items() if name not in _GENERATION} | {
    "activation_offloading": "settings={'parallel.cpu_offloading_num_layers': …} offloads activations",
    "dataset_num_proc": "the tokenizer uses all cores",
    "group_by_length": _LENGTHS,
    "length_column_name": _LENGTHS,
    "pad_token": _PADDING,
    "padding_value": _PADDING,
    "padding_free": "with packing=True, rows have several samples without padding",
    "per_device_eval_batch_size": "evaluation has the batches of training",
    "precompute_ref_batch_size": _REFERENCE,
    "precompute_ref_log_probs": _REFERENCE,
    "remove_unused_columns": "columns that a form does not read are ignored",
    "shuffle_dataset": _ORDER,
    "train_sampling_strategy": _LENGTHS,
}
UNSUPPORTED_DEFAULTS: dict[str, object] = {
    **{name: value for name, value in grpo.UNSUPPORTED_DEFAULTS.items() if name != "remove_unused_columns"},
    "dataset_kwargs": None, "dataset_text_field": "text", "eos_token": None, "eval_packing": None,
    "generate_during_eval": False,
    "is_encoder_decoder": None, "max_completion_length": None,
}  # fmt: skip
REMEDIES = grpo.REMEDIES | {
    "dataset_text_field": "; rename the column to text",
}
