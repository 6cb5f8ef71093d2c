"""Every message between processes: tagged msgspec structs, array-like, no pickle.

Direction is named in each docstring: front (HTTP or Python face), tokenizer, scheduler, detokenizer. Arrays of
numbers travel as little-endian bytes (`int32`, `uint64`, `uint8`), one message per step for all requests. Times are
CLOCK_MONOTONIC nanoseconds, comparable between the processes of one machine; 0 = not yet.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from enum import IntEnum
from typing import TypeAlias

import msgspec
import numpy as np

from engine.errors import ErrorInfo
from engine.sampling import SamplingParams

RequestId: TypeAlias = int
"""u64 made by the front: front index in the top 8 bits, a counter below. The user's own id is only a label."""


class Finish(IntEnum):
    """Why a request ended."""

    NONE = 0
    STOP_TOKEN = 1
    STOP_STRING = 2
    LENGTH = 3
    ABORT = 4
    ERROR = 5


class Stamps(msgspec.Struct, array_like=True):
    """Stations of one request's life, in CLOCK_MONOTONIC nanoseconds."""

    arrived: int = 0
    tokenized: int = 0
    queued: int = 0
    first_scheduled: int = 0
    first_token: int = 0
    sent: int = 0


class Hello(msgspec.Struct, tag="hello", array_like=True):
    """Any -> any, first message on every connection: both ends must agree on schema and config."""

    sender: str
    schema_hash: str
    config_hash: str


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """Process -> front: loaded and serving. `facts` are for logs and /server_info."""

    sender: str
    facts: dict[str, str | int | float]


class ChatInput(msgspec.Struct, tag="chat", frozen=True, array_like=True):
    """Messages for the chat template as a JSON array, checked by the front; template variables as a JSON object."""

    messages_json: bytes
    template_kwargs_json: bytes = b"{}"


class TextInput(msgspec.Struct, tag="text", frozen=True, array_like=True):
    """A plain prompt."""

    text: str
    add_special_tokens: bool = True


class TokenInput(msgspec.Struct, tag="tokens", frozen=True, array_like=True):
    """Token ids as int32 bytes, taken as they are."""

    ids: bytes


class GenerateRequest(msgspec.Struct, tag="generate", array_like=True):
    """Front -> tokenizer: a new request, or (output_ids, attempt > 0) one that goes on."""

    request: RequestId
    attempt: int
    front: int
    label: str
    input: ChatInput | TextInput | TokenInput
    sampling: SamplingParams
    stream: bool
    output_ids: bytes
    stamps: Stamps
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    priority: int = 0
    echo: bool = False
    """The front wants the prompt's text back, in Accepted."""


class TokenizedRequest(msgspec.Struct, tag="tokenized", array_like=True):
    """Tokenizer -> scheduler."""

    request: RequestId
    attempt: int
    front: int
    label: str
    prompt_ids: bytes
    sampling: SamplingParams
    stream: bool
    output_ids: bytes
    stamps: Stamps
    cache_salt: str | None = None
    priority: int = 0
    echo: bool = False


class Abort(msgspec.Struct, tag="abort", array_like=True):
    """Front -> tokenizer -> scheduler, on the path of its request, so that it never overtakes it."""

    request: RequestId
    attempt: int


class Stop(msgspec.Struct, tag="stop", array_like=True):
    """Detokenizer -> scheduler: the text ended after `num_tokens` output tokens (or the held-back end is confirmed)."""

    request: RequestId
    attempt: int
    num_tokens: int


class Resend(msgspec.Struct, tag="resend", array_like=True):
    """Detokenizer -> scheduler, or front -> detokenizer: output from token index `first_token` on did not arrive."""

    request: RequestId
    attempt: int
    first_token: int


class Opened(msgspec.Struct, tag="opened", array_like=True):
    """In StepOutput: the scheduler accepted a request; what the detokenizer must know of it."""

    request: RequestId
    attempt: int
    front: int
    stream: bool
    num_prompt_tokens: int
    stop: tuple[str, ...]
    skip_special_tokens: bool
    output_ids: bytes
    stamps: Stamps
    min_tokens: int = 0
    keep_stop: bool = False
    echo: bytes | None = None
    """The prompt's ids (int32) if its text is wanted back."""


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """In StepOutput and FrontOutput: a request ended with an error. `front` -1: the one that opened it."""

    request: RequestId
    attempt: int
    front: int
    error: ErrorInfo


class Started(msgspec.Struct, tag="started", array_like=True):
    """In StepOutput: facts that come with a request's first token of this attempt."""

    request: RequestId
    attempt: int
    cached_tokens: int
    stamps: Stamps


class Logprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log probabilities of m tokens and, per token, of the `width` most likely ones, best first.

    chosen float32 [m] (NaN: none), ids int32 [m, width], tops float32 [m, width].
    """

    width: int
    chosen: bytes
    ids: bytes
    tops: bytes


class PromptLogprobs(msgspec.Struct, array_like=True):
    """In StepOutput: logprobs of prompt tokens from index `first` on, whose ids (int32) are here too."""

    request: RequestId
    attempt: int
    first: int
    ids: bytes
    logprobs: Logprobs


class Drafted(msgspec.Struct, array_like=True):
    """Drafted tokens of a request that were accepted and sent, and those that were not."""

    request: RequestId
    attempt: int
    accepted: int
    rejected: int


class TokenBatch(msgspec.Struct, array_like=True):
    """One step's tokens for all its requests, packed.

    requests uint64 [n], attempts int32 [n], first_token int32 [n] (index of the row's first token in its output),
    counts int32 [n], tokens int32 [sum(counts)] (row after row), finish uint8 [n] (Finish), held uint8 [n] (1 = the
    end waits for Stop). A row may have count 0 and only a finish. Empty counts: 1 each; empty finish and held: 0 each.

    Rows that stay the same for many steps are named once: a batch with `rows` > 0 and requests names its rows, and
    later ones with that `rows` and without requests are of them. Their first tokens are those of the naming batch, plus
    `ahead`.
    """

    requests: bytes = b""
    attempts: bytes = b""
    first_token: bytes = b""
    counts: bytes = b""
    tokens: bytes = b""
    finish: bytes = b""
    held: bytes = b""
    rows: int = 0
    ahead: int = 0
    logprobs: list[tuple[int, Logprobs]] = []
    """(index of a row, logprobs of all its tokens here) for the rows that want them; in order."""


class StepOutput(msgspec.Struct, tag="step", array_like=True):
    """Scheduler -> detokenizer: everything one step has to say; one message a step. Read in field order."""

    step: int
    opened: list[Opened]
    started: list[Started]
    tokens: TokenBatch
    failed: list[Failed]
    sent: int
    prompts: list[PromptLogprobs] = []
    """Before the first token of their request."""
    drafted: list[Drafted] = []
    """Of requests that end in this message or whose text may have ended; before its token rows."""


class Accepted(msgspec.Struct, tag="accepted", array_like=True):
    """In FrontOutput: the request holds a place in the queue; from here errors come inside the stream."""

    request: RequestId
    attempt: int
    num_prompt_tokens: int
    prompt_text: str | None = None
    """With `echo`: the prompt as the detokenizer reads it."""


class Ended(msgspec.Struct, tag="ended", array_like=True):
    """In FrontOutput: the final facts of a request. `num_tokens` output tokens count."""

    request: RequestId
    attempt: int
    finish: Finish
    stop_reason: str | int | None
    num_prompt_tokens: int
    num_tokens: int
    cached_tokens: int
    stamps: Stamps
    accepted_drafts: int = 0
    """Of the tokens that count, those that were drafted."""
    rejected_drafts: int = 0


# Inside TokenLogprob the plain name means its field.
_Bytes: TypeAlias = bytes


class TokenLogprob(msgspec.Struct, array_like=True):
    """One token's logprob (None: there is none) and its bytes; `top`: the most likely tokens, best first."""

    id: int
    logprob: float | None
    bytes: _Bytes
    top: list[tuple[int, float, _Bytes]]


class PromptDelta(msgspec.Struct, array_like=True):
    """In FrontOutput: logprobs of a request's prompt tokens from index `first` on."""

    request: RequestId
    attempt: int
    first: int
    logprobs: list[TokenLogprob]


class TextDelta(msgspec.Struct, array_like=True):
    """In FrontOutput: new text of one request and the ids behind it (int32 bytes), from output index `first_token`."""

    request: RequestId
    attempt: int
    first_token: int
    token_ids: bytes
    text: str
    logprobs: list[TokenLogprob] | None = None
    """One per token id, if asked for."""


class FrontOutput(msgspec.Struct, tag="output", array_like=True):
    """Detokenizer -> one front: one message a step with all its requests. Read in field order."""

    step: int
    accepted: list[Accepted]
    deltas: list[TextDelta]
    ended: list[Ended]
    failed: list[Failed]
    prompts: list[PromptDelta] = []
    """To be read before `deltas`."""


class StatsCall(msgspec.Struct, tag="stats_call", array_like=True):
    """Front -> scheduler."""

    front: int
    call: int


class Stats(msgspec.Struct, tag="stats", array_like=True):
    """Scheduler -> front: a snapshot between two steps. Pages by owner; they add up to total."""

    call: int
    running: int
    waiting: int
    step: int
    pages_total: int
    pages_free: int
    pages_tree: int
    pages_tail: int
    pages_in_flight: int
    audit_errors: int
    prompt_tokens: int = 0
    """Prompt tokens of all requests that have started; `cached_tokens` of them came from the prefix cache."""
    cached_tokens: int = 0
    output_tokens: int = 0
    retractions: int = 0
    settled: dict[str, str | int] = {}
    """What options came to here, by name."""
    drafted_tokens: int = 0
    """Drafted tokens that were verified since the start; `accepted_tokens` of them were accepted."""
    accepted_tokens: int = 0
    verified_rows: int = 0
    """Rows of steps that verified drafts: a row gives one token and those accepted."""


class FlushCall(msgspec.Struct, tag="flush_call", array_like=True):
    """Front -> scheduler: drop every cached prefix that nobody uses. Answered with Reply {pages}."""

    front: int
    call: int


class PinCall(msgspec.Struct, tag="pin_call", array_like=True):
    """Front -> tokenizer: keep a cached prefix for `ttl_s` seconds. Becomes PinTokens, or a Reply with an error."""

    front: int
    call: int
    input: ChatInput | TextInput | TokenInput
    ttl_s: float
    cache_salt: str | None


class PinTokens(msgspec.Struct, tag="pin_tokens", array_like=True):
    """Tokenizer -> scheduler. Answered with Reply {pin, tokens}."""

    front: int
    call: int
    ids: bytes
    ttl_s: float
    cache_salt: str | None


class UnpinCall(msgspec.Struct, tag="unpin_call", array_like=True):
    """Front -> scheduler. Answered with Reply {found}."""

    front: int
    call: int
    pin: int


class TokenizeCall(msgspec.Struct, tag="tokenize_call", array_like=True):
    """Front -> tokenizer. Answered with Reply.ids (int32 bytes)."""

    front: int
    call: int
    input: ChatInput | TextInput


class DetokenizeCall(msgspec.Struct, tag="detokenize_call", array_like=True):
    """Front -> tokenizer. Answered with Reply.text."""

    front: int
    call: int
    ids: bytes
    skip_special_tokens: bool


class Reply(msgspec.Struct, tag="reply", array_like=True):
    """Tokenizer or scheduler -> front: the answer to a call."""

    call: int
    values: dict[str, int]
    error: ErrorInfo | None = None
    text: str = ""
    ids: bytes = b""


ToTokenizer: TypeAlias = Hello | GenerateRequest | Abort | PinCall | TokenizeCall | DetokenizeCall
ToScheduler: TypeAlias = (
    Hello | TokenizedRequest | Abort | Stop | Resend | StatsCall | FlushCall | PinTokens | UnpinCall
)
ToDetokenizer: TypeAlias = Hello | StepOutput | Resend
ToFront: TypeAlias = Hello | Ready | FrontOutput | Failed | Stats | Reply


def pack_i32(values: object) -> bytes:
    """Integers as little-endian int32 bytes."""
    return np.asarray(values, dtype="<i4").tobytes()


def unpack_i32(data: bytes) -> np.ndarray:
    """int32 [n] view of little-endian bytes (read-only)."""
    return np.frombuffer(data, dtype="<i4")


def unpack_f32(data: bytes) -> np.ndarray:
    """float32 [n] view of little-endian bytes (read-only)."""
    return np.frombuffer(data, dtype="<f4")


def unpack_u64(data: bytes) -> np.ndarray:
    """uint64 [n] view of little-endian bytes (read-only)."""
    return np.frombuffer(data, dtype="<u8")


class RowReader:
    """Unpacks TokenBatches of one sender, in the order they came."""

    def __init__(self) -> None:
        self._named = TokenBatch()

    def columns(self, batch: TokenBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Request uint64, attempt int32, first token int32 of each row. Raises LookupError for rows never named."""
        names = batch
        if batch.rows:
            if batch.requests:
                self._named = batch
            elif batch.rows != self._named.rows:
                raise LookupError(f"rows {batch.rows} are unknown; {self._named.rows} are")
            names = self._named
        return unpack_u64(names.requests), unpack_i32(names.attempts), unpack_i32(names.first_token) + batch.ahead

    def rows(self, batch: TokenBatch) -> Iterator[tuple[int, int, int, int, int, int]]:
        """Request, attempt, first token, count, finish, held of each row. Raises LookupError for rows never named."""
        requests, attempts, first = self.columns(batch)
        num = len(requests)
        return zip(
            requests.tolist(),
            attempts.tolist(),
            first.tolist(),
            unpack_i32(batch.counts).tolist() if batch.counts else [1] * num,
            batch.finish or bytes(num),
            batch.held or bytes(num),
            strict=True,
        )


def schema_hash() -> str:
    """Hash of every message's fields and types: two builds that disagree refuse each other at connect."""
    parts = [repr(msgspec.inspect.type_info(union)) for union in (ToTokenizer, ToScheduler, ToDetokenizer, ToFront)]
    parts.append(repr([(member.name, member.value) for member in Finish]))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
