"""Exported checkpoints against Megatron core itself, on CPUs: `make megatron-core` installs it and runs this.

Of each model a run of two steps is exported in both forms. Megatron core's own `dist_checkpointing.load` fills a
GPTModel of its own, and each `mp_rank` file goes through `load_state_dict(strict=True)`; every tensor has to have the
bits that it has here, and the logits have to be ours. The optimizers are Megatron's too.
"""

import contextlib
import dataclasses
import os
import sys
import tempfile
import types
from pathlib import Path

import torch
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.optimizer import optimizer as core_optimizer
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import experts, moe_utils
from megatron_checkpoint import core_state
from torch import distributed

import megalith
from megalith.bridge.megatron.megatron_exporter import export_megatron
from megalith.checkpoint import open_existing
from megalith.config import RunConfig



def grouped_matmul(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, trans_b: bool) -> torch.Tensor:
    """What the library grouped_gemm computes, which is for GPUs alone."""
    assert not trans_b
    return torch.cat([rows @ matrix for rows, matrix in zip(x.split(counts.tolist()), weight)])


# Megatron core has a CPU initialization, and asks for a GPU in these places all the same.
torch.cuda.current_device = lambda: torch.device("cpu")
CudaRNGStatesTracker.fork = lambda *ignored: contextlib.nullcontext()
experts.gg.ops = types.SimpleNamespace(gmm=grouped_matmul)
experts.gg.assert_grouped_gemm_is_available = lambda: None
moe_utils.te_general_gemm = None

DENSE = dict(num_layers=4, hidden_size=32, num_attention_heads=4, vocab_size=151, max_position_embeddings=64,
             hidden_dropout=0.0, attention_dropout=0.0)  # fmt: skip
LLAMA = dict(DENSE, ffn_hidden_size=48, num_query_groups=2, kv_channels=12, position_embedding_type="rope", swiglu=True,
             normalization="RMSNorm", add_bias_linear=False, untie_embeddings_and_output_weights=True)  # fmt: skip
EXPERTS = dict(LLAMA, num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=16)
MODELS = {
    "gpt": DENSE,
    "llama": LLAMA,
    "qk norms": dict(LLAMA, qk_layernorm=True, add_qkv_bias=True),
    "sequential experts": dict(EXPERTS, moe_shared_expert_intermediate_size=32),
    "grouped experts": dict(EXPERTS, moe_grouped_gemm=True),
    "experts in some layers": dict(EXPERTS, moe_layer_freq=2),
    "biased experts": dict(DENSE, num_experts=4, moe_router_topk=2),
    "expert bias": dict(EXPERTS, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True),
}
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]


def trained(model: dict, folder: Path, precision: str = "fp32") -> Path:
    """A run of two steps."""
    tree = {
        "model": model,
        "data": {"mock": True, "seq_length": 16},
        "optim": {"lr": 0.02},
        "train": {"train_iters": 2, "micro_batch_size": 2, "global_batch_size": 2, "output_dir": str(folder),
                  "precision": precision},
        "runtime": {"device": "cpu"},
    }  # fmt: skip
    megalith.train(RunConfig.from_tree(tree))
    return folder


def core_model(args: types.SimpleNamespace) -> GPTModel:
    """Megatron core's model as a checkpoint's arguments say it, for the layout of this process."""
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    said = {name: value for name, value in vars(args).items() if name in fields and value is not None}
    if not args.group_query_attention:
        said["num_query_groups"] = args.num_attention_heads
    if args.num_experts:
        said |= {"num_moe_experts": args.num_experts, "moe_token_dispatcher_type": "allgather"}
    config = TransformerConfig(
        **{**said, "layernorm_epsilon": args.norm_epsilon, "gated_linear_unit": args.swiglu,
           "bias_activation_fusion": args.bias_gelu_fusion,
           "activation_func": F.silu if args.swiglu else F.gelu, "use_cpu_initialization": True,
           "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
           "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
           "pipeline_dtype": args.params_dtype, "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
    )  # fmt: skip
    if args.num_experts:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=args.normalization)
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization)
    return GPTModel(
        config, spec, vocab_size=args.padded_vocab_size, max_sequence_length=args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type, rotary_base=args.rotary_base,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
    ).to(args.params_dtype)  # fmt: skip


def arguments_of(folder: Path) -> types.SimpleNamespace:
    file = folder / "common.pt"
    file = file if file.is_file() else next(folder.glob("mp_rank_00*/model_optim_rng.pt"))
    return torch.load(file, weights_only=False)["args"]


def load_distributed(folder: Path) -> GPTModel:
    model = core_model(arguments_of(folder))
    strict = dist_checkpointing.validation.StrictHandling.RAISE_ALL
    loaded = dist_checkpointing.load(
        {"model": model.sharded_state_dict(metadata={})}, str(folder), strict=strict
    )
    model.load_state_dict(loaded["model"], strict=True)
    return model.eval()


def load_rank_file(folder: Path) -> GPTModel:
    tp, pp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    file = folder / (f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if stages > 1 else "")) / "model_optim_rng.pt"
    saved = torch.load(file, weights_only=False)
    model = core_model(saved["args"])
    model.load_state_dict(saved["model"], strict=True)
    return model.eval()


def tensors_of(model: GPTModel) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def different(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return [name for name, value in one.items() if not torch.equal(value, other[name])]
