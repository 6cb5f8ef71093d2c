"""The systemd unit and its example configuration agree with the engine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from engine.cli.flags import parse

FOLDER = Path(__file__).resolve().parents[2] / "tools" / "systemd"
UNIT = FOLDER / "engine-serve.service"


def unit_values() -> dict[str, str]:
    lines = [line for line in UNIT.read_text().splitlines() if "=" in line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def test_the_example_parses() -> None:
    config = parse(["--config", str(FOLDER / "config.yaml")])
    keys = yaml.safe_load((FOLDER / "config.yaml").read_text())
    for key, value in keys.items():
        assert config.flat()[key.replace("-", "_")] == value


def test_timeouts_fit_the_example() -> None:
    config = parse(["--config", str(FOLDER / "config.yaml")])
    values = unit_values()
    assert config.http.drain_timeout < float(values["TimeoutStopSec"]) <= config.http.drain_timeout + 30
    assert config.process.start_timeout < float(values["TimeoutStartSec"])


def test_what_the_unit_must_say() -> None:
    values = unit_values()
    assert values["Type"] == "notify"
    assert values["ExecStart"].endswith("/bin/engine-serve --config /etc/engine-serve/config.yaml")
    assert "MemoryDenyWriteExecute" not in values
    assert "AF_NETLINK" not in values["RestrictAddressFamilies"]


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze here")
    true = shutil.which("true")
    assert true is not None
    program = unit_values()["ExecStart"].split()[0]
    copy = tmp_path / UNIT.name
    # The program need not be installed where the tests run.
    copy.write_text(UNIT.read_text().replace(program, true))
    run = subprocess.run(
        [analyze, "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False, timeout=30
    )
    ours = [line for line in run.stderr.splitlines() if UNIT.name in line]
    assert not ours, run.stderr
    assert run.returncode == 0, run.stderr
