"""Choosing among implementations and configurations by measuring them, once for a device and a shape."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Protocol

import torch
import triton

from kernels.cuda.timing import GraphTimer

log = logging.getLogger(__name__)

Key = tuple[int | str, ...]
"""What distinguishes one choice from another of the same operation: sizes, types."""


class Timer(Protocol):
    """Measures a call."""

    def __call__(self, call: Callable[[], object]) -> float:
        """Seconds that `call` takes on the device. Raises what it raises."""
        ...


class Tuner:
    """Remembers the fastest candidate of every key, in memory and in a file for this device and these versions."""

    def __init__(self, device: torch.device, directory: Path | None, timer: Timer | None = None) -> None:
        """directory: where choices are kept; it is made with mode 0700, and not used if it is another user's or others
        can write to it. None: nothing is kept. timer: replaces the one that suits the device; on a CPU nothing is
        measured without one.
        """
        self._device = device
        self._timer = timer or (GraphTimer(device) if device.type == "cuda" else None)
        self._file = None if directory is None else _choices_file(directory, _identity(device))
        self._known = {} if self._file is None else _read(self._file)
        self._names: dict[tuple[str, Key], str] = {}
        self._is_frozen = False
        self._guesses: list[tuple[str, Key]] = []
        """What was answered while frozen, without a measurement."""

    def choose(self, op: str, key: Key, candidates: Mapping[str, Callable[[], object]], default: str) -> str:
        """Name of the candidate of an operation that is fastest for a key; one that raises is left out.

        `default` where nothing is remembered and nothing can be measured: amid the capture of a graph, without a
        device, or if all candidates raise. Costs a look into a dictionary when known.
        """
        name = self.known(op, key)
        if name is not None and name in candidates:
            return name
        if len(candidates) == 1:
            return next(iter(candidates))
        name = self._remembered_or_measured(op, key, candidates)
        if name is None:
            if self._is_frozen:
                self._names[op, key] = default
                self._guesses.append((op, key))
            elif self._measures():
                # Nothing could be measured: it would not be otherwise the next time, and take as long.
                self._names[op, key] = default
            return default
        self._names[op, key] = name
        return name

    def freeze(self) -> None:
        """Measure nothing from now on: the default is taken where nothing is remembered."""
        self._is_frozen = True
        if isinstance(self._timer, GraphTimer):
            self._timer.let_go()

    def thaw(self) -> None:
        """Measure again, also what was answered meanwhile."""
        self._is_frozen = False
        for guess in self._guesses:
            self._names.pop(guess, None)
        self._guesses.clear()

    def known(self, op: str, key: Key) -> str | None:
        """What was chosen before, so that candidates need not be made."""
        return self._names.get((op, key))

    def _remembered_or_measured(self, op: str, key: Key, candidates: Mapping[str, Callable[[], object]]) -> str | None:
        entry = _entry(op, key, candidates)
        name = self._known.get(entry)
        if name in candidates:
            return name
        if not self._measures():
            return None
        name = self._fastest(op, key, candidates)
        if name is not None:
            self._known[entry] = name
            if self._file is not None:
                _write(self._file, self._known)
        return name

    def _measures(self) -> bool:
        if self._timer is None or self._is_frozen:
            return False
        return self._device.type != "cuda" or not torch.cuda.is_current_stream_capturing()

    def _fastest(self, op: str, key: Key, candidates: Mapping[str, Callable[[], object]]) -> str | None:
        assert self._timer is not None
        times: dict[str, float] = {}
        for name, call in candidates.items():
            try:
                times[name] = self._timer(call)
            except Exception as error:  # A candidate that cannot do it is no candidate, whatever it says.
                log.debug("event=candidate_left_out op=%s key=%s candidate=%s reason=%r", op, key, name, error)
        if not times:
            log.warning("event=nothing_measured op=%s key=%s effect=the default is taken", op, key)
            return None
        shown = " ".join(f"{name}:{seconds * 1e6:.1f}us" for name, seconds in sorted(times.items(), key=lambda t: t[1]))
        log.debug("event=measured op=%s key=%s %s", op, key, shown)
        return min(times, key=times.__getitem__)


def _entry(op: str, key: Key, candidates: Mapping[str, Callable[[], object]]) -> str:
    # With the candidates' names in it: where there are new ones, they must be measured.
    names = hashlib.sha256(",".join(sorted(candidates)).encode()).hexdigest()[:8]
    return " ".join((op, *map(str, key), names))


def _identity(device: torch.device) -> str:
    """A name for what measurements depend on, beside the shapes."""
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    facts = " ".join(
        (
            *(properties.name, str(properties.multi_processor_count)),
            *(torch.__version__, triton.__version__, _flashinfer_version(), _own_version()),
        )
    )
    plain = "".join(char if char.isalnum() else "-" for char in properties.name)
    return f"{plain}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"


def _flashinfer_version() -> str:
    try:
        return metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        return "none"


def _own_version() -> str:
    """Of the kernels: a name may stand for another configuration after a change."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(__file__).parent.parent / "flashinfer"):
        for file in sorted(folder.glob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _choices_file(directory: Path, identity: str) -> Path | None:
    """None, with a line in the log, where the directory cannot be used or must not be trusted."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = directory.stat()
    except OSError as error:
        log.warning("event=choices_not_kept directory=%s reason=%s", directory, error.strerror)
        return None
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        log.warning("event=choices_not_kept directory=%s reason=another user can write to it", directory)
        return None
    return directory / f"{identity}.json"


def _read(file: Path) -> dict[str, str]:
    """Nothing where there is no file; a file that is broken is told of and then replaced."""
    try:
        found = json.loads(file.read_bytes())
        if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
            raise ValueError("not a table of names")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("event=choices_unreadable file=%s reason=%s effect=measured anew", file, error)
        return {}
    return found


def _write(file: Path, known: Mapping[str, str]) -> None:
    """Whole or not at all: several processes may write, and the last one's choices stay."""
    written = Path(f"{file}.{os.getpid()}")
    try:
        written.write_text(json.dumps(dict(sorted(known.items())), indent=0))
        os.replace(written, file)
    except OSError as error:
        written.unlink(missing_ok=True)
        log.warning("event=choices_not_kept file=%s reason=%s", file, error.strerror)
