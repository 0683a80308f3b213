"""Continue a prompt with the small cache, and say what it cost.

python -m pod.generate --ckpt exports/tiny --prompt "def main():"
python -m pod.generate --ckpt exports/llama3-32k --prompt-file book.txt --max-new-tokens 200
python -m pod.generate --ckpt exports/tiny --prompt-file book.txt --eviction snapkv:budget=256+h2o:budget=256
python -m pod.generate --ckpt exports/tiny --prompt-file book.txt --tau 0.7
python -m pod.generate --ckpt exports/tiny --prompt-file book.txt --question "Who did it?" \\
    --eviction snapkv:budget=256,query_aware=false
python -m pod.generate --ckpt exports/tiny --prompt-file book.txt --quantization-bits 4
python -m pod.generate --ckpt exports/tiny --prompt-file book.txt --draft quest:budget=256
python -m pod.generate --ckpt exports/chat --prompt "Once upon a time" --raw    # no question: a text to go on with
python -m pod.generate --eviction list

Where the tokenizer has a chat template, the prompt is a user's turn and the answer is generated.
"""

import argparse
import re
import sys
import time
from pathlib import Path

import torch
from transformers import TextStreamer

from pod import eviction as methods
from pod.cache import PodCache
from pod.evaluation.command import add_cache, add_eviction
from pod.evaluation.models import as_pod, asks_apart, dense_token_bytes, load, read_context
from pod.evaluation.runner import Request, as_chat, question_at, question_tokens, tokenise
from pod.evaluation.texts import read_text
from pod.terminal import exit_status
from pod_kernels import Quantization

# What torch says where there is no memory, or where a size in bytes is no number of 64 bits any more.
_NO_MEMORY = re.compile("out of memory|allocate memory|not enough memory|Overflow when unpacking|calculation overflow")


def generate(
    ckpt: str,
    prompt: str,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    eviction: methods.Eviction | None = None,
    tau: float | None = None,
    quantization: Quantization | None = None,
    question: str = "",
    raw: bool = False,
    draft: methods.ReadSelector | None = None,
    num_assistant_tokens: int = 4,
) -> str:
    """Stream a continuation to standard output, then print prompt length, tokens/s and cache bytes against dense.

    Args:
        ckpt: a directory that `pod.export` wrote, or any model of a supported family.
        prompt: the text to continue.
        max_new_tokens: at most so many tokens.
        temperature: of sampling, in (0, inf); 0 is greedy.
        seed: for sampling, a number of 64 bits.
        eviction: which tokens the cache keeps; all when None.
        tau: gate from which layers that are no anchors leave distant tokens out, 0 to 1; the model's own when None.
        quantization: in how many bits the cache keeps values and distant keys; as they come when None.
        raw: continue prompt and question as they are, where a chat template would make them a user's turn.
        draft: reads less of the cache for draft tokens, which one forward that reads everything then verifies.
        num_assistant_tokens: so many in a round.
        question: follows the prompt; with a method of `query_aware=False` it is read after the prompt was evicted from.

    Returns:
        The new text.

    Raises:
        ValueError: an empty prompt, no such model, no tokenizer beside it, a negative temperature, no new tokens, no or
            too many draft tokens, more than there is memory for, or what `PodCache` refuses: a budget below what is
            always kept, tau out of range or with eviction, quantization with either where they do not go together,
            drafts where not everything is kept and read; `query_aware=False` without a question.
    """
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"--temperature {temperature:g}: wanted a number from 0 (greedy) on")
    if max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {max_new_tokens}: wanted at least 1")
    if num_assistant_tokens < 1:
        raise ValueError(f"--num-assistant-tokens {num_assistant_tokens}: wanted at least 1")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"--seed {seed}: wanted a number of 64 bits")
    if asks_apart(eviction) and not question:
        raise ValueError(
            "query_aware=false evicts the prompt before the question is read: say with --question what comes after "
            "the prompt, or leave query_aware out"
        )
    model, tokenizer = load(ckpt)
    model = as_pod(model)
    is_chat = bool(tokenizer.chat_template) and not raw
    text = as_chat(tokenizer, prompt + question) if is_chat else prompt + question
    asked_at = question_at(text, question) if is_chat else len(prompt)
    if asks_apart(eviction) and asked_at is None:
        raise ValueError(
            "query_aware=false: the chat template changes the question, so where it begins is not known; leave "
            "query_aware out, or give the text with the template's marks to --raw"
        )
    request = Request("prompt", text, max_new_tokens, special_tokens=not is_chat, question_at=asked_at)
    ids = torch.tensor([tokenise(tokenizer, text, request.special_tokens)], device=model.device, dtype=torch.long)
    length = ids.shape[1]
    if length == 0 or not prompt + question and is_chat:
        raise ValueError("the prompt is empty: give at least one token to continue")
    capacity = length + max_new_tokens
    cache = PodCache(model.config, max_length=capacity, eviction=eviction, tau=tau, quantization=quantization)
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    drafts = {} if draft is None else {"draft": draft, "num_assistant_tokens": num_assistant_tokens}
    start = time.perf_counter()
    try:
        if asks_apart(eviction):
            count = question_tokens(tokenizer, request, ids[0].tolist())
            suffix = text[asked_at + len(question) :] or "\n"
            read_context(model, cache, ids, count, tokenizer=tokenizer, suffix=suffix)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            past_key_values=cache,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            **sampling,
            **drafts,
        )
    except (RuntimeError, TypeError) as error:
        if not _NO_MEMORY.search(str(error)):
            raise
        raise ValueError(
            f"--max-new-tokens {max_new_tokens}: no memory for a prompt of {length:,} tokens and so many new ones; ask "
            "for fewer"
        ) from error
    seconds = time.perf_counter() - start
    new = output[0, length:]
    config = model.config
    in_chat = " in the chat template (--raw leaves it out)" if is_chat else ""
    dense = dense_token_bytes(model) * capacity
    print(
        f"\nprompt {length} tokens{in_chat}, {len(new)} new in {seconds:.1f} s ({len(new) / seconds:.1f} tokens/s, "
        f"prefill included)\ncache {cache.nbytes():,} bytes for {capacity} tokens, dense {dense:,} bytes: "
        f"{1 - cache.nbytes() / dense:.1%} saved"
    )
    proximal = config.sink_size + config.recent_size + cache.crop_slack
    if capacity <= proximal and not config.blocks.is_dense:
        print(f"sharing saves beyond {proximal} tokens: sink_size, recent_size and {cache.crop_slack} for cropping")
    if cache.drafted:
        print(f"{cache.accepted} of {cache.drafted} draft tokens accepted ({cache.accepted / cache.drafted:.0%})")
    if cache.tau is not None:
        stats = cache.stats
        print(
            f"tau {cache.tau}: {stats.skipped:,} of {stats.decisions:,} decisions skipped, "
            f"{stats.unread_values:,} of {stats.distant_values:,} distant values not read"
        )
    return tokenizer.decode(new, skip_special_tokens=True)


@exit_status
def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m pod.generate", description=__doc__.split("\n")[0])
    parser.add_argument("--ckpt", help="an export, an adapter, or any Hugging Face causal LM")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="the text to continue")
    source.add_argument("--prompt-file", type=Path, help="a UTF-8 file with the text to continue")
    parser.add_argument(
        "--question",
        default="",
        help="text behind the prompt; with query_aware=false the prompt is evicted from before it",
    )
    parser.add_argument(
        "--raw", action="store_true", help="continue the text as it is, without the tokenizer's chat template"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, help="at most so many (128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (0)")
    parser.add_argument("--seed", type=int, default=0, help="for sampling (0)")
    add_cache(parser, "which tokens the cache keeps, such as snapkv:budget=256,window=16, one method after another")
    what = "what draft tokens read of the cache, such as quest:budget=256; all of it then verifies them"
    add_eviction(parser, "--draft", what, lambda text: [methods.parse(text)], default=[None], several=False)
    parser.add_argument("--num-assistant-tokens", type=int, default=4, help="draft tokens in a round (4)")
    options = parser.parse_args(arguments)
    if options.ckpt is None or (options.prompt is None and options.prompt_file is None):
        parser.error("--ckpt and one of --prompt and --prompt-file are required")
    given = vars(options)
    chosen, bits, file = (given.pop(name) for name in ("eviction", "quantization_bits", "prompt_file"))
    given["quantization"] = None if bits is None else Quantization(bits=bits)
    (given["draft"],) = given["draft"]
    if file is not None:
        given["prompt"] = read_text(file, "--prompt-file")
    for method in chosen or [None]:
        if len(chosen or []) > 1:
            print(f"\n{method}")
        generate(**given, eviction=method)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
