"""Exported checkpoints against Megatron core itself, on CPUs: `make megatron-core` installs it and runs this.

Of each model a run with random weights is exported in both forms. Megatron core's own `dist_checkpointing.load` fills a
GPTModel of its own, and each `mp_rank` file goes through `load_state_dict(strict=True)`; every tensor has to have the
bits that it has here, and the logits have to be ours. The optimizers are Megatron's too.
"""

import contextlib
import dataclasses
import tempfile
import types
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models import backends
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import optimizer as core_optimizer
from megatron.core.package_info import MAJOR, MINOR
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import MLATransformerConfig, TransformerConfig, multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import experts, moe_utils
from megatron_checkpoint import PADDED, core_state, save_run
from torch import distributed

import megalith
from megalith.bridge.megatron.megatron_exporter import export_megatron
from megalith.bridge.megatron.megatron_names import stack_experts
from megalith.checkpoint import open_existing
from megalith.config import ModelConfig
from megalith.models.transformer import Transformer

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def grouped_matmul(
    x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, trans_b: bool
) -> torch.Tensor:
    """Compute what the GPU library grouped_gemm does."""
    assert not trans_b
    return torch.cat([rows @ matrix for rows, matrix in zip(x.split(counts.tolist()), weight)])


# Megatron core has a CPU initialization, and asks for a GPU in these places all the same.
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.synchronize = lambda *ignored: None
_ones = torch.ones
torch.ones = lambda *size, device=None, **options: _ones(*size, **options)  # of the windows' mask
torch.Tensor.cuda = lambda tensor: tensor  # of the embedding that two pipeline stages have
CudaRNGStatesTracker.fork = lambda *ignored: contextlib.nullcontext()


class LatentWidths(DotProductAttention):
    """The attention without Transformer Engine, for heads whose values are not as wide as their keys."""

    def __init__(
        self, *args: object, k_channels: int | None = None, v_channels: int | None = None, **options: object
    ):
        super().__init__(*args, **options)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


multi_latent_attention.TELinear = type("TELinear", (), {})  # which nothing is an instance of here
backends.LocalSpecProvider.core_attention = lambda provider: LatentWidths
GROUPED = hasattr(experts, "gg")  # up to core 0.16
if GROUPED:
    experts.gg.ops = types.SimpleNamespace(gmm=grouped_matmul)
    experts.gg.assert_grouped_gemm_is_available = lambda: None
moe_utils.te_general_gemm = None
SPELLINGS = (
    ("norm_epsilon", "apply_layernorm_1p")
    if (MAJOR, MINOR) < (0, 17)
    else ("layernorm_epsilon", "layernorm_zero_centered_gamma")
)

DENSE = dict(num_layers=4, hidden_size=32, num_attention_heads=4, vocab_size=151, max_position_embeddings=64,
             hidden_dropout=0.0, attention_dropout=0.0)  # fmt: skip
LLAMA = dict(DENSE, ffn_hidden_size=48, num_query_groups=2, kv_channels=12, position_embedding_type="rope", swiglu=True,
             normalization="RMSNorm", add_bias_linear=False, untie_embeddings_and_output_weights=True)  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
EXPERTS = dict(LLAMA, num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=16, moe_grouped_gemm=False)
MODELS = {  # with the precision of the run
    "gpt": (DENSE, "fp32"),
    "llama": (LLAMA, "fp32"),
    "qk norms": (dict(LLAMA, qk_layernorm=True, add_qkv_bias=True), "bf16"),
    "sequential experts": (dict(EXPERTS, moe_shared_expert_intermediate_size=32), "fp32"),
    "grouped experts": (dict(EXPERTS, moe_grouped_gemm=True), "bf16"),
    "experts in some layers": (dict(EXPERTS, moe_layer_freq=2), "fp32"),
    "expert bias": (
        dict(EXPERTS, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True),
        "fp32",
    ),
    "yarn": (dict(LLAMA, rope_scaling=dict(YARN, attention_factor=1.3)), "fp32"),
    "bert": (dict(DENSE, model_type="bert", lm_head_activation="gelu"), "fp32"),
    "bert without an order": (
        dict(DENSE, model_type="bert", bert_binary_head=False, activation="gelu",
             untie_embeddings_and_output_weights=True),
        "fp32",
    ),
}  # fmt: skip
if not GROUPED:  # later cores compute grouped experts by Transformer Engine alone
    del MODELS["grouped experts"]
BOUNDS = {"fp32": 1e-5, "bf16": 3e-2}  # of the largest logit


def core_model(args: types.SimpleNamespace) -> GPTModel | BertModel:
    """Megatron core's model as a checkpoint's arguments say it, for the layout of this process."""
    config = core_config(args)
    stage = dict(
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    if "bert_binary_head" in args:
        return BertModel(
            config, 2 * args.bert_binary_head, bert_layer_local_spec, args.padded_vocab_size,
            args.max_position_embeddings, add_binary_head=args.bert_binary_head,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights, **stage,
        ).to(args.params_dtype)  # fmt: skip
    options = dict(use_transformer_engine=False)
    if args.num_experts:
        spec = get_gpt_decoder_block_spec(config, normalization=args.normalization, **options)
        last = spec.layer_specs[-1]
    else:
        last = spec = get_gpt_layer_local_spec(
            qk_layernorm=args.qk_layernorm, normalization=args.normalization,
            multi_latent_attention=args.multi_latent_attention,
        )  # fmt: skip
    further = get_gpt_mtp_block_spec(config, last, **options) if args.mtp_num_layers else None
    return GPTModel(
        config, spec, vocab_size=args.padded_vocab_size, max_sequence_length=args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type, rotary_base=args.rotary_base,
        rotary_percent=args.rotary_percent, mtp_block_spec=further,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights, **stage,
    ).to(args.params_dtype)  # fmt: skip


def core_config(args: types.SimpleNamespace) -> TransformerConfig:
    """Return the configuration that Megatron-LM derives from its arguments."""
    kind = MLATransformerConfig if getattr(args, "multi_latent_attention", False) else TransformerConfig
    fields = {field.name for field in dataclasses.fields(kind)}
    said = {name: value for name, value in vars(args).items() if name in fields and value is not None}
    if not args.group_query_attention:
        said["num_query_groups"] = args.num_attention_heads
    if args.num_experts:
        said |= {"num_moe_experts": args.num_experts, "moe_token_dispatcher_type": "allgather"}
    epsilon, zero_centered = (getattr(args, name) for name in SPELLINGS)
    said |= {
        "layernorm_epsilon": epsilon, "layernorm_zero_centered_gamma": zero_centered, "gated_linear_unit": args.swiglu,
        "bias_activation_fusion": args.bias_gelu_fusion, "activation_func": F.silu if args.swiglu else F.gelu,
        "use_cpu_initialization": True, "apply_rope_fusion": False, "pipeline_dtype": args.params_dtype,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0,
    }  # fmt: skip
    if kind is MLATransformerConfig:
        said["q_lora_rank"] = args.q_lora_rank  # None counts: its default is a number
        return kind(**said)
    config = kind(**said)
    if getattr(args, "position_embedding_type", None) == "yarn":
        rounds = args.yarn_correction_range_round_to_int
        config.yarn_rotary_scaling_factor = args.rotary_scaling_factor
        config.yarn_original_max_position_embeddings = args.yarn_original_max_position_embeddings
        config.yarn_beta_fast, config.yarn_beta_slow = args.yarn_beta_fast or 32.0, args.yarn_beta_slow or 1.0
        config.yarn_mscale, config.yarn_mscale_all_dim = args.mscale, args.mscale_all_dim
        config.yarn_correction_range_round_to_int = True if rounds is None else rounds
    return config


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
    tp, pp = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    file = folder / (f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if stages > 1 else "")) / "model_optim_rng.pt"
    saved = torch.load(file, weights_only=False)
    model = core_model(saved["args"])
    model.load_state_dict(saved["model"], strict=True)
    return model.eval()


def check_one_process(name: str, run: Path, ours: Transformer, out: Path) -> str:
    """Both forms in one process against our tensors and logits."""
    expected = core_state(ours, te=False)
    precision = MODELS[name][1]
    expected = {one: value.to(PRECISIONS[precision]) if "expert_bias" not in one else value
                for one, value in expected.items()}  # fmt: skip
    distributed_model = load_distributed(export_megatron(run, out / "torch_dist", transformer_impl="local"))
    legacy = export_megatron(run, out / "torch", ckpt_format="torch", transformer_impl="local")
    legacy_model = load_rank_file(legacy)
    if "grouped" in name:
        expected = stack_experts(expected)
    counts = []
    for model in (distributed_model, legacy_model):
        whole = {one: value for one, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
        assert whole.keys() == expected.keys(), whole.keys() ^ expected.keys()
        for one, value in whole.items():
            rows = 151 if one in PADDED else None
            assert torch.equal(value[:rows], expected[one][:rows]), one
            assert rows is None or not value[rows:].any(), one
        counts.append(len(whole))
    ids = torch.randint(0, 151, (2, 16), generator=torch.Generator().manual_seed(0))
    hidden = torch.ones(1, 1, 16, 16, dtype=torch.bool).tril().logical_not()
    with torch.no_grad():
        if "bert" in name:
            mine, theirs = logits_of_berts(ours, distributed_model, ids)
        else:
            mine = ours.to(PRECISIONS[precision])(ids).float()
            theirs = distributed_model(ids, torch.arange(16).expand(2, 16), hidden)[..., :151].float()
    difference, largest = (mine - theirs).abs().max().item(), mine.abs().max().item()
    assert difference <= BOUNDS[precision] * largest, (difference, largest)
    return (
        f"{counts[0]} + {counts[1]} tensors bitwise, logits within {difference / largest:.1e} of the largest"
    )


def logits_of_berts(
    ours: Transformer, core: BertModel, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours and Megatron's of the tokens that do not fill up, those of the segments' order behind them."""
    real = torch.arange(16) < torch.tensor([[16], [11]])
    segments = (torch.arange(16) > 6).long().expand(2, 16) if ours.binary_head is not None else None
    theirs, order = core(ids, real.float(), tokentype_ids=segments)
    mine = [ours(ids, tokentype_ids=segments, padding_mask=real)[real]]
    expected = [theirs[..., :151][real]]
    if order is not None:
        mine.append(ours.encodings(ids, segments, padding_mask=real).order)
        expected.append(order)
    return tuple(torch.cat([each.flatten() for each in side]) for side in (mine, expected))


def check_layout(tp: int, pp: int, out: Path) -> int:
    """Every rank's model from its file is the one from the distributed checkpoint; how many tensors."""
    count = 0
    for name in MODELS:
        whole = load_distributed(next((out / name / "torch_dist").glob("iter_*")))
        ranks = load_rank_file(next((out / name / f"torch tp{tp} pp{pp}").glob("iter_*")))
        one, other = (
            {key: value for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
            for model in (whole, ranks)
        )
        assert one.keys() == other.keys(), (name, one.keys() ^ other.keys())
        assert all(torch.equal(value, other[key]) for key, value in one.items()), name
        count += len(one)
    return count


def check_optimizer(run: Path, ours: Transformer, out: Path) -> str:
    """Megatron's plain optimizer takes the exported state, and the distributed one's tensors are there."""
    folder = export_megatron(run, out / "optimizer", transformer_impl="local", with_optimizer=True)
    model = core_model(arguments_of(folder))
    decays = [value for value in model.parameters() if value.ndim > 1]
    others = [value for value in model.parameters() if value.ndim < 2]
    groups = [
        {
            "params": values,
            "wd_mult": weight,
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
        }
        for values, weight in ((decays, 1.0), (others, 0.0))
    ]
    inner = torch.optim.AdamW(groups, lr=1.0)
    optimizer = object.__new__(core_optimizer.FP32Optimizer)  # its constructor asks for a GPU
    optimizer.optimizer, optimizer.config = inner, types.SimpleNamespace(optimizer="adam")
    optimizer.init_state_fn, optimizer.is_stub_optimizer = begin_state, False
    metadata = dist_checkpointing.load_content_metadata(str(folder))
    wanted = model.sharded_state_dict(metadata=metadata)
    requested = {"model": wanted, "optimizer": optimizer.sharded_state_dict(wanted, is_loading=True)}
    loaded = dist_checkpointing.load(requested, str(folder))
    optimizer.load_state_dict(loaded["optimizer"])
    weights = {  # as the distributed optimizer asks for the fp32 weights
        name: dataclasses.replace(
            tensor, key=f"optimizer.state.param.{tensor.key}", data=torch.empty_like(tensor.data)
        )
        for name, tensor in model.sharded_state_dict(metadata=metadata).items()
        if isinstance(tensor, dist_checkpointing.ShardedTensor)
    }
    found = dist_checkpointing.load(dict(weights), str(folder))
    assert all(torch.equal(found[name], loaded["model"][name]) for name in weights)
    checkpoint = open_existing(run, ("model", "optimizer"))
    count = 0
    for key in ("exp_avg", "exp_avg_sq"):
        state = {
            name: checkpoint.read("optimizer", f"optim.{name}.{key}") for name, _ in ours.named_parameters()
        }
        state = {name: torch.cat([value, value.new_zeros(256 - 151, value.shape[1])]) if name in PADDED else value
                 for name, value in state.items()}  # fmt: skip
        holder = Transformer(ours.config)
        holder.load_state_dict(state)
        expected = core_state(holder, te=False)
        for name, parameter in model.named_parameters():
            value = inner.state[parameter][key]
            rows = 151 if name in PADDED else None
            assert torch.equal(value[:rows], expected[name][:rows]), (key, name)
            count += 1
    assert {int(state["step"]) for state in inner.state.values()} == {2}
    assert [group["weight_decay"] for group in inner.param_groups] == [0.1, 0.0]
    return f"{count} tensors of the optimizer's state and {len(weights)} fp32 weights bitwise"


def begin_state(optimizer: torch.optim.Optimizer, config: object) -> None:
    for group in optimizer.param_groups:
        for value in group["params"]:
            optimizer.state[value] = {"exp_avg": torch.zeros_like(value), "exp_avg_sq": torch.zeros_like(value),
                                      "step": torch.tensor(0.0)}  # fmt: skip


def in_processes(work: Callable[[Path], None], tp: int, pp: int, out: Path) -> None:
    """Runs `work` in a process for each rank of a layout."""
    store = out / f"store {work.__name__} {tp} {pp}"
    arguments = work, tp, pp, store, out
    torch.multiprocessing.start_processes(_begin, arguments, nprocs=tp * pp, start_method="fork")


def _begin(rank: int, work: Callable[[Path], None], tp: int, pp: int, store: Path, out: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=tp * pp)
    parallel_state.initialize_model_parallel(tp, pp)
    work(out)
    distributed.destroy_process_group()


def check_whole(out: Path) -> None:
    for name in MODELS:
        run = out / name / "run"
        ours = megalith.load(run)
        print(f"{name}: {check_one_process(name, run, ours, out / name)}", flush=True)
        if name in ("gpt", "llama"):
            print(f"{name}: {check_optimizer(run, ours, out / name)}", flush=True)


def check_ranks(out: Path) -> None:
    tp, pp = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    count = check_layout(tp, pp, out)
    print(
        f"TP {tp}, PP {pp}, rank {distributed.get_rank()}: {count} tensors of both forms bitwise", flush=True
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        for name, (model, precision) in MODELS.items():
            save_run(out / name / "run", ModelConfig(**model), precision=precision)
            for tp, pp in LAYOUTS[1:]:
                options = dict(ckpt_format="torch", tp=tp, pp=pp, transformer_impl="local")
                export_megatron(out / name / "run", out / name / f"torch tp{tp} pp{pp}", **options)
        for tp, pp in LAYOUTS:
            in_processes(check_whole if tp * pp == 1 else check_ranks, tp, pp, out)


if __name__ == "__main__":
    main()
