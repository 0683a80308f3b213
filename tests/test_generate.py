"""`python -m pod.generate`: options of the cache and of sampling, and what is refused."""

import re

import pytest
from scripts import save, tiny_llama

import pod
from pod.generate import main


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A PoD model whose recent window is short, so that a prompt of 80 bytes has distant tokens."""
    model = pod.convert(
        tiny_llama(num_hidden_layers=3), pod.LayerBlocks([[0, 0], [0, 0], [0, 2]]), sink_size=2, recent_size=6
    )
    return str(save(model, tmp_path_factory.mktemp("exported")))


def said(capsys, *arguments, times: int = 40) -> str:
    assert main([*arguments, "--prompt", "def main" * times, "--max-new-tokens", "3"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("more", [[], ["--eviction", "snapkv:budget=512,window=8"]])
def test_a_quantised_cache_takes_fewer_bytes(exported, capsys, bits, more):
    texts = [
        said(capsys, "--ckpt", exported, *more, *options, times=160)
        for options in ([], ["--quantization-bits", str(bits)])
    ]
    found = [int(re.search(r"cache ([\d,]+) bytes", text)[1].replace(",", "")) for text in texts]
    assert found[1] < found[0]
    if not more:
        config = pod.PodLlamaConfig.from_pretrained(exported)
        cache = pod.PodCache(config, quantization=pod.Quantization(bits=bits))
        assert found == [
            pod.PodCache(config).expected_nbytes(1283, itemsize=4),
            cache.expected_nbytes(1283, itemsize=4),
        ]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--quantization-bits", "4", "--tau", "0.5"], "tau=0.5 cannot be combined with quantization"),
        (["--quantization-bits", "8", "--eviction", "h2o:budget=64"], "quantization cannot be combined with H2O"),
        (["--quantization-bits", "8", "--eviction", "quest:budget=64"], "quantization cannot be combined with Quest"),
        (["--temperature", "-1"], "--temperature -1: wanted a number from 0 (greedy) on"),
        (["--temperature", "nan"], "--temperature nan: wanted a number from 0 (greedy) on"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0: wanted at least 1"),
        *(
            (["--max-new-tokens", number, *more], f"--max-new-tokens {number}: no memory for a prompt of 3 tokens and ")
            for number in ("99999999999999", str(2**62), "9" * 30)
            for more in ([], ["--quantization-bits", "4"], ["--eviction", "snapkv:budget=64,window=8"])
        ),
        (["--seed", str(2**64)], "--seed 18446744073709551616: wanted a number of 64 bits"),
        (["--seed", str(-(2**63) - 1)], "--seed -9223372036854775809: wanted a number of 64 bits"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(exported, capsys, arguments, message):
    assert main(["--ckpt", exported, "--prompt", "abc", *arguments]) == 2
    line = capsys.readouterr().err.splitlines()[-1]  # after what transformers says of loading
    assert line.startswith("error: ") and message in line
