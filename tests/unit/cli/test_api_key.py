"""The key: from flag, file or environment, and out of every message."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.cli.flags import KEY_VARIABLE, parse
from engine.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
KEY = "sk-very-secret"


def key_of(arguments: list[str], environ: dict[str, str]) -> str | None:
    return parse(arguments, environ).http.api_key


def test_the_flag_beats_the_file_beats_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("api-key: from-file\n")
    environ = {KEY_VARIABLE: "from-environment"}
    assert key_of(["--config", str(file), "--api-key", "from-flag"], environ) == "from-flag"
    assert key_of(["--config", str(file)], environ) == "from-file"
    assert key_of([], environ) == "from-environment"
    assert key_of([], {}) is None


def test_only_the_word_none_takes_a_key_away(tmp_path: Path) -> None:
    environ = {KEY_VARIABLE: KEY}
    assert key_of(["--api-key", "none"], environ) is None
    file = tmp_path / "config.yaml"
    file.write_text("api-key:\n")
    assert key_of(["--config", str(file)], environ) == KEY


@pytest.mark.parametrize("text", ["", " ", f"{KEY}\n", f"{KEY} x", "caf\u00e9", "\x00"])
def test_keys_that_no_header_carries(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"api_key: {ascii(text)[1:-1]!r}\n" if not text.strip() else f'api_key: "{ascii(text)[1:-1]}"\n')
    for source, arguments, environ in (
        ("--api-key", ["--api-key", text], {}),
        (KEY_VARIABLE, [], {KEY_VARIABLE: text}),
        (str(file), ["--config", str(file)], {}),
    ):
        with pytest.raises(ConfigError, match="visible ASCII") as caught:
            parse(arguments, environ)
        assert source in caught.value.message
        assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        "api-key: [sk-very-secret]",
        "api-key: {sk-very-secret: 1}",
        "api-key: sk-very-secret: 5",
        'api-key: "sk-very-secret',
        "port: 1\napi-key: 'sk-very-secret' 'x'",
        "api-key: sk-very-secret\n  port: [",
        "api-key: sk-very-secret\napi_key: sk-very-secret",
    ],
)
def test_no_message_about_the_file_quotes_it(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse(["--config", str(file)], {})
    assert "secret" not in caught.value.message
    assert str(file) in caught.value.message


def test_no_message_about_the_flags_quotes_it() -> None:
    for arguments in (["--api-kye=" + KEY], ["--api-kye", KEY], ["--api-key", KEY, "--port", "x"]):
        with pytest.raises(ConfigError) as caught:
            parse(arguments, {})
        assert KEY not in caught.value.message


def test_help_names_the_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    assert KEY_VARIABLE in capsys.readouterr().out


def test_a_key_on_the_command_line_leaves_the_process_list() -> None:
    code = (
        "import sys, pathlib\nfrom engine.cli.serve import hide_key\n"
        "hide_key(sys.argv[1:])\nprint(pathlib.Path('/proc/self/cmdline').read_bytes())"
    )
    for arguments in (["--port", "1", "--api-key", KEY], [f"--api-key={KEY}"]):
        run = subprocess.run(
            [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert KEY not in run.stdout
        assert "engine-serve" in run.stdout
