"""`python -m tokenizer_proc FD`: one tokenizer process, configured by the message on file descriptor FD."""

from __future__ import annotations

import sys
from pathlib import Path

from engine.errors import EngineError, ModelFileError
from engine.ipc.child import ChildConfig, begin, fail_start, until_stopped
from engine.ipc.messages import (
    Abort,
    DetokenizeCall,
    Ended,
    Failed,
    Finish,
    FrontOutput,
    GenerateRequest,
    PinCall,
    PinTokens,
    Reply,
    TokenizeCall,
    TokenizedRequest,
    ToTokenizer,
)
from engine.ipc.peers import announce, connect
from engine.ipc.sockets import Puller, context
from engine.tokenizer.chat_template import ChatTemplate
from engine.tokenizer.load import load_tokenizer
from tokenizer_proc.encoder import Encoder

IDLE_WAIT_S = 0.25
PORTION = 64
"""Most messages taken in at once."""


def build_encoder(child: ChildConfig) -> Encoder:
    """The tokenizer, and the chat template from --chat-template or the model."""
    tokenizer = load_tokenizer(child.model)
    source = tokenizer.chat_template
    path = child.config.model.chat_template
    if path is not None:
        try:
            source = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFileError(f"--chat-template {path} cannot be read: {error}") from error
    if path is not None and not (source or "").strip():
        raise ModelFileError(f"--chat-template {path} is empty")
    template = None if source is None else ChatTemplate(source, tokenizer.special_tokens)
    limit = child.config.model.context_length or child.model.config.max_position
    return Encoder(tokenizer, template, limit, child.model.name)


def cancel(messages: list[ToTokenizer]) -> tuple[list[GenerateRequest], list[Abort], list[GenerateRequest]]:
    """Split a batch into requests, aborts for requests that went on earlier, and requests aborted right here."""
    aborts = {(m.request, m.attempt): m for m in messages if isinstance(m, Abort)}
    requests, cancelled = [], []
    for message in messages:
        if isinstance(message, GenerateRequest):
            if aborts.pop((message.request, message.attempt), None) is None:
                requests.append(message)
            else:
                cancelled.append(message)
    return requests, list(aborts.values()), cancelled


def aborted(request: GenerateRequest) -> FrontOutput:
    """What the front hears of a request that was cancelled here."""
    ended = Ended(request.request, request.attempt, Finish.ABORT, None, 0, 0, 0, request.stamps)
    return FrontOutput(0, [], [], [ended], [])


def answer_call(encoder: Encoder, call: PinCall | TokenizeCall | DetokenizeCall) -> PinTokens | Reply:
    """Carry out a call; PinTokens goes on to the schedulers."""
    if isinstance(call, PinCall):
        return encoder.pin(call)
    return encoder.tokenize(call) if isinstance(call, TokenizeCall) else encoder.detokenize(call)


def main() -> int:
    child, heartbeat, board, stop = begin(int(sys.argv[1]))
    ctx = context()
    layout, hello = child.layout, child.hello()
    try:
        inbox: Puller[ToTokenizer] = Puller(ctx, layout.address(child.name), ToTokenizer, hello)
        encoder = build_encoder(child)
        schedulers = connect(ctx, child, "scheduler")
        fronts = list(connect(ctx, child, "front").values())
        announce(child, heartbeat, fronts)
        stopped = until_stopped(stop, board)
        num_done = 0
        while not stopped():
            inbox.wait(IDLE_WAIT_S)
            # In portions: an abort that comes meanwhile still finds its request in the next one.
            messages = list(inbox.drain(PORTION))
            requests, aborts, cancelled = cancel(messages)
            # Short ones first: different requests may overtake each other, and a long one costs only itself.
            requests.sort(key=Encoder.work)
            for request in cancelled:
                fronts[request.front].send(aborted(request))
            for abort in aborts:
                schedulers[layout.route(abort.request)].send(abort)
            heartbeat.beat(num_done, len(requests))
            for result in encoder.encode(requests):
                num_done += 1
                heartbeat.beat(num_done, 1)
                if isinstance(result, TokenizedRequest):
                    schedulers[layout.route(result.request)].send(result)
                else:
                    request, error = result
                    fronts[request.front].send(Failed(request.request, request.attempt, request.front, error))
            for message in messages:
                if isinstance(message, PinCall | TokenizeCall | DetokenizeCall):
                    heartbeat.beat(num_done, 1)
                    answer = answer_call(encoder, message)
                    if isinstance(answer, PinTokens):
                        for pusher in schedulers.values():
                            pusher.send(answer)
                    else:
                        fronts[message.front].send(answer)
            heartbeat.beat(num_done, 0)
    except EngineError as error:
        return fail_start(child, error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
