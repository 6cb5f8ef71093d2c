"""Imports only go down (docs: the house), and the light entry points load nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("engine", "tokenizer_proc", "scheduler_proc", "detokenizer_proc", "kernels")

SHARED = frozenset(
    f"engine.{name}"
    for name in ("ipc", "config", "sampling", "errors", "model_files", "sharing", "tokenizer", "sd_notify")
)
PROCESSES = frozenset({"tokenizer_proc", "scheduler_proc", "detokenizer_proc"})
FACES = frozenset(f"engine.{name}" for name in ("server", "api", "lang", "grpc", "router", "bench"))

CLIENT = frozenset(
    f"engine.{name}" for name in ("generation", "health", "client", "spawn", "workers", "supervisor")
) | {"engine"}

# Who may import whom, besides itself. The supervisor starts processes by name, so it imports none.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "kernels": frozenset(),
    **dict.fromkeys(SHARED, SHARED | {"engine"}),
    "tokenizer_proc": SHARED | {"engine"},
    "detokenizer_proc": SHARED | {"engine"},
    "scheduler_proc": SHARED | {"engine", "kernels"},
    "engine.generation": SHARED | {"engine"},
    "engine.health": SHARED | {"engine"},
    "engine.client": SHARED | {"engine", "engine.generation", "engine.health"},
    "engine.spawn": SHARED | {"engine"},
    "engine.workers": SHARED | {"engine", "engine.client", "engine.spawn"},
    "engine.supervisor": SHARED | {"engine", "engine.client", "engine.spawn", "engine.workers"},
    **dict.fromkeys(FACES, SHARED | FACES | CLIENT),
    "engine.cli": SHARED | FACES | CLIENT,
    # The front door names what it loads lazily; that it loads nothing by itself is tested below.
    "engine": SHARED | FACES | {"engine.client", "engine.supervisor"},
}


def unit_of(module: str) -> str | None:
    """The floor's name for one of our modules: engine.<part>, or the package."""
    head, _, rest = module.partition(".")
    if head not in PACKAGES:
        return None
    return f"engine.{rest.split('.')[0]}" if head == "engine" and rest else head


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, path: Path) -> Iterator[str]:
    """Every module named in an import, in functions and for type checking too."""
    package = list(path.relative_to(ROOT).parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from engine import client` imports engine.client; `from engine import __version__` only engine.
            yield from (
                f"{module}.{alias.name}" if module == "engine" and is_module(alias.name) else module
                for alias in node.names
            )


def is_module(name: str) -> bool:
    return (ROOT / "engine" / name).is_dir() or (ROOT / "engine" / f"{name}.py").is_file()


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def test_there_is_something_to_check() -> None:
    assert {module_name(path).split(".")[0] for path in sources()} >= {"engine"}


def test_imports_only_go_down() -> None:
    wrong = []
    for path in sources():
        own = unit_of(module_name(path))
        assert own is not None
        assert own in MAY_IMPORT, f"{own} has no floor yet: give it one here"
        for target in imports(ast.parse(path.read_text(), str(path)), path):
            unit = unit_of(target)
            if unit is not None and unit != own and unit not in MAY_IMPORT[own]:
                wrong.append(f"{path.relative_to(ROOT)} imports {target}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["pickle", "fastapi", "dill", "cloudpickle", "transformers"])
def test_what_no_module_imports(name: str) -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in sources()
        if any(target.split(".")[0] == name for target in imports(ast.parse(path.read_text()), path))
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import engine", {"torch", "numpy", "zmq", "aiohttp", "asyncio", "msgspec"}),
        ("import engine.cli.flags", {"torch", "numpy", "zmq", "aiohttp", "yaml", "asyncio"}),
        ("import engine.model_files", {"torch", "transformers"}),
        ("import engine.tokenizer", {"torch", "transformers"}),
        ("import engine.server.app", {"torch", "transformers"}),
        ("import engine.bench.command", {"torch", "transformers"}),
        ("import engine.bench.worker", {"torch", "transformers"}),
    ],
)
def test_light_imports(statement: str, heavy: set[str]) -> None:
    code = f"{statement}\nimport sys\nloaded = {heavy!r} & set(sys.modules)\nassert not loaded, loaded"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
