"""A tiny random PoD model with a byte tokenizer, saved as an export is."""

import pytest
import torch
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

import pod


def tiny_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    blocks = pod.LayerBlocks([[0, 0], [0, 1]])
    return pod.convert(LlamaForCausalLM(config).eval(), blocks, sink_size=2, recent_size=14)


@pytest.fixture(scope="session")
def model():
    return tiny_model()


@pytest.fixture(scope="session")
def tokenizer():
    return ByT5Tokenizer(extra_ids=0)


@pytest.fixture(scope="session")
def ckpt(tmp_path_factory, model, tokenizer):
    folder = tmp_path_factory.mktemp("ckpt") / "tiny"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
