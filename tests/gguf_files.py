"""Tiny models written as GGUF, as llama.cpp's converter writes them: names, Llama's rows of q and k in pairs."""

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from transformers.convert_slow_tokenizer import bytes_to_unicode

LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
MERGES = ["Ġ Ġ", "t h", "th e", "1 2"]


def name_of(name):
    """model.layers.3.self_attn.q_proj.weight -> blk.3.attn_q.weight"""
    module, _, kind = name.rpartition(".")
    if module in OTHERS:
        return f"{OTHERS[module]}.{kind}"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{LAYER[inner]}.{kind}"


def tokens():
    """GPT-2's 256 bytes, what the merges make, and an end token."""
    return [*bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in MERGES), "<|im_end|>"]


def write_gguf(path, model, kind="F32", pre="smollm", template="{{ messages[0]['content'] }}", fields=(), extra=()):
    """Write a stock model of a supported family.

    Args:
        kind: "F32", "F16", "Q8_0" or "Q4_1": of the matrices.
        fields: more integers or strings of the header, in pairs. extra: names of tensors that belong to nothing.
    """
    config, quantization = model.config, GGMLQuantizationType[kind]
    family = config.model_type if config.model_type != "mistral" else "llama"
    writer = GGUFWriter(path, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = model.model.layers[0].self_attn.head_dim
    writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type({"F32": 0, "F16": 1, "Q8_0": 7, "Q4_1": 3}[kind])
    for key, value in fields:
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    words = tokens()
    writer.add_token_list(words)
    writer.add_token_types([TokenType.NORMAL] * (len(words) - 1) + [TokenType.CONTROL])
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(len(words) - 1)
    writer.add_chat_template(template)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
                # Rotated halves become neighbouring pairs.
                weight = weight.view(-1, 2, head_dim // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
            data = weight.float().numpy()
            if data.ndim == 2 and kind != "F32":
                writer.add_tensor(name_of(name), quantize(data, quantization), raw_dtype=quantization)
            else:
                writer.add_tensor(name_of(name), data)
        for name in extra:
            writer.add_tensor(name, np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
