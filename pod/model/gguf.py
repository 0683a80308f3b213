"""GGUF files, llama.cpp's, as Hugging Face folders: dequantised once, kept in the user's cache, found again.

    local("SmolLM2-135M-Instruct.Q4_1.gguf")     # -> ~/.cache/pod/gguf/SmolLM2-135M-Instruct.Q4_1-2f0e.../

Everything that opens a model, a config or a tokenizer by name goes through `local`, so that a path that ends with
.gguf may stand wherever a directory may. transformers reads the file (`gguf_file=`); what it would read wrong without
a word is refused here: other families, RoPE scaling, windows, tensors that have no place, a tokenizer whose way of
splitting text it does not know. The rounding of a quantised file stays in the weights: it is the model that it is.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from tokenizers import pre_tokenizers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pod.extras import require
from pod.files import naming, publish, read_json, write_sums, write_text

ARCHITECTURES = ("llama", "phi3", "qwen2", "qwen3")  # GGUF's names of PoD's families; Mistral's files say llama
# By general.file_type: files of 32 and 16 bits keep theirs; what was quantised is no finer than bfloat16.
DTYPES = {0: torch.float32, 1: torch.float16}
FORMAT = 1  # of what is written: another number, other folders


def cache_folder() -> Path:
    """Where dequantised models are kept: pod/gguf in the user's cache, $XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pod" / "gguf"


def local(where: str | Path) -> str | Path:
    """What transformers opens: of a GGUF file the Hugging Face folder that it becomes, else `where` as it is.

    The folder is made at the first call, in a minute for 135M parameters; other processes wait for it. It is named by
    the file's path, size and time, so that a file that has changed is read anew.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: as `write_folder`.
        OSError: the cache cannot be written to.
    """
    path = Path(where)
    if path.suffix.lower() != ".gguf" or path.is_dir():
        return where
    path = path.resolve()
    if not path.is_file():
        raise FileNotFoundError(f"{where}: no such GGUF file")
    status = path.stat()
    key = hashlib.sha256(repr((FORMAT, str(path), status.st_size, status.st_mtime_ns)).encode()).hexdigest()
    folder = cache_folder() / f"{path.stem}-{key[:16]}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with naming(folder), FileLock(folder.with_name(f".{folder.name}.lock")):
            if not folder.is_dir():  # another process may have made it in the meantime
                write_folder(path, folder)
    return folder


def write_folder(path: str | Path, folder: str | Path) -> None:
    """Write a GGUF file as a Hugging Face folder: config, weights, tokenizer, chat template, checksums; whole or not.

    Args:
        path: the file.
        folder: the directory to write; one that is there is replaced.

    Raises:
        ImportError: the package gguf is missing.
        ValueError: the file is damaged; its family, or something in it, is not supported.
            Names it.
    """
    require("gguf", "gguf", what=str(path))
    path, folder = Path(path).resolve(), Path(folder)
    fields, tensors = _read(path)
    _check(path, fields, tensors)
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write_model(path, fields, tensors, aside)
        _write_tokenizer(path, fields, aside)
        write_sums(aside)
        aside.chmod(0o755)
        publish(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _read(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The file's fields, of arrays their length, and the names of its tensors."""
    from gguf import GGUFReader, GGUFValueType

    try:
        reader = GGUFReader(path)
        fields = {
            name: len(field.data) if field.types[:1] == [GGUFValueType.ARRAY] else field.contents()
            for name, field in reader.fields.items()
        }
        return fields, [tensor.name for tensor in reader.tensors]
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ValueError(f"{path}: truncated, damaged, or no GGUF file ({error}); get it anew") from error


def _check(path: Path, fields: dict[str, Any], tensors: list[str]) -> None:
    """Refuse what would be read wrong."""
    family = fields.get("general.architecture")
    if family not in ARCHITECTURES:
        raise ValueError(
            f"{path}: a GGUF of the family {family!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    length = fields.get(f"{family}.context_length", 0)
    problems = {
        "a mixture of experts": fields.get(f"{family}.expert_count", 0) > 0,
        "RoPE scaling": fields.get(f"{family}.rope.scaling.type", "none") != "none"
        or any(name.startswith("rope_") for name in tensors),
        "sliding-window attention": 0 < fields.get(f"{family}.attention.sliding_window", 0) < length,
    }
    if found := [name for name, is_there in problems.items() if is_there]:
        raise ValueError(
            f"{path}: a GGUF with {' and '.join(found)} is not supported; take the model's safetensors instead"
        )


def _write_model(path: Path, fields: dict[str, Any], tensors: list[str], folder: Path) -> None:
    family = fields["general.architecture"]
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    if (head_dim := fields.get(f"{family}.attention.key_length")) is not None:
        config.head_dim = head_dim  # transformers reads it off RoPE, or not at all
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):  # else the family's default ids stay
        setattr(config, f"{name}_token_id", fields.get(f"tokenizer.ggml.{key}_token_id"))
    loaded, found = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        config=config,
        dtype=torch.float32,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    wrong = sorted({*found["missing_keys"], *found["unexpected_keys"], *(key[0] for key in found["mismatched_keys"])})
    if wrong or len(tensors) != len(list(loaded.parameters())):
        raise ValueError(
            f"{path}: its {len(tensors)} tensors are not those of {type(loaded).__name__} with "
            f"{len(list(loaded.parameters()))} ({', '.join(wrong[:3]) or 'some have no place'}); take its safetensors"
        )
    # A config without the mark of a quantised model, which transformers would refuse to save.
    kept = {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    kept.pop("_model_name_or_path", None)
    dtype = DTYPES.get(fields.get("general.file_type"), torch.bfloat16)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[config.model_type](**kept))
    model.load_state_dict({name: value.to(dtype) for name, value in loaded.state_dict().items()}, assign=True)
    model.tie_weights()
    model.config.dtype = dtype
    model.save_pretrained(folder)


def _write_tokenizer(path: Path, fields: dict[str, Any], folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    split = fields.get("tokenizer.ggml.pre", "default")
    if fields.get("tokenizer.ggml.model") == "gpt2":  # byte-level BPE, whose merges are within pieces of the text
        backend = tokenizer.backend_tokenizer
        if split in ("smollm", "starcoder"):  # each digit alone, then GPT-2's pieces; transformers has these only
            digits = pre_tokenizers.Digits(individual_digits=True)
            backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        elif split not in ("default", "gpt-2") and isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
            raise ValueError(
                f"{path}: transformers does not know how its tokenizer ({split}) splits text: take the model's "
                "safetensors and tokenizer.json instead"
            )
    tokenizer.save_pretrained(folder)
    # GPT-2's <|endoftext|>, which is added where a file does not have it, would lie beyond the embedding.
    written = read_json(folder / "tokenizer.json")
    count = fields["tokenizer.ggml.tokens"]
    written["added_tokens"] = [token for token in written["added_tokens"] if token["id"] < count]
    write_text(folder / "tokenizer.json", json.dumps(written, ensure_ascii=False))
