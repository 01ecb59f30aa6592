"""DeepSeek-MoE (Dai et al. 2024), whose class is not in transformers: Llama with its published MLP written out here."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import linear, silu

import megalith
from megalith.bridge.exporter import export_hf
from megalith.bridge.importer import import_hf

LLAMA = dict(vocab_size=97, hidden_size=32, intermediate_size=72, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=4, max_position_embeddings=64)  # fmt: skip
MOE = dict(n_routed_experts=6, num_experts_per_tok=3, moe_intermediate_size=20, n_shared_experts=2,
           first_k_dense_replace=1, moe_layer_freq=1, scoring_func="softmax")  # fmt: skip


class GatedMLP(nn.Module):
    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class ExpertsOfDeepseek(nn.Module):
    """Softmax over all experts, the best of them with these weights; and the shared ones, which every token meets."""

    def __init__(self, hidden: int, normalized: bool):
        super().__init__()
        self.normalized = normalized
        self.gate = nn.Linear(hidden, MOE["n_routed_experts"], bias=False)
        width = MOE["moe_intermediate_size"]
        self.experts = nn.ModuleList(GatedMLP(hidden, width) for _ in range(MOE["n_routed_experts"]))
        self.shared_experts = GatedMLP(hidden, width * MOE["n_shared_experts"])

    def forward(self, x):
        weights, chosen = linear(x, self.gate.weight).softmax(-1).topk(MOE["num_experts_per_tok"], dim=-1)
        if self.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        everywhere = torch.stack([expert(x) for expert in self.experts], -2)
        found = everywhere.take_along_dim(chosen[..., None], -2)
        return (found * weights[..., None]).sum(-2) + self.shared_experts(x)


@pytest.mark.parametrize("normalized", [False, True])
def test_logits_are_those_of_the_published_formula_and_a_folder_comes_back_bitwise(tmp_path, normalized):
    torch.manual_seed(2)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).eval()
    for layer in model.model.layers[MOE["first_k_dense_replace"] :]:
        layer.mlp = ExpertsOfDeepseek(LLAMA["hidden_size"], normalized)
    source = tmp_path / "hf"
    source.mkdir()
    tensors = {name: x.contiguous() for name, x in model.state_dict().items()}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    hf_config = LLAMA | MOE | {"norm_topk_prob": normalized, "architectures": ["DeepseekForCausalLM"]}
    (source / "config.json").write_text(
        json.dumps(hf_config | {"model_type": "deepseek", "rms_norm_eps": 1e-6})
    )
    ids = torch.randint(0, LLAMA["vocab_size"], (2, 20))
    with torch.no_grad():
        expected = model(ids).logits
        assert (megalith.load(source)(ids) - expected).abs().max() <= 1e-5 * expected.abs().max()
    import_hf(str(source), tmp_path / "run", show_progress=False)
    export_hf(tmp_path / "run", tmp_path / "again", show_progress=False)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == tensors.keys() and all(torch.equal(again[name], tensors[name]) for name in again)
    assert hf_config.items() <= json.loads((tmp_path / "again" / "config.json").read_text()).items()
