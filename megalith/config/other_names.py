"""What other systems call our settings: a name of theirs is not accepted, but told what it is here."""

from __future__ import annotations

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
    "tie_word_embeddings":           "model.untie_embeddings_and_output_weights, the other way round",
    "num_processes":                 "--nproc, the processes of a machine",
    "num_machines":                  "--nnodes",
    # Oumi
    "model_name":                    "model.init_from",
    "torch_dtype_str":               "train.precision",
    "enable_gradient_checkpointing": "parallel.recompute_granularity: full",
    "include_performance_metrics":   "nothing that has to be asked for: metrics.jsonl has them",
    "use_async_checkpoint":          "checkpoint.async_save",
    "use_fully_parallel_strategy":   "nothing that has to be asked for: every rank writes its share of a checkpoint",
    "enable_sequence_packing":       "data.reset_attention_mask: samples are packed anyway, this keeps their documents apart",
    "enable_fsdp":                   "parallel.data_parallel_sharding_strategy: optim_grads_params",
    "dataset_name":                  "data.data_path, of what `megalith preprocess` wrote",
    # Megatron-LM
    "group_query_attention":         "model.num_query_groups above 0",
}
# fmt: on


def hint_of_other_name(key: str) -> str:
    """What to add to the sentence that refuses `key`; nothing where no system that is known has it."""
    ours = OTHER_NAMES.get(key)
    return f"; here it is {ours}" if ours else ""
