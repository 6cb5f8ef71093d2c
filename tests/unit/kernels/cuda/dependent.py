"""What is compiled of kernels that take part in programmatic dependent launch keeps the rules of docs/kernels.md."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.support.triton_compile import Compiled

WAIT = "griddepcontrol.wait"
NEXT = "griddepcontrol.launch_dependents"

_WRITES = re.compile(r"\b(?:st\.global|atom\.|red\.|cp\.async\.bulk\.global|ret\b)")
_READS = re.compile(r"\b(?:ld\.global|cp\.async\.c[ag])")


def both_ways(
    name: str, make: Callable[[bool], Compiled], capability: int, *, reads_weights: bool = False
) -> list[tuple[str, Compiled]]:
    """Names and results of a kernel alone and, where there is dependent launch, of the one that takes part.

    make: compiles it, told whether it takes part. reads_weights: it may read, though not write, before it waits.
    """
    plain = make(False)
    assert WAIT not in plain.ptx and NEXT not in plain.ptx, name
    if capability < 90:
        return [(name, plain)]
    early = make(True)
    assert_waits(name, early.ptx, reads_weights=reads_weights)
    return [(name, plain), (f"{name}, pdl", early)]


def assert_waits(name: str, ptx: str, *, reads_weights: bool = False) -> None:
    """All threads wait, once, before anything is written or, unless weights are, read; and none leaves before."""
    body = ptx[ptx.index(".entry") :]
    assert body.count(WAIT) == 1 and body.count(NEXT) >= 1, name
    before = body[: body.index(WAIT)]
    assert not _WRITES.search(before), (name, _WRITES.findall(before))
    assert reads_weights or not _READS.search(before), (name, _READS.findall(before))
