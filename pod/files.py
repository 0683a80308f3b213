"""Files that are there whole or not at all, and errors of writing and reading that name the file.

Whatever others read while it is being made, or that a kill must not leave half done, is written aside, forced onto the
disk and renamed. A full disk, a quota or a lost mount raises OSError out of `write`, mostly without a name: `naming`
adds it, so that the one line a command prints says what could not be written. The other way round, `opening` and
`read_json` say which file of what is read is damaged.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

SUMS = "SHA256SUMS"  # in a model's directory: the checksums of its files, as `sha256sum --check` reads them
# What of a model's directory its results depend on; no results that somebody wrote there.
_TELLING = ("*.safetensors", "*.bin", "*config.json", "tokenizer*", "chat_template*", "vocab*", "merges*")
_LARGE = 2**30  # bytes that take a second to read: progress is shown


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let no error of writing leave the block without a file's name: an OSError that has none gets `path`.

    torch.save and safetensors wrap the system's error into one of their own, without its number: it is taken out again.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        if error.errno is None:
            raise OSError(f"{path}: {error}") from error
        raise OSError(error.errno, error.strerror, str(path)) from error
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise OSError(error.__context__.errno, error.__context__.strerror, str(path)) from error
        raise
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise ValueError(f"{path}: {error}") from error
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Write a file whole or not at all.

    Args:
        path: the file; its folders are made.

    Yields:
        A path beside it, hidden and of this process alone, to write to. When the block ends that file takes the name
        `path`; when it fails, `path` is what it was. What a killed process had begun there is removed.

    Raises:
        OSError: it cannot be written; names `path` where the system names nothing.
    """
    path = Path(path)
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _clear(path)
        aside = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
        try:
            yield aside
            force(aside)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)


def _clear(path: Path) -> None:
    """Remove what processes of this machine that are no more left of a file; of other machines nothing is known."""
    begun = re.compile(rf"\.{re.escape(path.name)}\.{re.escape(socket.gethostname())}\.(\d+)\.tmp")
    for name in os.listdir(path.parent):
        if match := begun.fullmatch(name):
            try:
                os.kill(int(match[1]), 0)  # no signal, only whether it is there
            except (ProcessLookupError, OverflowError):
                path.with_name(name).unlink(missing_ok=True)
            except PermissionError:
                pass  # somebody else's process, alive


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file, UTF-8, whole or not at all. Folders are made.

    Raises:
        OSError: as `replacing`.
    """
    with replacing(path) as aside:
        aside.write_bytes(text.encode("utf-8"))


def force(path: Path) -> None:
    """See a file, or all files below a directory, on the disk, so that a rename cannot come before its content."""
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.is_file():
            with naming(file), open(file, "rb") as opened:
                os.fsync(opened.fileno())


def publish(aside: Path, path: Path) -> None:
    """Give a finished directory its name. One that has the name stays whole until then, and goes afterwards.

    A process that is killed in between leaves `.NAME.old` beside it, the replaced directory, which the next call takes
    away: a caller that was to replace it finds either of the two under `path`, or none, and is run again.
    """
    old = path.with_name(f".{path.name}.old")
    force(aside)
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(path, old)
    os.rename(aside, path)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def locked(path: Path, what: Path, wait: float = 0) -> Iterator[None]:
    """Let one process at a time into the block.

    The system gives the lock of a process that has died to the next one. Folders that were made for it, and the file,
    go when the block ends, unless it was killed or has written there.

    Args:
        path: the lock's file, in which the process says who it is.
        what: is written in the block; named when another process does so.
        wait: seconds for another process to end.

    Raises:
        ValueError: another process is in there; says which one, and since when.
        OSError: the file cannot be written.
    """
    made = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=wait)
    except Timeout:
        holder = "another process"
        with suppress(FileNotFoundError):  # it has ended meanwhile
            holder = path.read_text(encoding="utf-8").strip() or holder
        raise ValueError(
            f"{what} is being written by {holder} (it holds {path}): wait for it, end it, or write elsewhere"
        ) from None
    try:
        began = time.strftime("%Y-%m-%d %H:%M:%S")
        with naming(path):
            path.write_text(f"process {os.getpid()} on {socket.gethostname()} since {began}\n", encoding="utf-8")
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def check_writable(folder: str | os.PathLike[str]) -> None:
    """Make a folder and see that a file can be written there: before hours of work, not after.

    Raises:
        OSError: it cannot; names the folder or the file.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, "is a file, wanted a folder", str(folder)) from None
    with naming(folder), tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(b"probe")


def read_json(path: str | os.PathLike[str]) -> Any:
    """What a JSON file holds.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no JSON; names the file.
    """
    try:
        return json.loads(Path(path).read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON, so truncated or damaged: {error}") from error


def note_whole(note: Path, result: Any, sums: Mapping[str, str]) -> None:
    """Note that some files beside `note` are whole, with what is to be known of them as JSON, for `whole`.

    Args:
        sums: path from the note's folder -> sha256.
    """
    with naming(note):
        aside = note.with_suffix(".tmp")
        aside.write_text(json.dumps({"sha256": sums, "result": result}))
        os.replace(aside, note)


def whole(note: Path) -> Any | None:
    """What `note_whole` noted; None where it did not, or the files, every byte of which is read, are not those."""
    try:
        known = json.loads(note.read_text())
        is_whole = all(digest(note.parent / name) == value for name, value in known["sha256"].items())
        return known["result"] if is_whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_sums(folder: Path) -> None:
    """Add the checksums of a model's files: damaged weights, or a field of its config that is gone, would not show."""
    lines = [f"{digest(file)}  {file.name}\n" for file in sorted(folder.iterdir()) if file.suffix != ".md"]
    write_text(folder / SUMS, "".join(lines))


def read_sums(folder: Path) -> dict[str, str]:
    """The checksums that a directory has: file -> sha256."""
    lines = (folder / SUMS).read_text(encoding="utf-8", errors="replace").splitlines()
    return {name: value for value, _, name in (line.partition("  ") for line in lines)}


def check_sums(folder: str | os.PathLike[str]) -> None:
    """Compare a directory's files with their checksums, where it has any; reads every byte of them.

    Raises:
        ValueError: a file is missing or damaged; names it.
    """
    folder = Path(folder)
    if not (folder / SUMS).is_file():
        return
    sums = read_sums(folder)
    if not sums:
        raise ValueError(f"{folder / SUMS} is empty: export again, or remove it")
    for name, wanted in sums.items():
        file = folder / name
        if not name or not file.is_file():
            raise ValueError(f"{folder / SUMS} names {name!r}, which is not there: export again")
        if digest(file) != wanted:
            raise ValueError(
                f"{file} is damaged, or was changed: its sha256 is not the one in {SUMS}. Export again; or, if it was "
                f"changed on purpose, take its line out of {SUMS}"
            )


def weights_sum(folder: str | os.PathLike[str]) -> str:
    """What tells a model's directory from one with other weights, another config or tokenizer: a sha256 of theirs.

    Those of SHA256SUMS are taken from there, as `check_sums` has compared them; else every byte is read.
    """
    folder = Path(folder)
    known = read_sums(folder) if (folder / SUMS).is_file() else {}
    files = {file for pattern in _TELLING for file in folder.glob(pattern) if file.is_file()}
    sizes = {file: file.stat().st_size for file in sorted(files, key=lambda file: file.name) if file.name not in known}
    size = sum(sizes.values())
    with tqdm(total=size, desc=f"{folder}: sha256", unit="B", unit_scale=True, disable=size < _LARGE) as bar:
        for file in sizes:
            known[file.name] = digest(file)
            bar.update(sizes[file])
    lines = [f"{known[name]}  {name}\n" for name in sorted(file.name for file in files)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


_OWN_SUM = re.compile(r"(\{\n)?\W*sha256 of the other lines\W+([0-9a-f]{64})\b.*(?:\n|\Z)")


def with_sum(text: str, line: str) -> str:
    """A text, of YAML or of JSON's `{`, that begins with a checksum of itself: no cut takes that and leaves the rest.

    Args:
        text: its lines.
        line: the line that is added, with `sha256 of the other lines` and {} in it, where the checksum goes.
    """
    brace = "{\n" if text.startswith("{\n") else ""
    return brace + line.format(hashlib.sha256(text.encode()).hexdigest()) + text.removeprefix(brace)


def check_sum(path: str | os.PathLike[str], text: str) -> None:
    """Compare the text of a file with the checksum that it begins with, where it has one.

    Raises:
        ValueError: it is another; names the file.
    """
    found = _OWN_SUM.match(text)
    if found and hashlib.sha256(((found[1] or "") + text[found.end() :]).encode()).hexdigest() != found[2]:
        raise ValueError(
            f"{path} is truncated or damaged, or was changed: its sha256 is not the one that it begins with. If it was "
            "changed on purpose, take that line out"
        )


@contextmanager
def opening(where: str | os.PathLike[str]) -> Iterator[None]:
    """Say of a model's directory what is wrong with it, whatever transformers and safetensors raise in the block.

    Its files are compared with their checksums first, where it has any. What is no directory here is looked for on the
    hub, which may take minutes when it cannot be reached: a line says so first.

    Args:
        where: the directory, or a hub id.

    Raises:
        FileNotFoundError: there is no such directory, and no hub id is like that.
        ValueError: names the directory, or the file in it.
    """
    announce_hub(where)
    check_sums(where)
    try:
        yield
    except SafetensorError as error:
        raise ValueError(
            f"{_unreadable(Path(where))}: truncated or damaged ({error}). Download or export it again"
        ) from error
    except StrictDataclassError as error:
        raise ValueError(f"{Path(where) / 'config.json'}: {' '.join(str(error).split())}") from error
    except json.JSONDecodeError:
        for file in sorted(Path(where).glob("*.json")):
            read_json(file)  # the damaged one is named
        raise
    except (AttributeError, KeyError, TypeError, ZeroDivisionError) as error:
        kind = type(error).__name__
        raise ValueError(f"{Path(where) / 'config.json'}: a field is missing or wrong ({kind}: {error})") from error
    except RuntimeError as error:
        if "mismatched_sizes" not in str(error):
            raise
        raise ValueError(f"{where}: the weights do not have the shapes that config.json says") from error


def announce_hub(where: str | os.PathLike[str]) -> None:
    """Say on stderr, once, that what is no directory here will be looked for on the hub.

    Raises:
        FileNotFoundError: no hub id is like that.
    """
    if not Path(where).exists():
        _announce(str(where))


@cache
def _announce(where: str) -> None:
    try:
        validate_repo_id(where)
    except HFValidationError:
        raise FileNotFoundError(f"{where}: no such directory") from None
    print(f"{where}: no such directory here; looking on the hub", file=sys.stderr, flush=True)


def _unreadable(folder: Path) -> Path:
    """The first file of weights that cannot be opened."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError:
            return file
    return folder


def digest(path: Path) -> str:
    """sha256 (hex) of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
