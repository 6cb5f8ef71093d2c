"""EngineConfig: every option once. Flags, YAML keys, --help, docs and the config hash derive from these structs.

A field's type gives its range, its docstring-like `description` the help text; `extra["auto"]` says what None means.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Device = Literal["auto", "cpu", "null", "delayed"]
LoadFormat = Literal["auto", "dummy"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
OnCrash = Literal["exit", "restart"]
LogLevel = Literal["debug", "info", "warning", "error"]


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is served."""

    model: Annotated[
        str | None,
        Meta(
            description="Directory (HF layout), .gguf file or hub name.",
            extra={"auto": "SmolLM2-135M-Instruct, fetched once"},
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        Meta(
            description="Directory, tokenizer.json, tokenizer.model or .gguf to take the tokenizer from.",
            extra={"auto": "the model's own"},
        ),
    ] = None
    revision: Annotated[
        str | None, Meta(description="Branch, tag or commit of a hub model.", extra={"auto": "the hub's default"})
    ] = None
    load_format: Annotated[
        LoadFormat, Meta(description="auto: real weights; dummy: random weights made from config.json alone.")
    ] = "auto"
    dtype: Annotated[DType, Meta(description="Type of weights, activations and KV; auto is float32 on CPU.")] = "auto"
    context_length: Annotated[
        Annotated[int, Meta(ge=8)] | None,
        Meta(description="Most tokens of prompt and answer together.", extra={"auto": "the model's own"}),
    ] = None
    served_model_name: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="Name in /v1/models and in answers.", extra={"auto": "from --model"}),
    ] = None
    chat_template: Annotated[
        str | None, Meta(description="File with a Jinja chat template.", extra={"auto": "the model's own"})
    ] = None


class HttpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP front."""

    host: Annotated[str, Meta(min_length=1, description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0 takes a free one.")] = 30000
    max_body_mb: Annotated[int, Meta(ge=1, le=1024, description="Largest request body in MiB; beyond it 413.")] = 16
    drain_timeout: Annotated[
        float,
        Meta(ge=0, description="Seconds that running requests may take to finish after SIGTERM or SIGINT."),
    ] = 30.0
    skip_server_warmup: Annotated[bool, Meta(description="Report healthy without the warm-up request.")] = False


class SchedulerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Batches and memory."""

    device: Annotated[
        Device,
        Meta(
            description="auto: cpu. null: instant tokens without a model, for benchmarks. "
            "delayed: the CPU model in a thread, for tests of overlap."
        ),
    ] = "auto"
    max_running_requests: Annotated[
        int, Meta(ge=1, le=65536, description="Most requests in the running batch; more wait in the queue.")
    ] = 64
    max_total_tokens: Annotated[
        Annotated[int, Meta(ge=16)] | None,
        Meta(
            description="Size of the KV pool in tokens.",
            extra={"auto": "65536, but at most a quarter of the available memory"},
        ),
    ] = None
    chunked_prefill_size: Annotated[
        int, Meta(ge=1, description="Most tokens of one step, decode rows included; longer prompts take several.")
    ] = 256
    page_size: Annotated[int, Meta(ge=1, le=1024, description="Tokens per KV page.")] = 16
    overlap_depth: Annotated[
        Annotated[int, Meta(ge=0, le=2)] | None,
        Meta(
            description="Steps launched ahead of the one whose tokens are processed.",
            extra={"auto": "0 on cpu, 1 on the other devices"},
        ),
    ] = None


class ProcessOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Processes, threads and logs."""

    tokenizer_workers: Annotated[int, Meta(ge=1, le=64, description="Tokenizer processes.")] = 1
    cpu_threads: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Threads of the CPU model.", extra={"auto": "the cores this process may use"}),
    ] = None
    on_crash: Annotated[
        OnCrash,
        Meta(
            description="When a process dies, running requests fail; then exit: end with a non-zero status; "
            "restart: start the processes again."
        ),
    ] = "exit"
    start_timeout: Annotated[float, Meta(gt=0, description="Seconds the processes may take to come up.")] = 600.0
    log_level: Annotated[LogLevel, Meta(description="Least severe log line to write.")] = "info"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The whole configuration, in groups; option names are unique across groups."""

    model: ModelOptions = ModelOptions()
    http: HttpOptions = HttpOptions()
    scheduler: SchedulerOptions = SchedulerOptions()
    process: ProcessOptions = ProcessOptions()

    @property
    def device(self) -> Literal["cpu", "null", "delayed"]:
        """The device `auto` stands for."""
        return "cpu" if self.scheduler.device == "auto" else self.scheduler.device

    @property
    def overlap_depth(self) -> int:
        """Launched, uncollected steps while the newest one is running."""
        if self.scheduler.overlap_depth is not None:
            return self.scheduler.overlap_depth
        return 0 if self.device == "cpu" else 1

    def flat(self) -> dict[str, str | int | float | bool | None]:
        """Option name -> value, over all groups."""
        values: dict[str, str | int | float | bool | None] = {}
        for group in self.__struct_fields__:
            values.update(msgspec.to_builtins(getattr(self, group)))
        return values


def config_hash(*parts: msgspec.Struct) -> str:
    """Hash of everything a process was started with; peers compare it at connect."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(msgspec.msgpack.encode(part))
    return digest.hexdigest()[:16]
