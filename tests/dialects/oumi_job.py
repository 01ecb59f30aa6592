"""A tiny Llama folder, a gsm8k file, and the document's quick start shrunk in sizes alone."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

LETTERS = [chr(code) for code in range(32, 127)] + ["\n", "<|end|>"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUICK_START = """\
model:
  model_name: "{model}"
  torch_dtype_str: "bfloat16"
  load_pretrained_weights: True

data:
  train:
    datasets:
      - dataset_name: "gsm8k"
        split: "train"

training:
  trainer_type: "MEGATRON_GRPO"
  max_steps: 2
  per_device_train_batch_size: 1
  gradient_accumulation_steps: 4
  learning_rate: 5.0e-7
  output_dir: "{output}"

megatron:
  tensor_model_parallel_size: {tp}
  pipeline_model_parallel_size: {pp}
  enable_sequence_packing: True
  inference_backend: "vllm"

grpo:
  num_generations: 4
  temperature: 0.9
  epsilon: 0.2
"""
SIZES = ["--training.grpo.max_prompt_length=150", "--training.grpo.max_completion_length=10"]


def tiny_llama(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Weights of four layers, a tokenizer of letters and a chat template, as `save_pretrained` writes them."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
                 num_key_value_heads=2, vocab_size=len(LETTERS), max_position_embeddings=256)  # fmt: skip
    config = LlamaConfig(**sizes, bos_token_id=None, eos_token_id=len(LETTERS) - 1, initializer_range=0.2)
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return write_letters(folder)


def write_letters(folder: Path) -> Path:
    """A tokenizer of letters and a chat template, beside weights."""
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(LETTERS)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    written = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(written))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def gsm8k(folder: Path, count: int = 16, split: str = "train") -> Path:
    """gsm8k/SPLIT.jsonl: questions and answers that end in #### and a number."""
    (folder / "gsm8k").mkdir(parents=True, exist_ok=True)
    path = folder / "gsm8k" / f"{split}.jsonl"
    records = [
        {"question": f"Ann has {n} apples and buys {n + 1}.", "answer": f"{n}+{n + 1}\n#### {2 * n + 1}"}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def quick_start(folder: Path, name: str = "run", tp: int = 1, pp: int = 1) -> Path:
    """The document's first configuration below `folder`, with its model and data there."""
    path = folder / f"{name}.yaml"
    path.write_text(QUICK_START.format(model=folder / "llama", output=folder / name, tp=tp, pp=pp))
    return path
