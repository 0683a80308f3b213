"""Kill preparing, training, evaluating and exporting at seeded random moments, and see that nothing is lost.

    python tests/faults.py                              # 20 kills, as `make test-all` runs them
    python tests/faults.py --kills 100 --seed 1
    python tests/faults.py --kills 100 --stages fit export --keep /tmp/faults

Each command first runs undisturbed; that is what it must come to. Then it is killed (SIGKILL) a random part of that
time after its start, run again with the same arguments, killed again, and in the end left alone. Of the kills of
training, at least one in `WRITING` comes while a checkpoint is being written: its file is seen beside its place then.

Checked after every kill: what has its final name is whole. Checked at the end of every round:

    prepare     the prepared directory is the undisturbed one's, byte for byte, and nothing lies beside it
    fit         every micro-batch that any of the processes trained on is the one that the undisturbed run has there,
                with the same loss to the last bit; each process begins at a checkpoint's step, not after the step
                that its predecessor had reached; all steps are there; weights, optimiser and blocks are the same
    needle      predictions (each once), scores and picture are the same bytes
    export      the exported directory is the same bytes; an older export that is replaced is there, whole, until then

The processes are forked from one that has imported everything and started no thread, so that a kill costs the work it
undoes and not ten seconds of imports. From there on they are the commands: their `main`, in a process of their own.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # threads of a pool would not survive the fork
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import argparse
import csv
import hashlib
import json
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, ByT5Tokenizer, LlamaConfig

import pod.data.sample_writer
import pod.export
import pod.fit
import pod.training.checkpoints
from pod import prepare
from pod.data.prepared import PreparedData
from pod.evaluation import needle
from pod.evaluation.runner import Predictions
from pod.files import write_sums
from pod.training.module import PodModule

STEPS, ACCUMULATE, MICRO, LENGTH = 12, 2, 2, 128
CHECKPOINT_EVERY = 2
WRITING = 3  # every third kill of training comes inside checkpoint writing
CONFIG = {
    "vocab_size": 259,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


class Failure(AssertionError):
    """What was promised does not hold."""


def check(holds: bool, message: str) -> None:
    if not holds:
        raise Failure(message)


# Processes


def start(main: Callable[[list[str]], int], arguments: list[str], log: Path, trace: Path | None = None) -> int:
    """Run a command in a process of its own, which writes to `log`; its process id."""
    check(len(os.listdir("/proc/self/task")) == 1, "the parent has started threads: it cannot be forked any more")
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        print(f"--- {main.__module__} {' '.join(arguments)}", flush=True)
        sys.argv = [main.__module__, *arguments]
        torch.set_num_threads(1)
        if trace is not None:
            follow(trace)
        code = main(arguments)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def follow(trace: Path) -> None:
    """Let training write a line for each micro-batch: process, optimiser step, the samples' hashes, the loss."""
    file = os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    whole = PodModule.training_step

    def training_step(self, batch, index):
        loss = whole(self, batch, index)
        samples = [hashlib.sha256(row.numpy().tobytes()).hexdigest()[:16] for row in batch["input_ids"]]
        line = json.dumps([os.getpid(), self.trainer.global_step, samples, float(loss.detach()).hex()])
        os.write(file, f"{line}\n".encode())
        return loss

    PodModule.training_step = training_step


def wait(child: int, seconds: float) -> int | None:
    """The exit status of a process (negative: the signal), None when it still runs after so many seconds."""
    end = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= end:
            return None
        time.sleep(0.001)


# Files


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder; a model card's snippet names it, and is read as if it had no place."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    if "README.md" in found:
        found["README.md"] = found["README.md"].replace(str(folder).encode(), b"")
    return found


def check_same(found: dict[str, bytes], wanted: dict[str, bytes], where: Path) -> None:
    check(found.keys() == wanted.keys(), f"{where}: {sorted(found.keys() ^ wanted.keys())} there or missing")
    for name, value in wanted.items():
        check(found[name] == value, f"{where}/{name} differs from the undisturbed run's")


def metrics(run: Path) -> Iterator[dict[str, str]]:
    """The rows of a run's logs, one process after the other."""
    for log in sorted(run.glob("logs/version_*/metrics.csv"), key=lambda path: int(path.parent.name[8:])):
        with open(log, newline="") as file:
            yield from csv.DictReader(file)


@dataclass
class Stage:
    """One command, and what must hold.

    Attributes:
        name: of the stage.
        main: the command.
        root: the folder of all stages' inputs, with `reference` in it, the undisturbed run's folder.
    """

    name: str
    main: Callable[[list[str]], int]
    root: Path
    seconds: float = 0.0  # of the undisturbed run
    kills: int = 0
    inside: int = 0  # kills inside checkpoint writing
    rounds: int = 0

    @cached_property
    def reference(self) -> Path:
        return self.root / "reference"

    @property
    def replaces(self) -> bool:
        """Whether this round's output takes the place of an older one: every other round's does."""
        return self.rounds % 2 == 1

    def arguments(self, folder: Path) -> list[str]:
        raise NotImplementedError

    def begin(self, folder: Path) -> None:
        """Lay out what a round starts from."""

    def after_kill(self, folder: Path) -> None:
        """What must hold after every kill."""

    def at_end(self, folder: Path) -> None:
        """What must hold when the command has ended."""

    def start(self, folder: Path) -> int:
        return start(self.main, self.arguments(folder), folder / f"{self.name}.log", self.trace(folder))

    def trace(self, folder: Path) -> Path | None:
        return None

    def finish(self, child: int, folder: Path) -> None:
        status = wait(child, 600)
        check(status == 0, f"{self.name} ended with {status}:\n{(folder / f'{self.name}.log').read_text()[-3000:]}")

    def undisturbed(self) -> None:
        self.reference.mkdir(exist_ok=True)
        self.begin(self.reference)
        began = time.monotonic()
        self.finish(self.start(self.reference), self.reference)
        self.seconds = time.monotonic() - began
        self.at_end(self.reference)

    def wait_for_the_moment(self, child: int, folder: Path, moments: random.Random) -> bool:
        """Wait until the process is to be killed; False when it has ended before."""
        return wait(child, moments.uniform(0, self.seconds)) is None

    def round(self, moments: random.Random, kills: int) -> None:
        """One run that is killed up to `kills` times (at most 4), and then left alone."""
        folder = self.root / f"{self.name}-{self.rounds}"
        self.rounds += 1
        folder.mkdir()
        self.begin(folder)
        for _ in range(min(kills, moments.randint(1, 4))):
            child = self.start(folder)
            if not self.wait_for_the_moment(child, folder, moments):
                break  # it had ended; the next round begins anew
            os.kill(child, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if status == 0:
                break  # the signal came after its end
            check(status == -signal.SIGKILL, f"it was not the kill but {status}")
            self.kills += 1
            self.after_kill(folder)
        self.finish(self.start(folder), folder)
        self.at_end(folder)
        shutil.rmtree(folder)


class Prepare(Stage):
    """Documents -> samples, by two processes, into several shards; every other round replaces an older directory."""

    def arguments(self, folder: Path) -> list[str]:
        common = f"--tokenizer bytes --sequence-length {LENGTH} --num-proc 2 --held-out 0.05 --length-intervals 300"
        return ["--source", str(self.root / "corpus"), "--out", str(folder / "data"), "--force", *common.split()]

    def begin(self, folder: Path) -> None:
        if self.replaces:
            shutil.copytree(self.root / "older", folder / "data")

    def after_kill(self, folder: Path) -> None:
        if not (folder / "data").exists():
            return
        PreparedData(folder / "data").verify()
        found = content(folder / "data")
        known = [content(self.reference / "data"), *([content(self.root / "older")] if self.replaces else [])]
        check(found in known, "a prepared directory that is neither the older one nor the new one")

    def at_end(self, folder: Path) -> None:
        PreparedData(folder / "data").verify()
        check_same(content(folder / "data"), content(self.reference / "data"), folder / "data")
        names = sorted(path.name for path in folder.iterdir() if path.name.startswith("."))
        check(not names, f"left beside the prepared directory: {names}")


class Fit(Stage):
    """Analysis and training with accumulation, a checkpoint every other step."""

    def arguments(self, folder: Path) -> list[str]:
        return [f"recipe={self.root / 'recipe.yaml'}", f"output={folder / 'run'}", "resume=auto"]

    def trace(self, folder: Path) -> Path:
        return folder / "trace"

    def being_written(self, folder: Path) -> list[Path]:
        return [path for path in (folder / "run").glob("steps/.*") if path.stat().st_size]

    def wait_for_the_moment(self, child: int, folder: Path, moments: random.Random) -> bool:
        if self.kills % WRITING:
            return super().wait_for_the_moment(child, folder, moments)
        steps = folder / "run" / "steps"
        for path in steps.glob(".*"):
            path.unlink()  # of an earlier kill
        written = moments.randint(0, STEPS // CHECKPOINT_EVERY - 1) + len(list(steps.glob("step=*.ckpt")))
        while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            try:
                enough = len(list(steps.glob("step=*.ckpt"))) >= min(written, 2)
                if enough and any(path.stat().st_size for path in steps.glob(".*")):
                    return True
            except FileNotFoundError:
                pass  # it has just got its name
        return wait(child, 0) is None

    def after_kill(self, folder: Path) -> None:
        for path in (folder / "run").glob("*/step=*.ckpt"):
            check(pod.training.checkpoints.is_whole(path), f"{path} is half a checkpoint under a whole one's name")
        for name in ("blocks.json", "recipe.yaml"):
            path = folder / "run" / name
            check(not path.exists() or path.read_bytes().endswith(b"\n"), f"{path} is cut short")
        self.inside += bool((folder / "run" / "steps").exists() and self.being_written(folder))

    def at_end(self, folder: Path) -> None:
        run = folder / "run"
        self.check_trace(folder)
        ours, theirs = (
            torch.load(place / f"run/steps/step={STEPS}.ckpt", map_location="cpu", weights_only=True)
            for place in (folder, self.reference)
        )
        for name, weight in theirs["state_dict"].items():
            check(torch.equal(ours["state_dict"][name], weight), f"{run}: {name} differs")
        states = [checkpoint["optimizer_states"][0]["state"] for checkpoint in (ours, theirs)]
        for number, state in states[1].items():
            for name, value in state.items():
                check(torch.equal(states[0][number][name], value), f"{run}: the optimiser's {name} differs")
        check(ours["PodDataModule"] == theirs["PodDataModule"], f"{run}: another position in the data")
        for name in ("blocks.json", "similarity.safetensors", "similarity.png", "blocks.png"):
            check((run / name).read_bytes() == (self.reference / "run" / name).read_bytes(), f"{run}/{name} differs")
        left = [path.name for path in run.rglob(".*")]
        check(not left, f"left in {run}: {left}")
        whole = sorted(path.name for path in (self.reference / "run" / "steps").iterdir())
        found = sorted(path.name for path in (run / "steps").iterdir())
        check(found == whole, f"{run}/steps holds {found}, undisturbed {whole}")
        ours, theirs = (
            {int(row["step"]): row["train_loss"] for row in metrics(place) if row["train_loss"]}
            for place in (run, self.reference / "run")
        )
        # A step's row is logged when its checkpoint is written: a kill between the two takes the row along.
        missing = {step for step in theirs if step not in ours and (step + 1) % CHECKPOINT_EVERY}
        check(not missing, f"{run}: the log has no loss of the steps {sorted(missing)}")
        check(all(theirs[step] == loss for step, loss in ours.items()), f"{run}: other losses in the log")

    def check_trace(self, folder: Path) -> None:
        """Samples and losses of every process against the undisturbed run's."""
        rows = [json.loads(line) for line in (self.reference / "trace").read_text().splitlines()]
        wanted = [(step, samples, loss) for _, step, samples, loss in rows]
        check([step for step, _, _ in wanted] == [s for s in range(STEPS) for _ in range(ACCUMULATE)], "no such steps")
        every = [sample for _, samples, _ in wanted for sample in samples]
        check(len(set(every)) == len(every) == STEPS * ACCUMULATE * MICRO, "the undisturbed run repeats samples")
        reached = 0
        processes: dict[int, list] = {}
        for process, *row in map(json.loads, (folder / "trace").read_text().splitlines()):
            processes.setdefault(process, []).append(tuple(row))
        for rows in processes.values():
            first = rows[0][0]
            check(first % CHECKPOINT_EVERY == 0, f"a process began at step {first}, where no checkpoint is")
            check(first * ACCUMULATE <= reached, f"a process began at step {first}, {reached} micro-batches were done")
            begin = first * ACCUMULATE
            for number, (found, right) in enumerate(zip(rows, wanted[begin:], strict=False), start=begin):
                check(tuple(found) == right, f"micro-batch {number} is {found}, undisturbed {right}")
            check(len(rows) <= len(wanted) - begin, "more micro-batches than the run has")
            reached = begin + len(rows)
        check(reached == len(wanted), f"the last process ended after {reached} of {len(wanted)} micro-batches")


class Needle(Stage):
    """Generated predictions, with and without eviction."""

    def arguments(self, folder: Path) -> list[str]:
        common = "--min-length 420 --max-length 500 --steps 2 --eviction snapkv:budget=64,window=16"
        out = ["--out", str(folder / "needle"), "--haystack", str(self.root / "haystack.txt")]
        return ["--ckpt", str(self.root / "reference" / "export"), *out, *common.split()]

    def after_kill(self, folder: Path) -> None:
        wanted = content(self.reference / "needle")
        for name, value in content(folder / "needle").items() if (folder / "needle").exists() else ():
            if ".part" in name:
                Predictions(folder / "needle", "needle").read()
            elif not Path(name).name.startswith("."):
                check(value == wanted[name], f"{name} is neither missing nor whole after a kill")

    def at_end(self, folder: Path) -> None:
        found = {name: value for name, value in content(folder / "needle").items() if not hidden(name)}
        check_same(found, content(self.reference / "needle"), folder / "needle")
        keys = [json.loads(line)["key"] for line in found["needle.jsonl"].splitlines()]
        check(len(keys) == len(set(keys)) == 4, f"predictions {keys}")


class Export(Stage):
    """A checkpoint -> a model directory, in place of an older one."""

    def arguments(self, folder: Path) -> list[str]:
        return ["--ckpt", str(self.reference / "run"), "--out", str(folder / "export"), "--force"]

    def begin(self, folder: Path) -> None:
        if self.replaces:
            shutil.copytree(self.root / "older-export", folder / "export")

    def after_kill(self, folder: Path) -> None:
        if (folder / "export").exists():
            found = content(folder / "export")
            known = [content(self.reference / "export")]
            known += [content(self.root / "older-export")] if self.replaces else []
            check(found in known, f"{folder}/export is neither the older export nor the new one")

    def at_end(self, folder: Path) -> None:
        check_same(content(folder / "export"), content(self.reference / "export"), folder / "export")
        left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
        check(not left, f"left beside the export: {left}")


def hidden(name: str) -> bool:
    return Path(name).name.startswith(".")


# Inputs


def write_inputs(arguments: list[str]) -> int:
    """Texts, a base model of random weights, the recipe, and older outputs for others to take the place of."""
    root = Path(arguments[0])
    generator = np.random.default_rng(7)
    letters = np.frombuffer(b"etaoin shrdlu cmfwyp. ", np.uint8)

    def text(size: int) -> str:
        return generator.choice(letters, size).tobytes().decode()

    (root / "corpus").mkdir()
    for number in range(6):
        rows = [json.dumps({"text": text(size)}) for size in generator.integers(20, 900, 250)]
        (root / "corpus" / f"{number}.jsonl").write_text("\n".join(rows) + "\n")
    for number in range(30):
        (root / "corpus" / f"{number}.txt").write_text(text(2000))
    (root / "haystack.txt").write_text(text(1500))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG)).save_pretrained(root / "base")
    ByT5Tokenizer(extra_ids=0).save_pretrained(root / "base")
    shutil.copytree(root / "base", root / "older-export")
    write_sums(root / "older-export")  # else it is no export, which is not replaced
    recipe = {
        "name": "faults",
        "description": "A run that is killed",
        "model": {"base": str(root / "base"), "tokenizer": "bytes", "sink_size": 2, "recent_size": 14},
        "blocks": {"kv_saving": 0.25, "samples": 8},
        "data": {"path": str(root / "reference/data"), "sequence_length": LENGTH, "micro_batch_size": MICRO},
        "optimizer": {"lr": 1e-3, "warmup_steps": 2},
        "trainer": {"max_steps": STEPS, "tokens_per_batch": LENGTH * MICRO * ACCUMULATE, "validate_every": 5}
        | {"validation_batches": 2, "checkpoint_every": CHECKPOINT_EVERY, "keep_checkpoints": 3, "accelerator": "cpu"},
    }
    (root / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    older = ["--source", str(root / "corpus" / "0.txt"), "--out", str(root / "older"), "--tokenizer", "bytes"]
    return prepare.main([*older, "--sequence-length", str(LENGTH), "--num-proc", "1"])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="in all, dealt out among the stages (20)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    names = ("prepare", "fit", "needle", "export")
    parser.add_argument("--stages", nargs="+", choices=names, default=names, help="which commands are killed (all)")
    parser.add_argument("--keep", type=Path, help="work in this folder, which must not exist, and leave it there")
    options = parser.parse_args(arguments)
    if options.keep is not None:
        options.keep.mkdir(parents=True)
    root = (options.keep or Path(tempfile.mkdtemp(prefix="faults-"))).resolve()
    pod.data.sample_writer.SHARD_BYTES = 2 * LENGTH * 500  # several shards of little text
    began = time.monotonic()
    try:
        (root / "reference").mkdir()
        child = start(write_inputs, [str(root)], root / "inputs.log")
        check(wait(child, 120) == 0, (root / "inputs.log").read_text())
        every = [
            Prepare("prepare", prepare.main, root),
            Fit("fit", pod.fit.main, root),
            Export("export", pod.export.main, root),
            Needle("needle", needle.main, root),
        ]
        for stage in every:
            stage.undisturbed()
            print(f"{stage.name}: {stage.seconds:.1f} s undisturbed", flush=True)
        # Half of the kills are training's where there is a choice: it has the most to lose.
        weights = {"prepare": 2, "fit": 5, "needle": 2, "export": 2}
        chosen = [stage for stage in every if stage.name in options.stages]
        total = sum(weights[stage.name] for stage in chosen)
        left = options.kills
        for stage in chosen:
            wanted = max(1, options.kills * weights[stage.name] // total) if stage is not chosen[-1] else left
            moments = random.Random(f"{options.seed}/{stage.name}")
            while stage.kills < wanted:
                check(stage.rounds < 20 * wanted, f"{stage.name} ends before it can be killed")
                stage.round(moments, wanted - stage.kills)
            left -= stage.kills
            inside = f", {stage.inside} of them inside checkpoint writing" if stage.name == "fit" else ""
            print(f"{stage.name}: {stage.kills} kills in {stage.rounds} runs{inside}: nothing lost", flush=True)
            check(stage.name != "fit" or stage.inside > 0, "no kill came inside checkpoint writing")
    except Failure as failure:
        print(f"FAILED (kept in {root}): {failure}")
        return 1
    print(f"{sum(stage.kills for stage in chosen)} kills in {time.monotonic() - began:.0f} s, seed {options.seed}")
    if options.keep is None:
        shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    assert threading.active_count() == 1
    sys.exit(main(sys.argv[1:]))
