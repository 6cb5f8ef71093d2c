"""A stand-in for EngineClient: says what a script says, remembers what it was asked. No processes, no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.config import EngineConfig, HttpOptions
from engine.errors import EngineError, UnavailableError
from engine.ipc.messages import ChatInput, Ended, Finish, Stamps, Stats, TextInput, TokenInput, TokenLogprob
from engine.model_files.types import ModelConfig, ModelFiles, RopeConfig
from engine.sampling import SamplingParams

State = Literal["starting", "ready", "draining", "restarting", "failed"]


@dataclass
class FakeDelta:
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]


@dataclass
class FakeHealth:
    ok: bool
    state: str
    reason: str
    processes: list[dict[str, object]]


@dataclass
class Script:
    """What the next request does: texts are deltas of one token each; an error, or waiting, comes where it says."""

    texts: list[str] = field(default_factory=lambda: ["Hel", "lo"])
    finish: Finish = Finish.STOP_TOKEN
    stop_reason: str | int | None = 2
    refuse: EngineError | None = None
    fail: Exception | None = None
    """Raised after the texts."""
    hang_before_accept: bool = False
    hang_after_texts: bool = False
    pause_s: float = 0.0
    num_prompt_tokens: int = 7
    cached_tokens: int = 3
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    """Per delta; empty: none."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_text: str | None = None


class FakeGeneration:
    def __init__(self, client: FakeClient, script: Script, label: str) -> None:
        self.request = len(client.asked)
        self.label = label
        self.ended: Ended | None = None
        self.prompt_logprobs: list[TokenLogprob] = []
        self.prompt_text: str | None = None
        self.closed = False
        self._client = client
        self._script = script

    async def accepted(self) -> int:
        await asyncio.sleep(0)
        if self._script.hang_before_accept:
            await asyncio.Event().wait()
        if self._script.refuse is not None:
            raise self._script.refuse
        self.prompt_text = self._script.prompt_text
        return self._script.num_prompt_tokens

    async def __aiter__(self) -> AsyncIterator[FakeDelta]:
        script = self._script
        self.prompt_logprobs = script.prompt_logprobs
        ends = not script.hang_after_texts and script.fail is None
        for idx, text in enumerate(script.texts):
            await asyncio.sleep(script.pause_s)
            if ends and idx == len(script.texts) - 1:
                # As in a Generation: the final facts come with the last output.
                self.ended = self._facts()
            yield FakeDelta(text, [100 + idx], script.logprobs[idx] if script.logprobs else [])
        if script.hang_after_texts:
            await asyncio.Event().wait()
        if script.fail is not None:
            raise script.fail
        self.ended = self._facts()

    def _facts(self) -> Ended:
        script = self._script
        return Ended(
            request=self.request,
            attempt=0,
            finish=script.finish,
            stop_reason=script.stop_reason,
            num_prompt_tokens=script.num_prompt_tokens,
            num_tokens=len(script.texts),
            cached_tokens=script.cached_tokens,
            stamps=Stamps(),
            accepted_drafts=script.accepted_drafts,
            rejected_drafts=script.rejected_drafts,
        )

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._client.in_flight -= 1
            self._client.closed.set()


@dataclass
class Asked:
    """One call of generate."""

    input: ChatInput | TextInput | TokenInput
    sampling: SamplingParams
    stream: bool
    label: str
    echo: bool = False


class FakeClient:
    def __init__(self, *, max_body_mb: int = 1, **http: Any) -> None:
        self.config = EngineConfig(http=HttpOptions(max_body_mb=max_body_mb, **http))
        self.observers: list[Any] = []
        self.scripts: list[Script] = []
        """Scripts of the next requests, in order; when they are used up, `script` is taken."""
        self.aborted: list[tuple[str | None, str | None]] = []
        self.model: ModelFiles | None = tiny_files()
        self.model_name = "org/tiny"
        self.context_length = 512
        self.created = 1_700_000_000
        self.state: State = "ready"
        self.in_flight = 0
        self.script = Script()
        self.asked: list[Asked] = []
        self.generations: list[FakeGeneration] = []
        self.started = asyncio.Event()
        self.closed = asyncio.Event()
        self.report = FakeHealth(True, "ready", "", [{"name": "scheduler", "pid": 1, "age_s": 0.1}])

    def check_ready(self) -> None:
        if self.state != "ready":
            raise UnavailableError(f"The server is {self.state}.", retry_after_s=5)

    def generate(
        self,
        source: ChatInput | TextInput | TokenInput,
        sampling: SamplingParams,
        *,
        stream: bool,
        label: str = "",
        cache_salt: str | None = None,
        priority: int = 0,
        echo: bool = False,
    ) -> FakeGeneration:
        self.check_ready()
        assert self.model is not None
        sampling.checked(self.model.config.vocab_size)
        self.in_flight += 1
        self.started.set()
        self.asked.append(Asked(source, sampling, stream, label, echo))
        script = self.scripts.pop(0) if self.scripts else self.script
        self.generations.append(FakeGeneration(self, script, label))
        return self.generations[-1]

    async def stats(self) -> Stats:
        if self.state != "ready":
            raise UnavailableError(f"The server is {self.state}.", retry_after_s=5)
        return Stats(0, 1, 2, 33, 100, 60, 30, 8, 2, 0, drafted_tokens=40, accepted_tokens=30, verified_rows=20)

    async def tokenize(self, source: ChatInput | TextInput) -> list[int]:
        """A token is a character."""
        return [ord(char) % 1000 for char in source.text] if isinstance(source, TextInput) else [1, 2, 3]

    async def detokenize(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))

    def abort(self, *, label: str | None = None, prefix: str | None = None) -> int:
        self.aborted.append((label, prefix))
        return 1

    async def flush_cache(self) -> int:
        return 12

    def health(self) -> FakeHealth:
        return self.report


def tiny_files() -> ModelFiles:
    """Facts of a model that has no files."""
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position=512,
        norm_eps=1e-5,
        rope=RopeConfig(),
        tie_embeddings=True,
    )
    return ModelFiles(
        name="org/tiny", format="dummy", config=config, path="/models/tiny", weight_files=(), tokenizer_path=""
    )
