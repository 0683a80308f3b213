"""Speed as ratios inside one run, on the device at hand.

    python eval/speed.py --suite decode --lengths 8192,16384
    python eval/speed.py --suite prefill --lengths 4096
    python eval/speed.py --suite all

A random model of 8 layers with 70 % of the keys shared; on a GPU in Llama-3-8B's shape with a window of 4,096 tokens:

    attention   shared-score attention, forward and with backward, against the dense causal attentions at hand
    decode      one token: its attention alone, against dense attention to as many keys; with early skip; after
                eviction; and the whole step: PoD against the same cache with blocks of one layer, and against
                transformers' DynamicCache
    cache       storing one token in all layers (keys, values, and what a method keeps to decide), without attention:
                into the cache's own storage against concatenation, as DynamicCache does it
    prefill     the prompt by the same three; and a cascade's strides in one layer against causal attention to all
    end-to-end  `generate`: a prompt and 32 new tokens
    fork        one token of 16 rows over one context (`cache.fork`), against rows that are copies of it

and, never part of `all`, a real model's weights on a CPU, in float32 or with `--dtype bfloat16`:

    cpu         PoD against transformers' DynamicCache and StaticCache and, where it is installed, kvpress: a decode
                step, also after SnapKV(512) of 4,000 tokens, its attention alone, the prompt, a training step; 32
                tokens drafted by a sparse read (and how many were accepted) against the same one by one; and
                `attention_similarity` against the forward that it watches

Each by torch's operations and, on a GPU, by the fused kernels, attention also by cuDNN. The works take turns, round
after round, and a ratio is the median over the rounds of one's time by the other's in the same round: a busy machine
slows all alike. On a GPU, time is between two CUDA events, the L2 cache emptied before; decoding and storing by
the fused kernels are replays of a CUDA graph, and the page says where they could not be captured. Where a work's
operations or bytes are known, its rate is printed too, with its share of what a large product or copy reached in the
same run. With one thread (OMP_NUM_THREADS=1) a CPU's seconds are the process's own. Where only
attention or storing is measured the cache is filled with random keys and values, without running the model.

Writes speed-SUITE.json after every measurement, then speed.md, and prints it; at its end are the goals. A run that was
stopped goes on with `--resume`. What fails is
said there, the rest is measured, and the exit status is 1. `--suite all` runs each suite in a process of its own: an
error that leaves a GPU unusable costs one suite, of which the rest is measured without the fused kernels and cuDNN.
"""

import argparse
import gc
import json
import multiprocessing
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import timing
import torch
from dense_attention import OTHERS
from speed_cpu import BUDGET, CPU_LENGTHS, KVPRESS_EVICTED, real_models
from speed_goals import goals
from speed_setting import SETTINGS, Setting, shared_blocks
from speed_works import POD_CUDNN, SHORTEST, SUITES, decode_after_eviction, prefill
from timing import BYTES, OPERATIONS, SCALE

from pod.evaluation import command, report
from pod.terminal import exit_status

LENGTHS = {
    "cpu": {
        "attention": [2048],
        "decode": [8192, 16_384],
        "prefill": [4096],
        "cache": [16_384],
        "end-to-end": [2048],
        "fork": [4096],
        "cpu": [2048, 8192],
    },
    "cuda": {
        "attention": [8192, 32_768, 131_072],
        "decode": [32_768, 131_072],
        "cache": [16_384],
        "prefill": [32_768, 2**20],
        "end-to-end": [32_768],
        "fork": [4096],
    },
}
# Longer prompts do not fit into the whole model, or would take minutes.
LONGEST = {prefill: 131_072, decode_after_eviction: 32_768}
OPTIONAL = (*OTHERS, POD_CUDNN, KVPRESS_EVICTED)  # what a device may lack
DEVICE_ERROR = re.compile(r"CUDA error|Error \[CUDA\]")  # torch's and Triton's words; not for want of memory
MOST_SECONDS = 240  # of one suite's process on a GPU


def default_lengths(suite: str, run: Callable[[Setting, int], timing.Measured], device: str) -> list[int]:
    """Tokens that a function of a suite is run with where none are asked for."""
    return CPU_LENGTHS.get(run, LENGTHS[device][suite])


def identity(setting: Setting) -> dict[str, Any]:
    """What has to be alike for a run to go on with another's results."""
    return {
        "commit": described_commit(),
        "threads": torch.get_num_threads(),
        "dtype": str(setting.dtype).removeprefix("torch."),
        "batch": setting.batch,
        "rounds": setting.rounds,
        "ckpt": str(setting.ckpt),
        "blocks": str(setting.blocks),
    }


def run_suite(suite: str, lengths: list[int] | None, setting: Setting, path: Path) -> None:
    """Measure what of one suite is not in its results yet.

    They are written after every measurement, so that a long run that is stopped has not been for nothing, and neither
    has one of which a part fails.

    Args:
        suite: one of `SUITES`.
        lengths: tokens; None for each function's own.
        setting: on what.
        path: for the results, as JSON.
    """
    again = "" if setting.has_kernels else ", without the fused kernels"
    facts = read(path) or {
        "suite": suite,
        "device": torch.cuda.get_device_properties(0).name if setting.device == "cuda" else setting.device,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        **identity(setting),
        **model_facts(suite, setting),
        "ceilings": timing.ceilings(setting.device, setting.dtype, setting.rounds),
        "results": [],
        "failed": [],
    }
    known = {(record["what"], record["tokens"]) for record in facts["results"]}
    asked = {run: lengths or default_lengths(suite, run, setting.device) for run in SUITES[suite]}
    for length in dict.fromkeys(length for some in asked.values() for length in some):
        for run in SUITES[suite]:
            if length not in asked[run] or length > LONGEST.get(run, length) or (run.__name__, length) in known:
                continue
            where = f"{run.__name__} at {length:,}{again}"
            try:
                if setting.device == "cuda":
                    gc.collect()
                    torch.cuda.empty_cache()
                with torch.no_grad():
                    found = run(setting, length)
            except Exception as error:
                facts["failed"].append(f"{where}: {timing.reason(error)}")
            else:
                if found.seconds:  # without any it is not known, and a process that follows measures it
                    facts["results"].append(found.record(run.__name__, length))
                broken = {name: why for name, why in found.left_out.items() if name not in OPTIONAL}
                facts["failed"] += [f"{where}, {name}: {why}" for name, why in broken.items()]
            report.write_json(path, facts)


def model_facts(suite: str, setting: Setting) -> dict[str, Any]:
    """What the page says of a suite's model."""
    if suite != "cpu":
        return {"head_dim": setting.head_dim, "shared_keys": 2 * shared_blocks().kv_saving}
    config = real_models(setting.ckpt, setting.blocks, torch.float32)["PoD"].config
    return {"head_dim": config.head_dim, "shared_keys": 2 * config.blocks.kv_saving}


def run_process(suite: str, lengths: list[int] | None, setting: Setting, path: Path) -> str | None:
    """`run_suite` in a process of its own; how that ended where it is not as it should."""
    process = multiprocessing.get_context("spawn").Process(target=run_suite, args=(suite, lengths, setting, path))
    process.start()
    process.join(MOST_SECONDS if setting.device == "cuda" else None)
    if process.is_alive():
        process.kill()
        process.join()
        return f"suite {suite}: not done after {MOST_SECONDS} seconds"
    return f"suite {suite}: ended with exit status {process.exitcode}" if process.exitcode else None


def run_alone(suite: str, lengths: list[int] | None, setting: Setting, path: Path) -> list[str]:
    """A suite that takes down no other; how its processes ended where that is not as they should.

    One that leaves a GPU unusable, or does not end, is followed by one without the fused kernels, for what is missing.
    """
    ending = run_process(suite, lengths, setting, path)
    found = read(path)
    is_unusable = found is None or any(DEVICE_ERROR.search(line) for line in found["failed"])
    if setting.device == "cpu" or not (ending or is_unusable):
        return [ending] if ending else []
    again = run_process(suite, lengths, replace(setting, has_kernels=False), path)
    first = [f"{ending}, and was run again without the fused kernels"] if ending else []
    return first + ([again] if again else [])


def read(path: Path) -> dict[str, Any] | None:
    """A suite's results; None where there are none yet."""
    return json.loads(path.read_text()) if path.exists() else None


def keep_or_clear(path: Path, setting: Setting, resumes: bool) -> None:
    """Make ready for a run: earlier results go, or stay for a run that goes on, without what failed.

    Raises:
        ValueError: they are of another commit or setting.
    """
    if not resumes or not path.exists():
        return path.unlink(missing_ok=True)
    found = read(path)
    for name, value in identity(setting).items():
        if found.get(name) != value:
            raise ValueError(f"--resume: {path} has {name} {found.get(name)}, not {value}: leave out --resume")
    report.write_json(path, found | {"failed": []})


@exit_status
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=[*SUITES, "all"], required=True)
    command.add_numbers(parser, "--lengths", None, "tokens, by the device")
    parser.add_argument(
        "--batch", type=int, help="rows (1; where a GPU decodes or stores, as many as docs/EVALUATE.md says)"
    )
    parser.add_argument("--rounds", type=int, help="timed rounds (9, on a GPU 15)")
    parser.add_argument("--device", choices=list(SETTINGS), help="a GPU where there is one (but for the suite cpu)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="bfloat16 on a GPU, float32 elsewhere")
    parser.add_argument("--ckpt", help="the real model of the suite cpu (checkpoints/smollm2-135m)")
    parser.add_argument("--blocks", help="its blocks (those of checkpoints/smollm2-pod-35)")
    parser.add_argument("--resume", action="store_true", help="measure only what OUT/speed-SUITE.json lacks")
    options = command.parse(parser, "speed", arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() and options.suite != "cpu" else "cpu")
    command.check_least(options, batch=1, rounds=1, lengths=SHORTEST)
    if options.suite == "cpu" and options.device != "cpu":
        raise ValueError("--suite cpu runs on a CPU: leave out --device")
    if options.suite == "cpu" and min(options.lengths or [2 * BUDGET]) < 2 * BUDGET:
        raise ValueError(f"--suite cpu evicts down to {BUDGET} tokens: --lengths are at least {2 * BUDGET}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU here. Choose --device cpu, or a torch built for CUDA")
    given = {name: getattr(options, name) for name in ("batch", "rounds", "ckpt", "blocks")}
    given["dtype"] = options.dtype and getattr(torch, options.dtype)
    setting = replace(SETTINGS[options.device], **{name: value for name, value in given.items() if value is not None})
    suites = [name for name in SUITES if name == options.suite or (options.suite == "all" and name != "cpu")]
    paths = {suite: options.out / f"speed-{suite}.json" for suite in suites}
    for path in paths.values():
        keep_or_clear(path, setting, options.resume)
    broken: list[str] = []
    for suite, path in paths.items():
        asked = suite, options.lengths, setting, path
        if options.suite == "all":
            broken += run_alone(*asked)
        else:
            run_suite(*asked)
        done = [found for found in map(read, paths.values()) if found is not None]
        text = page(done, options.device, broken)
        report.write(options.out / "speed.md", text + "\n")
    print(text)
    print(f"written: {options.out}/speed.md and speed-SUITE.json")
    return int(bool(broken) or any(facts["failed"] for facts in done))


def page(suites: list[dict[str, Any]], kind: str, broken: list[str]) -> str:
    """All that is printed: what the figures are from, the suites' tables, what failed, the goals.

    Args:
        suites: what `run_suite` wrote.
        kind: of the device.
        broken: how processes ended, of those that should not have.
    """
    parts = [heading(suites[0])] if suites else []
    parts += [timing.table(facts["suite"], facts["results"], facts["ceilings"]) for facts in suites]
    failed = broken + [line for facts in suites for line in facts["failed"]]
    if failed:
        parts.append("### failed\n\n" + "\n".join(f"- {line}" for line in failed))
    table = goals(suites, kind)
    return "\n\n".join(parts + ([f"### goals\n\n{table}"] if table else []))


def described_commit() -> str:
    """The commit of this tree, with "-dirty" where files differ; "unknown" without git or its folder."""
    if shutil.which("git") is None:  # many containers with a GPU have none
        return "unknown"
    command = ["git", "describe", "--always", "--dirty"]
    said = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout
    return said.strip() or "unknown"


def heading(facts: dict[str, Any]) -> str:
    """Where and when: what a figure needs to be believed."""
    ceiling = facts["ceilings"]
    return (
        f"## {facts['device']}, {facts['date']}, commit {facts['commit']}\n\n"
        f"{facts['dtype']}, torch {torch.__version__}, {facts['threads']} threads; {facts['shared_keys']:.0%} of the "
        f"keys shared. A large copy reached {ceiling[BYTES] / SCALE[BYTES]:,.0f} {BYTES}, a large product "
        f"{ceiling[OPERATIONS] / SCALE[OPERATIONS]:,.2f} {OPERATIONS}."
    )


if __name__ == "__main__":
    sys.exit(main())
