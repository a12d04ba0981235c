"""The OpenAI error envelope: ``{"error": {"message", "type", "param", "code"}}``."""

from collections.abc import Sequence
from typing import Any

from fastapi.responses import JSONResponse

from fathom_serve.engine.request import Failed

TYPES = {
    400: "invalid_request_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
}


class ApiError(Exception):
    """An answer that is an error.

    Args:
        failed: status, message, parameter and code.
    """

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed


def envelope(failed: Failed) -> dict[str, Any]:
    """The body of an error answer, also sent as the last event of a stream that fails."""
    kind = TYPES.get(failed.status, "server_error")
    return {"error": {"message": failed.message, "type": kind, "param": failed.param, "code": failed.code}}


def error_response(failed: Failed) -> JSONResponse:
    """The error as an HTTP answer, with Retry-After where waiting helps."""
    headers = {} if failed.retry_after_s is None else {"Retry-After": str(failed.retry_after_s)}
    return JSONResponse(envelope(failed), failed.status, headers)


def validation_failed(errors: Sequence[Any], known: Sequence[str]) -> Failed:
    """The first validation error as a 400 that names the parameter."""
    first = errors[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    # pydantic adds the branch of a union to the place; a client knows only its own fields and their indices.
    param = ".".join(part for part in place if part.isidentifier() or part.isdigit()) or None
    if first["type"] == "json_invalid":
        return Failed(400, f"the body is not valid JSON: {first.get('ctx', {}).get('error', '')}", None, "invalid_json")
    if first["type"] == "extra_forbidden":
        near = f"; supported here: {', '.join(known)}" if len(place) == 1 else ""
        return Failed(400, f"unknown or unsupported parameter: {param}{near}", param, "unsupported_parameter")
    if first["type"] == "missing":
        return Failed(400, f"missing parameter: {param or 'the body'}", param, "missing_parameter")
    return Failed(400, f"{param}: {first['msg']}", param, "invalid_parameter")
