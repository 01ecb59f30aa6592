"""Megatron-LM's flags: each is classified, an omitted one has Megatron's default, and all problems are reported."""

import ast
import csv
import json
import math
import re
import shlex
from pathlib import Path

import pytest

from megalith.cli.main import main
from megalith.config import RunConfig
from megalith.config.aliases import ALIASES
from megalith.config.mup import MupRatios
from megalith.config.rules.run_rules import check_training
from megalith.data.blend import parse_data_path
from megalith.dialects.megatron.flag_kinds import Derives, NoEffect, Refused, Sets
from megalith.dialects.megatron.flag_table import FLAGS
from megalith.dialects.megatron.other_flags import MODELOPT, OLDER
from megalith.dialects.megatron.translate import Translation, in_flags, translate
from megalith.errors import ConfigError
from megalith.training.build import prepare

LINES = [line for line in (Path(__file__).parent / "megatron_parser.tsv").open() if not line.startswith("# ")]
PARSER = {row["flag"]: row for row in csv.DictReader(LINES, delimiter="\t")}
OTHER_CHOICES = {"--distributed-backend": ["nccl2"], "--tokenizer-type": ["Llama3Tokenizer"]}  # newer, older
SWITCHES = ("StoreTrue", "StoreFalse", "BooleanOptional", "Help")
SHAPE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 "
)
LEAST = SHAPE + "--train-iters 10 --vocab-size 100 --mock-data --save out "


def translated(flags: str, world_size: int = 1, **options) -> Translation:
    return translate(shlex.split(flags), world_size, **options)


def config_of(flags: str) -> RunConfig:
    return translated(LEAST + flags).config()


def problems(flags: str, **options) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        translated(flags, **options)
    return str(raised.value).split("\n")


def value_at(config: RunConfig, path: str):
    section, name = path.split(".")
    return getattr(getattr(config, section), name)


def default_of(row: dict[str, str]):
    try:
        value = ast.literal_eval(row["default"] or "None")
    except (ValueError, SyntaxError):
        return None
    return None if row["action"] in SWITCHES or value in ([], "==SUPPRESS==") else value


def test_every_flag_of_megatrons_parser_is_classified_as_its_parser_takes_it():
    assert FLAGS.keys() == PARSER.keys() and len(FLAGS) == 877
    for flag, row in PARSER.items():
        ours = FLAGS[flag]
        assert (ours.takes == "switch") == (row["action"] in SWITCHES), flag
        many = {"*": "*", "+": "+", "3": "{3}"}.get(row["nargs"], "")
        assert ours.takes.endswith(many) and (many or ours.takes[-1] not in "*+}"), flag
        if row["type"] in ("int", "float") and row["action"] == "Store":
            assert ours.takes.startswith(row["type"]), flag
        elif row["choices"] and "." not in row["choices"] and row["type"] == "str":
            assert ours.takes.rstrip("+*").split("|") == [
                *ast.literal_eval(row["choices"]), *OTHER_CHOICES.get(flag, ())
            ], flag  # fmt: skip


def test_the_defaults_are_those_of_megatrons_parser():
    for flag, ours in FLAGS.items():
        if isinstance(ours, Sets | Derives | Refused):
            assert ours.default == default_of(PARSER[flag]), flag


def test_every_row_sets_what_there_is_and_says_why():
    fields = {
        f"{section}.{name}"
        for section, whole in RunConfig.model_fields.items()
        for name in whole.annotation.model_fields
    }
    for flag, row in (FLAGS | MODELOPT).items():
        assert row.means, flag
        if isinstance(row, Sets):
            assert row.path in fields | ALIASES.keys(), flag
        if isinstance(row, Refused):
            assert ";" in row.means, f"{flag} has no way out"


def test_of_the_uses_in_known_scripts_at_least_98_percent_are_not_refused():
    uses = {flag: int(row["uses"] or 0) for flag, row in PARSER.items()}
    refused = sum(count for flag, count in uses.items() if isinstance(FLAGS[flag], Refused))
    assert 1 - refused / sum(uses.values()) > 0.98


def test_no_flag_that_20_scripts_use_is_refused():
    often = [flag for flag, row in PARSER.items() if int(row["uses"] or 0) >= 20]
    assert [flag for flag in often if isinstance(FLAGS[flag], Refused)] == []


def test_of_296_training_scripts_at_least_200_have_no_refused_flag():
    """Each use of a refused flag is of one script at most. Those of hybrid and RL scripts, which are not among the 296,
    do not count."""
    uses = {flag: int(row["uses"] or 0) for flag, row in PARSER.items() if isinstance(FLAGS[flag], Refused)}
    aside = re.compile("--(hybrid|is-hybrid|spec$|perform-rl)")
    assert 296 - sum(count for flag, count in uses.items() if not aside.match(flag)) >= 200


def published_command_lines() -> dict[str, tuple[int, list[str], list[str]]]:
    """Name → processes, words of each refusal, and the flags, of scripts that were published."""
    common, lines = {}, {}
    rows = iter((Path(__file__).parent / "megatron_command_lines.txt").read_text().splitlines())
    for row in rows:
        first, _, rest = row.partition(" ")
        if first.startswith("@"):
            common[first] = rest.split()
        elif first != "#":
            head, *messages = row.split(" | ")
            name, processes = head.split()
            words = next(rows).split()
            lines[name] = (
                int(processes),
                messages,
                [more for word in words for more in common.get(word, [word])],
            )
    return lines


def test_published_training_scripts_pass_whole_or_are_told_what_is_not_there():
    whole, lines = 0, published_command_lines()
    for name, (processes, messages, words) in lines.items():
        try:
            tree = translate(words, processes).tree
            tree["model"].setdefault("vocab_size", 50257)  # the tokenizer's, where there is one
            with in_flags():
                check_training(RunConfig.from_tree(tree), processes)
        except ConfigError as error:
            refusals = str(error).split("\n")
            assert len(refusals) == len(messages) and all(
                any(few in line for line in refusals) for few in messages
            ), (name, refusals)
            continue
        assert not messages, name
        whole += 1
    assert (whole, len(lines)) == (16, 22)


def test_balancing_losses_of_no_weight_are_none_and_nothing_is_refused():
    for kinds, taken in (("global_aux_loss", "none"), ("seq_aux_loss global_aux_loss", "seq_aux_loss")):
        model = translated(f"{LEAST} --num-experts 4 --moe-router-load-balancing-type {kinds}").tree["model"]
        assert (model["moe_router_load_balancing_type"], model["moe_aux_loss_coeff"]) == (taken, 0.0)


def test_sinkhorn_weights_are_megatrons_whatever_the_flags_of_the_other_losses_say():
    """sigmoids where a token has one expert, else the softmax over all, by no factor."""
    for topk, score in ((1, "sigmoid"), (2, "softmax")):
        model = translated(
            f"{LEAST} --num-experts 4 --moe-router-load-balancing-type sinkhorn --moe-router-topk {topk} "
            "--moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5"
        ).tree["model"]
        assert (model["moe_router_score_function"], model["moe_router_pre_softmax"]) == (score, topk > 1)
        assert "moe_router_topk_scaling_factor" not in model


def test_flags_that_megatron_has_removed_are_passed_over_or_answered_with_the_new_ones():
    notes = translated(LEAST + "--data-impl mmap --DDP-impl local --use-legacy-models").notes
    assert any("--data-impl --DDP-impl" in note and "Megatron has removed it" in note for note in notes)
    messages = problems(LEAST + "--data-impl lazy --fp8-hybrid --checkpoint-num-layers 1")
    assert messages[0] == "--data-impl is lazy: it must be one of mmap, infer"
    assert "use --fp8-format hybrid" in messages[1] and "use --recompute-num-layers" in messages[2]
    assert not (OLDER | MODELOPT).keys() & FLAGS.keys()
    given = config_of("--cpu-offload-optimizer --enable-straggler-detection --dp-comm-overlap-bucket-size 9")
    assert given.optim.optimizer_cpu_offload and given.runtime.enable_straggler_detection


# What a run is whose command line leaves everything out that it can.
OMITTED = {
    "model.position_embedding_type": "learned_absolute", "model.normalization": "LayerNorm",
    "model.layernorm_epsilon": 1e-5, "model.activation": "gelu_tanh", "model.hidden_dropout": 0.1,
    "model.attention_dropout": 0.1, "model.init_method_std": 0.02, "model.num_query_groups": 0,
    "model.untie_embeddings_and_output_weights": False, "model.add_bias_linear": True,
    "optim.optimizer": "adamw", "optim.lr_decay_style": "linear", "optim.min_lr": 0.0, "optim.weight_decay": 0.01,
    "optim.adam_beta1": 0.9, "optim.adam_beta2": 0.999, "optim.adam_eps": 1e-8, "optim.clip_grad": 1.0,
    "optim.hysteresis": 2, "optim.loss_scale_window": 1000,
    "train.precision": "fp32", "train.seed": 1234, "train.eval_iters": 0, "train.deterministic": False,
    "data.dataloader_type": "single", "data.num_workers": 2, "log.log_interval": 100, "log.log_throughput": False,
    "log.console": "lines", "log.tensorboard": False, "log.wandb": False, "checkpoint.save_interval": None,
    "checkpoint.save_at_end": True, "checkpoint.save_when_stopped": "at_exits", "checkpoint.load": None,
    "parallel.data_parallel_sharding_strategy": "no_shard", "parallel.recompute_granularity": None,
    "runtime.distributed_timeout_minutes": 10,
}  # fmt: skip


def test_an_omitted_flag_means_megatrons_default():
    config = config_of("")
    assert {path: value_at(config, path) for path in OMITTED} == OMITTED


# flags, what they mean, and words of the note that comes with them
CASES = [
    ("--bf16", {"train.precision": "bf16"}, ""),
    ("--fp16", {"train.precision": "fp16", "optim.initial_loss_scale": 2.0**32}, ""),
    ("--swiglu --hidden-size 4096 --num-attention-heads 32", {"model.ffn_size": 10880}, ""),
    ("--disable-bias-linear", {"model.activation": "gelu", "model.add_bias_linear": False}, ""),
    ("--disable-bias-linear --openai-gelu", {"model.activation": "gelu"}, "--openai-gelu (Megatron core does not"),
    ("--no-bias-gelu-fusion --use-te-activation-func", {"model.activation": "gelu_tanh"}, ""),
    ("--disable-bias-linear --use-te-activation-func --transformer-impl local", {"model.activation": "gelu"}, ""),
    ("--disable-bias-linear --use-transformer-engine-op-fuser", {"model.activation": "gelu_tanh"}, ""),
    ("--disable-bias-linear --use-transformer-engine-op-fuser --num-experts 4", {"model.activation": "gelu"}, ""),
    ("--squared-relu", {"model.activation": "squared_relu"}, ""),
    ("--quick-geglu", {"model.activation": "quick_gelu", "model.gated": True}, ""),
    ("--group-query-attention --num-query-groups 2", {"model.num_query_groups": 2}, ""),
    ("--group-query-attention", {"model.num_query_groups": 1}, ""),
    ("--num-query-groups 2", {"model.num_query_groups": 0}, "no effect without --group-query-attention"),
    ("--use-rotary-position-embeddings --no-position-embedding --rotary-percent 0.5",
     {"model.position_embedding_type": "rope", "model.rotary_percent": 0.5}, ""),
    ("--rotary-percent 0.5", {"model.rotary_percent": 1.0}, ""),
    ("--position-embedding-type rope --use-rope-scaling --rope-scaling-factor 4",
     {"model.rope_scaling.type": "llama3", "model.rope_scaling.factor": 4.0}, ""),
    ("--position-embedding-type rope --rotary-seq-len-interpolation-factor 2",
     {"model.rope_scaling.type": "linear", "model.rope_scaling.factor": 2.0}, ""),
    ("--multi-latent-attention --qk-layernorm --position-embedding-type rope --rotary-scaling-factor 40 --mscale 0.7 "
     "--mscale-all-dim 0.7 --disable-bias-linear",
     {"model.rope_scaling.type": "yarn", "model.rope_scaling.factor": 40.0, "model.rope_scaling.mscale": 0.7,
      "model.rope_scaling.original_max_position_embeddings": 4096, "model.kv_lora_rank": 32,
      "model.qk_layernorm": False}, ""),
    ("--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 64 --mscale 0.7 "
     "--mscale-all-dim 0.5",
     {"model.rope_scaling.beta_fast": 32, "model.rope_scaling.beta_slow": 1,
      "model.rope_scaling.attention_factor": (0.1 * 0.7 * math.log(4) + 1) / (0.1 * 0.5 * math.log(4) + 1)}, ""),
    ("--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 64",
     {"model.rope_scaling.type": "yarn", "model.rope_scaling.attention_factor": None}, ""),
    ("--multi-latent-attention --rope-type rope --use-rope-scaling --rotary-seq-len-interpolation-factor 2",
     {"model.rope_scaling": None}, "has no effect with --multi-latent-attention"),
    ("--multi-latent-attention --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 64 "
     "--yarn-beta-fast 16",
     {"model.rope_scaling.original_max_position_embeddings": 4096, "model.rope_scaling.beta_fast": 32},
     "--yarn-original-max-position-embeddings --yarn-beta-fast has no effect with --multi-latent-attention"),
    ("--position-embedding-type rope --rotary-interleaved --no-rope-freq 2",
     {"model.rotary_interleaved": True, "model.no_rope_freq": 2}, ""),
    ("--qk-l2-norm --qk-layernorm", {"model.qk_l2_norm": True, "model.qk_layernorm": False}, ""),
    ("--rotary-interleaved", {"model.rotary_interleaved": False}, ""),
    ("--experimental-attention-variant gated_delta_net --linear-attention-freq ([1]*3+[0])*3 --linear-num-key-heads 4 "
     "--linear-num-value-heads 8 --attention-output-gate",
     {"model.experimental_attention_variant": "gated_delta_net", "model.linear_attention_freq": [1, 1, 1, 0] * 3,
      "model.linear_num_key_heads": 4, "model.linear_value_head_dim": 128, "model.attention_output_gate": True}, ""),
    ("--num-layers 9 --hybrid-override-pattern M-*M --is-hybrid-model --mamba-num-heads 4 --mamba-num-groups 2 "
     "--position-embedding-type none --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec",
     {"model.hybrid_layer_pattern": "M-*M", "model.num_layers": 4, "model.mamba_num_heads": 4,
      "model.mamba_num_groups": 2, "model.mamba_state_dim": 128, "model.position_embedding_type": "none"},
     "--num-layers 9 has no effect with --hybrid-override-pattern, which has 4 layers"),
    ("--hybrid-layer-pattern M-*M/*-/*- --mtp-num-layers 1 --position-embedding-type none",
     {"model.hybrid_layer_pattern": "M-*M", "model.num_layers": 4, "model.mtp_num_layers": 2},
     "--mtp-num-layers 1 has no effect with --hybrid-layer-pattern, which has 2 layers of multi-token prediction"),
    ("--hybrid-layer-pattern M-*E/*E --num-experts 4 --position-embedding-type none",
     {"model.hybrid_layer_pattern": "M-*E", "model.num_layers": 4, "model.mtp_num_layers": 1},
     "--num-layers 2 has no effect with --hybrid-layer-pattern, which has 4 layers"),
    ("--num-experts 4 --quick-geglu --softmax-type learnable --activation-func-clamp-value 7 --glu-linear-offset 1",
     {"model.softmax_type": "learnable", "model.activation_func_clamp_value": 7.0, "model.glu_linear_offset": 1.0,
      "model.add_router_bias": True}, "turns attention dropout off in Megalith"),
    ("--num-experts 4 --disable-bias-linear", {"model.add_router_bias": False}, ""),
    ("--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 64 "
     "--no-yarn-correction-range-round-to-int", {"model.rope_scaling.truncate": False}, ""),
    ("--linear-attention-freq 4", {"model.experimental_attention_variant": None}, ""),
    ("--window-size (15,0) --window-attn-skip-freq 2", {"model.window_size": [15, 0],
                                                        "model.window_attn_skip_freq": 2}, ""),
    ("--tensor-model-parallel-size 4", {"model.padded_vocab_size": 512}, ""),
    ("--padded-vocab-size 300", {"model.padded_vocab_size": 300}, ""),
    ("--no-pad-vocab-size", {"model.padded_vocab_size": 100}, ""),
    ("--tokenizer-type NullTokenizer", {"model.vocab_size": 101}, ""),
    ("--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model m", {"data.tokenizer_type": "SentencePieceTokenizer",
                                                                        "model.vocab_size": None}, "no effect"),
    ("--vocab-file v --merge-file m", {"data.tokenizer_type": "GPT2BPETokenizer"}, ""),
    ("--optimizer sgd", {"optim.optimizer": "sgd"}, ""),
    ("--optimizer lion --lion-beta2 0.97", {"optim.optimizer": "lion", "optim.lion_beta1": 0.95,
                                            "optim.lion_beta2": 0.97}, ""),
    ("--optimizer muon --muon-fp32-matmul-prec high",
     {"optim.optimizer": "muon", "optim.muon_momentum": 0.9, "optim.muon_nesterov": False,
      "optim.muon_extra_scale_factor": 1.0, "optim.muon_fp32_matmul_prec": "highest",
      "optim.muon_coefficient_type": "quintic", "optim.muon_split_qkv": True, "optim.muon_split_gate_up": False,
      "optim.muon_scalar_optimizer": "adamw"}, ""),
    ("--optimizer adaptive_muon",
     {"optim.optimizer": "muon", "optim.muon_moment2_method": "adamuon", "optim.muon_beta2": 0.95,
      "optim.muon_split_gate_up": False}, ""),
    ("--optimizer soap --adam-beta2 0.95",
     {"optim.optimizer": "soap", "optim.soap_use_kl_shampoo": True, "optim.soap_max_precond_dim": None,
      "optim.soap_shampoo_beta": 0.95, "optim.adam_beta2": 0.95}, ""),
    ("--optimizer dist_muon --muon-nesterov --muon-no-split-qkv --muon-coefficient-type polar_express "
     "--muon-scalar-optimizer lion --lion-beta1 0.9 --muon-num-ns-steps 8",
     {"optim.optimizer": "muon", "optim.muon_nesterov": True, "optim.muon_fp32_matmul_prec": "medium",
      "optim.muon_coefficient_type": "polar_express", "optim.muon_split_qkv": False,
      "optim.muon_scalar_optimizer": "lion", "optim.lion_beta1": 0.9, "optim.muon_num_ns_steps": 8}, ""),
    ("--use-mup --mup-base-hidden-size 16 --mup-base-head-dim 8 --mup-embedding-mult 2 --mup-output-mult 0.5 "
     "--mup-width-mult 9",
     {"model.use_mup": True, "model.mup_ratios": MupRatios(4.0), "model.attention_scale": 8**0.5 / 16,
      "model.embedding_multiplier": 2.0, "model.logits_divisor": 2.0}, "--mup-width-mult"),
    ("--use-mup", {"model.mup_ratios": MupRatios(1.0), "model.attention_scale": 1 / 16,
                   "model.logits_divisor": 1.0}, ""),
    ("--mup-base-hidden-size 16 --mup-output-mult 0.5", {"model.use_mup": False, "model.logits_divisor": 1.0}, ""),
    ("--decoupled-lr 2e-3 --decoupled-min-lr 1e-4",
     {"optim.decoupled_lr": 2e-3, "optim.decoupled_min_lr": 1e-4}, ""),
    ("--sequence-parallel", {"parallel.sequence_parallel": False}, "no effect with --tensor-model-parallel-size 1"),
    ("--sequence-parallel --tensor-model-parallel-size 2", {"parallel.sequence_parallel": True}, ""),
    ("--use-distributed-optimizer", {"parallel.data_parallel_sharding_strategy": "optim"}, ""),
    ("--use-megatron-fsdp --use-distributed-optimizer",
     {"parallel.data_parallel_sharding_strategy": "optim_grads_params"}, ""),
    ("--recompute-activations", {"parallel.recompute_granularity": "selective",
                                 "parallel.recompute_modules": ["core_attn"]}, ""),
    ("--recompute-granularity full --recompute-method block --recompute-num-layers 2",
     {"parallel.recompute_method": "block", "parallel.recompute_num_layers": 2}, ""),
    ("--recompute-granularity selective --recompute-modules mlp moe_act", {"parallel.recompute_modules": ["mlp"]},
     "moe_act: these modules are not recomputed"),
    ("--num-layers 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
     {"parallel.virtual_pipeline_model_parallel_size": 2}, ""),
    ("--pipeline-model-parallel-layout 'Et|tm*2L'", {"parallel.pipeline_model_parallel_layout": "Et|tL"}, ""),
    ("--cp-comm-type a2a --context-parallel-size 2", {"parallel.cp_comm_type": "a2a"}, ""),
    ("--num-experts 4 --tensor-model-parallel-size 2",
     {"parallel.expert_tensor_parallel_size": 2, "parallel.moe_token_dispatcher_type": "allgather",
      "model.moe_shared_expert_overlap": False, "model.moe_router_topk": 2}, ""),
    ("--num-experts 4 --num-layers 5 --moe-layer-freq ([0]*2+[1]*3) --moe-aux-loss-coeff 1e-2",
     {"model.moe_layer_freq": [0, 0, 1, 1, 1], "model.moe_aux_loss_coeff": 0.01}, ""),
    ("--eval-interval 5", {"train.eval_interval": 5, "train.eval_iters": 100}, ""),
    ("--eval-interval 5 --eval-iters -1", {"train.eval_interval": 5, "train.eval_iters": 0}, ""),
    ("--rampup-batch-size 2 2 100", {"train.rampup_batch_size": None},
     "--rampup-batch-size 2 2 100 is ignored, as by core 0.20"),
    ("--step-batch-size-schedule '0:2 3.2K:4 1M:8'",
     {"train.step_batch_size_schedule": [(0, 2), (100, 4), (31250, 8)], "train.global_batch_size": 8,
      "optim.schedule_unit": "samples"}, "depend on samples, as in Megatron"),
    ("--step-batch-size-schedule '3.2k:8,0:2'",
     {"train.step_batch_size_schedule": [(0, 2), (100, 8)], "optim.schedule_unit": "samples"}, "depend on samples"),
    ("--save-interval 4 --save-retain-interval 8", {"checkpoint.keep_last": 1, "checkpoint.keep_every": 8}, ""),
    ("--exit-signal-handler", {"checkpoint.save_when_stopped": "always"}, ""),
    ("--tensorboard-dir tb", {"log.tensorboard": True, "log.tensorboard_dir": "tb"}, ""),
    ("--wandb-project p --wandb-exp-name n --wandb-entity e --wandb-save-dir d",
     {"log.wandb": True, "log.wandb_project": "p", "log.wandb_name": "n", "log.wandb_entity": "e",
      "log.wandb_dir": "d"}, ""),
    ("--multi-latent-attention --rotary-base 500",
     {"model.latent_layernorm": False, "model.position_embedding_type": "rope", "model.add_position_embedding": True,
      "model.rotary_base": 500.0, "model.add_bias_linear": True}, ""),
    ("--multi-latent-attention --qk-layernorm --position-embedding-type rope --disable-bias-linear",
     {"model.latent_layernorm": True, "model.add_position_embedding": False, "model.add_bias_linear": False}, ""),
    ("--softmax-type learnable", {"model.softmax_type": "learnable", "model.attention_dropout": 0.0},
     "Megatron's default is 0.1; set --attention-dropout 0"),
    ("--enable-gpt-oss --export-force-local-attention --export-model-type GPTModel --export-kv-cache-quant none",
     {"model.position_embedding_type": "learned_absolute"}, "--enable-gpt-oss (Megatron-LM reads it only for"),
    ("--save out", {"checkpoint.megatron_tracker": True}, ""),
    ("--load nowhere", {"checkpoint.load": None}, "has no checkpoint: training starts at step 0"),
    ("--load nowhere --exit-on-missing-checkpoint", {"checkpoint.load": "nowhere"}, ""),
    ("--load out", {"checkpoint.load": "out", "train.output_dir": "out"}, ""),
    ("--eod-mask-loss", {"data.eod_mask_loss": True, "train.calculate_per_token_loss": False}, ""),
    ("--reset-attention-mask", {"data.reset_attention_mask": True}, "Megatron's Transformer Engine and fused softmax"),
    ("--reset-attention-mask --reset-position-ids --no-create-attention-mask-in-dataloader",
     {"data.reset_attention_mask": False, "data.reset_position_ids": True}, "attention crosses the ends of documents"),
    ("--null-tokenizer-pad-id -1", {}, ""),
    ("--eod-mask-loss --calculate-per-token-loss", {"train.calculate_per_token_loss": True}, ""),
    ("--log-params-norm --log-num-zeros-in-grad --timing-log-level 2 --timing-log-option max",
     {"log.log_params_norm": True, "log.log_num_zeros_in_grad": True, "log.timing_log_level": 2,
      "log.timing_log_option": "max"}, ""),
    ("--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --no-fp8-wgrad "
     "--first-last-layers-bf16", {"train.fp8_format": "hybrid", "train.fp8_recipe": "delayed",
                                  "train.fp8_amax_history_len": 1024, "train.fp8_amax_compute_algo": "max",
                                  "train.fp8_wgrad": False, "train.first_last_layers_bf16": True}, ""),
    ("--no-load-optim", {"checkpoint.load_optim": False}, ""),
    ("--lr=2e-4 --adam-beta2=.95", {"optim.lr": 2e-4, "optim.adam_beta2": 0.95}, ""),
    ("--tensor-model-par 2", {"parallel.tensor_model_parallel_size": 2}, "read as --tensor-model-parallel-size"),
    ("--fp8-param-gather --transformer-impl local --use-flash-attn", {}, "these flags have no effect in Megalith"),
    ("--softmax-type vanilla --num-experts 2 --moe-token-dispatcher-type alltoall --error-injection-rate 0", {}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "means", "note"), CASES, ids=[case[0] for case in CASES])
def test_what_flags_mean(flags, means, note, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = translated(LEAST + flags)
    config = result.config()
    for path, value in means.items():
        section, *names = path.split(".")
        found = getattr(config, section)
        for name in names:
            found = getattr(found, name)
        assert found == value, path
    assert any(note in message for message in result.notes) if note else not result.notes


def test_data_is_named_in_each_of_megatrons_ways(tmp_path):
    blend = SHAPE + "--train-samples 100 --save out --vocab-size 9 "
    one = translated(blend + "--data-path a").config().data
    assert (one.data_path, one.split) == ("a", "969,30,1")
    several = translated(blend + "--data-path 0.3 a 0.7 b --split \"'99,1,0'\"").config().data
    assert (several.data_path, several.split) == ("0.3 a 0.7 b", "99,1,0")
    (tmp_path / "args").write_text("0.3 a\n0.7 b\n")
    assert translated(blend + f"--data-args-path {tmp_path}/args").config().data.data_path == "0.3 a 0.7 b"
    (tmp_path / "parts").write_text(json.dumps({"train": ["a"], "valid": ["b"], "test": None}))
    parts = translated(blend + f"--per-split-data-args-path {tmp_path}/parts").config().data
    assert (parts.train_data_path, parts.valid_data_path, parts.data_path) == ("a", "b", None)
    (tmp_path / "parts").write_text(json.dumps({"train": "0.3 a 0.7 b", "valid": "c", "test": None}))
    parts = translated(blend + f"--per-split-data-args-path {tmp_path}/parts").config().data
    assert (parts.train_data_path, parts.valid_data_path) == ("0.3 a 0.7 b", "c")


def test_paths_with_spaces_stay_whole_and_files_of_data_have_megatrons_separators(tmp_path):
    blend = SHAPE + "--train-samples 100 --save out --vocab-size 9 "
    one = translated(blend + "--data-path 'my data/a'").config().data.data_path
    assert parse_data_path(one) == (["my data/a"], None)
    several = translated(blend + "--train-data-path 0.3 'my data/a' 0.7 b").config().data.train_data_path
    assert parse_data_path(several) == (["my data/a", "b"], [0.3, 0.7])
    (tmp_path / "args").write_bytes(b"\xef\xbb\xbf0.025  a's\r\n0.15\tb\r\n")
    data = translated(blend + f"--data-args-path {tmp_path}/args").config().data
    assert parse_data_path(data.data_path) == (["a's", "b"], [0.025, 0.15])


def test_flags_of_fill_in_the_middle_set_its_settings():
    blend = SHAPE + "--train-samples 100 --save out --vocab-size 9 --data-path a "
    flags = (
        "--fim-data --fim-rate 0.9 --fim-spm-rate 0.25 --fim-split-sample '<file>' --fim-fragment-rate 0.5 "
    )
    data = translated(blend + flags + "--fim-no-prefix '#' --fim-pad-token '<pad>'").config().data
    assert (data.fim_data, data.fim_rate, data.fim_spm_rate) == (True, 0.9, 0.25)
    assert (data.fim_split_sample, data.fim_fragment_rate, data.fim_no_prefix) == ("<file>", 0.5, "#")
    assert (data.fim_pad_token, data.fim_middle_token, data.fim_eod_token) == (
        "<pad>",
        "<fim_middle>",
        "<|endoftext|>",
    )


def test_without_save_figures_go_to_a_folder_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = LEAST.replace("--save out", "")
    first = translated(flags).config()
    assert (first.train.output_dir, first.checkpoint.save_at_end) == ("output", False)
    assert first.checkpoint.save_when_stopped == "never"
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "metrics.jsonl").write_text("{}\n")
    assert translated(flags).config().train.output_dir == "output-2"


def test_the_global_batch_without_its_flag_is_a_micro_batch_on_each_replica():
    flags = LEAST.replace("--global-batch-size 8", "--tensor-model-parallel-size 2 --context-parallel-size 2")
    assert translated(flags, world_size=16).config().train.global_batch_size == 4


def test_finetune_begins_from_the_weights_alone(tmp_path):
    (tmp_path / "run" / "checkpoints" / "step_00000004").mkdir(parents=True)
    run = tmp_path / "run"
    (run / "checkpoints" / "step_00000004" / "manifest.json").touch()
    config = translated(LEAST + f"--finetune --load {run}").config()
    assert (config.model.init_from, config.checkpoint.load) == (str(run), None)
    assert translated(LEAST + f"--load {run} --ckpt-step 4").config().checkpoint.load == str(
        run / "checkpoints" / "step_00000004"
    )
    missing = translated(LEAST + f"--load {run} --ckpt-step 5").config().checkpoint.load
    assert missing == str(
        run / "checkpoints" / "step_00000005"
    )  # which the run will refuse: a step was named
    (tmp_path / "theirs" / "iter_0000007").mkdir(parents=True)
    named = translated(LEAST + f"--load {tmp_path}/theirs --ckpt-step 7").config().checkpoint.load
    assert named == str(tmp_path / "theirs" / "iter_0000007")
    assert translated(LEAST + "--load nowhere --ckpt-step 7").config().checkpoint.load is None
    assert translated(LEAST + f"--pretrained-checkpoint {run}").config().model.init_from == str(run)


def test_all_that_is_wrong_is_told_at_once():
    messages = problems(
        "--num-layers 2 --hiden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --lr fast --bf16 "
        "--fp16 --train-iters 5 --train-samples 9 --moe-token-dispatcher-type flex --fp8-recipe custom --warmup 3 "
        "--position-embedding-type relative --optimizer sophia --num 3 --swiglu yes --frobnicate 7 --split --sft "
        "--seed -3"
    )
    for words in (
        "no flag --hiden-size; did you mean --hidden-size",
        "--max-position-embeddings is missing",
        "--lr is fast: it must be a number",
        "--bf16 and --fp16 contradict each other",
        "--train-iters and --train-samples contradict each other",
        "--moe-token-dispatcher-type flex is refused: choose among alltoall, allgather",
        "--fp8-recipe custom is refused: choose among delayed, tensorwise, blockwise, mxfp8",
        "--warmup is refused: Megatron has removed it; use --lr-warmup-fraction",
        "--position-embedding-type relative is not supported",
        "--optimizer is sophia: it must be one of adam, sgd, muon, dist_muon, lion, soap, adaptive_muon",
        "--num could be --num-layers",
        "--swiglu is yes: it takes no value",
        "there is no flag --frobnicate",
        "--split is given no value: it needs one value",
        "--sft is refused",
        "--seed is -3",
    ):
        assert any(words in line for line in messages), words
    assert len(messages) == 16 and not any("--hidden-size is missing" in line for line in messages)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("−−lr 3", "'−−lr' begins with a character that looks like - but is not; write --lr"),
        ("stray", "--save is out stray: it needs one value"),
        ("--seed nan", "it must be a whole number"),
        ("--weight-decay inf", "it must be a finite number"),
        ("--rampup-batch-size 1 2", "it needs three values"),
        ("--no-position-embedding", "supported only with rotary positions"),
        (
            "--multi-latent-attention --rope-type rope --mscale-all-dim 0.7 --rotary-scaling-factor 4",
            "--mscale-all-dim 0.7 is refused with --rope-type rope",
        ),
        (
            "--position-embedding-type yarn --rotary-scaling-factor 4",
            "--yarn-original-max-position-embeddings",
        ),
        ("--export-quant-cfg FP8_DEFAULT_CFG", "is refused: only ModelOpt quantizes models"),
        ("--export-kd-teacher-load t", "is refused: this command has no teacher"),
        ("--pipeline-model-parallel-layout Etm|tL", "must be in the last stage, with the head"),
        ("--window-size 9", "it needs two numbers"),
        ("--num-experts 2 --moe-layer-freq __import__('os')", "lists of numbers with"),
        ("--num-experts 2 --moe-layer-freq [0]*(9999*9999*9999)*2", "lists of numbers with"),
        (
            "--num-experts 2 --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1",
            "do not depend on the layout",
        ),
        ("--num-experts 2 --moe-aux-loss-coeff 1e-2 1e-3", "choose a single one of aux_loss"),
        ("--tokenizer-type MultimodalTokenizer", "is not supported; use one of GPT2BPETokenizer"),
        (
            "--optimizer muon --muon-tp-mode blockwise",
            "--muon-tp-mode blockwise is not supported, because matrices are never split",
        ),
        (
            "--optimizer muon --muon-coefficient-type cans",
            "is cans: it must be one of simple, quintic, polar_express, aol",
        ),
        ("--optimizer adaptive_muon --muon-tp-mode blockwise", "--muon-tp-mode blockwise is not supported"),
        ("--optimizer soap --adam-eps 1e-6", "--adam-eps 1e-06 is refused with --optimizer soap"),
        ("--step-batch-size-schedule 5K:8", "it needs TOKENS:SIZE pairs, the first from 0"),
        ("--step-batch-size-schedule 0:2,1K:4", "which ends with 4; remove"),
        ("--data-path a", "--data-path and --mock-data contradict"),
        ("--wandb-project p", "needs --wandb-exp-name"),
        ("--tokenizer-type Null", "one of BertWordPieceLowerCase"),
        ("--data-args-path nowhere", "contradict each other"),
        ("--lr-warmup-fraction .1 --lr-warmup-iters 5", "contradict each other"),
    ],
)
def test_a_flag_that_cannot_be_is_refused_with_a_way_out(flags, message):
    assert any(message in line for line in problems(LEAST + flags))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--seed -3", "--seed is -3: input should be greater than or equal to 0"),
        ("--save-interval 0", "--save-interval is 0:"),
        ("--allow-ambiguous-pad-tokens", "--allow-ambiguous-pad-tokens is refused: Megatron leaves tokens"),
        ("--null-tokenizer-pad-id 3", "--null-tokenizer-pad-id is refused: Megatron leaves tokens"),
        (
            "--softmax-type learnable --attention-dropout 0.1",
            "--softmax-type learnable is not supported with --attention-dropout",
        ),
        (
            "--tensor-model-parallel-size 0",
            "--tensor-model-parallel-size is 0: input should be greater than 0",
        ),
        ("--num-experts 2 --moe-layer-freq 0", "--moe-layer-freq is 0: input should be greater than 0"),
        ("--hidden-size 66", "--hidden-size 66 is not divisible by --num-attention-heads 4"),
        (
            "--global-batch-size 7 --micro-batch-size 2",
            "--global-batch-size (7) is not a multiple of --micro-batch-size (2)",
        ),
        ("--save-interval 2 --save-retain-interval 0", "--save-retain-interval is 0:"),
        ("--make-vocab-size-divisible-by 0", "--make-vocab-size-divisible-by is 0:"),
        ("--num-experts 2 --moe-aux-loss-coeff -1", "--moe-aux-loss-coeff is -1.0:"),
        ("--seq-length 64", "--seq-length 64 is longer than --max-position-embeddings 32"),
    ],
)
def test_what_the_settings_refuse_is_told_in_flags(flags, message):
    with pytest.raises(ConfigError) as raised, in_flags():
        check_training(config_of(flags))
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("world_size", "flags", "message"),
    [
        (3, "--tensor-model-parallel-size 3", "4 is not divisible by --tensor-model-parallel-size 3"),
        (6, "--tensor-model-parallel-size 4", "lower --tensor-model-parallel-size to 3, or start 8 processes"),
        (2, "--pipeline-model-parallel-size 2 --num-layers 3", "--pipeline-model-parallel-size to one of 1, 3"),
        (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3",
         "6 stages; set --pipeline-model-parallel-layout to 'E||t|t||L'"),
        (1, "--num-virtual-stages-per-pipeline-rank 2", "raise --pipeline-model-parallel-size to 2"),
        (2, "--sequence-parallel --tensor-model-parallel-size 2 --seq-length 31",
         "--seq-length 31 / --context-parallel-size 1) over --tensor-model-parallel-size 2 ranks"),
    ],
)  # fmt: skip
def test_layouts_are_refused_in_flags_without_a_setting_of_ours(world_size, flags, message):
    with pytest.raises(ConfigError) as raised, in_flags():
        prepare(config_of(flags), world_size)
    assert message in str(raised.value) and "_" not in str(raised.value)


def test_what_has_no_effect_without_another_flag_is_told_in_flags_once():
    result = translated(LEAST + "--decoupled-min-lr 1e-4 --wandb-entity e --hysteresis 3 --no-fp8-wgrad")
    assert [note.partition(" has no effect: it requires ")[2] for note in result.notes] == [
        "--decoupled-lr", "the precision fp16", "--fp8-format", "--wandb-project"
    ]  # fmt: skip
    assert not prepare(result.config(), 1).notes


def test_what_is_missing_stands_in_one_line():
    (line, length) = problems("--num-layers 2 --lr 1e-3 --seq-length 8")
    assert line.startswith(
        "--hidden-size, --num-attention-heads, --max-position-embeddings, --micro-batch-size are missing"
    )
    assert length.startswith("neither --train-iters nor --train-samples is given")


def test_ignore_unknown_passes_over_what_changes_no_result_and_over_nothing_else():
    flags = LEAST + "--frobnicate 7 --record-memory-history --inprocess-restart "
    assert len(problems(flags)) == 3
    result = translated(flags, ignore_unknown=True)
    assert [note.partition(" is ")[0] for note in result.notes] == [
        "warning: --frobnicate",
        "warning: --record-memory-history",
        "warning: --inprocess-restart",
    ]
    messages = problems(flags + "--moe-latent-size 8 --hiden-dropout 0", ignore_unknown=True)
    assert [line.split(" is refused")[0] for line in messages] == [
        "there is no flag --hiden-dropout; did you mean --hidden-dropout?; `megalith megatron flags` lists them all",
        "--moe-latent-size",
    ]


def test_the_flags_without_effect_stand_in_one_note():
    result = translated(
        LEAST + "--use-mcore-models --no-load-rng --no-rope-fusion --log-timers-to-tensorboard"
    )
    (note,) = result.notes
    assert (
        "--use-mcore-models --no-rope-fusion (kernels" in note and "--no-load-rng (there is no random" in note
    )


def test_the_command_lists_every_flag_with_its_kind(capsys):
    assert main(["megatron", "flags", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table.keys() == FLAGS.keys() | MODELOPT.keys()
    assert {row["kind"] for row in table.values()} == {"sets", "derives", "no effect", "refused"}
    assert table["--lr"] == {"kind": "sets", "means": "optim.lr"}
    assert main(["megatron", "flags"]) == 0
    assert "--use-distributed-optimizer" in capsys.readouterr().out


def test_no_row_is_both_harmless_and_a_matter_of_results():
    assert not any(isinstance(row, NoEffect) and row.means.startswith("it changes") for row in FLAGS.values())
