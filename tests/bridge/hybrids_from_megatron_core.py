"""Hybrid models of Megatron core itself, on CPUs: `make megatron-core` installs it and runs this.

Megatron core builds gated delta nets and Mamba-2 with Transformer Engine, flash-linear-attention and mamba-ssm, which
need GPUs. Their places are taken here: linears with a norm by Megatron's own linear and PyTorch's norm, kernels by the
published recurrences, token by token. Names, shapes, splits and the rest of the computation are Megatron's.

Of each model one process saves a checkpoint by `dist_checkpointing.save` and computes logits; two tensor-parallel
processes save it again, and write rank files. All are imported: equal to the bit, and with Megatron's logits. What
Megalith exports loads strictly, with the bits that were imported.
"""

import argparse
import sys
import tempfile
import types
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus


class RMSNormGated(nn.Module):
    """Stand-in of mamba-ssm's norm: per group, after multiplying by SiLU of the gate."""

    def __init__(self, size, eps, group_size, norm_before_gate, device, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        y = (x * nn.functional.silu(z)).unflatten(-1, (-1, self.group_size))
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)).flatten(-2) * self.weight


def scan(x, dt, a, b, c, chunk_size, D, dt_bias, **ignored) -> Tensor:
    """Mamba-2 token by token: S ← e^{A Δ} S + Δ x ⊗ B, y = S C + D x. x is [batch, seq, heads, size]."""
    dt, sharing = softplus(dt + dt_bias), x.shape[2] // b.shape[2]
    b, c = b.repeat_interleave(sharing, 2), c.repeat_interleave(sharing, 2)
    state, out = x.new_zeros(x.shape[0], *x.shape[2:], b.shape[-1]), []
    for t in range(x.shape[1]):
        written = (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        state = (dt[:, t] * a).exp()[..., None, None] * state + written
        out.append((state * c[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(out, 1)


MODULES = {
    "mamba_ssm": {},
    "mamba_ssm.ops": {},
    "mamba_ssm.ops.triton": {},
    "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNormGated},
    "mamba_ssm.ops.triton.ssd_combined": {
        "mamba_chunk_scan_combined": scan,
        "mamba_split_conv1d_scan_combined": None,
    },
}
for module, contents in MODULES.items():
    sys.modules[module] = types.ModuleType(module)
    vars(sys.modules[module]).update(contents)

from against_megatron_core import core_config, in_processes  # noqa: E402
from from_megatron_core import LLAMA, PADDED_VOCABULARY, SEQUENCE, VOCABULARY, arguments, ids_of_test  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel  # noqa: E402
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.mamba import MambaModel  # noqa: E402
from megatron.core.ssm import gated_delta_net, mamba_block  # noqa: E402
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules  # noqa: E402
from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules  # noqa: E402
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules  # noqa: E402
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules  # noqa: E402
from megatron.core.ssm.mlp_layer import MLPLayer  # noqa: E402
from megatron.core.transformer import TransformerLayer, TransformerLayerSubmodules  # noqa: E402
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.mlp import MLP, MLPSubmodules  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402

import megalith  # noqa: E402
from megalith.bridge.megatron.megatron_exporter import export_megatron  # noqa: E402
from megalith.bridge.megatron.megatron_importer import import_megatron  # noqa: E402


class NormLinear(tensor_parallel.ColumnParallelLinear):
    """Stand-in of Transformer Engine's linear after a norm, with its parameters' names."""

    def __init__(self, input_size, output_size, *, config, **options):
        super().__init__(input_size, output_size, config=config, **options)
        self.layer_norm_weight = nn.Parameter(torch.ones(input_size))
        self.epsilon, self.offset = config.layernorm_epsilon, float(config.layernorm_zero_centered_gamma)

    def forward(self, x: Tensor, *rest, **options):
        x = nn.functional.rms_norm(x, x.shape[-1:], self.layer_norm_weight + self.offset, self.epsilon)
        return super().forward(x, *rest, **options)


class Norm(nn.Module):
    """Stand-in of Transformer Engine's RMSNorm."""

    def __init__(self, config, hidden_size, eps=1e-5, **ignored):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps, self.offset = eps, float(config.layernorm_zero_centered_gamma)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight + self.offset, self.eps)


gated_delta_net.HAVE_FLA = True
gated_delta_net.l2norm = lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
mamba_block.TENorm = Norm

ATTENTION = ModuleSpec(
    module=SelfAttention,
    params={"attn_mask_type": AttnMaskType.causal},
    submodules=SelfAttentionSubmodules(
        linear_qkv=NormLinear,
        core_attention=DotProductAttention,
        linear_proj=tensor_parallel.RowParallelLinear,
    ),
)
FEED_FORWARD = ModuleSpec(
    module=MLP, submodules=MLPSubmodules(linear_fc1=NormLinear, linear_fc2=tensor_parallel.RowParallelLinear)
)
DELTA_NET = ModuleSpec(
    module=GatedDeltaNet,
    submodules=GatedDeltaNetSubmodules(
        in_proj=NormLinear, out_norm=Norm, out_proj=tensor_parallel.RowParallelLinear
    ),
)
MIXER = ModuleSpec(
    module=MambaMixer,
    submodules=MambaMixerSubmodules(in_proj=NormLinear, out_proj=tensor_parallel.RowParallelLinear),
)


def layer(
    mixer: ModuleSpec | None, feed_forward: ModuleSpec | None, module: type = TransformerLayer
) -> ModuleSpec:
    parts = {} if mixer is None else dict(self_attention=mixer, self_attn_bda=get_bias_dropout_add)
    parts |= {} if feed_forward is None else dict(mlp=feed_forward, mlp_bda=get_bias_dropout_add)
    return ModuleSpec(module=module, submodules=TransformerLayerSubmodules(**parts))


DELTA = dict(
    LLAMA, experimental_attention_variant="gated_delta_net", linear_attention_freq=[1, 0, 1, 1], qk_layernorm=False,
    linear_conv_kernel_dim=3, linear_key_head_dim=5, linear_value_head_dim=6, linear_num_key_heads=2,
    linear_num_value_heads=4, attention_output_gate=False, transformer_impl="transformer_engine",
)  # fmt: skip
MAMBA = dict(
    LLAMA, swiglu=False, squared_relu=True, position_embedding_type="none", hybrid_override_pattern="M-*M",
    is_hybrid_model=True, spec=["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"],
    mamba_num_heads=8, mamba_head_dim=6, mamba_state_dim=5, mamba_num_groups=4,
    transformer_impl="transformer_engine",
)  # fmt: skip
MODELS = {
    "gated delta nets": DELTA,
    "gated delta nets, norms of 1 + weight": dict(DELTA, zero_centered=True, linear_attention_freq=2),
    "hybrid": MAMBA,
    "hybrid with RoPE": dict(
        MAMBA,
        position_embedding_type="rope",
        mamba_num_heads=None,
        mamba_head_dim=8,
        hybrid_override_pattern="MM*-",
    ),
}


def build(args: argparse.Namespace) -> nn.Module:
    config = core_config(args)
    config.perform_initialization = False
    options = dict(
        vocab_size=args.padded_vocab_size, max_sequence_length=args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type, rotary_base=args.rotary_base,
        rotary_percent=args.rotary_percent,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    )  # fmt: skip
    if getattr(args, "is_hybrid_model", False):
        config.use_mamba_mem_eff_path = False
        config.activation_func = lambda x: nn.functional.relu(x).square()
        mamba = MambaLayerSubmodules(mixer=MIXER, mamba_bda=get_bias_dropout_add)
        stack = MambaStackSubmodules(
            mamba_layer=ModuleSpec(module=MambaLayer, submodules=mamba),
            attention_layer=layer(ATTENTION, None),
            mlp_layer=layer(None, FEED_FORWARD, MLPLayer),
        )
        spec = ModuleSpec(module=MambaStack, submodules=stack)
        return MambaModel(config, spec, hybrid_override_pattern=args.hybrid_override_pattern, **options)
    config.deterministic_mode = True
    frequency = args.linear_attention_freq
    layers = [n % frequency != frequency - 1 for n in range(4)] if isinstance(frequency, int) else frequency
    plain = get_gpt_layer_local_spec(normalization="RMSNorm").submodules.self_attention
    assert plain.module is SelfAttention
    specs = [layer(DELTA_NET if linear else ATTENTION, FEED_FORWARD) for linear in layers]
    return GPTModel(config, TransformerBlockSubmodules(layer_specs=specs, layer_norm=Norm), **options)


def logits_of(model: nn.Module) -> Tensor:
    hidden = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).tril().logical_not()
    return model(ids_of_test(), torch.arange(SEQUENCE).expand(2, SEQUENCE), hidden)[..., :VOCABULARY]


@torch.no_grad()
def save_whole(out: Path) -> None:
    """In one process: the checkpoint `one`, and the logits."""
    for name, model in MODELS.items():
        args = arguments(model)
        built, generator = build(args).eval(), torch.Generator().manual_seed(5)
        for value in built.parameters():
            value.normal_(0, 0.2, generator=generator)
        save(built, args, out / name / "one")
        torch.save(logits_of(built), out / name / "logits.pt")


@torch.no_grad()
def save_again(out: Path) -> None:
    """In two processes: what `one` holds as `several`, and as rank files."""
    for name, model in MODELS.items():
        args = arguments(model)
        built = build(args).eval()
        load(built, out / name / "one")
        save(built, args, out / name / "several")
        rank = parallel_state.get_tensor_model_parallel_rank()
        folder = out / name / f"ranks/iter_0000007/mp_rank_{rank:02d}"
        folder.mkdir(parents=True)
        saved = {"args": args, "checkpoint_version": 3.0, "iteration": 7, "model": built.state_dict()}
        torch.save(saved, folder / "model_optim_rng.pt")
        (out / name / "ranks/latest_checkpointed_iteration.txt").write_text("7")


@torch.no_grad()
def load_exported(out: Path) -> None:
    """In two processes: the exports in both forms, whose tensors have to be those of `one`."""
    for name, model in MODELS.items():
        args = arguments(model)
        expected, distributed_model, rank_model = (build(args) for _ in range(3))
        load(expected, out / name / "one")
        load(distributed_model, out / name / "exported")
        rank = parallel_state.get_tensor_model_parallel_rank()
        folder = next((out / name / "exported ranks").glob("*/mp_rank_*")).parent
        saved = torch.load(folder / f"mp_rank_{rank:02d}/model_optim_rng.pt", weights_only=False)
        # Transformer Engine's attention has a state, the stand-in has none.
        state = {key: value for key, value in saved["model"].items() if "core_attention._extra" not in key}
        rank_model.load_state_dict(state, strict=True)
        bound = 1e-6 if "1 + weight" in name else 0.0  # 1 is added and subtracted in float32
        for one, value in expected.state_dict().items():
            for other in (distributed_model, rank_model):
                if isinstance(value, Tensor):
                    rows = value.shape[0] if "embedding" not in one and "output_layer" not in one else 0
                    difference = (other.state_dict()[one][:rows] - value[:rows]).abs()
                    assert not rows or difference.max() <= bound, (name, one)


def save(model: nn.Module, args: argparse.Namespace, folder: Path) -> None:
    if torch.distributed.get_rank() == 0:
        (folder / "iter_0000007").mkdir(parents=True)
        (folder / "latest_checkpointed_iteration.txt").write_text("7")
    torch.distributed.barrier()
    args.tensor_model_parallel_size = parallel_state.get_tensor_model_parallel_world_size()
    args.pipeline_model_parallel_size = 1
    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": model.sharded_state_dict(metadata={}),
    }
    dist_checkpointing.save(state, str(folder / "iter_0000007"))


def load(model: nn.Module, folder: Path) -> None:
    iteration = next(path for path in folder.iterdir() if path.is_dir())
    wanted = {"model": model.sharded_state_dict(metadata={})}
    model.load_state_dict(dist_checkpointing.load(wanted, str(iteration))["model"], strict=True)


def check(name: str, folder: Path) -> str:
    runs = {}
    for kind in ("one", "several", "ranks"):
        import_megatron(folder / kind, folder / f"{kind} here", trust=True, show_progress=False)
        runs[kind] = megalith.load(folder / f"{kind} here").eval()
    one, *others = (runs[kind].state_dict() for kind in runs)
    for other in others:
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[key]) for key, value in one.items()), name
    with torch.no_grad():
        ours, theirs = runs["several"](ids_of_test()).float(), torch.load(folder / "logits.pt")
    difference, largest = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    assert difference <= 1e-5 * largest, (name, difference, largest)
    divisible = PADDED_VOCABULARY // 2
    export_megatron(folder / "one here", folder / "exported", make_vocab_size_divisible_by=divisible, tp=2)
    export_megatron(folder / "one here", folder / "exported ranks", make_vocab_size_divisible_by=divisible, tp=2,
                    ckpt_format="torch")  # fmt: skip
    return f"{name}: {len(one)} tensors bitwise, logits within {difference / largest:.1e} of the largest"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        in_processes(save_whole, 1, 1, Path(folder))
        in_processes(save_again, 2, 1, Path(folder))
        for name in MODELS:
            print(check(name, Path(folder) / name), flush=True)
        in_processes(load_exported, 2, 1, Path(folder))
        print("exports of all load strictly with these bits, in both forms", flush=True)


if __name__ == "__main__":
    main()
