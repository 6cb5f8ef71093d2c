"""EngineClient: the one async object that turns messages into streams; every face (HTTP, Python) uses it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from engine.config import EngineConfig
from engine.errors import (
    EngineError,
    RemoteError,
    RequestTimeoutError,
    SlowReaderError,
    StartupError,
    UnavailableError,
)
from engine.generation import Generation, log_end
from engine.health import Health, health_report
from engine.ipc.board import Board, Heartbeat, State
from engine.ipc.child import Layout
from engine.ipc.messages import (
    Abort,
    ChatInput,
    DetokenizeCall,
    Ended,
    Failed,
    FlushCall,
    FrontOutput,
    GenerateRequest,
    Hello,
    PinCall,
    Ready,
    Reply,
    Resend,
    Stamps,
    Stats,
    StatsCall,
    TextInput,
    ToFront,
    TokenInput,
    TokenizeCall,
    UnpinCall,
    pack_i32,
    unpack_i32,
)
from engine.ipc.sockets import Puller, Pusher, context
from engine.model_files.types import ModelFiles
from engine.sampling import SamplingParams

log = logging.getLogger(__name__)

ClientState = Literal["starting", "ready", "draining", "restarting", "failed"]

CALL_TIMEOUT_S = 10.0
BEAT_EVERY_S = 0.5
SCHEDULER = "scheduler 0"


class Observer(Protocol):
    """Hears of every request of a front that ends: with its facts, with an error, or because its client went away."""

    def on_ended(self, label: str, ended: Ended) -> None: ...

    def on_error(self, label: str, error: EngineError) -> None: ...

    def on_gone(self, label: str) -> None: ...


class Follower(Protocol):
    """Does what a client does: the fronts in other processes, as the main process's client sees them."""

    def attach(self, model: ModelFiles, layout: Layout, hello: Hello) -> None: ...

    def detach(self) -> None: ...

    def set_state(self, state: ClientState, reason: str) -> None: ...

    def fail_all(self, error: EngineError) -> None: ...


class EngineClient:
    """Requests out, streams back. Belongs to one event loop; the supervisor attaches it to the processes."""

    def __init__(self, config: EngineConfig, front: int = 0, life: int = 0) -> None:
        """`life` counts the processes that were this front before: their request numbers are never used again."""
        self.config = config
        self.front = front
        self.model: ModelFiles | None = None
        self.state: ClientState = "starting"
        self.reason = "starting"
        self.created = int(time.time())
        self.ready: dict[str, dict[str, str | int | float]] = {}
        """Facts of the processes that have reported Ready since the last attach."""
        self.on_ready: asyncio.Event = asyncio.Event()
        """Set whenever a process reports Ready."""
        self.fatal: StartupError | None = None
        """A peer that does not belong to this start was refused."""
        self._context = context()
        self._layout: Layout | None = None
        self._board: Board | None = None
        self._heartbeat: Heartbeat | None = None
        self._puller: Puller[ToFront] | None = None
        self._pushers: dict[str, Pusher] = {}
        self._generations: dict[int, Generation] = {}
        """Requests of which messages may still come."""
        self._open: set[Generation] = set()
        self._calls: dict[int, asyncio.Future[Stats | Reply]] = {}
        self.observers: list[Observer] = []
        """Hear of every request that ends."""
        self.followers: list[Follower] = []
        self._counter = life << 40
        self._first_number = front << 56 | self._counter
        self._disowned: set[int] = set()
        """Requests of this front's former lives that were seen and aborted."""
        self._beat_timer: asyncio.TimerHandle | None = None

    # -- life -----------------------------------------------------------------------------------------------------

    def attach(self, model: ModelFiles, layout: Layout, board: Board, hello: Hello) -> None:
        """Bind this front's socket and connect to the processes of one start (they need not exist yet)."""
        self.detach()
        self.model = model
        self._layout, self._board = layout, board
        self._heartbeat = Heartbeat(board, self.front)
        self.ready = {}
        self.fatal = None
        self._puller = Puller(self._context, layout.address(f"front {self.front}"), ToFront, hello)
        for name in layout.processes:
            if not name.startswith("front") and layout.rank_of(name)[1] == 0:
                self._pushers[name] = Pusher(self._context, layout.address(name), hello)
        asyncio.get_running_loop().add_reader(self._puller.fd, self._on_readable)
        self._heartbeat.state(State.READY)
        self._beat()
        for follower in self.followers:
            follower.attach(model, layout, hello)

    def detach(self) -> None:
        """Close the sockets of the last attach."""
        if self._puller is not None:
            asyncio.get_running_loop().remove_reader(self._puller.fd)
            self._puller.close()
            self._puller = None
        for pusher in self._pushers.values():
            pusher.close()
        self._pushers.clear()
        self._disowned.clear()
        self._board = None
        self._heartbeat = None
        if self._beat_timer is not None:
            self._beat_timer.cancel()
            self._beat_timer = None
        for follower in self.followers:
            follower.detach()

    def close(self) -> None:
        """Detach and end the ZeroMQ context."""
        self.detach()
        self._context.destroy(linger=0)

    def set_state(self, state: ClientState, reason: str = "") -> None:
        """What this front, and those that follow it, say of the server; requests are taken only when it is ready."""
        self.state, self.reason = state, reason
        for follower in self.followers:
            follower.set_state(state, reason)

    def mark_stopped(self) -> None:
        """Tell the processes, through the board, that this front needs them no more."""
        if self._heartbeat is not None:
            self._heartbeat.state(State.STOPPED)

    def mark(self, front: int, state: State) -> None:
        """Say on the board, for a front that can no longer say it, how it stands."""
        if self._board is not None:
            self._board.mark(front, state)

    def is_silent(self, front: int, limit_s: float) -> bool:
        """Whether a front's line on the board is older than `limit_s`, or there is none."""
        return self._board is None or self._board.read(front).age_s > limit_s

    def work_of(self, front: int) -> int:
        """How many requests a front has open, as its line on the board says."""
        return 0 if self._board is None else self._board.read(front).work

    def _beat(self) -> None:
        assert self._heartbeat is not None
        self._heartbeat.beat(self._counter & (1 << 40) - 1, len(self._open))
        self._beat_timer = asyncio.get_running_loop().call_later(BEAT_EVERY_S, self._beat)

    def fail_all(self, error: EngineError) -> None:
        """End everything in flight with `error`, at those that follow too."""
        for follower in self.followers:
            follower.fail_all(error)
        for generation in list(self._generations.values()):
            self._tell_error(generation, error)
            generation.on_error(error)
        self._generations.clear()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(UnavailableError(str(error)))
        self._calls.clear()

    # -- requests -------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Requests whose face has not let go of them yet: a slow reader's answer counts until he has it all."""
        return len(self._open)

    @property
    def model_name(self) -> str:
        """The served name."""
        options = self.config.model
        if options.served_model_name is not None:
            return options.served_model_name
        return self.model.name if self.model is not None else (options.model or "default")

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together."""
        facts = self.ready.get("scheduler 0", {})
        return int(facts.get("max_len", 0))

    def check_ready(self) -> None:
        """Raise UnavailableError unless requests are taken now."""
        if self.state != "ready":
            raise UnavailableError(f"The server is {self.state}: {self.reason}.", retry_after_s=5)

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
    ) -> Generation:
        """Send a request off. Raises UnavailableError unless ready, InvalidRequestError for impossible parameters."""
        self.check_ready()
        return self._send(
            source, sampling, stream=stream, label=label, cache_salt=cache_salt, priority=priority, echo=echo
        )

    def abort(self, *, label: str | None = None, prefix: str | None = None) -> int:
        """End the running requests whose label is `label`, or begins with `prefix`, or all; how many these were.

        Each still gets its final facts, with the output so far and finish "abort".
        """
        found = [
            generation
            for generation in self._generations.values()
            if (label is None or generation.label == label) and (prefix is None or generation.label.startswith(prefix))
        ]
        for generation in found:
            self._send_abort(generation)
        return len(found)

    async def warm_up(self) -> None:
        """One short request through every process, before `ready`."""
        sampling = SamplingParams(temperature=0.0, max_tokens=min(4, self.context_length - 1), ignore_eos=True)
        generation = self._send(TokenInput(pack_i32([0])), sampling, stream=True, label="warm-up")
        try:
            async for _ in generation:
                pass
        finally:
            generation.close()

    def _send(
        self,
        source: ChatInput | TextInput | TokenInput,
        sampling: SamplingParams,
        *,
        stream: bool,
        label: str,
        cache_salt: str | None = None,
        priority: int = 0,
        echo: bool = False,
    ) -> Generation:
        assert self.model is not None
        sampling.checked(self.model.config.vocab_size)
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=secrets.randbits(63))
        self._counter += 1
        number = self.front << 56 | self._counter
        generation = Generation(number, 0, label, self.release)
        request = GenerateRequest(
            request=number,
            attempt=0,
            front=self.front,
            label=label,
            input=source,
            sampling=sampling,
            stream=stream,
            output_ids=b"",
            stamps=Stamps(arrived=time.monotonic_ns()),
            cache_salt=cache_salt,
            priority=priority,
            echo=echo,
        )
        self._tokenizer_of(number).send(request)
        if (limit_s := self.config.http.request_timeout) is not None:
            error = RequestTimeoutError(f"The request took longer than {limit_s:g} s (--request-timeout).")
            generation.deadline = asyncio.get_running_loop().call_later(limit_s, self._give_up, generation, error)
        self._generations[number] = generation
        self._open.add(generation)
        return generation

    def release(self, generation: Generation) -> None:
        """Forget a request; if it is still running, have it aborted."""
        self._open.discard(generation)
        if self._generations.pop(generation.request, None) is not None:
            self._send_abort(generation)
            self._tell_gone(generation)

    def _send_abort(self, generation: Generation) -> None:
        if self._pushers:
            self._tokenizer_of(generation.request).send(Abort(generation.request, generation.attempt))

    def _give_up(self, generation: Generation, error: EngineError) -> None:
        """End a running request with an error of this front's own making."""
        if self._generations.pop(generation.request, None) is not None:
            log.warning("event=given_up label=%r reason=%s", generation.label, error.code)
            self._send_abort(generation)
            self._tell_error(generation, error)
            generation.on_error(error)

    def _tell_error(self, generation: Generation, error: EngineError) -> None:
        for observer in self.observers:
            observer.on_error(generation.label, error)

    def _tell_gone(self, generation: Generation) -> None:
        for observer in self.observers:
            observer.on_gone(generation.label)

    def _tokenizer_of(self, number: int) -> Pusher:
        assert self._layout is not None
        return self._pushers[self._layout.tokenizer_of(number)]

    # -- calls ----------------------------------------------------------------------------------------------------

    async def stats(self) -> Stats:
        """The scheduler's counts. Raises UnavailableError if it does not answer."""
        answer = await self._call(SCHEDULER, lambda call: StatsCall(self.front, call))
        assert isinstance(answer, Stats)
        return answer

    async def flush_cache(self) -> int:
        """Drop every cached prefix that nobody uses; how many pages that freed."""
        return (await self._reply(SCHEDULER, lambda call: FlushCall(self.front, call))).values["pages"]

    async def tokenize(self, source: ChatInput | TextInput) -> list[int]:
        """The token ids of a text or chat. Raises InvalidRequestError."""
        answer = await self._reply(self._any_tokenizer(), lambda call: TokenizeCall(self.front, call, source))
        return unpack_i32(answer.ids).tolist()

    async def detokenize(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids. Raises InvalidRequestError for an id that the tokenizer has not."""
        data = pack_i32(ids)
        answer = await self._reply(
            self._any_tokenizer(), lambda call: DetokenizeCall(self.front, call, data, skip_special_tokens)
        )
        return answer.text

    def _any_tokenizer(self) -> str:
        """The tokenizers take calls in turn."""
        return "tokenizer 0" if self._layout is None else self._layout.tokenizer_of(self._counter + 1)

    async def pin_prefix(
        self, source: ChatInput | TextInput | TokenInput, ttl_s: float, cache_salt: str | None
    ) -> tuple[int, int]:
        """Keep a cached prefix; its pin id and how many tokens are kept. Raises InvalidRequestError."""
        answer = await self._reply("tokenizer 0", lambda call: PinCall(self.front, call, source, ttl_s, cache_salt))
        return answer.values["pin"], answer.values["tokens"]

    async def unpin_prefix(self, pin: int) -> bool:
        """Let a pinned prefix go; False if there is no such pin (any more)."""
        answer = await self._reply(SCHEDULER, lambda call: UnpinCall(self.front, call, pin))
        return bool(answer.values["found"])

    async def _reply(self, process: str, message: Callable[[int], msgspec.Struct]) -> Reply:
        answer = await self._call(process, message)
        assert isinstance(answer, Reply)
        if answer.error is not None:
            raise RemoteError(answer.error)
        return answer

    async def _call(self, process: str, message: Callable[[int], msgspec.Struct]) -> Stats | Reply:
        """Send a call and wait for its answer. Raises UnavailableError if none comes."""
        pusher = self._pushers.get(process)
        if pusher is None or self.state not in ("ready", "draining"):
            raise UnavailableError(f"The server is {self.state}: {self.reason}.", retry_after_s=5)
        self._counter += 1
        call = self._counter
        future: asyncio.Future[Stats | Reply] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        pusher.send(message(call))
        try:
            return await asyncio.wait_for(future, CALL_TIMEOUT_S)
        except TimeoutError:
            raise UnavailableError(f"The {process.split()[0]} did not answer in time.", retry_after_s=5) from None
        finally:
            self._calls.pop(call, None)

    # -- health ---------------------------------------------------------------------------------------------------

    def health(self) -> Health:
        """From the heartbeat board alone: nobody is asked."""
        return health_report(self.state, self.reason, self._layout, self._board)

    # -- messages -------------------------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        """Take in what waits, in portions; ZeroMQ's descriptor is edge-triggered, so come back until it is empty."""
        puller = self._puller
        if puller is None:
            return
        try:
            for message in puller.drain(limit=256):
                self._receive(message)
        except StartupError as error:
            self.fatal = error
            self.on_ready.set()
        finally:
            if puller.wait(0):
                asyncio.get_running_loop().call_soon(self._on_readable)

    def _receive(self, message: ToFront) -> None:
        if isinstance(message, FrontOutput):
            self._receive_output(message)
        elif isinstance(message, Failed):
            self._fail(message)
        elif isinstance(message, Stats | Reply):
            future = self._calls.get(message.call)
            if future is not None and not future.done():
                future.set_result(message)
        elif isinstance(message, Ready):
            self.on_process_ready(message)

    def on_process_ready(self, message: Ready) -> None:
        """A process of this start is up."""
        self.ready[message.sender] = message.facts
        self.on_ready.set()

    def _receive_output(self, output: FrontOutput) -> None:
        find = self._generations.get
        for accepted in output.accepted:
            if (generation := find(accepted.request)) is not None:
                generation.on_accepted(accepted.num_prompt_tokens, accepted.prompt_text)
            else:
                self._disown(accepted.request, accepted.attempt)
        for prompt in output.prompts:
            generation = find(prompt.request)
            if generation is not None and generation.attempt == prompt.attempt:
                generation.on_prompt(prompt.first, prompt.logprobs)
        now_s = time.monotonic()
        for delta in output.deltas:
            generation = find(delta.request)
            if generation is None:
                self._disown(delta.request, delta.attempt)
                continue
            if generation.attempt != delta.attempt:
                continue
            missing = generation.on_delta(delta)
            if missing is not None:
                self._pushers["detokenizer 0"].send(Resend(delta.request, delta.attempt, missing))
            elif generation.unread_too_much(delta, now_s):
                self._give_up(generation, SlowReaderError("The answer was not read: too much of it waited too long."))
        for ended in output.ended:
            generation = find(ended.request)
            if generation is not None and generation.attempt == ended.attempt:
                del self._generations[ended.request]
                log_end(generation.label, ended)
                for observer in self.observers:
                    observer.on_ended(generation.label, ended)
                generation.on_ended(ended)
        for failed in output.failed:
            self._fail(failed)

    def _disown(self, number: int, attempt: int) -> None:
        """Abort a request of a process that was this front before and died: nobody reads its output any more."""
        if number < self._first_number and number not in self._disowned and self._pushers:
            self._disowned.add(number)
            self._tokenizer_of(number).send(Abort(number, attempt))

    def _fail(self, failed: Failed) -> None:
        generation = self._generations.get(failed.request)
        if generation is not None and generation.attempt == failed.attempt:
            del self._generations[failed.request]
            error = RemoteError(failed.error)
            self._tell_error(generation, error)
            generation.on_error(error)
