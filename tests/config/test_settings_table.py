"""Every setting of Megatron's documentation is accepted under its own spelling and has the default stated there.

The tables are written out: spelling where its kin live, a value, where that value ends, and the default there.
"""

import pytest

from megalith.config import RunConfig
from megalith.config.rules.run_rules import check_training
from megalith.errors import ConfigError

REQUIRED = None  # no default: a run without it is refused

# fmt: off
SETTINGS = [
    # parallelism
    ("parallel.tensor_model_parallel_size",            2, "parallel.tensor_model_parallel_size", 2, 1),
    ("parallel.pipeline_model_parallel_size",          2, "parallel.pipeline_model_parallel_size", 2, 1),
    ("parallel.sequence_parallel",                     True, "parallel.sequence_parallel", True, False),
    ("parallel.context_parallel_size",                 2, "parallel.context_parallel_size", 2, 1),
    ("parallel.expert_model_parallel_size",            2, "parallel.expert_model_parallel_size", 2, 1),
    ("parallel.num_layers_per_virtual_pipeline_stage", 3, "parallel.virtual_pipeline_model_parallel_size", 4, None),
    ("parallel.use_distributed_optimizer",             True, "parallel.data_parallel_sharding_strategy", "optim", "no_shard"),
    ("parallel.use_distributed_optimizer",             False, "parallel.data_parallel_sharding_strategy", "no_shard", "no_shard"),
    # model
    ("model.num_layers",                               32, "model.num_layers", 32, REQUIRED),
    ("model.hidden_size",                              4096, "model.hidden_size", 4096, REQUIRED),
    ("model.num_attention_heads",                      32, "model.num_attention_heads", 32, REQUIRED),
    ("model.num_query_groups",                         8, "model.num_query_groups", 8, 0),
    ("model.ffn_hidden_size",                          11008, "model.ffn_hidden_size", 11008, None),
    ("model.seq_length",                               4096, "data.seq_length", 4096, 1024),
    ("model.max_position_embeddings",                  4096, "model.max_position_embeddings", 4096, None),
    ("model.swiglu",                                   True, "model.swiglu", True, False),
    ("model.normalization",                            "RMSNorm", "model.normalization", "RMSNorm", "LayerNorm"),
    ("model.use_rotary_position_embeddings",           True, "model.position_embedding_type", "rope", "learned_absolute"),
    ("model.untie_embeddings_and_output_weights",      True, "model.untie_embeddings_and_output_weights", True, False),
    ("model.disable_bias_linear",                      True, "model.add_bias_linear", False, True),
    # training
    ("train.micro_batch_size",                         4, "train.micro_batch_size", 4, 1),
    ("train.global_batch_size",                        64, "train.global_batch_size", 64, REQUIRED),
    ("train.lr",                                       3e-4, "optim.lr", 3e-4, REQUIRED),
    ("train.min_lr",                                   3e-5, "optim.min_lr", 3e-5, 0.0),
    ("train.lr_decay_style",                           "linear", "optim.lr_decay_style", "linear", "cosine"),
    ("train.lr_decay_style",                           "constant", "optim.lr_decay_style", "constant", "cosine"),
    ("train.lr_warmup_iters",                          500, "optim.lr_warmup_iters", 500, 0),
    ("train.train_iters",                              1000, "train.train_iters", 1000, REQUIRED),
    ("train.weight_decay",                             0.1, "optim.weight_decay", 0.1, 0.01),
    ("train.clip_grad",                                0.5, "optim.clip_grad", 0.5, 1.0),
    ("train.dataloader_type",                          "single", "data.dataloader_type", "single", "cyclic"),
    ("train.split",                                    "949,50,1", "data.split", "949,50,1", "99,1,0"),
    ("optim.lr",                                       3e-4, "optim.lr", 3e-4, REQUIRED),
    ("optim.min_lr",                                   3e-5, "optim.min_lr", 3e-5, 0.0),
    ("optim.lr_decay_style",                           "linear", "optim.lr_decay_style", "linear", "cosine"),
    ("optim.lr_warmup_iters",                          500, "optim.lr_warmup_iters", 500, 0),
    ("optim.weight_decay",                             0.1, "optim.weight_decay", 0.1, 0.01),
    ("optim.clip_grad",                                0.5, "optim.clip_grad", 0.5, 1.0),
    # mixed precision
    ("train.bf16",                                     True, "train.precision", "bf16", "fp32"),
    ("train.fp16",                                     True, "train.precision", "fp16", "fp32"),
    ("train.attention_softmax_in_fp32",                True, None, None, None),
    ("model.attention_softmax_in_fp32",                True, None, None, None),
    ("train.accumulate_allreduce_grads_in_fp32",       True, None, None, None),
    ("parallel.accumulate_allreduce_grads_in_fp32",    True, None, None, None),
    ("train.fp8_format",                               "hybrid", "train.fp8_format", "hybrid", None),
    ("train.fp8_amax_history_len",                     1024, "train.fp8_amax_history_len", 1024, 1),
    ("train.fp8_amax_compute_algo",                    "max", "train.fp8_amax_compute_algo", "max", "most_recent"),
    # communication
    ("parallel.overlap_grad_reduce",                   True, None, None, None),
    ("parallel.overlap_param_gather",                  True, None, None, None),
    ("parallel.tp_comm_overlap",                       True, "parallel.tp_comm_overlap", True, "auto"),
    ("parallel.dp_comm_overlap_bucket_size",           40000000, "parallel.dp_comm_overlap_bucket_size", 40000000, None),
    # memory
    ("parallel.recompute_activations",                 True, "parallel.recompute_granularity", "full", None),
    ("parallel.recompute_granularity",                 "selective", "parallel.recompute_granularity", "selective", None),
    ("parallel.recompute_granularity",                 "full", "parallel.recompute_granularity", "full", None),
    ("parallel.recompute_method",                      "uniform", "parallel.recompute_method", "uniform", None),
    ("parallel.recompute_method",                      "block", "parallel.recompute_method", "block", None),
    ("parallel.recompute_num_layers",                  2, "parallel.recompute_num_layers", 2, 1),
    ("optim.use_distributed_optimizer",                True, "parallel.data_parallel_sharding_strategy", "optim", "no_shard"),
    ("optim.cpu_offload_optimizer",                    True, "optim.optimizer_cpu_offload", True, False),
    # mixture of experts
    ("model.num_experts",                              8, "model.num_experts", 8, None),
    ("model.moe_router_topk",                          4, "model.moe_router_topk", 4, 2),
    ("model.moe_aux_loss_coeff",                       0.01, "model.moe_aux_loss_coeff", 0.01, 0.0),
    ("model.moe_grouped_gemm",                         False, "model.moe_grouped_gemm", False, True),
    ("model.expert_model_parallel_size",               2, "parallel.expert_model_parallel_size", 2, 1),
    ("model.moe_permute_fusion",                       False, "model.moe_permute_fusion", False, True),
    # checkpoints and failures
    ("checkpoint.save",                                "runs/a", "train.output_dir", "runs/a", "output"),
    ("checkpoint.load",                                "runs/a", "checkpoint.load", "runs/a", None),
    ("checkpoint.save_interval",                       500, "checkpoint.save_interval", 500, None),
    ("train.save",                                     "runs/a", "train.output_dir", "runs/a", "output"),
    ("train.load",                                     "runs/a", "checkpoint.load", "runs/a", None),
    ("train.save_interval",                            500, "checkpoint.save_interval", 500, None),
    ("checkpoint.ckpt_format",                         "torch", None, None, None),
    ("checkpoint.ckpt_format",                         "torch_dist", None, None, None),
    ("checkpoint.auto_detect_ckpt_format",             True, None, None, None),
    ("checkpoint.no_save_optim",                       True, "checkpoint.save_optim", False, True),
    ("checkpoint.no_save_rng",                         True, None, None, None),
    ("log.enable_straggler_detection",                 True, "runtime.enable_straggler_detection", True, False),
    ("runtime.enable_straggler_detection",             True, "runtime.enable_straggler_detection", True, False),
    ("train.exit_signal_handler",                      True, None, None, None),
    ("train.distributed_timeout_minutes",              5.0, "runtime.distributed_timeout_minutes", 5.0, 10.0),
    # data
    ("data.tokenizer_type",                            "HuggingFaceTokenizer", "data.tokenizer_type", "HuggingFaceTokenizer", None),
    ("data.tokenizer_type",                            "SentencePieceTokenizer", "data.tokenizer_type", "SentencePieceTokenizer", None),
    ("data.tokenizer_model",                           "t/tokenizer.json", "data.tokenizer_model", "t/tokenizer.json", None),
    ("data.data_path",                                 "0.7 a_text_document 0.3 b_text_document", "data.data_path", "0.7 a_text_document 0.3 b_text_document", None),
    ("data.split",                                     "949,50,1", "data.split", "949,50,1", "99,1,0"),
    ("data.dataloader_type",                           "single", "data.dataloader_type", "single", "cyclic"),
    ("data.seq_length",                                4096, "data.seq_length", 4096, 1024),
]
# fmt: on

BESIDE = {  # what a spelling needs beside it
    "parallel.num_layers_per_virtual_pipeline_stage": {"model.num_layers": 24, "parallel.pipeline_model_parallel_size": 2},
}  # fmt: skip


def get(config, path):
    section, name = path.split(".")
    return getattr(getattr(config, section), name)


def tree_of(settings):
    tree = {}
    for path, value in settings.items():
        section, key = path.split(".")
        tree.setdefault(section, {})[key] = value
    return tree


@pytest.mark.parametrize(("spelling", "value", "path", "becomes", "default"), SETTINGS)
def test_the_spelling_is_accepted_means_what_it_says_and_has_its_default(
    spelling, value, path, becomes, default
):
    config = RunConfig.from_tree(tree_of({spelling: value, **BESIDE.get(spelling, {})}))
    if path is None:
        assert config.to_tree() == RunConfig().to_tree()
        assert [note.startswith(f"{spelling} = {value}: ") for note in config.notes] == [True]
    else:
        assert get(config, path) == becomes
        assert get(RunConfig(), path) == default
        assert len(config.notes) == (spelling == "parallel.recompute_activations"), config.notes


@pytest.mark.parametrize(("spelling", "value", "path", "becomes", "default"), SETTINGS)
def test_the_command_line_takes_it_as_well(spelling, value, path, becomes, default):
    words = [
        part
        for name, v in {spelling: value, **BESIDE.get(spelling, {})}.items()
        for part in (f"--{name}", str(v))
    ]
    dashes = [word.replace("_", "-") if word.startswith("--") else word for word in words]
    from_tree = RunConfig.from_tree(tree_of({spelling: value, **BESIDE.get(spelling, {})}))
    assert RunConfig.load(None, words) == RunConfig.load(None, dashes) == from_tree


COMPLETE = {
    "model.num_layers": 2, "model.hidden_size": 64, "model.num_attention_heads": 4, "model.vocab_size": 100,
    "train.train_iters": 10, "train.global_batch_size": 8, "optim.lr": 1e-3, "data.mock": True,
}  # fmt: skip


@pytest.mark.parametrize("missing", [path for path in COMPLETE if path != "data.mock"])
def test_a_run_without_a_required_setting_is_refused_by_its_name(missing):
    check_training(RunConfig.from_tree(tree_of(COMPLETE)))
    rest = {path: value for path, value in COMPLETE.items() if path != missing}
    with pytest.raises(ConfigError, match=missing.split(".")[1]):
        check_training(RunConfig.from_tree(tree_of(rest)))


def test_zero_query_groups_are_multi_head_attention():
    model = RunConfig.from_tree(tree_of(COMPLETE)).model
    assert (model.num_query_groups, model.query_groups) == (0, 4)


def test_recompute_activations_leaves_a_granularity_that_is_given():
    both = {"parallel.recompute_activations": True, "parallel.recompute_granularity": "selective"}
    chosen = RunConfig.from_tree(tree_of(both))
    assert chosen.parallel.recompute_granularity == "selective" and chosen.notes == ()
    assert RunConfig.from_tree(tree_of({"parallel.recompute_activations": False})) == RunConfig()
    (note,) = RunConfig.from_tree(tree_of({"parallel.recompute_activations": True})).notes
    assert "recompute_granularity = full: full recomputation of every layer" in note


CONTRADICTIONS = [
    ({"train.bf16": True, "train.precision": "fp32"}, "train.bf16 sets train.precision to 'bf16', but .* 'fp32'"),
    ({"train.bf16": True, "train.fp16": True}, "train.fp16 sets .*'fp16', but train.precision is already 'bf16'"),
    ({"model.disable_bias_linear": True, "model.add_bias_linear": True}, "disable_bias_linear sets"),
    ({"train.lr": 1e-3, "optim.lr": 1e-4}, "train.lr sets optim.lr to 0.001, but optim.lr is already 0.0001"),
    ({"train.save": "a", "checkpoint.save": "b"}, "checkpoint.save sets train.output_dir to 'b'"),
    ({"model.seq_length": 128, "data.seq_length": 256}, "model.seq_length sets data.seq_length to 128"),
    ({"parallel.use_distributed_optimizer": True, "parallel.data_parallel_sharding_strategy": "optim_grads_params"},
     "use_distributed_optimizer sets parallel.data_parallel_sharding_strategy to 'optim'"),
    ({"checkpoint.no_save_optim": True, "checkpoint.save_optim": True}, "no_save_optim sets"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "sentence"), CONTRADICTIONS)
def test_a_spelling_that_contradicts_its_field_is_refused(settings, sentence):
    with pytest.raises(ConfigError, match=sentence + ".*; remove one of them"):
        RunConfig.from_tree(tree_of(settings))


@pytest.mark.parametrize("settings", [
    {"train.bf16": True, "train.precision": "bf16"}, {"train.lr": 1e-3, "optim.lr": 1e-3},
    {"train.bf16": False, "train.precision": "fp32"}, {"train.save": "a", "train.output_dir": "a"},
])  # fmt: skip
def test_a_spelling_that_agrees_with_its_field_is_accepted(settings):
    RunConfig.from_tree(tree_of(settings))


WRONG_TYPES = [
    ("train.bf16", "yes please", "it must be true or false"),
    ("parallel.recompute_activations", "false", "it must be true or false"),
    ("parallel.overlap_grad_reduce", 3, "it must be true or false"),
    ("checkpoint.ckpt_format", "zip", "one of torch, torch_dist"),
    ("parallel.num_layers_per_virtual_pipeline_stage", "2", "it must be a whole number"),
    ("train.lr", "fast", "optim.lr is 'fast': it must be a number"),
    ("model.seq_length", 0, "data.seq_length is 0: input should be greater than 0"),
]


@pytest.mark.parametrize(("spelling", "value", "sentence"), WRONG_TYPES)
def test_a_wrong_value_under_another_spelling_is_refused(spelling, value, sentence):
    with pytest.raises(ConfigError, match=sentence):
        RunConfig.from_tree(tree_of({spelling: value}))


@pytest.mark.parametrize(
    ("layers", "stages", "each"), [(24, 2, 5), (24, 5, 2), (24, 2, 0), (None, 2, 1), (24, 2, -1)]
)
def test_layers_of_a_virtual_stage_that_do_not_fit_are_refused_with_the_numbers(layers, stages, each):
    tree = {"model": {"num_layers": layers}, "parallel": {"pipeline_model_parallel_size": stages}}
    tree["parallel"]["num_layers_per_virtual_pipeline_stage"] = each
    with pytest.raises(
        ConfigError, match=f"stage {each} × .* {stages} does not divide model.num_layers {layers}"
    ):
        RunConfig.from_tree(tree)


def test_a_virtual_stage_counts_the_layers_of_a_preset():
    parallel = {"pipeline_model_parallel_size": 4, "num_layers_per_virtual_pipeline_stage": 2}
    config = RunConfig.from_tree({"model": {"preset": "llama3-8b"}, "parallel": parallel})
    assert config.parallel.virtual_pipeline_model_parallel_size == 4
