"""airgap_wheels: what it collects for which target. pip is real; its index is a folder of wheels made here."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import airgap_wheels
from tools.airgap_wheels import (
    BundleError,
    Target,
    build_engine,
    collect,
    glibc_needed,
    main,
    not_asked_for,
    parse_target,
)

ROOT = Path(__file__).resolve().parents[3]
TARGET = Target((3, 12), "x86_64", (2, 28))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    folder.mkdir()
    return folder


def wheel(
    index: Path, name: str, version: str = "1.0", requires: Iterable[str] = (), tag: str = "py3-none-any"
) -> Path:
    path = index / f"{name}-{version}-{tag}.whl"
    info = f"{name}-{version}.dist-info"
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in requires]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", "\n".join(metadata) + "\n")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_platforms() -> None:
    assert parse_target("3.12", "manylinux_2_31_aarch64") == Target((3, 12), "aarch64", (2, 31))
    assert parse_target("3.11.7", "manylinux2014_x86_64") == Target((3, 11), "x86_64", (2, 17))
    for shorthand in ("x86_64", "linux_x86_64", "linux-x86_64"):
        assert parse_target("3.12", shorthand) == TARGET


def test_tags_are_those_of_its_glibc_and_older() -> None:
    tags = TARGET.tags()
    assert tags[0] == "manylinux_2_28_x86_64" and tags[-1] == "linux_x86_64"
    assert {"manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64"} <= set(tags)
    assert "manylinux_2_29_x86_64" not in tags
    assert "manylinux1_aarch64" not in Target((3, 12), "aarch64", (2, 28)).tags()


def test_markers_are_the_targets(index: Path, bundle: Path) -> None:
    requires = ("old; python_version < '3.12'", "arm; platform_machine == 'aarch64'", "mac; sys_platform == 'darwin'")
    wheel(index, "root", requires=(*requires, "new; python_version >= '3.12'", "leaf[more]"))
    wheel(index, "leaf", requires=("extra_dep; extra == 'more'", "other; extra == 'less'"))
    for name in ("old", "arm", "mac", "new", "extra_dep", "other"):
        wheel(index, name)
    assert set(collect([Requirement("root")], TARGET, bundle)) == {"root", "new", "leaf", "extra-dep"}
    assert len(list(bundle.iterdir())) == 4


def test_what_only_a_package_left_out_needs_is_left_out(index: Path, bundle: Path) -> None:
    wheel(index, "root", requires=("heavy", "shared"))
    wheel(index, "shared")
    # There is no heavy at all: it is not even asked for.
    assert set(collect([Requirement("root")], TARGET, bundle, {"heavy"})) == {"root", "shared"}


def test_names_left_out_that_nothing_asked_for(index: Path, bundle: Path) -> None:
    wheel(index, "root", requires=("Heavy_One", "shared"))
    wheel(index, "shared")
    roots = [Requirement("root"), Requirement("light")]
    collect(roots, TARGET, bundle, {"heavy-one", "light"})
    assert not_asked_for(["heavy.one", "light", "haevy"], roots, bundle) == ["haevy"]


def test_the_targets_wheel_is_taken(index: Path, bundle: Path) -> None:
    for tag in ("cp311-cp311-manylinux_2_17_x86_64", "cp312-cp312-manylinux_2_17_x86_64"):
        wheel(index, "native", tag=tag)
    wheel(index, "native", "2.0", tag="cp312-cp312-manylinux_2_34_x86_64")
    assert collect([Requirement("native")], TARGET, bundle) == {"native": "1.0"}
    assert [path.name for path in bundle.iterdir()] == ["native-1.0-cp312-cp312-manylinux_2_17_x86_64.whl"]


def test_a_version_found_too_new_is_replaced(index: Path, bundle: Path) -> None:
    for version in ("1.0", "2.0"):
        wheel(index, "shared", version, requires=("dropped",) if version == "2.0" else ())
    wheel(index, "dropped")
    wheel(index, "middle", requires=("shared<2",))
    found = collect([Requirement("shared"), Requirement("middle")], TARGET, bundle)
    assert found == {"shared": "1.0", "middle": "1.0"}
    assert sorted(path.name.split("-")[0] for path in bundle.iterdir()) == ["middle", "shared"]


def test_constraints(index: Path, bundle: Path, tmp_path: Path) -> None:
    for version in ("1.0", "2.0"):
        wheel(index, "shared", version)
    constraint = tmp_path / "constraints.txt"
    constraint.write_text("shared==1.0\n")
    assert collect([Requirement("shared")], TARGET, bundle, constraints=[constraint]) == {"shared": "1.0"}


def test_a_missing_wheel_is_named(index: Path, bundle: Path) -> None:
    wheel(index, "root", requires=("native>=1",))
    wheel(index, "native", tag="cp312-cp312-manylinux_2_17_aarch64")
    with pytest.raises(BundleError, match=r"no wheel of native>=1 for Python 3\.12 on manylinux_2_28_x86_64"):
        collect([Requirement("root")], TARGET, bundle)


def test_without_a_network(index: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    # Port 9 discards, where anything listens at all.
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(BundleError, match="no network"):
        collect([Requirement("anything")], TARGET, bundle)


@pytest.mark.parametrize(
    ("arguments", "said"),
    (
        (("2.7", "x86_64"), "'2.7' is no Python"),
        (("3.12", "sparc"), "unknown platform 'sparc'; known are"),
        (("3.12", "win_amd64"), "unknown platform 'win_amd64'"),
        (("3.12", "x86_64", "OUT", "--extra", "nothing"), "the engine has no extra 'nothing'; it has: cuda, test"),
        (("3.12", "x86_64", "FULL"), "is not empty"),
        (("3.12", "x86_64", "FILE"), "is a file, not a folder"),
        (("3.9", "x86_64", "OUT"), "the engine needs Python >=3.11, not 3.9"),
    ),
)
def test_errors(arguments: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "FULL").mkdir()
    (tmp_path / "FULL/file").touch()
    (tmp_path / "FILE").touch()
    places = {name: str(tmp_path / name) for name in ("OUT", "FULL", "FILE")}
    assert main([places.get(argument, argument) for argument in arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("airgap_wheels: ") and said in error
    assert not (tmp_path / "OUT").exists()


def test_help() -> None:
    run = subprocess.run([ROOT / "tools/airgap_wheels.sh", "--help"], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("usage: airgap_wheels.sh")


def test_glibc_is_read_from_the_libraries(tmp_path: Path) -> None:
    path = tmp_path / "x.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.so", b"\0GLIBC_2.9\0GLIBC_2.34\0GLIBC_PRIVATE\0GLIBCXX_3.4\0")
        archive.writestr("a.py", "GLIBC_3.99")
    assert glibc_needed(path) == (2, 34)


def test_another_machine_gets_the_sources(tmp_path: Path) -> None:
    other = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    engine = build_engine(Target((3, 12), other, (2, 28)), tmp_path)
    assert engine.is_source and "built on the target" in engine.remark
    with tarfile.open(engine.path) as archive:
        names = archive.getnames()
    (top,) = {name.split("/")[0] for name in names}
    assert engine.path.name == f"{top}.tar.gz"
    for wanted in ("pyproject.toml", "README.md", "LICENSE", "engine/__init__.py", "kernels/cpu/src/main.cpp"):
        assert f"{top}/{wanted}" in names
    assert not [name for name in names if name.endswith((".so", ".pyc")) or "/tests" in name]


def test_an_older_glibc_gets_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(airgap_wheels, "_build_wheel", lambda tree, folder: tree)
    monkeypatch.setattr(airgap_wheels, "glibc_needed", lambda wheel: (2, 34))
    for glibc, is_source in (((2, 28), True), ((2, 34), False)):
        scratch = tmp_path / str(glibc[1])
        scratch.mkdir()
        engine = build_engine(Target((3, 12), platform.machine(), glibc), scratch)
        assert engine.path.name.endswith(".tar.gz") == is_source


LEFT_OUT = ("torch", "triton", "numpy")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_bundle_installs_and_serves_without_a_network(tmp_path: Path) -> None:
    libc, glibc = platform.libc_ver()
    if libc != "glibc":
        pytest.skip("needs glibc")
    python, target = f"{sys.version_info[0]}.{sys.version_info[1]}", f"manylinux_{glibc.replace('.', '_')}"
    bundle = tmp_path / "bundle"
    made = subprocess.run(
        [ROOT / "tools/airgap_wheels.sh", python, f"{target}_{platform.machine()}", bundle, "--without", *LEFT_OUT],
        env={**os.environ, "BUILD_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    if "no network" in made.stderr:
        pytest.skip("needs a package index")
    assert made.returncode == 0, made.stderr
    there = {canonicalize_name(path.name.split("-")[0]) for path in bundle.glob("*.whl")}
    assert "msgspec" in there and not there & set(LEFT_OUT)

    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    link(venv, closure(LEFT_OUT) - there)
    # As the tool says it: from beside the folder, by a relative path.
    offline = {**os.environ, "PYTHON": "venv/bin/python", "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    for name in ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PYTHONPATH"):
        offline.pop(name, None)
    installed = subprocess.run(
        ["bundle/install.sh"], env=offline, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert installed.returncode == 0, installed.stdout + installed.stderr
    code = "import msgspec, zmq, uvloop, aiohttp, engine; import engine.cli.serve; print(engine.__file__)"
    ran = subprocess.run(
        [venv / "bin/python", "-c", code], env=offline, cwd="/", capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert Path(ran.stdout.strip()).is_relative_to(venv)
    helped = subprocess.run(
        [venv / "bin/engine-serve", "--help"], env=offline, cwd="/", capture_output=True, text=True, check=False
    )
    assert helped.returncode == 0 and "--port" in helped.stdout, helped.stderr


def closure(names: Iterable[str]) -> set[str]:
    """These packages and what they need, as far as they are installed here."""
    found: set[str] = set()
    pending = [str(canonicalize_name(name)) for name in names]
    while pending:
        name = pending.pop()
        if name in found:
            continue
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(name)
        requirements = [Requirement(line) for line in lines]
        pending += [
            str(canonicalize_name(r.name)) for r in requirements if not r.marker or r.marker.evaluate({"extra": ""})
        ]
    return found


def link(venv: Path, names: Iterable[str]) -> None:
    """Let an environment have packages of this one: it is the machine that has torch already."""
    (site,) = (venv / "lib").glob("python*/site-packages")
    for name in names:
        distribution = importlib.metadata.distribution(name)
        tops = {path.parts[0] for path in distribution.files or () if path.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            target = site / top
            if not target.exists():
                target.symlink_to(Path(str(distribution.locate_file(top))).resolve())
