"""The Python blocks of the pages: what each takes for granted, and what makes it small.

`make test-docs` runs all of them (page_trials.py), and the suite the quick ones (test_pages.py). A block that is not
run says why; its names are still imported.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Block:
    """A Python block of a page."""

    before: str = ""
    """Code that makes what the page takes for granted. It sees the functions of this file."""
    instead: tuple[tuple[str, str], ...] = ()
    """Texts of the block, and what makes them small."""
    is_quick: bool = True
    """It runs in the suite too."""
    not_run: str = ""
    """Why it is not run."""

    def program(self, shown: str) -> str:
        for old, new in self.instead:
            assert old in shown, f"{old!r} is not on the page"
            shown = shown.replace(old, new)
        return f"from page_code import *\n{self.before}\n{shown}"


def small_run_file(path: str, **sections: dict) -> None:
    tree = {
        "model": {
            "num_layers": 1,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "vocab_size": 256,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "data": {"mock": True, "seq_length": 16, "num_workers": 0},
        "optim": {"lr": 1e-3},
        "train": {
            "train_iters": 2,
            "micro_batch_size": 2,
            "global_batch_size": 2,
            "output_dir": "runs/small",
        },
        "runtime": {"device": "cpu"},
    }
    for section, settings in sections.items():
        tree[section] = tree.get(section, {}) | settings
    Path(path).write_text(yaml.safe_dump(tree))


def small_run(folder: str, **sections: dict) -> None:
    """A trained run in `folder`, in place of an earlier command's."""
    import megalith

    shutil.rmtree(folder, ignore_errors=True)
    small_run_file("small.yaml", train={"output_dir": folder}, **sections)
    megalith.train(megalith.RunConfig.load("small.yaml", ["--train.train_iters", "2"]))


def small_tokenizer(folder: str) -> None:
    from megalith.cli.main import main

    Path("text.jsonl").write_text("".join(json.dumps({"text": f"def main(): {n}"}) + "\n" for n in range(50)))
    assert (
        main(f"tokenizer train --input text.jsonl --vocab-size 300 --output {folder} --overwrite".split())
        == 0
    )


def small_model(folder: str, kind: str = "Llama", **sizes: int) -> None:
    """A model of transformers' with a tokenizer."""
    import transformers

    sizes = dict(num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_attention_heads=2, **sizes)
    if kind == "T5":
        sizes = dict(num_layers=1, d_model=32, d_ff=64, d_kv=16, num_heads=2, vocab_size=300)
    config = getattr(transformers, f"{kind}Config")(**{"vocab_size": 300} | sizes)
    head = {"Llama": "ForCausalLM", "Bert": "ForPreTraining", "T5": "ForConditionalGeneration"}[kind]
    getattr(transformers, kind + head)(config).save_pretrained(folder)
    small_tokenizer(folder)


OTHERS = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                     num_attention_heads=2))
"""
GRPO = """
import megalith
small_model("models/Qwen2.5-0.5B", max_position_embeddings=1024)
records = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
held_out_records = records[:2]
Path("prompts.jsonl").write_text("".join(json.dumps(record) + "\\n" for record in records))
my_reward = lambda completions, answer, **columns: [float(a in c) for c, a in zip(completions, answer)]
small_run_file("run.yaml", model={"vocab_size": None}, data={"tokenizer_type": "ByteTokenizer", "mock": False},
               train={"global_batch_size": 8, "train_iters": 1},
               rl={"prompts": "prompts.jsonl", "num_generations": 4, "max_completion_length": 4})
"""
PAIRS = """
small_model("models/Qwen3-0.6B", max_position_embeddings=64)
pairs = [{"prompt_ids": [1, k], "chosen_ids": [3, 4], "rejected_ids": [5]} for k in range(4)]
"""
ENCODER = """
import megalith, torch
small_model("bert-base-uncased", "Bert")
input_ids = torch.arange(8)[None]
types, real = torch.zeros_like(input_ids), torch.ones_like(input_ids, dtype=torch.bool)
"""
ENCODER_DECODER = """
import megalith, torch
small_model("flan-t5-small", "T5")
ids = decoder_input_ids = torch.arange(8)[None]
real = torch.ones_like(ids, dtype=torch.bool)
"""
POLICY = """
from dataclasses import dataclass
import megalith, torch
@dataclass
class Rollouts(megalith.Batch):
    advantages: torch.Tensor
small_run_file("own.yaml")
model = megalith.parallelize(megalith.RunConfig.load("own.yaml"), megalith.Mesh.alone(), torch.device("cpu"))
ids = torch.arange(16).expand(2, 16)
batch = Rollouts(ids, ids, torch.ones(2, 16), ids, None, torch.arange(2), torch.tensor([1.0, -1.0]))
micro_batches = [batch]
"""
AS_FILES = Block(not_run="page_trials.py runs the page's three blocks as two files")
SHOWN = Block(
    not_run="tests/parallel/test_seams_in_use.py compares it with examples/seams, which the suite runs"
)
UPDATED_ENGINE = """
from megalith.generation.sync import engine_for
from megalith.training.loading import load

small_run("runs/live", model={"max_position_embeddings": 64})
model, prompts = load("runs/live"), [[1, 2, 3]]
engine = engine_for(model, max_rows=2, max_tokens=32)
"""
PYTHON: dict[str, tuple[Block, ...]] = {
    "docs/agents.md": (
        *(Block(), Block(), Block()),
        Block(not_run="tests/rl/against_verifiers.py runs it with the package"),
        Block(not_run="tests/rl/test_trajectories.py trains with them"),
    ),
    "README.md": (
        Block('small_run_file("small.yaml")', (("examples/quickstart", "small"), ('"100"', '"2"'))),
    ),
    "docs/accelerate.md": (
        Block("", (("tp_degree=2, pp_degree=2", "tp_degree=1, pp_degree=1"), ("24, n_head=16", "2, n_head=2"),
                       ("n_embd=1024", "n_embd=32"), ('mixed_precision="bf16", ', "")), is_quick=False),
        Block(OTHERS, (("tp_degree=2, sequence_parallelism=True", "tp_degree=1"),
                       ("max_steps=100", 'max_steps=2, report_to="none", use_cpu=True')), is_quick=False),
    ),
    "docs/adding_a_family.md": (Block(), Block("from megalith.bridge.rows import qkv, same")),
    "docs/architecture.md": (SHOWN, SHOWN, SHOWN),
    "docs/checkpoints.md": (
        Block('import torch\nsmall_run("runs/gpt2")\ntensor, part = torch.ones(4, 4), torch.ones(512, 64)',
              (("(50, 768)", "(50, 32)"), ("offset=(128, 0)", "offset=(0, 0)"))),
    ),
    "docs/audit.md": (
        Block(not_run="page_trials.py runs it as a file"),
        *[Block(not_run="lines of jobs; tests/parity/audit_jobs.py has such jobs")] * 7,
    ),
    "docs/cluster.md": (Block(not_run="NeMo-Run is not installed"),),
    "docs/data.md": (Block('small_tokenizer("tokenizer")'),),
    "docs/data_format.md": (Block(instead=(("/tmp/", ""),)),),
    "docs/first_hour/trainer.md": (AS_FILES, AS_FILES, AS_FILES),
    "docs/from_oumi.md": (Block(not_run="a 70B; tests/dialects/test_oumi_training.py runs a small one"),),
    "docs/grpo.md": (Block(GRPO, (('"max_steps": 100', '"max_steps": 1, "num_generations": 2, "max_prompt_length": 16, '
                                   '"max_completion_length": 4, "per_device_train_batch_size": 4'),),
                           is_quick=False), Block()),
    "docs/grpo_objective.md": (Block(), Block(), Block()),  # tests/rl/test_extensions.py trains with them
    "docs/hugging_face.md": (Block('small_model("HF_DIR")'), Block(not_run="vLLM is not installed")),
    "docs/inference.md": (
        Block(not_run="tests/serve/test_serve.py holds such a conversation"),
        Block('small_run("runs/quickstart", model={"vocab_size": None, "max_position_embeddings": 256},'
              ' data={"tokenizer_type": "ByteTokenizer"})', (("max_new_tokens=100", "max_new_tokens=4"),)),
        Block(UPDATED_ENGINE),
    ),
    "docs/models.md": (Block(ENCODER), Block(ENCODER_DECODER), Block()),
    "docs/own_data.md": (Block(), Block(), Block(), Block()),  # tests/data/test_own_dataset.py trains on them
    "docs/own_model.md": (Block(POLICY), Block('small_run_file("run.yaml")')),
    "docs/preference.md": (Block(PAIRS, (('"max_steps": 100', '"max_steps": 1, "max_length": 16, '
                                          '"per_device_train_batch_size": 2'),), is_quick=False),),
}  # fmt: skip
