"""Megatron core's own checkpoints, imported, on CPUs: `make megatron-core` installs it and runs this.

Of each model one process makes random weights, saves them by `dist_checkpointing.save`, and computes logits. Four
processes, TP 2 × PP 2, load that checkpoint and save it again. Both are imported here: the tensors have to be the same
to the bit, the logits have to be Megatron's.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from against_megatron_core import BOUNDS, GROUPED, SPELLINGS, core_model, in_processes
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.transformer.enums import AttnBackend
from torch import distributed

import megalith
from megalith.bridge.megatron.megatron_importer import import_megatron

VOCABULARY, PADDED_VOCABULARY, SEQUENCE = 151, 256, 32
SHAPE = dict(
    num_layers=4, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, kv_channels=8, max_position_embeddings=64,
    group_query_attention=False, num_query_groups=1, position_embedding_type="learned_absolute",
    use_rotary_position_embeddings=False, rotary_base=10000, rotary_percent=1.0, rotary_interleaved=False,
    rotary_seq_len_interpolation_factor=None, use_rope_scaling=False, rope_scaling_factor=8.0, rope_type=None,
    rotary_scaling_factor=1.0, mscale=1.0, mscale_all_dim=0.0, yarn_original_max_position_embeddings=None,
    yarn_beta_fast=None, yarn_beta_slow=None, yarn_correction_range_round_to_int=None, no_rope_freq=None,
    normalization="LayerNorm", swiglu=False, squared_relu=False, openai_gelu=False, quick_geglu=False,
    bias_gelu_fusion=True, add_bias_linear=True, add_qkv_bias=False, qk_layernorm=False, qk_l2_norm=False,
    softmax_type="vanilla", window_size=None, window_attn_skip_freq=None, multi_latent_attention=False,
    num_experts=None, mtp_num_layers=None, untie_embeddings_and_output_weights=False, attention_dropout=0.0,
    hidden_dropout=0.0, vocab_size=VOCABULARY, padded_vocab_size=PADDED_VOCABULARY, params_dtype=torch.float32,
    transformer_impl="local", attention_backend=AttnBackend.auto, save=Path("somewhere"), epsilon=1e-5,
    zero_centered=False,
)  # fmt: skip
LLAMA = dict(SHAPE, group_query_attention=True, num_query_groups=2, position_embedding_type="rope", swiglu=True,
             normalization="RMSNorm", add_bias_linear=False, bias_gelu_fusion=False,
             untie_embeddings_and_output_weights=True)  # fmt: skip
EXPERTS = dict(LLAMA, num_experts=4, moe_layer_freq=1, moe_ffn_hidden_size=16, moe_router_topk=2,
               moe_shared_expert_intermediate_size=32, moe_grouped_gemm=False, moe_router_pre_softmax=True,
               moe_router_score_function="softmax", moe_router_load_balancing_type="none",
               moe_router_enable_expert_bias=False, moe_router_topk_scaling_factor=2.5)  # fmt: skip
LATENT = dict(LLAMA, group_query_attention=False, num_query_groups=1, kv_channels=None, multi_latent_attention=True,
              qk_layernorm=True, q_lora_rank=8, kv_lora_rank=12, qk_head_dim=8, qk_pos_emb_head_dim=4,
              v_head_dim=6)  # fmt: skip
YARN = dict(rotary_scaling_factor=4.0, yarn_original_max_position_embeddings=16)
LATENT_YARN = dict(
    rotary_scaling_factor=4.0, original_max_position_embeddings=16, beta_fast=16.0, beta_slow=2.0
)
MODELS = {
    "gpt": dict(SHAPE, epsilon=1e-3),
    "llama": dict(LLAMA, epsilon=1e-3, rotary_base=5000, rotary_percent=0.5, qk_layernorm=True),
    "windows and sinks": dict(LLAMA, window_size=(7, 0), window_attn_skip_freq=2, softmax_type="learnable"),
    "yarn": dict(LLAMA, position_embedding_type="yarn", **YARN),
    "experts": EXPERTS,
    "experts in some layers": dict(EXPERTS, moe_layer_freq=[0, 1, 1, 0], moe_router_score_function="sigmoid",
                                   moe_router_enable_expert_bias=True, moe_router_pre_softmax=False),
    "latents": dict(LATENT, mscale=0.7, mscale_all_dim=0.9, **LATENT_YARN),
    "latents without norms": dict(
        LATENT, qk_layernorm=False, position_embedding_type="learned_absolute", add_bias_linear=True, mscale=0.7,
        **LATENT_YARN
    ),
    # with norms core 0.17 and later need Transformer Engine
    "latents of keys": dict(LATENT, q_lora_rank=None, rope_type="rope", qk_layernorm=GROUPED),
}  # fmt: skip


def arguments(model: dict[str, object]) -> argparse.Namespace:
    """The arguments under this version's names."""
    args = dict(model)
    args |= dict(zip(SPELLINGS, (args.pop("epsilon"), args.pop("zero_centered"))))
    return argparse.Namespace(**args)


def save(model: torch.nn.Module, args: argparse.Namespace, folder: Path) -> None:
    if distributed.get_rank() == 0:
        (folder / "iter_0000007").mkdir(parents=True)
        (folder / "latest_checkpointed_iteration.txt").write_text("7")
    distributed.barrier()
    tp, pp = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size = tp, pp
    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": model.sharded_state_dict(metadata={}),
    }
    dist_checkpointing.save(state, str(folder / "iter_0000007"))


def save_whole(out: Path) -> None:
    """In one process: the checkpoint `one`, and the logits."""
    for name, model in MODELS.items():
        args = arguments(model)
        built = core_model(args).eval()
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for value in (*built.parameters(), *built.buffers()):
                value.normal_(0, 0.1, generator=generator) if value.is_floating_point() else None
            ids = ids_of_test()
            hidden = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).tril().logical_not()
            logits = built(ids, torch.arange(SEQUENCE).expand(2, SEQUENCE), hidden)[..., :VOCABULARY]
        save(built, args, out / name / "one")
        torch.save(logits, out / name / "logits.pt")


def save_again(out: Path) -> None:
    """In several processes: what `one` holds, as the checkpoint `several`."""
    for name, model in MODELS.items():
        args = arguments(model)
        built = core_model(args)
        wanted = {"model": built.sharded_state_dict(metadata={})}
        loaded = dist_checkpointing.load(wanted, str(out / name / "one/iter_0000007"))
        built.load_state_dict(loaded["model"], strict=True)
        save(built, args, out / name / "several")


def ids_of_test() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(0))


def check(name: str, folder: Path) -> str:
    runs = {}
    for kind in ("one", "several"):
        import_megatron(folder / kind, folder / f"{kind} here", trust=True, show_progress=False)
        runs[kind] = megalith.load(folder / f"{kind} here").eval()
    one, several = (runs[kind].state_dict() for kind in ("one", "several"))
    assert one.keys() == several.keys()
    assert all(torch.equal(value, several[key]) for key, value in one.items()), name
    with torch.no_grad():
        ours = runs["several"](ids_of_test()).float()
    theirs = torch.load(folder / "logits.pt").float()
    difference, largest = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    assert difference <= BOUNDS["fp32"] * largest, (name, difference, largest)
    return f"{name}: {len(one)} tensors of TP 2, PP 2 bitwise, logits within {difference / largest:.1e} of the largest"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        in_processes(save_whole, 1, 1, Path(folder))
        in_processes(save_again, 2, 2, Path(folder))
        for name in MODELS:
            print(check(name, Path(folder) / name), flush=True)


if __name__ == "__main__":
    main()
