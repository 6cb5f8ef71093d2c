"""The outbox: what it gathers goes out once, and a message says it all."""

from __future__ import annotations

import msgspec
import numpy as np

from engine.ipc.messages import Drafted, Finish, StepOutput
from engine.sampling import SamplingParams
from scheduler_proc.outbox import Outbox
from tests.unit.scheduler.test_steady import make_request


def test_drafts_go_out_once_beside_the_end_of_their_request() -> None:
    outbox = Outbox()
    request = make_request(5, [1, 2, 3], SamplingParams(max_tokens=4))
    assert not outbox
    outbox.add_drafted(request, 3, 2)
    assert outbox
    outbox.add_row(request, 3, np.array([7], np.int32), Finish.LENGTH)
    output = outbox.take(9)
    assert output.drafted == [Drafted(5, 0, 3, 2)]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=StepOutput) == output
    # Whoever is in a message that is lost is known by its rows.
    assert outbox.named_in(output) == ([5], [0])
    assert not outbox
    outbox.add_row(request, 3, np.array([7], np.int32), Finish.LENGTH)
    assert outbox.take(10).drafted == []
