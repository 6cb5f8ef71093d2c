"""`python -m detokenizer_proc FD`: the detokenizer process, configured by the message on file descriptor FD."""

from __future__ import annotations

import sys

from detokenizer_proc.streams import Streams
from engine.errors import EngineError
from engine.ipc.child import begin, fail_start, until_stopped
from engine.ipc.messages import Resend, StepOutput, ToDetokenizer
from engine.ipc.peers import announce, connect
from engine.ipc.sockets import Puller, context
from engine.tokenizer.load import load_tokenizer

IDLE_WAIT_S = 0.25


def main() -> int:
    child, heartbeat, board, stop = begin(int(sys.argv[1]))
    ctx = context()
    layout, hello = child.layout, child.hello()
    try:
        inbox: Puller[ToDetokenizer] = Puller(ctx, layout.address(child.name), ToDetokenizer, hello)
        tokenizer = load_tokenizer(child.model)
        streams = Streams(tokenizer.token_table(), tokenizer.special_ids, layout.num_fronts)
        schedulers = connect(ctx, child, "scheduler")
        fronts = list(connect(ctx, child, "front").values())
        del tokenizer
        announce(child, heartbeat, fronts)
        stopped = until_stopped(stop, board)
        while not stopped():
            inbox.wait(IDLE_WAIT_S)
            for message in inbox.drain():
                if isinstance(message, StepOutput):
                    streams.absorb(message)
                elif isinstance(message, Resend):
                    streams.resend(message)
            outputs, stops = streams.take()
            for front, output in outputs:
                fronts[front].send(output)
            for message in stops:
                schedulers[layout.route(message.request)].send(message)
            heartbeat.beat(streams.step, len(streams))
    except EngineError as error:
        return fail_start(child, error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
