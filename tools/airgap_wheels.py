"""Collects the wheels that a machine without a network needs to install the engine; tools/airgap_wheels.sh runs it.

Versions are chosen for the target, not for the machine that this runs on: pip takes the target's tags, and which
requirements apply is decided here, by the target's own environment markers (pip would take this machine's). What the
target has already is never fetched, nor is what only that needs.
"""

from __future__ import annotations

import argparse
import email
import fnmatch
import hashlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

try:
    from packaging.markers import default_environment
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.specifiers import SpecifierSet
    from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
except ImportError:
    sys.exit(f"airgap_wheels: {sys.executable} lacks `packaging`: pip install packaging, or say BUILD_PYTHON=")

ROOT = Path(__file__).resolve().parent.parent
MACHINES = ("aarch64", "x86_64")
DEFAULT_GLIBC = (2, 28)
# The names that PEP 600 gave numbers to.
LEGACY_TAGS = {(2, 17): "manylinux2014", (2, 12): "manylinux2010", (2, 5): "manylinux1"}
MAX_ROUNDS = 30


class BundleError(Exception):
    """What the user is told; no wheels are left behind that look complete."""


@dataclass(frozen=True)
class Target:
    """The machine to install on."""

    python: tuple[int, int]
    machine: str
    glibc: tuple[int, int]

    @property
    def name(self) -> str:
        return f"Python {self.python[0]}.{self.python[1]} on manylinux_{self.glibc[0]}_{self.glibc[1]}_{self.machine}"

    def tags(self) -> list[str]:
        """Every platform tag that installs there: wheels for its glibc or an older one, best first."""
        tags = []
        for minor in range(self.glibc[1], 4, -1):
            tags.append(f"manylinux_2_{minor}_{self.machine}")
            if (2, minor) in LEGACY_TAGS and (minor == 17 or self.machine == "x86_64"):
                tags.append(f"{LEGACY_TAGS[2, minor]}_{self.machine}")
        return [*tags, f"linux_{self.machine}"]

    def environment(self) -> dict[str, str]:
        """The values of environment markers there."""
        short = f"{self.python[0]}.{self.python[1]}"
        return {
            **dict.fromkeys(default_environment(), ""),
            "implementation_name": "cpython",
            "implementation_version": f"{short}.0",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_system": "Linux",
            "python_full_version": f"{short}.0",
            "python_version": short,
            "sys_platform": "linux",
        }


def parse_target(python: str, platform_name: str) -> Target:
    """Raises BundleError for a Python or a platform that is none."""
    match = re.fullmatch(r"3\.(\d+)(?:\.\d+)?", python)
    if match is None:
        raise BundleError(f"{python!r} is no Python: say 3.12, for example")
    minor = int(match[1])
    match = re.fullmatch(r"(?:(?:manylinux_2_(\d+)|(manylinux2014)|linux)[_-])?([a-z0-9_]+)", platform_name)
    if match is None or match[3] not in MACHINES:
        known = ", ".join(f"{machine} or manylinux_2_28_{machine}" for machine in MACHINES)
        raise BundleError(f"unknown platform {platform_name!r}; known are, for example, {known}")
    glibc = (2, 17) if match[2] else (2, int(match[1])) if match[1] else DEFAULT_GLIBC
    return Target((3, minor), match[3], glibc)


def engine_requirements(extras: Collection[str], root: Path = ROOT) -> list[Requirement]:
    """What the engine needs with these extras. Raises BundleError for an extra that there is not."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    unknown = sorted(set(extras) - set(optional))
    if unknown:
        raise BundleError(f"the engine has no extra {unknown[0]!r}; it has: {', '.join(sorted(optional))}")
    lines = [*project["dependencies"], *(line for extra in extras for line in optional[extra])]
    return [Requirement(line) for line in lines]


def check_python(target: Target, root: Path = ROOT) -> None:
    """Raises BundleError for a Python that the engine does not run on."""
    wanted = tomllib.loads((root / "pyproject.toml").read_text())["project"]["requires-python"]
    if f"{target.python[0]}.{target.python[1]}.0" not in SpecifierSet(wanted):
        raise BundleError(f"the engine needs Python {wanted}, not {target.python[0]}.{target.python[1]}")


def build_requirements(root: Path = ROOT) -> list[Requirement]:
    """What building the engine needs."""
    return [
        Requirement(line) for line in tomllib.loads((root / "pyproject.toml").read_text())["build-system"]["requires"]
    ]


def wheel_requirements(wheel: Path) -> list[Requirement]:
    """All of a wheel's Requires-Dist, those of its extras too."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
        metadata = email.message_from_bytes(archive.read(name))
    requirements = []
    for line in metadata.get_all("Requires-Dist") or []:
        try:
            requirements.append(Requirement(str(line)))
        except InvalidRequirement as e:
            raise BundleError(f"{wheel.name} has a requirement that cannot be read: {line}") from e
    return requirements


def needed(
    roots: Sequence[Requirement], wheels: Mapping[str, Path], target: Target, without: Collection[str]
) -> dict[str, SpecifierSet]:
    """Which packages are needed, by what is known so far, and in which versions."""
    environment = target.environment()
    specifiers: dict[str, SpecifierSet] = {}
    extras: dict[str, set[str]] = {}
    pending = [(requirement, frozenset({""})) for requirement in roots]
    while pending:
        requirement, on_behalf_of = pending.pop()
        marker = requirement.marker
        if marker and not any(marker.evaluate({**environment, "extra": extra}) for extra in on_behalf_of):
            continue
        name = canonicalize_name(requirement.name)
        if name in without:
            continue
        is_new = name not in specifiers or not requirement.extras <= extras[name]
        specifiers[name] = specifiers.get(name, SpecifierSet()) & requirement.specifier
        extras.setdefault(name, set()).update(requirement.extras)
        if is_new and name in wheels:
            asked = frozenset({"", *extras[name]})
            pending += [(inner, asked) for inner in wheel_requirements(wheels[name])]
    return specifiers


def wheels_in(folder: Path) -> Iterator[tuple[str, str, Path]]:
    """(normalised name, version, file) of each wheel."""
    for path in sorted(folder.glob("*.whl")):
        try:
            name, version, _, _ = parse_wheel_filename(path.name)
        except InvalidWheelFilename as e:
            raise BundleError(f"{path.name} is not the name of a wheel") from e
        yield name, str(version), path


def fetch(wanted: Mapping[str, SpecifierSet], target: Target, folder: Path, constraints: Sequence[Path]) -> None:
    """Download one wheel of each package. Raises BundleError that says of which there is none."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), "--implementation", "cp"]
    command += ["--python-version", f"{target.python[0]}.{target.python[1]}"]
    command += [f"--platform={tag}" for tag in target.tags()]
    command += [f"--constraint={path}" for path in constraints]
    run = subprocess.run(
        [*command, *(f"{name}{specifier}" for name, specifier in sorted(wanted.items(), key=lambda item: item[0]))],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode == 0:
        return
    missing = re.search(r"No matching distribution found for (.+)", run.stderr)
    if re.search(r"Retrying \(|ConnectionError|Failed to establish a new connection", run.stderr):
        raise BundleError(f"no network: the package index cannot be reached\n{_last_lines(run.stderr)}")
    if missing is None:
        raise BundleError(f"pip failed\n{_last_lines(run.stderr)}")
    package = missing[1].strip()
    raise BundleError(f"there is no wheel of {package} for {target.name} (if the target has it: --without)")


def collect(
    roots: Sequence[Requirement],
    target: Target,
    folder: Path,
    without: Collection[str] = (),
    constraints: Sequence[Path] = (),
) -> dict[str, str]:
    """Fill a folder with the wheels that the requirements need on the target. Returns name -> version.

    A version that turns out too new for a package found later is replaced; where no choice settles, BundleError.
    """
    for _ in range(MAX_ROUNDS):
        found = {name: (version, path) for name, version, path in wheels_in(folder)}
        wanted = needed(roots, {name: path for name, (_, path) in found.items()}, target, without)
        stale = [
            name for name, (version, _) in found.items() if name not in wanted or not _accepts(wanted[name], version)
        ]
        for name in stale:
            found.pop(name)[1].unlink()
        absent = {name: specifier for name, specifier in wanted.items() if name not in found}
        if not absent and not stale:
            return {name: version for name, (version, _) in found.items()}
        if absent:
            fetch(absent, target, folder, constraints)
    raise BundleError("the versions do not settle: pin some with --constraint")


def not_asked_for(names: Collection[str], roots: Sequence[Requirement], folder: Path) -> list[str]:
    """Those of the names that neither the roots nor any wheel of the folder mentions."""
    asked = {canonicalize_name(requirement.name) for requirement in roots}
    for _, _, wheel in wheels_in(folder):
        asked |= {canonicalize_name(requirement.name) for requirement in wheel_requirements(wheel)}
    return [name for name in names if canonicalize_name(name) not in asked]


@dataclass(frozen=True)
class Engine:
    """The engine's own package, a wheel or a source distribution."""

    path: Path
    remark: str

    @property
    def is_source(self) -> bool:
        return not self.path.name.endswith(".whl")


def build_engine(target: Target, scratch: Path, root: Path = ROOT) -> Engine:
    """A wheel where one built here runs on the target, else a source distribution.

    The library of CPU kernels is loaded by ctypes, so one build serves every Python (hence the tag abi3) whose machine
    and C library fit. A target that builds needs a C++ compiler to have the CPU kernels, and does without otherwise.
    """
    tree = copy_sources(root, scratch)
    if target.machine != platform.machine():
        return Engine(_archive(tree), f"built on the target: this machine is {platform.machine()}")
    wheel = _build_wheel(tree, scratch / "wheel")
    glibc = glibc_needed(wheel)
    if glibc <= target.glibc:
        return Engine(wheel, f"built here, needs glibc {glibc[0]}.{glibc[1]}")
    return Engine(_archive(tree), f"built on the target: a build of this machine needs glibc {glibc[0]}.{glibc[1]}")


def copy_sources(root: Path, scratch: Path) -> Path:
    """The files that a build reads, and no earlier build's: building in place would leave its traces there."""
    pyproject = tomllib.loads((root / "pyproject.toml").read_text())
    project, find = pyproject["project"], pyproject["tool"]["setuptools"]["packages"]["find"]
    tree = scratch / f"{canonicalize_name(project['name']).replace('-', '_')}-{project['version']}"
    tree.mkdir()
    for path in root.iterdir():
        if path.name in ("pyproject.toml", project["readme"], *project["license-files"]):
            shutil.copy(path, tree)
        elif (path / "__init__.py").exists() and any(fnmatch.fnmatch(path.name, p) for p in find["include"]):
            shutil.copytree(path, tree / path.name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tree


def glibc_needed(wheel: Path) -> tuple[int, int]:
    """The newest glibc version that a wheel's libraries ask for; (0, 0) without any."""
    with zipfile.ZipFile(wheel) as archive:
        libraries = [archive.read(name) for name in archive.namelist() if name.endswith(".so")]
    versions = [match for library in libraries for match in re.findall(rb"GLIBC_(\d+)\.(\d+)", library)]
    return max(((int(major), int(minor)) for major, minor in versions), default=(0, 0))


def write_bundle_files(folder: Path, extras: Sequence[str]) -> None:
    """install.sh and SHA256SUMS."""
    engine = f"engine-serve[{','.join(extras)}]" if extras else "engine-serve"
    install = f"""#!/bin/sh
# Installs {engine} from this folder alone. PYTHON= names the interpreter (of a virtual environment).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
(cd "$here" && sha256sum --check --quiet SHA256SUMS)
exec "${{PYTHON:-python3}}" -m pip --isolated install --no-index --find-links "$here" {shlex.quote(engine)} "$@"
"""
    (folder / "install.sh").write_text(install)
    (folder / "install.sh").chmod(0o755)
    lines = [f"{_sha256(path)}  {path.name}\n" for path in _packages(folder)]
    (folder / "SHA256SUMS").write_text("".join(lines))


def _packages(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.endswith((".whl", ".tar.gz")))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _accepts(specifier: SpecifierSet, version: str) -> bool:
    return specifier.contains(version, prereleases=True)


def _last_lines(text: str, count: int = 5) -> str:
    return "\n".join(text.strip().splitlines()[-count:])


def _archive(tree: Path) -> Path:
    return Path(shutil.make_archive(str(tree), "gztar", tree.parent, tree.name))


def _build_wheel(tree: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--config-settings=--build-option=--py-limited-api=cp311", "--wheel-dir", str(folder), str(tree)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise BundleError(f"the engine's wheel cannot be built\n{_last_lines(run.stderr)}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def make_bundle(
    target: Target, folder: Path, extras: Sequence[str], without: Sequence[str], constraints: Sequence[Path]
) -> str:
    """Fill an empty folder; returns what to tell the user."""
    roots = engine_requirements(extras)
    check_python(target)
    if folder.exists() and not folder.is_dir():
        raise BundleError(f"{folder} is a file, not a folder")
    if folder.exists() and any(folder.iterdir()):
        raise BundleError(f"{folder} is not empty")
    with tempfile.TemporaryDirectory(prefix="airgap-") as scratch:
        engine = build_engine(target, Path(scratch))
        wheels = Path(scratch) / "bundle"
        wheels.mkdir()
        if engine.is_source:
            roots += build_requirements()
        collect(roots, target, wheels, {canonicalize_name(name) for name in without}, constraints)
        slips = not_asked_for(without, roots, wheels)
        shutil.copy(engine.path, wheels)
        write_bundle_files(wheels, extras)
        shutil.copytree(wheels, folder, dirs_exist_ok=True)
    sizes = [(path.stat().st_size, path.name) for path in _packages(folder)]
    lines = [f"{size / 2**20:8.2f} MiB  {name}" for size, name in sorted(sizes, reverse=True)]
    lines.append(f"{sum(size for size, _ in sizes) / 2**20:8.2f} MiB  in all, for {target.name}")
    lines.append(f"engine: {engine.remark}")
    if without:
        lines.append(f"left out, the target has to have them: {', '.join(without)} and what only they need")
    if slips:
        lines.append(f"nothing asked for {', '.join(slips)}: a slip, or what only others left out need")
    lines.append(f"carry {folder} over, then there: PYTHON=.venv/bin/python {folder.name}/install.sh")
    return "\n".join(lines)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="airgap_wheels.sh",
        description="Collect into a folder the wheels that a machine without a network needs to install the engine.",
        epilog="Example: tools/airgap_wheels.sh 3.12 manylinux_2_28_x86_64 wheels --extra cuda --without torch triton",
    )
    parser.add_argument("python", metavar="PYTHON", help="the target's Python, 3.12 for example")
    parser.add_argument(
        "platform",
        metavar="PLATFORM",
        help="manylinux_2_N_MACHINE: the target's glibc (`ldd --version` says 2.N) and machine; or only x86_64 or "
        "aarch64, which stands for manylinux_2_28",
    )
    parser.add_argument("output", metavar="OUTPUT_DIR", nargs="?", type=Path, default=Path("wheels"))
    parser.add_argument("--extra", nargs="+", action="extend", default=[], metavar="NAME", help="extras of the engine")
    parser.add_argument(
        "--without",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="packages that the target has; what only they need is left out too",
    )
    parser.add_argument(
        "--constraint",
        action="append",
        type=Path,
        default=[],
        metavar="FILE",
        help="versions to hold to, in pip's format",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parse_arguments(arguments)
    try:
        target = parse_target(asked.python, asked.platform)
        print(make_bundle(target, asked.output, asked.extra, asked.without, asked.constraint))
    except BundleError as e:
        print(f"airgap_wheels: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
