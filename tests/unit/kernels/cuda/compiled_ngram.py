"""The kernel of n-gram trees as it is launched, compiled without a GPU.

Not a test by itself: `compile_all` is for a process whose kernels are not interpreted.
"""

from __future__ import annotations

from kernels.cuda.ngram import TEXT_BLOCK, tree_rows
from tests.support.triton_compile import Compiled, compile_kernel

TREE = {
    "texts": "*i32",
    "seq_len": "*i64",
    "rows": "*i64",
    "known": "*i32",
    "keys": "*i64",
    "known_places": "*i32",
    "tokens_out": "*i64",
    "parents_out": "*i64",
    "num_drafts": "i32",
    "depth": "i32",
    "share": "i32",
    "least": "i32",
    "last_place": "i32",
    "text_stride": "i32",
    "num_known": "i32",
    "num_keys": "i32",
    "kept": "i32",
}


def compile_all(capability: int = 90) -> list[tuple[str, Compiled]]:
    """Names and results."""
    done = []
    for with_corpus in (False, True):
        for branches, size in ((1, 8), (2, 8), (4, 8), (4, 16), (16, 64)):
            if branches == 1 and not with_corpus:
                continue
            constants = {
                "MOST": 8,
                "BRANCHES": branches,
                "BLOCK": TEXT_BLOCK,
                "SIZE": size,
                "WAYS": branches,
                "KEPT": branches,
                "KNOWN": 8 * branches,
            }
            if branches == 1:
                constants |= {"parents_out": None, "kept": 1}
            if not with_corpus:
                constants |= {"known": None, "keys": None, "known_places": None}
            made = compile_kernel(tree_rows, TREE, constants, capability=capability, num_warps=4)
            corpus = ", corpus" if with_corpus else ""
            done.append((f"tree_rows, {branches} branches, {size} nodes{corpus}", made))
    return done
