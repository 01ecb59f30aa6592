"""Model types of transformers that Megalith cannot read, each with the reason.

The types are transformers' causal and sequence-to-sequence language models. `python -m megalith.bridge.unsupported`
prints the table of docs/models.md. Errors about such a type give the reason. With `--all` the command prints every type
of the installed transformers with Megalith's class for it, the reason why there is none, or "unknown".
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

# Operator that is missing → model types that need it. A type is in the row of one operator, though some need several.
OPERATORS: Mapping[str, str] = {
    "state-space layers of Mamba-1": "falcon_mamba jamba mamba",
    "attention blocks that layers share": "zamba zamba2",
    "a recurrence (RWKV, xLSTM, RG-LRU)": "recurrent_gemma rwkv xlstm",
    "short convolutions inside attention or with other norms": "lfm3 inkling_text inkling2_text inkling2_loop_text",
    "lightning attention": "minimax",
    "hyper-connections between residual streams, and n-gram embeddings": "qwen4_exp qwen4_exp_text",
    "delta nets whose input projections are one tensor": "lara_mini",
    "delta attention (KDA) with a lower bound of its decays": "bailing_hybrid",
    "sparse attention with an indexer (DSA)": "axk2 deepseek_v32 deepseek_v4 dots3_note dots3_note_text glm_moe_dsa "
    "hy_v4 minimax_m3_vl_text",
    "residual streams scaled by the number of their branches": "beam",
    "norms inside attention and MLP": "bitnet",
    "differential attention": "diffllama",
    "dynamic masks in attention": "doge",
    "normalized Transformers (nGPT) with looped layers": "dory",
    "looped layers": "hrm_text",
    "attention whose query and output matrices are experts, chosen per token (MoA)": "jetmoe",
    "an expert bias on router logits": "kolibri1",
    "experts that do nothing, and two attentions per layer": "longcat_flash",
    "softplus gates on attention's output": "laguna",
    "value heads and key heads of different sizes": "mimo_v2_flash",
    "convolutions inside attention, and routers that read the previous router's states": "zaya",
    "embeddings per layer and shared keys and values": "gemma3n_text gemma4_text gemma4_unified_text",
    "drafting from another model's states": "gemma4_assistant gemma4_unified_assistant",
    "LSH attention": "reformer",
    "block-sparse or local attention with global tokens": "big_bird bigbird_pegasus led longt5 pegasus_x",
    "permuted or two-stream attention, with relative positions": "xlnet prophetnet",
    "relative positions in segments": "cpmant",
    "experts in an encoder-decoder": "nllb-moe switch_transformers",
    "an encoder and a decoder with vocabularies of their own": "fsmt",
    "an encoder and a decoder with embeddings, windows and sizes of their own": "t5gemma",
    "self-attention and cross-attention in one softmax": "t5gemma2",
}
SCOPES: Mapping[str, str] = {
    "an encoder that transformers can also run as a decoder (train it as a masked language model)": "electra "
    "rembert roc_bert roformer xlm xmod",
    "images": "git gemma3n gemma4 gemma4_unified mllama phi4_multimodal trocr",
    "audio": "moshi musicgen musicgen_melody nemo_speechlm seamless_m4t seamless_m4t_v2 voxtral_realtime whisper",
    "two models of any families": "encoder-decoder",
    "bytes in patches of varying length": "blt",
}
# The same for language models and multimodal models that are in neither of transformers' two lists.
FURTHER: Mapping[str, str] = {
    "attention to the whole prompt (prefix LM)": "paligemma",
    "queries scaled by their position in latent attention": "mistral4",
    "experts for text and experts for images in one tensor": "ernie4_5_vl_moe",
}


def reasons() -> dict[str, str]:
    """Return the reason for every model type that is not supported."""
    return {
        **{kind: f"needs {name}" for name, kinds in (OPERATORS | FURTHER).items() for kind in kinds.split()},
        **{kind: f"is out of scope: {name}" for name, kinds in SCOPES.items() for kind in kinds.split()},
    }


def markdown() -> str:
    """Return the table of docs/models.md."""
    rows = [
        *((f"operator: {name}", kinds) for name, kinds in (OPERATORS | FURTHER).items()),
        *((f"out of scope: {name}", kinds) for name, kinds in SCOPES.items()),
    ]
    lines = [
        f"| {name} | {', '.join(f'`{kind}`' for kind in sorted(kinds.split()))} |" for name, kinds in rows
    ]
    return "\n".join(["| Missing | `model_type` |", "|---|---|", *lines])


def describe_types() -> dict[str, str]:
    """Return a description of each causal and sequence-to-sequence model type of the installed transformers."""
    from transformers.models.auto import modeling_auto as auto

    from megalith.bridge.families import FAMILIES
    from megalith.bridge.multimodal import WRAPPERS

    classes: dict[str, str] = {}
    for family in FAMILIES.values():
        for kind in (family.model_type, *family.other_model_types):
            classes.setdefault(kind, f"is read as {family.architecture}")
    texts = reasons() | classes
    types = {**auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}
    multimodal = {**types, **auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    return {
        kind: "is read without its tower for images or audio"
        if multimodal[kind] in WRAPPERS
        else texts.get(kind, "is unknown")
        for kind in sorted(types)
    }


if __name__ == "__main__":
    if "--all" in sys.argv[1:]:
        print("\n".join(f"{kind} {text}" for kind, text in describe_types().items()))
    else:
        print(markdown())
