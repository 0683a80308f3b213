"""What this folder holds: a run of two steps that shares, its base, its data and its export, as commit 4a8e9dc made it.

    PYTHONPATH=OLDER:OLDER/kernels python tests/version_before/make.py /tmp/before

Paths in it are relative, so it is used from inside a copy: `tests/test_version_before.py`.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

from pod import export, fit
from pod.sample_writer import SampleWriter

LENGTH = 32

folder = Path(sys.argv[1])
folder.mkdir()
os.chdir(folder)
torch.manual_seed(0)
sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 4, "max_position_embeddings": 128}
sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "initializer_range": 0.3}
special = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": True}
LlamaForCausalLM(LlamaConfig(vocab_size=259, **sizes, **special)).save_pretrained("base")
ByT5Tokenizer(extra_ids=0).save_pretrained("base")
with SampleWriter("data", sequence_length=LENGTH, vocab_size=259, tokenizer="bytes") as writer:
    for split, samples in (("train", 20), ("validation", 2)):
        writer.add(split, np.random.default_rng(samples).integers(3, 259, (samples, LENGTH)))
recipe = {
    "name": "before",
    "description": "A run of the version before",
    "output": "run",
    "model": {"base": "base", "tokenizer": "bytes", "sink_size": 2, "recent_size": 6},
    "blocks": {"kv_saving": 0.25, "samples": 2},
    "data": {"path": "data", "sequence_length": LENGTH, "micro_batch_size": 2},
    "optimizer": {"lr": 1e-2},
    "trainer": {"max_steps": 2, "tokens_per_batch": 2 * LENGTH, "checkpoint_every": 1, "keep_checkpoints": 1}
    | {"accelerator": "cpu"},
}
Path("recipe.yaml").write_text(json.dumps(recipe, indent=1) + "\n")  # JSON is YAML
assert fit.main(["recipe=recipe.yaml"]) == 0
assert export.main(["--ckpt", "run", "--out", "export"]) == 0
for picture in Path("run").glob("*.png"):
    picture.unlink()
