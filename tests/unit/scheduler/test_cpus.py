"""Cores that count: affinity, hardware threads, quotas; from trees of files laid out as Linux does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scheduler_proc.cgroup import cpu_quota
from scheduler_proc.cpus import usable_cores

MOUNT_V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
MOUNT_V1 = "35 31 0:32 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def topology(root: Path, siblings: list[str], name: str = "thread_siblings_list") -> None:
    """siblings: for each CPU the list of those on its core."""
    for cpu, text in enumerate(siblings):
        write(root / f"sys/devices/system/cpu/cpu{cpu}/topology/{name}", f"{text}\n")


def v2(root: Path, quotas: dict[str, str], group: str) -> None:
    write(root / "proc/self/cgroup", f"0::/{group}\n")
    write(root / "proc/self/mountinfo", MOUNT_V2)
    for folder, text in quotas.items():
        write(root / "sys/fs/cgroup" / folder / "cpu.max", f"{text}\n")


@pytest.mark.parametrize("name", ["thread_siblings_list", "core_cpus_list"])
def test_hardware_threads_of_a_core_count_once(tmp_path: Path, name: str) -> None:
    topology(tmp_path, ["0,4", "1,5", "2,6", "3,7"] * 2, name)
    assert usable_cores(tmp_path, range(8)) == 4
    assert usable_cores(tmp_path, {0, 4}) == 1
    assert usable_cores(tmp_path, {1, 4, 6}) == 3


def test_without_a_topology_every_cpu_is_a_core(tmp_path: Path) -> None:
    assert usable_cores(tmp_path, range(6)) == 6
    topology(tmp_path, ["", "", "2"])
    assert usable_cores(tmp_path, range(6)) == 6


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 8), ("150000 100000", 2), ("200000 100000", 2), ("1000 100000", 1), ("9999999 100000", 8), ("", 8)],
)
def test_a_quota_is_rounded_up(tmp_path: Path, quota: str, expected: int) -> None:
    v2(tmp_path, {"a": quota}, "a")
    assert usable_cores(tmp_path, range(8)) == expected


def test_the_tightest_quota_on_the_way_up_counts(tmp_path: Path) -> None:
    v2(tmp_path, {"pods": "800000 100000", "pods/one": "50000 20000", "pods/one/main": "max 100000"}, "pods/one/main")
    assert cpu_quota(tmp_path) == 2.5
    assert usable_cores(tmp_path, range(8)) == 3
    assert usable_cores(tmp_path, range(2)) == 2


@pytest.mark.parametrize(("quota", "expected"), [("-1", None), ("300000", 3.0), ("0", None)])
def test_version_1(tmp_path: Path, quota: str, expected: float | None) -> None:
    write(tmp_path / "proc/self/cgroup", "5:memory:/elsewhere\n4:cpu,cpuacct:/docker/abc\n0::/\n")
    write(tmp_path / "proc/self/mountinfo", MOUNT_V1)
    folder = tmp_path / "sys/fs/cgroup/cpu,cpuacct/docker/abc"
    write(folder / "cpu.cfs_quota_us", f"{quota}\n")
    write(folder / "cpu.cfs_period_us", "100000\n")
    assert cpu_quota(tmp_path) == expected


def test_version_1_at_its_usual_place(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "4:cpu:/a\n")
    write(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "50000\n")
    write(tmp_path / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert cpu_quota(tmp_path) == 0.5
    assert usable_cores(tmp_path, range(4)) == 1


def test_this_machine() -> None:
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
