"""PEFT's LoRA written out for a model of transformers: y = x·Wᵀ + bias + (alpha / r) · x·Aᵀ·Bᵀ, folded into W."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

PREFIX = "base_model.model."


def modules_named(model: nn.Module, targets: list[str]) -> dict[str, nn.Module]:
    """PEFT's rule: a module is meant whose name is a target or ends with one behind a dot."""
    return {
        name: module
        for name, module in model.named_modules()
        if any(name == target or name.endswith(f".{target}") for target in targets)
    }


def random_adapters(model: nn.Module, targets: list[str], rank: int) -> dict[str, torch.Tensor]:
    """A and B of every target, by PEFT's names."""
    tensors = {}
    for name, module in modules_named(model, targets).items():
        conv1d = not isinstance(module, nn.Linear)  # GPT-2's, whose weight is [in, out]
        outputs, inputs = reversed(module.weight.shape) if conv1d else module.weight.shape
        tensors[f"{PREFIX}{name}.lora_A.weight"] = 0.2 * torch.randn(rank, inputs)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = 0.2 * torch.randn(outputs, rank)
    return tensors


def save(tensors: dict[str, torch.Tensor], folder: Path, alpha: float, **config) -> Path:
    """Writes them as PEFT does; returns the folder."""
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    rank = next(len(tensor) for name, tensor in tensors.items() if "lora_A" in name)
    targets = sorted({name.removeprefix(PREFIX).split(".lora_")[0].rpartition(".")[2] for name in tensors})
    content = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(content | config))
    return folder


@torch.no_grad()
def adapt(model: nn.Module, folder: Path) -> None:
    """Adds the adapters of a folder to the weights of a model of transformers."""
    config = json.loads((folder / "adapter_config.json").read_bytes())
    tensors = load_file(folder / "adapter_model.safetensors")
    named = modules_named(model, config["target_modules"])
    assert {f"{PREFIX}{name}.lora_{half}.weight" for name in named for half in "AB"} == tensors.keys()
    for name, module in named.items():
        a, b = (tensors[f"{PREFIX}{name}.lora_{half}.weight"] for half in "AB")
        ends = [end for end in config.get("rank_pattern", {}) if name.endswith(f".{end}")]
        rank = config["rank_pattern"][ends[0]] if ends else config["r"]
        alpha = config["alpha_pattern"][ends[0]] if ends else config["lora_alpha"]
        assert len(a) == rank
        delta = alpha / rank * b @ a
        module.weight += delta if isinstance(module, nn.Linear) else delta.T
