"""What a client is told when its request fails, in OpenAI's error form."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shadowsup.errors import ShadowsupError

_encode = msgspec.json.Encoder().encode

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "engine_unavailable",
}


class ApiError(ShadowsupError):
    """A request that ends in an error.

    Args:
        status: HTTP status, used while no byte of the response has been sent.
        message: for the person who sent the request.
        type: OpenAI's ``type``; by default the one that goes with ``status``.
        param: the parameter at fault, ``messages[2].content``.
        code: a stable word for programs.
        retry_after_s: seconds after which the same request may succeed; None when it never will.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type or _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """Return the JSON body, the same for a response and for an event in a stream."""
        error: dict[str, object] = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        if self.retry_after_s is not None:
            # An event in a stream has no headers: there this says what Retry-After says in a response.
            error["retryable"] = True
        return _encode({"error": error})

    def headers(self) -> dict[str, str]:
        """Return the headers of the response; ``x-should-retry`` is what the openai client obeys."""
        if self.retry_after_s is not None:
            return {"Retry-After": str(max(1, round(self.retry_after_s))), "x-should-retry": "true"}
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer", "x-should-retry": "false"}
        return {"x-should-retry": "false"} if self.status >= 500 else {}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return a 400 for a request that can never work."""
    return ApiError(400, message, param=param, code=code)


def model_not_found(model: str, known: Iterable[str]) -> ApiError:
    """Return the 404 that lists what there is."""
    names = sorted(known)
    there_is = f"this node serves {', '.join(names)}" if names else "this node serves no model"
    return ApiError(404, f"The model '{model}' does not exist: {there_is}", param="model", code="model_not_found")


def unavailable(message: str) -> ApiError:
    """Return the 503 of a worker without an engine; another try may find one."""
    return ApiError(503, message, code="engine_unavailable", retry_after_s=1.0)


def internal() -> ApiError:
    """Return the 500 for a fault of this program; details go to the log, never to the client."""
    return ApiError(500, "The gateway failed to handle this request; the log of the gateway says why", code="internal_error")
