"""What Linux control groups leave this process of the machine: memory in bytes, processor time in CPUs.

A process is charged to its own group and to each group around it, so the tightest of all of them counts: a container's,
a pod's, a systemd unit's. Page cache that the kernel drops before it refuses memory is not counted as used.
See cgroups(7) and the kernel's cgroup-v1 and cgroup-v2 manuals.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple


class Version(NamedTuple):
    """How one version of control groups names its files; `cache`: memory.stat's droppable page cache, best first."""

    filesystem: str
    usual_mount: str
    """`{}` stands for the controller: version 1 has a hierarchy for each."""
    limits: tuple[str, ...]
    usage: str
    cache: tuple[str, ...]


V1 = Version(
    "cgroup",
    "sys/fs/cgroup/{}",
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "inactive_file"),
)
# Beyond memory.high nothing is refused, but everything is slowed down until it is back below.
V2 = Version("cgroup2", "sys/fs/cgroup", ("memory.max", "memory.high"), "memory.current", ("inactive_file",))


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes until the first limit of the groups of this process, at least 0; None where there is no limit.

    root: stands for the file system's root, /proc and /sys included.
    """
    found = (_room(folder, version) for version, folder in _groups(root, "memory"))
    return min((room for room in found if room is not None), default=None)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs whose whole time the groups of this process may use; None where there is no limit."""
    found = (_quota(folder, version) for version, folder in _groups(root, "cpu"))
    return min((quota for quota in found if quota is not None), default=None)


def _groups(root: Path, controller: str) -> Iterator[tuple[Version, Path]]:
    """The groups that this process's use of memory or cpu is charged to, each with those around it."""
    for version, path in _memberships(root, controller):
        for folder in _folders(root, controller, version, path):
            yield version, folder


def _memberships(root: Path, controller: str) -> Iterator[tuple[Version, str]]:
    """Their paths in the hierarchies."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield V2, path
        elif controller in controllers.split(","):
            yield V1, path


def _folders(root: Path, controller: str, version: Version, path: str) -> Iterator[Path]:
    """The group's folder and those above it, as far as they are to be seen from here."""
    mount, top = _mount(root, controller, version)
    group = PurePosixPath("/" + path.lstrip("/"))
    inside = group.relative_to(top) if group.is_relative_to(top) else group.relative_to("/")
    # A path from outside a namespace leads nowhere here; what can be seen of it begins at the mount.
    if ".." in inside.parts:
        inside = PurePosixPath()
    for part in (inside, *inside.parents):
        folder = mount / part
        if folder.is_dir():
            yield folder


def _mount(root: Path, controller: str, version: Version) -> tuple[Path, str]:
    """Where the hierarchy is mounted, and the group in it that one sees there."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        mount, _, source = line.partition(" - ")
        fields, (kind, *rest) = mount.split(), source.split() or [""]
        if kind != version.filesystem or len(fields) < 5:
            continue
        if version is V1 and controller not in rest[-1].split(","):
            continue
        return root / fields[4].lstrip("/"), fields[3]
    return root / version.usual_mount.format(controller), "/"


def _room(folder: Path, version: Version) -> int | None:
    """Bytes that one group still allows; None if it sets no limit."""
    found = [_read(folder / name).strip() for name in version.limits]
    limits = [int(text) for text in found if text.isdigit()]
    usage = _read(folder / version.usage).strip()
    if not limits or not usage.isdigit():
        return None
    stat = dict(line.split(maxsplit=1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
    cache = next((int(stat[name]) for name in version.cache if stat.get(name, "").isdigit()), 0)
    return max(min(limits) - max(int(usage) - cache, 0), 0)


def _quota(folder: Path, version: Version) -> float | None:
    """CPUs that one group allows; None if it sets no limit, which is -1 in version 1 and `max` in version 2."""
    if version is V2:
        texts = _read(folder / "cpu.max").split()
    else:
        texts = [_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(texts) != 2 or not all(text.isdigit() and int(text) for text in texts):
        return None
    quota_us, period_us = map(int, texts)
    return quota_us / period_us


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
