"""Settings that cannot stand together are refused with their values, the rule and the way out."""

import pytest

from megalith.config import RunConfig
from megalith.config.rules import check_training
from megalith.errors import ConfigError

COMPLETE = {
    "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100},
    "data": {"mock": True, "seq_length": 32},
    "train": {"train_iters": 10, "micro_batch_size": 2, "global_batch_size": 8},
    "optim": {"lr": 1e-3},
}  # fmt: skip

ROPE = {"position_embedding_type": "rope"}
IMPOSSIBLE = [
    ({"model": {"num_layers": None}}, "model.num_layers is not set; set it, or choose a model.preset: tiny-gpt"),
    ({"model": {"vocab_size": None}}, "model.vocab_size is not set and there is no tokenizer"),
    ({"model": {"hidden_size": 65}}, "hidden_size 65 is not divisible by model.num_attention_heads 4.*kv_channels"),
    ({"model": {"num_query_groups": 3}}, "num_attention_heads 4 is not divisible by model.num_query_groups 3"),
    ({"model": {"num_query_groups": 8}}, "num_attention_heads 4 is not divisible by model.num_query_groups 8"),
    ({"model": {**ROPE, "kv_channels": 15}}, "15 of a head's 15 turn"),
    ({"model": {**ROPE, "rotary_percent": 0.2}}, "3 of a head's 16 turn .*rotary_percent 0.2.*an even number does"),
    ({"model": {"rotary_percent": 0.5}}, "rotary_percent needs model.position_embedding_type rope"),
    ({"model": {**ROPE, "rotary_base_local": 1e4}}, "for layers with a window, but model.window_size is not set"),
    ({"model": {**ROPE, "rope_scaling": {"type": "longrope", "short_factor": [1.0]}}}, "short_factor has 1 .*8 pairs"),
    ({"model": {"window_size": [7, 1]}}, r"lets a query see 1 tokens behind its own.*set it to \[7, 0\]"),
    ({"model": {"window_size": [7, 0], "window_attn_skip_freq": [1]}}, "has 1 numbers, but model.num_layers is 2"),
    ({"model": {"window_attn_skip_freq": 2}}, "which layers have no window, but model.window_size is not set"),
    ({"model": {"qk_layernorm_full_width": True}}, "needs model.qk_layernorm, which is off, and .*which is LayerNorm"),
    ({"model": {"rope_scaling": {"factor": 2}}}, "rope_scaling needs model.position_embedding_type rope, which is"),
    ({"model": {**ROPE, "rope_scaling": {"low_freq_factor": 4}}}, "low_freq_factor 4.0 is not below high_freq"),
    ({"model": {**ROPE, "rope_scaling": {"type": "yarn", "beta_fast": 1}}}, "beta_slow 1.0 is not below beta_fast 1.0"),
    ({"lora": {"rank": 2, "targets": ["q_pro"]}}, "lora.targets names 'q_pro'; did you mean 'q_proj'"),
    ({"lora": {"rank": 2, "targets": ["gate_proj"]}}, "names gate_proj, but the MLP has no gate"),
    ({"lora": {"rank": 2, "targets": ["c_attn", "q_proj"]}}, "gives linear_qkv an adapter for all its rows and others"),
    ({"lora": {"alpha": 2}}, "lora.alpha is 2.0, but lora.rank is not set"),
    ({"checkpoint": {"export_hf": True, "save_at_end": False}}, "export_hf exports the checkpoint of the run's end"),
    ({"lora": {"rank": 2}, "checkpoint": {"export_hf": True}}, "export_hf writes a whole model, but with lora.rank 2"),
    ({"model": {"max_position_embeddings": 16}}, "seq_length 32 is longer than model.max_position_embeddings 16"),
    ({"data": {"mock": False}}, "there is nothing to train on; set data.data_path"),
    ({"data": {"data_path": "a"}}, "data.mock is True, data.data_path is 'a'.*give exactly one"),
    ({"data": {"mock": False, "data_path": "a", "train_data_path": "b"}}, "train_data_path has a path of its own"),
    ({"data": {"mock": False, "valid_data_path": "b"}}, "valid_data_path is set but data.train_data_path is not"),
    ({"train": {"train_iters": None}}, "train.train_iters is None and train.train_samples is None; set exactly one"),
    ({"train": {"train_samples": 80}}, "train.train_iters is 10 and train.train_samples is 80; set exactly one"),
    ({"train": {"global_batch_size": None}}, r"global_batch_size is not set.*micro_batch_size \(2\) × data parallel"),
    ({"train": {"global_batch_size": 7}}, r"\(7\) is not micro_batch_size \(2\) × data parallel \(1\) × accumulation"),
    ({"train": {"rampup_batch_size": [3, 1, 50]}}, r"the start of train.rampup_batch_size \(3\) is not micro"),
    ({"train": {"rampup_batch_size": [16, 2, 50]}}, r"\[16, 2, 50\] starts above train.global_batch_size \(8\)"),
    ({"train": {"rampup_batch_size": [2, 4, 50]}}, "8 − 2 = 6 is not divisible by the increment 4"),
    ({"optim": {"lr": None}}, "optim.lr is not set; training needs the highest learning rate"),
    ({"log": {"profile": True, "profile_step_end": 3}}, "profile_step_end 3 must come after log.profile_step_start 10"),
    ({"parallel": {"recompute_method": "block"}}, "recompute_method block .*granularity is None; set it to full"),
    ({"parallel": {"recompute_method": "block", "recompute_granularity": "selective"}}, "is selective; set it to full"),
    ({"parallel": {"distribute_saved_activations": True}}, "recompute_granularity is None; set it to full"),
    ({"parallel": {"distribute_saved_activations": True, "recompute_granularity": "full"}}, "parallel_size is 1"),
    ({"parallel": {"tensor_model_parallel_size": 2}}, r"world size 1 .*tensor \(2\)"),
    ({"parallel": {"pipeline_model_parallel_size": 2, "context_parallel_size": 2}}, r"pipeline \(2\) × context \(2\)"),
]  # fmt: skip


def tree_with(changes):
    return {s: {**COMPLETE.get(s, {}), **changes.get(s, {})} for s in COMPLETE.keys() | changes.keys()}


def test_the_complete_run_that_each_case_changes_is_possible():
    check_training(RunConfig.from_tree(COMPLETE))


@pytest.mark.parametrize(("changes", "sentence"), IMPOSSIBLE, ids=[str(c)[:60] for c, _ in IMPOSSIBLE])
def test_an_impossible_combination_is_refused_with_its_values(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_training(RunConfig.from_tree(tree_with(changes)))
