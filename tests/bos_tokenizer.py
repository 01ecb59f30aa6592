"""A tokenizer of bytes whose post-processor begins each text with `<s>`, as Llama's and Gemma's do."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megalith.data.tokenizers.huggingface import HuggingFaceTokenizer
from megalith.data.tokenizers.open_tokenizer import build_tokenizer


def bos_tokenizer(folder: Path, template: str) -> HuggingFaceTokenizer:
    """Write one with this chat template into `folder`, in transformers' files, and open it."""
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    whole = Tokenizer(models.BPE(alphabet, []))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = decoders.ByteLevel()
    whole.add_special_tokens(["<s>", "</s>"])
    begin = ("<s>", whole.token_to_id("<s>"))
    whole.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[begin])
    files = PreTrainedTokenizerFast(tokenizer_object=whole, bos_token="<s>", eos_token="</s>")
    files.chat_template = template
    files.save_pretrained(folder)
    return build_tokenizer("HuggingFaceTokenizer", folder)
