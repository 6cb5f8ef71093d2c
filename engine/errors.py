"""Typed errors: each carries an HTTP status, an OpenAI error type and code, and a process exit code."""

from __future__ import annotations

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, array_like=True):
    """An error as it travels between processes. `status` is the HTTP status the client gets."""

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None


class EngineError(Exception):
    """Base of every error a user may see. Subclasses fix status, type and exit code."""

    status = 500
    type = "internal_error"
    code: str | None = None
    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else type(self).code
        self.retry_after_s = retry_after_s

    def info(self) -> ErrorInfo:
        """The error as a message field."""
        return ErrorInfo(self.status, self.type, self.message, self.param, self.code, self.retry_after_s)


class RemoteError(EngineError):
    """An error another process reported; its status and type come from there."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message, param=info.param, code=info.code, retry_after_s=info.retry_after_s)
        self.status = info.status
        self.type = info.type

    def info(self) -> ErrorInfo:
        return ErrorInfo(self.status, self.type, self.message, self.param, self.code, self.retry_after_s)


class InvalidRequestError(EngineError):
    """The request itself is wrong; `param` names the field."""

    status = 400
    type = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """The prompt, or prompt and answer, exceed what the model or the pool can hold."""

    code = "context_length_exceeded"


class UnknownModelError(InvalidRequestError):
    """The request names a model this server does not serve."""

    status = 404
    code = "model_not_found"


class NotFoundError(InvalidRequestError):
    """No such route."""

    status = 404
    code = "not_found"


class MethodNotAllowedError(InvalidRequestError):
    """The route exists, the method does not."""

    status = 405
    code = "method_not_allowed"


class AuthenticationError(InvalidRequestError):
    """The API key is missing or wrong."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class RequestTimeoutError(EngineError):
    """The request took longer than --request-timeout."""

    status = 504
    type = "timeout_error"
    code = "request_timeout"


class SlowBodyError(EngineError):
    """The client began a request body and did not go on."""

    status = 408
    type = "timeout_error"
    code = "slow_body"


class SlowReaderError(EngineError):
    """The client did not read its answer: too much or for too long waited for it."""

    status = 408
    type = "timeout_error"
    code = "slow_reader"


class PayloadTooLargeError(InvalidRequestError):
    """The body exceeds --max-body-mb."""

    status = 413
    code = "payload_too_large"


class UnavailableError(EngineError):
    """The server cannot take requests now: starting, draining or restarting."""

    status = 503
    type = "unavailable_error"
    code = "unavailable"


class ProcessDiedError(EngineError):
    """A process the request depended on ended."""

    status = 500
    type = "internal_error"
    code = "process_died"
    exit_code = 70


class DeviceLostError(EngineError):
    """The device answers with errors only: the process that drives it must be started anew."""

    type = "device_error"
    code = "device_lost"
    exit_code = 71


class OverloadedError(EngineError):
    """Too many requests wait already; `retry_after_s` says when to come back."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class InternalError(EngineError):
    """Our own fault; the request ends, the server goes on."""


class ConfigError(EngineError):
    """A flag, a YAML key or their combination is wrong."""

    status = 400
    type = "config_error"
    exit_code = 2


class ModelFileError(EngineError):
    """A model file cannot be found, read or understood."""

    type = "model_error"
    exit_code = 3


class StartupError(EngineError):
    """A process did not come up."""

    type = "startup_error"
    exit_code = 4


class PortInUseError(StartupError):
    """The HTTP address is taken."""

    exit_code = 5
