"""What the tests of commands share: scripts as modules, and a tiny random model as a directory."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
from tokenizers import Tokenizer, decoders, models
from tokenizers.processors import TemplateProcessing
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

TEXT = "".join(f"def function_{n}(x):\n    return x * {n % 7}\n\n" for n in range(60))

ROOT = Path(__file__).resolve().parents[1]


def script(path: str) -> ModuleType:
    """The module of `python eval/NAME.py`, a fresh one at every call."""
    file = ROOT / path
    spec = importlib.util.spec_from_file_location(f"{file.parent.name}_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    sys.path.insert(0, str(file.parent))  # as Python does for a script
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module


def tiny_llama(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    """A dense model of two layers over bytes whose logits differ from token to token."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "initializer_range": 0.3}
    special = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(vocab_size=259, **{**sizes, **special, **changes})).eval()


def save(model: PreTrainedModel, folder: Path) -> Path:
    """Write a model of bytes as an export is; the folder."""
    model.save_pretrained(folder)
    ByT5Tokenizer(extra_ids=0).save_pretrained(folder)
    return folder


def letters_tokenizer() -> PreTrainedTokenizerFast:
    """Letters, the pair "ab" as one token, and a begin-of-text token that is put before every text."""
    vocab = {"<s>": 0, "a": 1, "b": 2, "c": 3, "ab": 4}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
