"""PEFT's LoRA written out for a model of transformers: y = x·Wᵀ + bias + (alpha / r) · x·Aᵀ·Bᵀ, folded into W."""

import json
import re
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


def random_adapters(
    model: nn.Module, targets: list[str], rank: int, experts: bool = False
) -> dict[str, torch.Tensor]:
    """A and B of every target, by PEFT's names; with `experts`, those of the experts' two parameters too."""
    tensors = {}
    for name, module in modules_named(model, targets).items():
        conv1d = not isinstance(module, nn.Linear)  # GPT-2's, whose weight is [in, out]
        outputs, inputs = reversed(module.weight.shape) if conv1d else module.weight.shape
        tensors[f"{PREFIX}{name}.lora_A.weight"] = 0.2 * torch.randn(rank, inputs)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = 0.2 * torch.randn(outputs, rank)
    for name, _, weight, _ in expert_parameters(model) if experts else ():
        count, outputs, inputs = weight.shape
        tensors[f"{PREFIX}{name}.lora_A.weight"] = 0.2 * torch.randn(rank * count, inputs)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = 0.2 * torch.randn(outputs, rank * count)
    return tensors


def expert_parameters(model: nn.Module) -> list[tuple[str, str, torch.Tensor, bool]]:
    """PEFT's wrapper, the parameter's name, the experts' weights [experts, out, in], and True if they are stored
    otherwise. The wrapper of the last parameter is the outermost."""
    return [
        (wrapper, f"{name}.{kind}", weight.mT if transposed else weight, transposed)
        for name, module in model.named_modules()
        if name.endswith("experts") and hasattr(module, "gate_up_proj")
        for transposed in [bool(getattr(module, "is_transposed", False))]
        for wrapper, kind in ((f"{name}.base_layer", "gate_up_proj"), (name, "down_proj"))
        for weight in [getattr(module, kind).data]
    ]


def save(tensors: dict[str, torch.Tensor], folder: Path, alpha: float, **config) -> Path:
    """Writes them as PEFT does; returns the folder."""
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    rank = next(len(tensor) for name, tensor in tensors.items() if "lora_A" in name)
    modules = {name.removeprefix(PREFIX).split(".lora_")[0] for name in tensors}
    targets = sorted({name.rpartition(".")[2] for name in modules if "experts" not in name.split(".")})
    if any(name.endswith("experts") for name in modules):
        config = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]} | config
    content = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(content | config))
    return folder


@torch.no_grad()
def put_saved_modules(model: nn.Module, config: dict, tensors: dict[str, torch.Tensor]) -> set[str]:
    """Gives the modules that PEFT saves in full their tensors; returns the names of these. PEFT matches the end of a
    name, and ties the output matrix to the embedding again if ensure_weight_tying is set."""
    ends, saved = tuple(config.get("modules_to_save") or ()), set()
    if not ends:
        return saved
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    for name, module in model.named_modules():
        if name.endswith(ends):
            assert isinstance(module, nn.Embedding) <= (config["ensure_weight_tying"] is tied)
            for key, value in module.state_dict(prefix=f"{PREFIX}{name}.").items():
                value.copy_(tensors[key])
                saved.add(key)
    if tied and any(
        isinstance(module, nn.Embedding) for name, module in model.named_modules() if name.endswith(ends)
    ):
        head = f"{PREFIX}lm_head.weight"
        assert torch.equal(tensors[head], model.lm_head.weight)
        saved.add(head)
    return saved


@torch.no_grad()
def put_token_rows(
    model: nn.Module, config: dict, tensors: dict[str, torch.Tensor]
) -> list[tuple[nn.Module, list[int], str]]:
    """Replaces the rows in trainable_token_indices; returns each module, its tokens and the tensor's name. A list is of
    the embedding's tokens."""
    tokens, rows = config.get("trainable_token_indices") or {}, []
    if isinstance(tokens, list):
        name = next(key for key, each in model.named_modules() if each is model.get_input_embeddings())
        tokens = {name: tokens}
    for end, index in tokens.items():
        ((name, module),) = modules_named(model, [end]).items()
        key = f"{PREFIX}{name}.token_adapter.trainable_tokens_delta"
        module.weight[index] = tensors[key]
        rows.append((module, index, key))
    return rows


def take_out_factors(model: nn.Module, named: dict[str, nn.Module], config: dict) -> None:
    """What PEFT does with the weights when it adds adapters of PiSSA or OLoRA: the first B·A is taken out of them."""
    for module in named.values() if config.get("init_lora_weights") in ("pissa", "olora") else ():
        scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
        a, b = first_factors(config["init_lora_weights"], module.weight, config["r"], scale)
        module.weight -= scale * b @ a


def first_factors(method: str, weight: torch.Tensor, rank: int, scale: float) -> tuple[torch.Tensor, ...]:
    """PEFT's pissa_init and olora_init: A and B."""
    if method == "olora":
        q, r = torch.linalg.qr(weight)
        return r[:rank], q[:, :rank]
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    root = torch.diag(torch.sqrt(values[:rank] / scale))
    return root @ right[:rank], left[:, :rank] @ root


@torch.no_grad()
def adapt(model: nn.Module, folder: Path) -> list[tuple[nn.Module, list[int], str]]:
    """Adds the adapters of a folder to the weights of a model of transformers. Returns the rows of `put_token_rows`."""
    config = json.loads((folder / "adapter_config.json").read_bytes())
    tensors = load_file(folder / "adapter_model.safetensors")
    named = modules_named(model, config["target_modules"])
    layers = config.get("layers_to_transform")
    if layers is not None:
        named = {name: each for name, each in named.items() if int(name.split(".")[2]) in layers}
    ends = [f".{end}" for end in config.get("target_parameters") or ()]
    experts = [each for each in expert_parameters(model) if any(f".{each[1]}".endswith(end) for end in ends)]
    wrappers = [*named, *(wrapper for wrapper, *_ in experts)]
    take_out_factors(model, named, config)
    lengths = {name: x for name, x in tensors.items() if name.endswith(".lora_magnitude_vector")}
    assert {f"{PREFIX}{name}.lora_magnitude_vector" for name in wrappers} == lengths.keys() or not lengths
    assert bool(lengths) == bool(config.get("use_dora"))
    saved, rows = put_saved_modules(model, config, tensors), put_token_rows(model, config, tensors)
    saved |= {key for _, _, key in rows}
    assert {f"{PREFIX}{name}.lora_{half}.weight" for name in wrappers for half in "AB"} == (
        tensors.keys() - lengths.keys() - saved
    )

    def factors(wrapper: str, name: str) -> tuple[torch.Tensor, torch.Tensor, float, int]:
        a, b = (tensors[f"{PREFIX}{wrapper}.lora_{half}.weight"] for half in "AB")

        def of(pattern: str, default: float) -> float:
            matching = [end for end in config.get(pattern, {}) if re.match(rf"(.*\.)?({end})$", name)]
            return config[pattern][matching[0]] if matching else default

        rank, alpha = of("rank_pattern", config["r"]), of("alpha_pattern", config["lora_alpha"])
        return a, b, alpha / (rank**0.5 if config.get("use_rslora") else rank), rank

    for name, module in named.items():
        a, b, scale, rank = factors(name, name)
        assert len(a) == rank
        delta = scale * b @ a
        module.weight += delta if isinstance(module, nn.Linear) else delta.T
        if lengths:  # DoRA
            length = lengths[f"{PREFIX}{name}.lora_magnitude_vector"] / module.weight.norm(dim=1)
            module.weight *= length[:, None]
    for wrapper, name, weight, _ in experts:
        a, b, scale, rank = factors(wrapper, name)
        assert len(a) == rank * len(weight)
        by_expert = a.view(len(weight), rank, -1), b.view(len(b), rank, len(weight))
        weight += scale * torch.einsum("eri,ore->eoi", *by_expert)
    return rows


def assert_equal_folders(first: Path, second: Path) -> None:
    """Assert that two folders in PEFT's format have the same tensors, bit for bit, and the same configuration."""
    one, other = (load_file(folder / "adapter_model.safetensors") for folder in (first, second))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    one, other = (json.loads((folder / "adapter_config.json").read_bytes()) for folder in (first, second))
    assert one == other
