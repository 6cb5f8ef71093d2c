"""EngineConfig: every option once. Flags, YAML keys, --help, docs and the config hash derive from these structs.

A field's type gives its range, its docstring-like `description` the help text; `extra["auto"]` says what None means.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Device = Literal["auto", "cpu", "cuda", "null", "delayed"]
LoadFormat = Literal["auto", "dummy"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["int8"]
KvCacheDType = Literal["auto", "float32", "float16", "bfloat16", "int8"]
LogprobsMode = Literal["raw", "processed"]
SchedulePolicy = Literal["fcfs", "lpm", "lof", "dfs-weight", "random", "priority"]
EvictionPolicy = Literal["lru", "lfu", "fifo", "priority"]
SpeculativeAlgorithm = Literal["NGRAM", "EAGLE", "EAGLE2", "EAGLE3", "DFLASH", "STANDALONE"]
DRAFT_HEADS = ("EAGLE", "EAGLE2", "EAGLE3")
"""Algorithms that draft with a head."""
DFLASH_BLOCK = 16
"""Tokens of a block where neither an option nor the drafter's configuration says."""
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
    dtype: Annotated[
        DType,
        Meta(
            description="Type of weights and activations. auto on a CPU keeps the packed weights of a GGUF file packed "
            "and is float32 else; on CUDA it is float16 if the checkpoint is, else bfloat16. Any value but auto "
            "de-quantises packed weights."
        ),
    ] = "auto"
    quantization: Annotated[
        Quantization | None,
        Meta(
            description="int8: weights of float checkpoints are packed to int8 in groups of 32 at load (on a CPU); "
            "packed matrices of GGUF files stay as they are.",
            extra={"auto": "as the checkpoint"},
        ),
    ] = None
    kv_cache_dtype: Annotated[
        KvCacheDType,
        Meta(
            description="Type of cached keys and values. auto: float16 beside packed weights, else the model's type; "
            "int8 wants packed weights."
        ),
    ] = "auto"
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
    api_key: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="Key that every request must bring as `Authorization: Bearer KEY`, but for /health. Better in "
            "the environment (ENGINE_API_KEY) or the config file than on the command line, where others can read it.",
            extra={"auto": "no key"},
        ),
    ] = None
    max_n: Annotated[int, Meta(ge=1, le=1024, description="Most answers (n) to one prompt.")] = 32
    max_logprobs: Annotated[
        int, Meta(ge=0, le=1000, description="Most alternatives (top_logprobs, logprobs) beside a token.")
    ] = 20
    request_timeout: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="Seconds a request may take from its arrival to its end; then it ends with an error.",
            extra={"auto": "no limit"},
        ),
    ] = None
    http_workers: Annotated[
        int,
        Meta(
            ge=1, le=64, description="Processes that speak HTTP, all on the same port; more than one for many streams."
        ),
    ] = 1
    drain_timeout: Annotated[
        float,
        Meta(ge=0, description="Seconds that running requests may take to finish after SIGTERM or SIGINT."),
    ] = 30.0
    skip_server_warmup: Annotated[bool, Meta(description="Report healthy without the warm-up request.")] = False

    def __repr__(self) -> str:
        """Everything but the key: what is printed may end in a log."""
        shown = msgspec.structs.asdict(self) | {"api_key": None if self.api_key is None else "***"}
        return f"HttpOptions({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


class SchedulerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Batches and memory."""

    device: Annotated[
        Device,
        Meta(
            description="auto: cuda where there is such a device, else cpu. null: instant tokens without a model, for "
            "benchmarks. delayed: the CPU model in a thread, for tests of overlap."
        ),
    ] = "auto"
    max_running_requests: Annotated[
        Annotated[int, Meta(ge=1, le=65536)] | None,
        Meta(
            description="Most requests in the running batch; more wait in the queue.",
            extra={"auto": "64, on CUDA 256"},
        ),
    ] = None
    max_total_tokens: Annotated[
        Annotated[int, Meta(ge=16)] | None,
        Meta(
            description="Size of the KV pool in tokens.",
            extra={"auto": "on a CPU 65536, but at most a quarter of the available memory; on CUDA what is left"},
        ),
    ] = None
    chunked_prefill_size: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Most tokens of one step, decode rows included; longer prompts take several.",
            extra={"auto": "256, on CUDA 4096"},
        ),
    ] = None
    mixed_chunk_size: Annotated[
        Annotated[int, Meta(ge=16)] | None,
        Meta(
            description="The same for a step in which requests decode: their next tokens wait for it. Prompts get as "
            "many tokens of it as there are decoding rows, where the step has room for both.",
            extra={"auto": "as any step; on CUDA what a fast device does in about 100 ms"},
        ),
    ] = None
    max_prefill_tokens: Annotated[
        int, Meta(ge=1, description="Most prompt tokens of one request in a step; the smaller of the two limits binds.")
    ] = 16384
    max_step_gap: Annotated[
        int,
        Meta(
            ge=2,
            le=1024,
            description="Every running request gets a token, and the oldest prompt a chunk, at least once in so many "
            "steps.",
        ),
    ] = 4
    max_queued_requests: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Most waiting requests; beyond it 429 with Retry-After.", extra={"auto": "no limit"}),
    ] = None
    mem_fraction_static: Annotated[
        Annotated[float, Meta(gt=0, lt=1)] | None,
        Meta(
            description="Share of the memory available at the start that weights and KV may take together; "
            "--max-total-tokens goes before it.",
            extra={"auto": "on a CPU the KV pool's own default; on CUDA all that steps and graphs leave"},
        ),
    ] = None
    schedule_policy: Annotated[
        SchedulePolicy,
        Meta(
            description="Order of the queue. fcfs: by arrival; lpm: longest cached prefix first; lof: longest answer "
            "first; dfs-weight: along the branches of the prefix tree; random; priority: by the request's priority, "
            "which may displace running ones. All but fcfs age."
        ),
    ] = "fcfs"
    priority_preemption_threshold: Annotated[
        int,
        Meta(ge=0, description="With schedule-policy priority: a request displaces those more than this far below it."),
    ] = 10
    schedule_conservativeness: Annotated[
        float,
        Meta(gt=0, description="Above 1, admission keeps more room for answers; below 1, it retracts more often."),
    ] = 1.0
    random_seed: Annotated[int, Meta(ge=0, description="Seed of schedule-policy random.")] = 0
    page_size: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        Meta(description="Tokens per KV page.", extra={"auto": "16, on CUDA 64"}),
    ] = None
    disable_radix_cache: Annotated[bool, Meta(description="Share no prefixes between requests.")] = False
    radix_eviction_policy: Annotated[
        EvictionPolicy, Meta(description="Which cached prefixes go first when memory runs out.")
    ] = "lru"
    max_pinned_share: Annotated[
        float, Meta(ge=0, le=1, description="Largest share of the KV pool that pinned prefixes may hold.")
    ] = 0.5
    kv_events_endpoint: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="ZeroMQ address to publish stored and removed KV blocks on, for routers.",
            extra={"auto": "not published"},
        ),
    ] = None
    record: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="File to record every message and plan of the scheduler in, for tools/replay.py; no text.",
            extra={"auto": "not recorded"},
        ),
    ] = None
    logprobs_mode: Annotated[
        LogprobsMode,
        Meta(
            description="raw: logprobs are those of the model's own logits; processed: after penalties, bias, "
            "temperature and filters."
        ),
    ] = "raw"
    cuda_graph_max_bs: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | None,
        Meta(
            description="Largest decode batch that runs as a CUDA graph; larger ones are launched kernel by kernel.",
            extra={"auto": "as many as may run, but at most 256"},
        ),
    ] = None
    disable_cuda_graph: Annotated[bool, Meta(description="Launch every step kernel by kernel.")] = False
    deterministic: Annotated[
        bool,
        Meta(
            description="Fixed orders of all sums: a request's tokens do not depend on what runs beside it, on chunks "
            "or on cached prefixes, to the bit. Slower on CUDA; on a CPU it needs packed weights, which are so anyway."
        ),
    ] = False
    overlap_depth: Annotated[
        Annotated[int, Meta(ge=0, le=2)] | None,
        Meta(
            description="Steps launched ahead of the one whose tokens are processed.",
            extra={"auto": "0 on cpu, 1 on the other devices"},
        ),
    ] = None


class SpeculativeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Speculative decoding: tokens are drafted, and the model verifies several of them in one step."""

    speculative_algorithm: Annotated[
        SpeculativeAlgorithm | None,
        Meta(
            description="Who drafts. NGRAM: what came after the last tokens when they were in the text before; no "
            "model, for texts that repeat themselves or their prompt. EAGLE, EAGLE3: a head of one layer that was "
            "trained for the model (EAGLE2: one of EAGLE, with trees), DFLASH: a few layers that draft a whole block "
            "at once, STANDALONE: a smaller model of the same vocabulary; all of --speculative-draft-model-path. For "
            "the default model an EAGLE3 head comes along.",
            extra={"auto": "nobody"},
        ),
    ] = None
    speculative_draft_model_path: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="Directory of the head or drafter (config.json and safetensors, as published), or the model "
            "that drafts, as --model.",
            extra={"auto": "with the default model and EAGLE3, the head that was trained for it"},
        ),
    ] = None
    speculative_num_steps: Annotated[
        int, Meta(ge=1, le=64, description="With heads and STANDALONE: how many tokens deep drafts are at most.")
    ] = 5
    speculative_eagle_topk: Annotated[
        Annotated[int, Meta(ge=1, le=16)] | None,
        Meta(
            description="With heads and STANDALONE: so many likely tokens are followed at each depth; 1 drafts a "
            "chain.",
            extra={"auto": "4, with EAGLE 1"},
        ),
    ] = None
    speculative_num_draft_tokens: Annotated[
        int,
        Meta(
            ge=2,
            le=65,
            description="Tokens of a request that a step verifies at most; its last known token is one of them. Not "
            "with DFLASH.",
        ),
    ] = 8
    speculative_dflash_block_size: Annotated[
        Annotated[int, Meta(ge=2, le=64)] | None,
        Meta(
            description="With DFLASH: tokens of a block at most, the last known one included; not more than the "
            "drafter was trained for.",
            extra={"auto": "the drafter's own"},
        ),
    ] = None
    speculative_adaptive: Annotated[
        bool,
        Meta(
            description="Draft as many tokens as pay, by what was accepted and what steps take, and none where none "
            "do; off: always as many as may be."
        ),
    ] = True
    speculative_ngram_min_match_window_size: Annotated[
        int, Meta(ge=1, le=64, description="With NGRAM: so many last tokens must have been there before at least.")
    ] = 2
    speculative_ngram_max_match_window_size: Annotated[
        int, Meta(ge=1, le=64, description="With NGRAM: of places where more of them match none is better.")
    ] = 8
    speculative_ngram_max_bfs_breadth: Annotated[
        int,
        Meta(
            ge=1,
            le=16,
            description="With NGRAM: so many different continuations are followed at most, the best one deepest; 1 "
            "drafts a chain.",
        ),
    ] = 1
    speculative_ngram_external_corpus_path: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="With NGRAM: UTF-8 text of 16 MiB and 4,194,304 tokens at most, in which the last tokens are "
            "looked for, too.",
            extra={"auto": "only in the request's own text"},
        ),
    ] = None


class ProcessOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Processes, threads and logs."""

    tokenizer_workers: Annotated[int, Meta(ge=1, le=64, description="Tokenizer processes.")] = 1
    tp_size: Annotated[
        int, Meta(ge=1, le=64, description="Processes (on CUDA: devices) that each hold a share of every layer.")
    ] = 1
    cpu_threads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        Meta(
            description="Threads of the CPU model; on CUDA, of loading.",
            extra={"auto": "the physical cores this process may use, within its control groups' CPU quota"},
        ),
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
    speculative: SpeculativeOptions = SpeculativeOptions()
    process: ProcessOptions = ProcessOptions()

    @property
    def device(self) -> Literal["cpu", "cuda", "null", "delayed"]:
        """The device. `auto` is settled by the scheduler (scheduler_proc/settle.py), which can look; else it is cpu."""
        return "cpu" if self.scheduler.device == "auto" else self.scheduler.device

    @property
    def max_running_requests(self) -> int:
        """Slots of the running batch."""
        return self.scheduler.max_running_requests or (256 if self.device == "cuda" else 64)

    @property
    def chunked_prefill_size(self) -> int:
        """Most tokens of one step."""
        return self.scheduler.chunked_prefill_size or (4096 if self.device == "cuda" else 256)

    @property
    def page_size(self) -> int:
        """Tokens per KV page."""
        return self.scheduler.page_size or (64 if self.device == "cuda" else 16)

    @property
    def cuda_graph_max_bs(self) -> int:
        """Largest decode batch with a CUDA graph; 0 = none has one."""
        if self.device != "cuda" or self.scheduler.disable_cuda_graph:
            return 0
        return min(self.scheduler.cuda_graph_max_bs or 256, self.max_running_requests)

    @property
    def overlap_depth(self) -> int:
        """Launched, uncollected steps while the newest one is running."""
        if self.scheduler.overlap_depth is not None:
            return self.scheduler.overlap_depth
        return 0 if self.device == "cpu" else 1

    @property
    def max_drafts(self) -> int:
        """Drafted tokens of a request in a step at most; 0 = nobody drafts."""
        options = self.speculative
        match options.speculative_algorithm:
            case None:
                return 0
            case "DFLASH":
                return (options.speculative_dflash_block_size or DFLASH_BLOCK) - 1
        return options.speculative_num_draft_tokens - 1

    @property
    def draft_places(self) -> int:
        """Places behind a request's last known token that drafting and verifying write to at most."""
        options = self.speculative
        if options.speculative_algorithm not in (*DRAFT_HEADS, "STANDALONE"):
            return self.max_drafts
        return max(self.max_drafts, (options.speculative_num_steps - 1) * self.eagle_topk)

    @property
    def eagle_topk(self) -> int:
        """Nodes of a tree of drafts that are extended at each depth; 1 = drafts are chains."""
        options = self.speculative
        return options.speculative_eagle_topk or (1 if options.speculative_algorithm == "EAGLE" else 4)

    def without_secrets(self) -> EngineConfig:
        """What processes and files beside the HTTP front may know."""
        return msgspec.structs.replace(self, http=msgspec.structs.replace(self.http, api_key=None))

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
