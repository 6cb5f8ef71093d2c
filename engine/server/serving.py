"""How every HTTP process serves its application."""

from __future__ import annotations

import logging
import zlib

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

FLUSH_TIMEOUT_S = 1.0
"""Seconds for last bytes (error events, final chunks) to reach their readers."""


async def set_up(app: web.Application) -> tuple[web.AppRunner, web.Server]:
    """A runner that is set up, and its protocol factory; `cleanup` of the runner ends what still runs."""
    logging.getLogger("aiohttp.server").addFilter(quiet_protocol_errors)
    # handler_cancellation: a client that goes away cancels its handler, streaming or not, which aborts the request.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=FLUSH_TIMEOUT_S)
    await runner.setup()
    assert runner.server is not None
    return runner, runner.server


def quiet_protocol_errors(record: logging.LogRecord) -> bool:
    """One line, no traceback, for a request that is broken as HTTP: its bytes are the client's, not ours to log."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError | web.RequestPayloadError | zlib.error):
        record.msg, record.args = "event=bad_http error=%s", (type(error).__name__,)
        record.exc_info = record.exc_text = None
        record.levelno, record.levelname = logging.WARNING, "WARNING"
    return True
