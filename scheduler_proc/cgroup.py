"""What Linux control groups leave this process of the machine's memory, in bytes.

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
    limits: tuple[str, ...]
    usage: str
    cache: tuple[str, ...]


V1 = Version(
    "cgroup",
    "/sys/fs/cgroup/memory",
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "inactive_file"),
)
# Beyond memory.high nothing is refused, but everything is slowed down until it is back below.
V2 = Version("cgroup2", "/sys/fs/cgroup", ("memory.max", "memory.high"), "memory.current", ("inactive_file",))


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes until the first limit of the groups of this process, at least 0; None where there is no limit.

    root: stands for the file system's root, /proc and /sys included.
    """
    rooms = [
        room
        for version, path in _memberships(root)
        for folder in _folders(root, version, path)
        if (room := _room(folder, version)) is not None
    ]
    return min(rooms, default=None)


def _memberships(root: Path) -> Iterator[tuple[Version, str]]:
    """The groups that this process's memory is charged to, by their path in the hierarchy."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield V2, path
        elif "memory" in controllers.split(","):
            yield V1, path


def _folders(root: Path, version: Version, path: str) -> Iterator[Path]:
    """The group's folder and those above it, as far as they are to be seen from here."""
    mount, top = _mount(root, version)
    group = PurePosixPath("/" + path.lstrip("/"))
    inside = group.relative_to(top) if group.is_relative_to(top) else group.relative_to("/")
    # A path from outside a namespace leads nowhere here; what can be seen of it begins at the mount.
    if ".." in inside.parts:
        inside = PurePosixPath()
    for part in (inside, *inside.parents):
        folder = mount / part
        if folder.is_dir():
            yield folder


def _mount(root: Path, version: Version) -> tuple[Path, str]:
    """Where the hierarchy is mounted, and the group in it that one sees there."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        mount, _, source = line.partition(" - ")
        fields, (kind, *rest) = mount.split(), source.split() or [""]
        if kind != version.filesystem or len(fields) < 5:
            continue
        if version is V1 and "memory" not in rest[-1].split(","):
            continue
        return root / fields[4].lstrip("/"), fields[3]
    return root / version.usual_mount.lstrip("/"), "/"


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


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
