"""Documents, tokenizer and settings of the fill-in-the-middle samples that fim_golden.json has from Megatron core."""

import json

import numpy as np
import tokenizers

from megalith.config import RunConfig
from megalith.data.indexed import IndexedWriter
from megalith.data.tokenizers.huggingface import HuggingFaceTokenizer
from megalith.data.tokenizers.train_tokenizer import train_tokenizer

SEED, SEQ, SAMPLES = 11, 40, 12
SPLIT = "<file_sep>"
SPECIAL = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", SPLIT]
CASES = {
    "default": {},
    "always, SPM": {"fim_rate": 1.0, "fim_spm_rate": 1.0},
    "always, PSM": {"fim_rate": 1.0, "fim_spm_rate": 0.0},
    "fragments": {"fim_rate": 0.9, "fim_split_sample": SPLIT, "fim_fragment_rate": 0.5},
    "no prefix": {"fim_rate": 1.0, "fim_no_prefix": "def"},
}
BODIES = (
    "return a + b",
    "x = [i for i in y]",
    "print('café', ☕)",
    "",
    "for k, v in d.items(): pass",
    "a\n\n  b",
)


def documents():
    """Texts, some of several files, and an empty one."""
    texts = [f"def f{n}(a, b):\n    {body}\n" for n, body in enumerate(BODIES * 3)]
    return [SPLIT.join(texts[n : n + 1 + n % 3]) for n in range(len(texts))] + ["", f"{SPLIT}class A: ..."]


def build_tokenizer(folder):
    """A byte-pair tokenizer with the special tokens."""
    text = folder / "text.jsonl"
    text.write_text(
        "".join(json.dumps({"text": text.replace(SPLIT, "")}) + "\n" for text in documents() if text)
    )
    train_tokenizer([text], 300, folder)
    trained = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    trained.add_special_tokens(SPECIAL)
    trained.save(str(folder / "tokenizer.json"))
    names = ("tokenizer.json", "tokenizer_config.json")
    return HuggingFaceTokenizer({name: (folder / name).read_bytes() for name in names})


def write_documents(folder, tokenizer):
    prefix = folder / "code"
    with IndexedWriter(prefix, np.uint16) as writer:
        for text in documents():
            writer.add_document(np.array([*tokenizer.encode(text), tokenizer.eod]))
    return str(prefix)


def config(prefix, folder, **settings):
    tree = {
        "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1},
        "data": {
            "data_path": prefix, "split": "1", "seq_length": SEQ, "fim_data": True,
            "tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder), **settings,
        },
        "train": {"seed": SEED, "micro_batch_size": 2, "global_batch_size": 4, "train_iters": 3, "eval_iters": 0},
        "optim": {"lr": 1e-3},
    }  # fmt: skip
    return RunConfig.from_tree(tree)
