"""How long preparing takes beside plain reading: generated Dolma-shaped files, read once, then prepared.

    python eval/data_speed.py --gigabytes 1

Prints both times and their ratio. Plain reading is what any reader must do: decompress every line and parse its JSON,
with as many processes.
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

SCRIPT = Path(__file__).resolve().parents[1] / "data" / "prepare.py"
FILE_BYTES = 2**25


def write_file(folder: Path, size: int, number: int) -> int:
    """One file of about `size` bytes of text, in documents of 200 bytes to 200 KB; returns the bytes written."""
    generator = np.random.default_rng(number)
    letters = generator.integers(97, 123, size).astype(np.uint8)
    letters[generator.random(size) < 0.17] = 32
    place = 0
    with gzip.open(folder / f"part-{number:05d}.jsonl.gz", "wt", compresslevel=1) as file:
        while place < size:
            length = int(np.exp(generator.uniform(np.log(200), np.log(200_000))))
            text = letters[place : place + length].tobytes().decode()
            file.write(json.dumps({"id": f"{number}-{place}", "text": text, "source": "made up"}) + "\n")
            place += length
    return min(place, size)


def read_file(path: Path) -> int:
    """Characters of text in a file."""
    with gzip.open(path, "rb") as file:
        return sum(len(json.loads(line)["text"]) for line in file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of text (1)")
    parser.add_argument("--tokenizer", default="bytes", help="bytes, or a tokenizer's directory (bytes)")
    parser.add_argument("--sequence-length", type=int, default=32768, help="tokens of a sample (32768)")
    parser.add_argument("--num-proc", type=int, default=os.cpu_count() or 1, help="processes (all cores)")
    parser.add_argument("--folder", help="where the files go for the time being (the system's temporary folder)")
    options = parser.parse_args()
    count = max(1, round(options.gigabytes * 1e9 / FILE_BYTES))
    size = round(options.gigabytes * 1e9 / count)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name) / "in"
        folder.mkdir()
        with ProcessPoolExecutor(options.num_proc) as pool:
            written = sum(pool.map(partial(write_file, folder, size), range(count)))

        def read() -> None:
            with ProcessPoolExecutor(options.num_proc) as pool:
                assert sum(pool.map(read_file, sorted(folder.iterdir()))) == written

        command = [sys.executable, str(SCRIPT), "--source", str(folder), "--out", f"{name}/out"]
        command += ["--tokenizer", options.tokenizer, "--sequence-length", str(options.sequence_length)]
        command += ["--num-proc", str(options.num_proc)]
        reading = timed(read)
        preparing = timed(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))
    print(
        f"{written / 1e9:.2f} GB of text in {count} files, {options.num_proc} processes, tokenizer {options.tokenizer}"
    )
    print("                  wall      CPU")
    for label, times in (("plain reading", reading), ("preparing", preparing)):
        print(f"{label:<14}{times[0]:7.1f}s {times[1]:7.1f}s  {written / 1e6 / times[0]:7.1f} MB/s")
    print(f"ratio         {preparing[0] / reading[0]:7.2f}  {preparing[1] / reading[1]:7.2f}")
    return 0


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds on the clock, and of the CPUs in the processes that `work` starts and ends (which other load spares)."""
    before, begin = os.times(), time.perf_counter()
    work()
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - begin, cpu


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
