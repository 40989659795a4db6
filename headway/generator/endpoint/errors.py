"""HTTP errors, in the error formats of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

from typing import Any

import msgspec

from headway.generator.recording.inflight_call import CallFailed
from headway.generator.recording.sessions import KeyRefused, NoSuchRollout
from headway.records.conversations import RequestRefused
from headway.records.errors import Overloaded

Headers = tuple[tuple[bytes, bytes], ...]
NO_RETRY: Headers = ((b"x-should-retry", b"false"),)  # both APIs' clients honour it
# status -> error type in OpenAI's API, in Anthropic's
_TYPES = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("invalid_request_error", "authentication_error"),
    403: ("invalid_request_error", "permission_error"),
    404: ("invalid_request_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("invalid_request_error", "invalid_request_error"),
    409: ("invalid_request_error", "conflict_error"),
    415: ("invalid_request_error", "invalid_request_error"),
    421: ("invalid_request_error", "permission_error"),
    413: ("invalid_request_error", "request_too_large"),
    431: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    503: ("server_error", "api_error"),
    504: ("server_error", "timeout_error"),
}
STATUSES = tuple(_TYPES)
_DETAILED = ("thread_unsupported_request",)  # codes that Anthropic's clients act on


class HttpError(Exception):
    """An error response."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, headers: Headers = ()
    ) -> None:
        """``status``: HTTP's; ``code`` and ``param`` (the field): as in OpenAI's API."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = headers

    def openai(self) -> bytes:
        """The body in OpenAI's format."""
        error_fields = {"message": str(self), "type": _TYPES[self.status][0], "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error_fields})

    def anthropic(self, request_id: str) -> bytes:
        """The body in Anthropic's format."""
        error_fields: dict[str, Any] = {"type": _TYPES[self.status][1], "message": str(self)}
        if self.code in _DETAILED:
            error_fields["details"] = {"error_code": self.code}
        return msgspec.json.encode({"type": "error", "error": error_fields, "request_id": request_id})


def http_error(error: Exception) -> HttpError:
    """Convert an error of sessions and recorders to an HTTP error; unknown errors are internal, status 500."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, RequestRefused):
        return _of_recorder(error)
    if isinstance(error, KeyRefused):
        return HttpError(401, str(error), code="invalid_api_key")
    if isinstance(error, NoSuchRollout):
        return HttpError(404, str(error), code="rollout_not_found", param="rollout")
    if isinstance(error, Overloaded):
        return HttpError(429, str(error), code="rate_limit_exceeded", headers=_retry_after(error.retry_after_s))
    if isinstance(error, CallFailed) and error.timeout:
        return HttpError(504, str(error), code="timeout", headers=NO_RETRY)  # a retry would time out too
    return HttpError(500, f"{type(error).__name__}: {error}", code="internal_error")


def _of_recorder(error: RequestRefused) -> HttpError:
    message, code, param = str(error), error.code, error.param
    if code == "rollout_busy":
        return HttpError(429, message, code="rate_limit_exceeded", headers=_retry_after(1))
    if code == "rollout_closed":
        return HttpError(409, message, code=code, headers=NO_RETRY)
    if code in ("rollout_limit_exceeded", "reward_refused"):
        return HttpError(403, message, code=code, headers=NO_RETRY)  # not 429: it won't pass
    keeps_code = code in ("context_length_exceeded", *_DETAILED)
    return HttpError(400, message, code=code if keeps_code else None, param=param)


def _retry_after(seconds: int) -> Headers:
    return ((b"retry-after", str(seconds).encode()),)
