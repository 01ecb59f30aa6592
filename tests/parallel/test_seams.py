"""What parallelism puts into a model's modules is what parallel/seams.py declares, and a seam does what it says."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from examples.seams.counting_gemm import count_matmuls
from megalith.comm.collectives import Axis
from megalith.config import LoraConfig, RunConfig
from megalith.errors import SeamError
from megalith.models.adapters import add_adapters
from megalith.models.init import initialize
from megalith.models.linear import Linear
from megalith.models.model_types import make_model
from megalith.models.transformer import Transformer
from megalith.parallel.context.context_parallel import apply_context
from megalith.parallel.memory.activation_offload import apply_activation_offload
from megalith.parallel.memory.recompute import apply_recompute
from megalith.parallel.overlap.ping_pong import apply_ping_pong
from megalith.parallel.pipeline.deferred_wgrad import DeferredWgrads, compute_wgrads
from megalith.parallel.seams import SEAMS, plug
from megalith.parallel.tensor.apply_tensor import apply_tensor
from megalith.parallel.tensor.lora_shards import shard_adapters

SIZES = dict(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=64, max_position_embeddings=16,
             hidden_dropout=0.0, attention_dropout=0.0)  # fmt: skip
LATENT = dict(multi_latent_attention=True, kv_lora_rank=8, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8,
              position_embedding_type="rope", normalization="RMSNorm", add_bias_linear=False)  # fmt: skip
MODELS = {
    "gpt": dict(num_query_groups=2),
    "latent attention and experts": dict(LATENT, num_experts=4, swiglu=True),
    "a norm over all heads": dict(
        qk_layernorm=True, qk_layernorm_full_width=True, norm_placement="post", normalization="RMSNorm"
    ),
    "bert": dict(model_type="bert"),
    "t5": dict(model_type="t5", position_embedding_type="relative"),
    "mamba2": dict(
        experimental_attention_variant="mamba2",
        linear_attention_freq=2,
        mamba_num_heads=4,
        mamba_head_dim=8,
        mamba_num_groups=2,
        mamba_state_dim=4,
    ),
}


def a_model(**settings) -> Transformer:
    model = make_model(RunConfig.from_tree({"model": SIZES | settings}).model, device=torch.device("meta"))
    if "num_experts" not in settings and "qk_layernorm" not in settings:
        add_adapters(model, LoraConfig(rank=2, targets=["q_proj", "v_proj", "c_proj", "c_fc"], use_dora=True))
    return model


def attributes(model: Transformer) -> dict[str, tuple[type, dict]]:
    """Of each module its class and all that stands in it but for torch's own and the parameters."""
    return {
        name: (type(module), {k: v for k, v in vars(module).items() if k not in vars(nn.Module())})
        for name, module in model.named_modules()
    }


def declared(module: nn.Module) -> set[str]:
    return {seam for kind, seams in SEAMS.items() if isinstance(module, kind) for seam in seams}


@pytest.mark.parametrize("name", MODELS)
def test_axes_change_nothing_in_a_module_but_its_seams(name):
    parallel = dict(recompute_granularity="selective", recompute_modules=["core_attn", "mlp", "layernorm"])
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        mesh = dist.init_device_mesh("cpu", (4,))
        axis = Axis(4, 1, mesh.get_group(), mesh.get_group().group_name, mesh)
        model = a_model(**MODELS[name])
        before = attributes(model)
        config = RunConfig.from_tree({"model": SIZES, "parallel": parallel}).parallel
        tensor = apply_tensor(model, axis, sequence_parallel=True)
        shard_adapters(model, tensor)
        apply_context(model, axis, "a2a" if name == "t5" else "p2p")
        halved = config.model_copy(update=dict(tp_comm_overlap=True, cpu_offloading_num_layers=1))
        for ping_pong in (tensor, None):
            apply_ping_pong(model, halved, ping_pong)
        apply_recompute(model, config)
        apply_activation_offload(model, halved)
        DeferredWgrads([model])
    finally:
        dist.destroy_process_group()
    for module_name, (kind, results) in attributes(model).items():
        old_kind, old = before[module_name]
        changed = {key for key in results.keys() | old.keys() if results.get(key) is not old.get(key)}
        assert kind is old_kind and changed <= declared(model.get_submodule(module_name)), module_name


def test_the_table_names_what_modules_have():
    met = {}
    for settings in MODELS.values():
        for module in a_model(**settings).modules():
            met |= {kind: module for kind in SEAMS if isinstance(module, kind)}
    assert met.keys() == SEAMS.keys()
    for kind, module in met.items():
        assert [seam for seam in SEAMS[kind] if not hasattr(module, seam)] == []
    assert sum(map(len, SEAMS.values())) <= 40


def test_what_is_no_seam_is_refused_with_those_that_there_are():
    linear = Linear(2, 2, bias=False)
    with pytest.raises(SeamError, match="Linear has no seam 'matmul'; its seams are gemm, rows, style"):
        plug(linear, "matmul", None)
    assert not hasattr(linear, "matmul")
    with pytest.raises(SeamError, match="its seams are none"):
        plug(nn.Identity(), "gemm", None)


def test_wgrads_of_another_gemm_can_be_put_off():
    config = RunConfig.from_tree({"model": SIZES}).model
    ids, gradients = torch.arange(16).view(1, 16), []
    for counted in (False, True):
        model = Transformer(config)
        initialize(model, config, seed=1)
        if counted:
            calls, wgrads = count_matmuls([model]), DeferredWgrads([model])
        model(ids, labels=ids).backward()
        if counted:
            assert calls == {"forward": 8, "dgrad": 8}
            compute_wgrads(wgrads.take())
            assert calls["wgrad"] == 8
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
