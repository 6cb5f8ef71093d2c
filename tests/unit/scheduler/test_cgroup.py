"""Memory limits of control groups, read from trees of files laid out as Linux does."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from scheduler_proc.cache.kv_pool import available_memory
from scheduler_proc.cgroup import available_bytes

GIB = 1 << 30
MOUNT_V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
MOUNT_V1 = "35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


class Machine:
    """A file system whose process is in the groups named by /proc/self/cgroup."""

    def __init__(self, root: Path, membership: str, mounts: str | None = MOUNT_V2) -> None:
        self.root = root
        write(root / "proc/self/cgroup", membership)
        if mounts is not None:
            write(root / "proc/self/mountinfo", "23 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + mounts)

    def v2(self, group: str, limit: int | str, used: int, inactive_file: int = 0, high: int | str = "max") -> None:
        folder = self.root / "sys/fs/cgroup" / group
        write(folder / "memory.max", f"{limit}\n")
        write(folder / "memory.high", f"{high}\n")
        write(folder / "memory.current", f"{used}\n")
        write(folder / "memory.stat", f"anon 4096\nfile 8192\ninactive_file {inactive_file}\n")

    def v1(self, group: str, limit: int, used: int, inactive_file: int = 0) -> None:
        folder = self.root / "sys/fs/cgroup/memory" / group
        write(folder / "memory.limit_in_bytes", f"{limit}\n")
        write(folder / "memory.usage_in_bytes", f"{used}\n")
        # A group's own cache is a part of what it and those below it have together.
        write(folder / "memory.stat", f"inactive_file 0\ntotal_inactive_file {inactive_file}\n")

    @property
    def available(self) -> int | None:
        return available_bytes(self.root)


def test_a_units_limit_binds(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/system.slice/engine-serve.service\n")
    machine.v2("system.slice", "max", 9 * GIB)
    machine.v2("system.slice/engine-serve.service", 2 * GIB, GIB // 2)
    assert machine.available == 3 * GIB // 2
    assert available_memory(tmp_path) == min(psutil.virtual_memory().available, 3 * GIB // 2)


def test_the_tightest_group_on_the_way_up_binds(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/pods/pod7/main\n")
    machine.v2("pods", 8 * GIB, 6 * GIB)
    machine.v2("pods/pod7", 4 * GIB, 3 * GIB)
    machine.v2("pods/pod7/main", 16 * GIB, GIB)
    machine.v2("pods/other", 1, 1)
    assert machine.available == GIB
    machine.v2("pods", 8 * GIB, 8 * GIB - 5)
    assert machine.available == 5


def test_page_cache_is_not_used_memory(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/\n")
    machine.v2("", 4 * GIB, 4 * GIB - 4096, inactive_file=3 * GIB)
    assert machine.available == 3 * GIB + 4096


def test_memory_high_is_a_limit_too(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/a\n")
    machine.v2("a", 4 * GIB, GIB, high=2 * GIB)
    assert machine.available == GIB


def test_no_less_than_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/a\n")
    machine.v2("a", GIB, 2 * GIB)
    assert machine.available == 0


@pytest.mark.parametrize("mounts", [None, MOUNT_V1.format(top="/")])
def test_version_1(tmp_path: Path, mounts: str | None) -> None:
    machine = Machine(tmp_path, "9:name=systemd:/elsewhere\n4:cpu,memory:/docker/abc\n0::/\n", mounts)
    machine.v1("", (1 << 63) - 4096, 40 * GIB)
    machine.v1("docker", 6 * GIB, 5 * GIB, inactive_file=4 * GIB)
    machine.v1("docker/abc", 3 * GIB, 2 * GIB, inactive_file=GIB // 2)
    assert machine.available == 3 * GIB // 2


def test_a_container_sees_its_group_at_the_mount(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "4:memory:/docker/abc/inner\n", MOUNT_V1.format(top="/docker/abc"))
    machine.v1("", 3 * GIB, GIB)
    machine.v1("inner", 4 * GIB, GIB)
    assert machine.available == 2 * GIB


@pytest.mark.parametrize("path", ["/not/mounted/here", "/../../outside"])
def test_a_path_that_leads_nowhere_ends_at_the_mount(tmp_path: Path, path: str) -> None:
    machine = Machine(tmp_path, f"0::{path}\n")
    machine.v2("", 3 * GIB, GIB)
    assert machine.available == 2 * GIB


def test_without_groups_the_machine_alone_counts(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
    machine = Machine(tmp_path, "0::/a\n")
    machine.v2("a", "max", GIB)
    assert machine.available is None
    assert 0 < available_memory(tmp_path) <= psutil.virtual_memory().total
