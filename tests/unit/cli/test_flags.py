"""The command line: every option by flag and by file, clear errors, and a fast --help."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.cli.flags import build_parser, flags_table, parse
from engine.cli.options import Option, all_options
from engine.config import EngineConfig
from engine.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


def other_value(option: Option) -> str | bool:
    """A legal value that is not the default."""
    if option.is_bool:
        return not option.default
    if option.choices:
        return next(choice for choice in option.choices if choice != option.default)
    if option.name in ("drain_timeout", "start_timeout"):
        return "12.5"
    shares = {"mem_fraction_static": "0.25", "max_pinned_share": "0.25"}
    small = dict.fromkeys(("overlap_depth", "speculative_eagle_topk", "speculative_ngram_max_bfs_breadth"), "2")
    return {"page_size": "32", **small, **shares}.get(option.name, "17")


def test_no_arguments_are_the_defaults() -> None:
    assert parse([]) == EngineConfig()


@pytest.mark.parametrize("option", list(all_options().values()), ids=lambda option: option.name)
def test_every_option_by_flag_and_by_file(option: Option, tmp_path: Path) -> None:
    value = other_value(option)
    if isinstance(value, bool):
        arguments = [option.flag if value else "--no-" + option.flag[2:]]
    else:
        arguments = [option.flag, value]
    by_flag = parse(arguments)
    assert by_flag.flat()[option.name] != option.default
    file = tmp_path / "config.yaml"
    text = str(value).lower() if isinstance(value, bool) else value
    for key in (option.name, option.flag[2:]):
        file.write_text(f"{key}: '{text}'\n" if "text" in option.expected else f"{key}: {text}\n")
        assert parse(["--config", str(file)]) == by_flag


def test_words_in_any_case(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("speculative-algorithm: NGram\nlog_level: INFO\n")
    by_file = parse(["--config", str(file)])
    assert by_file == parse(["--speculative-algorithm", "ngram", "--log-level", "info"])
    assert by_file.speculative.speculative_algorithm == "NGRAM"
    with pytest.raises(ConfigError, match="NGRAM"):
        parse(["--speculative-algorithm", "ngrams"])


def test_the_command_line_beats_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("port: 1234\nhost: '::'\nskip-server-warmup: true\ncontext_length: 100\n")
    config = parse(["--port", "0", "--config", str(file), "--no-skip-server-warmup", "--context-length=none"])
    assert (config.http.port, config.http.host, config.http.skip_server_warmup) == (0, "::", False)
    assert config.model.context_length is None


def test_sglang_spellings(tmp_path: Path) -> None:
    assert parse(["--model-path", "a", "--tokenizer-path", "b"]) == parse(["--model", "a", "--tokenizer", "b"])
    file = tmp_path / "config.yaml"
    file.write_text("model-path: a\n")
    assert parse(["--config", str(file)]).model.model == "a"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--port", "70000"], ["--port", "70000", "0 to 65535"]),
        (["--port", "x"], ["--port", "'x'", "integer"]),
        (["--port", "none"], ["--port", "none", "integer"]),
        (["--port"], ["--port", "one argument"]),
        (["--dtype", "int3"], ["--dtype", "int3", "bfloat16"]),
        (["--context-length", "2"], ["--context-length", "2", "at least 8", "none"]),
        (["--overlap-depth", "3"], ["--overlap-depth", "3", "0 to 2"]),
        (["--drain-timeout", "nan"], ["--drain-timeout", "nan", "finite"]),
        (["--drain-timeout", "inf"], ["--drain-timeout", "inf", "finite"]),
        (["--start-timeout", "0"], ["--start-timeout", "0", "above 0"]),
        (["--host", ""], ["--host", "not empty"]),
        (["--prot", "1"], ["--prot", "did you mean --port?"]),
        (["--por", "1"], ["--por", "did you mean --port?"]),
        (["--max-running-request=8"], ["did you mean --max-running-requests?"]),
        (["--no-skip-warmup"], ["did you mean --no-skip-server-warmup?"]),
        (["serve"], ["Unexpected argument 'serve'"]),
    ],
)
def test_errors_name_flag_value_and_range(arguments: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(arguments)
    assert caught.value.exit_code == 2
    for part in parts:
        assert part in caught.value.message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("prot: 1", ["'prot'", "did you mean port?"]),
        ("max_running_request: 1", ["did you mean max-running-requests?"]),
        ("port: 70000", ["port", "70000", "0 to 65535"]),
        ("port: [1, 2]", ["port", "[1,2]", "integer"]),
        ("port: 2020-01-01", ["port", "integer"]),
        ("port:", ["port", "null", "integer"]),
        ("port: 1\nport: 2", ["port", "twice"]),
        ("model: a\nmodel-path: b", ["model", "twice"]),
        ("page-size: 1\npage_size: 1", ["page_size", "twice"]),
        ("drain_timeout: .nan", ["drain_timeout", "finite"]),
        ("1: 2", ["'1'", "unknown key"]),
        ("- a", ["name: value"]),
        ("a: [", ["not valid YAML"]),
        ("a: !!python/object/apply:os.getcwd []", ["not valid YAML"]),
    ],
)
def test_errors_in_the_file_name_it(text: str, parts: list[str], tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse(["--config", str(file)])
    assert "\n" not in caught.value.message
    for part in (str(file), *parts):
        assert part in caught.value.message


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        parse(["--config", str(tmp_path / "missing.yaml")])
    empty = tmp_path / "empty.yaml"
    empty.write_text("# nothing\n")
    assert parse(["--config", str(empty)]) == EngineConfig()
    bare = tmp_path / "bare.yaml"
    bare.write_text("device: null\n")
    assert parse(["--config", str(bare)]).scheduler.device == "null"


def test_help_tells_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for option in all_options().values():
        assert option.flag in text
        assert option.description
        assert f"(default: {option.default_text})" in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--version"])
    assert capsys.readouterr().out.startswith("engine-serve ")


def test_help_is_fast_and_light() -> None:
    code = (
        "import sys\nfrom engine.cli.flags import parse\n"
        "try:\n    parse(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'aiohttp', 'zmq', 'numpy', 'yaml', 'transformers', 'asyncio'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )

    def fastest(source: str) -> float:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", source], check=True, capture_output=True, cwd=ROOT)
            times.append(time.perf_counter() - start)
        return min(times)

    assert fastest(code) - fastest("pass") < 0.35


def test_the_parser_keeps_no_state() -> None:
    assert parse(["--port", "1"]) != parse([])
    assert build_parser() is not build_parser()


def test_the_table_has_every_flag_once() -> None:
    table = flags_table()
    for option in all_options().values():
        assert table.count(f"| `{option.flag}`") == 1


def test_the_readme_is_up_to_date() -> None:
    run = subprocess.run(
        [sys.executable, "tools/flags_table.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
