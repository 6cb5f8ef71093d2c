"""How many threads of computation this process has use for."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from pathlib import Path

from scheduler_proc.cgroup import cpu_quota


def usable_cores(root: Path = Path("/"), cpus: Collection[int] | None = None) -> int:
    """Physical cores this process may run on, but no more than its control groups give it time for; at least 1.

    Two hardware threads of a core share its arithmetic units, so a second thread of computation there gains nothing.
    root: stands for the file system's root, /proc and /sys included. cpus: what the process may run on, by default
    its affinity (which control groups' cpusets narrow too).
    """
    allowed = os.sched_getaffinity(0) if cpus is None else cpus
    cores = len({_siblings(root, cpu) for cpu in allowed})
    quota = cpu_quota(root)
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def _siblings(root: Path, cpu: int) -> str:
    """The CPUs of `cpu`'s core in the kernel's list form, or `cpu` alone where the kernel does not say."""
    folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    for name in ("core_cpus_list", "thread_siblings_list"):
        try:
            text = (folder / name).read_text().strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text:
            return text
    return str(cpu)
