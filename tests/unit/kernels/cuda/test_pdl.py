"""Kernels that take part in programmatic dependent launch wait before they touch what other kernels write.

This reads the sources; what is compiled is looked at in compiled_*.py.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from kernels.cuda import pdl

FOLDER = Path(pdl.__file__).parent

READ_BEFORE = {
    "strip_kernel": {"weight_ptr"},
    "vector_kernel": {"weight_ptr"},
}
"""By kernel the pointers that may be read before it waits: weights, which no kernel of a step writes."""

NUMBERS = {"OUT_DIM", "in_dim", "weight_stride"}
"""Arguments of these that are no pointers."""

TAKING_PART = {
    *("fill_rows", "end_rows", "copy_rows", "rms_rows", "rms_long_rows", "rope_store_heads", "attend", "gate_rows"),
    *("strip_kernel", "vector_kernel", "tile_kernel"),
    *("summarise_tiles", "bound_rows", "collect_candidates", "take_largest", "choose_rows", "advance_rows"),
}
"""All kernels of a decode step, but for what is never launched in its graphs."""


@dataclass(frozen=True)
class Sources:
    """All that is compiled in kernels/cuda, and what is launched there."""

    functions: dict[str, ast.FunctionDef]
    """With the decorator triton.jit, by name."""
    modules: dict[str, ast.Module]


@pytest.fixture(scope="module")
def sources() -> Sources:
    modules = {path.name: ast.parse(path.read_text()) for path in sorted(FOLDER.glob("*.py"))}
    functions: dict[str, ast.FunctionDef] = {}
    for module in modules.values():
        for node in module.body:
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                functions[node.name] = node
    return Sources(functions, modules)


def test_kernels_of_a_decode_step_take_part(sources: Sources) -> None:
    assert {name for name, function in sources.functions.items() if "PDL" in parameters(function)} == TAKING_PART


def test_launches_say_the_same_to_the_kernel_and_to_the_driver(sources: Sources) -> None:
    launched: set[str] = set()
    for module in sources.modules.values():
        for scope in ast.walk(module):
            if not isinstance(scope, ast.FunctionDef):
                continue
            for call in calls(scope):
                told = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
                if "PDL" in told or "launch_pdl" in told:
                    assert told["PDL"] == told["launch_pdl"], ast.unparse(call)
                    launched |= kernels_of(call, scope, module) & sources.functions.keys()
    assert launched == TAKING_PART


@pytest.mark.parametrize("name", sorted(TAKING_PART))
def test_nothing_is_touched_before_the_wait(name: str, sources: Sources) -> None:
    function = sources.functions[name]
    before = list(statements_before_wait(function))
    for statement in before:
        assert not any(isinstance(node, ast.Return) for node in ast.walk(statement)), ast.unparse(statement)
    origins = origins_of(before, function)
    allowed = READ_BEFORE.get(name, set()) | NUMBERS
    for statement in before:
        for what, pointer in accesses(statement, sources, {}):
            assert what == "load", f"{what} before the wait: {ast.unparse(statement)}"
            assert named(pointer, origins) <= allowed, ast.unparse(statement)


def test_the_check_sees_what_is_wrong(sources: Sources) -> None:
    wrong = ast.parse("""
def kernel(x, out, PDL):
    a = x + 1
    helper(a)
    b = tl.load(out)
    tl.store(out, b)
    if PDL:
        gdc_wait()
    tl.store(x, b)

def helper(place):
    return tl.load(place + 1)
""")
    kernel, helper = (node for node in wrong.body if isinstance(node, ast.FunctionDef))
    before = list(statements_before_wait(kernel))
    origins = origins_of(before, kernel)
    found = [
        (what, named(pointer, origins))
        for statement in before
        for what, pointer in accesses(statement, Sources({"helper": helper}, {}), {})
    ]
    assert found == [("load", {"x"}), ("load", {"out"}), ("store", {"out"})]


def test_every_wait_lets_the_next_kernel_begin(sources: Sources) -> None:
    for name in TAKING_PART:
        (block,) = [node for node in sources.functions[name].body if is_wait(node)]
        places = 2 if name in ("rms_rows", "rms_long_rows") else 1  # By the dimension, one of two.
        assert ast.unparse(block).count("gdc_launch_dependents()") == places, name


def test_it_is_on_where_it_is_asked_for_and_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pdl.dependent_launch():
        assert not pdl.is_wanted(torch.zeros(1))
    asked: list[torch.device] = []

    def capability(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return (9, 0) if device.index == 0 else (8, 9)

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    pdl.can.cache_clear()
    first, second = (cast(Tensor, SimpleNamespace(device=torch.device("cuda", index))) for index in (0, 1))
    try:
        assert not pdl.is_wanted(first)
        with pdl.dependent_launch():
            assert [pdl.is_wanted(tensor) for tensor in (first, second, first, second)] == [True, False, True, False]
            assert len(asked) == 2
            with pdl.dependent_launch(False):
                assert not pdl.is_wanted(first)
            assert pdl.is_wanted(first)
        assert not pdl.is_wanted(first)
    finally:
        pdl.can.cache_clear()


def parameters(function: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in function.args.args]


def calls(node: ast.AST) -> list[ast.Call]:
    return [found for found in ast.walk(node) if isinstance(found, ast.Call)]


def kernels_of(call: ast.Call, scope: ast.FunctionDef, module: ast.Module) -> set[str]:
    """Names that a launch may be of, past the variables that stand for a kernel or a kernel with its grid."""
    found = {node.id for node in ast.walk(call.func) if isinstance(node, ast.Name)}
    for node in (*ast.walk(scope), *module.body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in found:
            found |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    return found


def is_wait(statement: ast.stmt) -> bool:
    """Whether it is `if PDL:` with the wait as one of its own statements."""
    return (
        isinstance(statement, ast.If)
        and ast.unparse(statement.test) == "PDL"
        and any(ast.unparse(inner) == "gdc_wait()" for inner in statement.body)
    )


def statements_before_wait(function: ast.FunctionDef) -> Iterator[ast.stmt]:
    """Of the function itself, in their order; the wait must be among them, so that every program comes by it."""
    for statement in function.body:
        if is_wait(statement):
            assert isinstance(statement, ast.If) and not statement.orelse
            for inner in statement.body:
                if ast.unparse(inner) == "gdc_wait()":
                    return
                yield inner
        yield statement
    raise AssertionError(f"{function.name} does not wait")


def origins_of(statements: list[ast.stmt], function: ast.FunctionDef) -> dict[str, set[str]]:
    """For each variable the arguments of the function that it may be made of."""
    origins = {name: {name} for name in parameters(function) if not name.isupper() or name == "OUT_DIM"}
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                made_of = named(node.value, origins)
                for target in targets:
                    for name in ast.walk(target):
                        if isinstance(name, ast.Name):
                            origins[name.id] = origins.get(name.id, set()) | made_of
    return origins


def named(expression: ast.AST, origins: dict[str, set[str]]) -> set[str]:
    names = (node.id for node in ast.walk(expression) if isinstance(node, ast.Name))
    return set().union(*(origins.get(name, set()) for name in names))


def accesses(node: ast.AST, sources: Sources, arguments: dict[str, ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    """Kind and pointer of each access to memory, also within the functions that are called.

    arguments: what stands for the parameters of the function that the node is in; a pointer in such a function is told
    as all that it was called with.
    """
    for call in calls(node):
        called = ast.unparse(call.func)
        if called in ("tl.load", "tl.store") or called.startswith("tl.atomic"):
            pointer = call.args[0]
            yield called.removeprefix("tl."), ast.Tuple(list(arguments.values()), ast.Load()) if arguments else pointer
        elif called in sources.functions:
            function = sources.functions[called]
            given = dict(zip(parameters(function), call.args, strict=False))
            given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
            whole: dict[str, ast.AST] = {"": ast.Tuple([*given.values(), *arguments.values()], ast.Load())}
            for statement in function.body:
                yield from accesses(statement, sources, whole)
