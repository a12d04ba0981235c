"""Routes: ``/v1/chat/completions``, ``/v1/models``, ``/health``."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from fathom_serve.api.backend import Backend, ModelCard
from fathom_serve.api.chat import ChatAnswer, accepted, to_generation, unknown_model
from fathom_serve.api.errors import ApiError, error_response, validation_failed
from fathom_serve.api.schema import ChatRequest
from fathom_serve.engine.request import Failed

MAX_BODY_BYTES = 4 << 20


def create_app(backend: Backend) -> FastAPI:
    """The HTTP surface of a backend."""
    app = FastAPI(title="Fathom", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_middleware(BodyLimit)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest) -> Response:
        return await _chat(backend, body)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(await backend.card())]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        card = await backend.card()
        if name != card.name:
            raise unknown_model(name, card)
        return _model(card)

    @app.get("/health")
    async def health() -> JSONResponse:
        fault = await backend.health()
        if fault is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unhealthy", "message": fault}, 503)

    return app


class BodyLimit:
    """Refuses large bodies, and bodies without a length, before anyone reads them.

    Plain ASGI: a wrapper that relays the body would hide a client's leaving from the stream below.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            length = dict(scope["headers"]).get(b"content-length", b"")
            if not length.isdigit() or int(length) > MAX_BODY_BYTES:
                text = f"send a Content-Length of at most {MAX_BODY_BYTES} bytes"
                await error_response(Failed(413, text, None, "body_too_large"))(scope, receive, send)
                return
        await self.app(scope, receive, send)


async def _chat(backend: Backend, body: ChatRequest) -> Response:
    generation = to_generation(body, await backend.card())
    events = backend.generate(generation)
    answer = ChatAnswer(body, generation)
    try:
        await accepted(events)
        if not body.stream:
            return JSONResponse(await answer.whole(events))
    except BaseException:
        await events.aclose()
        raise
    return StreamingResponse(_closing(answer.chunks(events), events), media_type="text/event-stream")


async def _closing(chunks: AsyncIterator[str], events: AsyncGenerator) -> AsyncIterator[str]:
    """Pass chunks on; however that ends, also by a client that leaves, the generation is closed."""
    try:
        async for chunk in chunks:
            yield chunk
    finally:
        await events.aclose()


def _model(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "fathom",
        "context_tokens": card.context,
        "source": card.source,
        "version": card.version,
        "depth": {"method": card.method, "max_depth": card.max_depth, "tau_exit": card.threshold},
    }


async def _on_api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return error_response(error.failed)


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return error_response(validation_failed(error.errors(), list(ChatRequest.model_fields)))


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return error_response(Failed(error.status_code, f"{request.url.path}: {error.detail}", None, None))
