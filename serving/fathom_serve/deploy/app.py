"""The Ray Serve application: ``import_path: fathom_serve.deploy.app:build``.

Two deployments: ``Gateway`` validates, shapes answers and streams; ``DepthEngine`` holds the model. Their own CPU
requests are small fractions: they only bound what Ray schedules, and so fit beside a stack on two cores.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from fathom.errors import ConfigError
from fathom_serve.api.app import create_app
from fathom_serve.api.backend import Generation, ModelCard
from fathom_serve.deploy.source import Source, local_folder, resolve
from fathom_serve.engine.limits import EngineLimits
from fathom_serve.engine.request import Event, Failed

GATEWAY_SLACK = 64
CANCEL_GRACE_S = 300.0


class DeployArgs(BaseModel):
    """``args`` of the application in a Serve configuration.

    Attributes:
        model: ``models:/NAME@ALIAS``, a folder, a URI, or a hub specification.
        name: what requests call the model; default from the registry or the folder.
        version: in the registry, when the model is already resolved.
        digest: of its manifest, when the model is already resolved.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    name: str | None = None
    version: str | None = None
    digest: str | None = None
    tracking_uri: str | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    threads: int | None = Field(default=None, ge=1, description="torch threads; default all cores")
    replicas: int = Field(default=1, ge=1)
    gateway_cpus: float = Field(default=0.05, ge=0.0)
    engine_cpus: float = Field(default=0.25, ge=0.0)
    engine_gpus: float = Field(default=0.0, ge=0.0)
    limits: EngineLimits = EngineLimits()

    def source(self) -> Source:
        """The model to serve; looks an alias up."""
        found = resolve(self.model, self.tracking_uri)
        return Source(self.name or found.name, found.uri, self.version or found.version, self.digest or found.digest)


class DepthEngine:
    """A replica: the model and its step loop."""

    def __init__(self, args: dict[str, Any], source: Source) -> None:
        # Only here: the ingress and whoever builds the application need no torch.
        from fathom_serve.deploy.service import EngineService

        settings = DeployArgs(**args)
        self.service = EngineService(local_folder(source), source, settings.limits, settings.dtype, settings.threads)

    async def card(self) -> ModelCard:
        """The model."""
        return await self.service.card()

    async def health(self) -> str | None:
        """None when the step loop moves."""
        return await self.service.health()

    async def generate(self, generation: Generation) -> AsyncIterator[list[Event]]:
        """Events of one answer; a cancelled reader frees what it holds."""
        events = self.service.generate(generation)
        try:
            async for batch in events:
                yield batch
        finally:
            await events.aclose()

    async def check_health(self) -> None:
        """Serve replaces a replica whose step loop has failed or is stuck."""
        fault = await self.service.health()
        if fault is not None:
            raise RuntimeError(fault)


class HandleBackend:
    """The engine deployment, seen from the gateway."""

    def __init__(self, engine: DeploymentHandle) -> None:
        self.engine = engine
        self._card: ModelCard | None = None

    async def card(self) -> ModelCard:
        """The model; asked for once, since replicas of one application all serve the same."""
        if self._card is None:
            self._card = await self.engine.card.remote()
        return self._card

    async def health(self) -> str | None:
        """What a replica says, or that none answers."""
        try:
            return await asyncio.wait_for(_await(self.engine.health.remote()), 10.0)
        except (RayActorError, BackPressureError, DeploymentUnavailableError, asyncio.TimeoutError) as error:
            return f"no engine replica answers: {type(error).__name__}"

    async def generate(self, generation: Generation) -> AsyncIterator[list[Event]]:
        """Events of one answer. Dropping a handle's generator would leave the request running, so it is cancelled."""
        events = self.engine.options(stream=True).generate.remote(generation)
        ended = False
        try:
            async for batch in events:
                yield batch
            ended = True
        except BackPressureError:
            yield [Failed(503, "the server is full", None, "queue_full", 5)]
        except (RayActorError, DeploymentUnavailableError):
            yield [Failed(503, "the engine replica went away; a new one is starting", None, "replica_lost", 10)]
        finally:
            if not ended:
                events.cancel()


async def _await(response: Any) -> Any:
    return await response


@serve.ingress()
class Gateway:
    """The ingress: no model, no torch work."""

    def __init__(self, engine: DeploymentHandle) -> None:
        self.backend = HandleBackend(engine)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self.backend)


def build(args: dict[str, Any]) -> serve.Application:
    """The application of a Serve configuration.

    Raises:
        ConfigError: unknown or invalid arguments.
        ModelError: the model cannot be found.
    """
    try:
        settings = DeployArgs(**args)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"deploy arguments: {'.'.join(map(str, first['loc']))}: {first['msg']}",
            f"known arguments: {', '.join(DeployArgs.model_fields)}",
        ) from error
    limits = settings.limits
    ongoing = limits.max_active + limits.max_queued
    engine = serve.deployment(
        DepthEngine,
        name="DepthEngine",
        num_replicas=settings.replicas,
        # Above what the engine itself takes, so that it is the engine that says when it is full.
        max_ongoing_requests=ongoing + GATEWAY_SLACK,
        health_check_period_s=5.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=CANCEL_GRACE_S,
        graceful_shutdown_wait_loop_s=1.0,
        ray_actor_options={"num_cpus": settings.engine_cpus, "num_gpus": settings.engine_gpus},
    )
    gateway = serve.deployment(
        Gateway,
        name="Gateway",
        max_ongoing_requests=settings.replicas * ongoing + 2 * GATEWAY_SLACK,
        graceful_shutdown_timeout_s=CANCEL_GRACE_S,
        graceful_shutdown_wait_loop_s=1.0,
        ray_actor_options={"num_cpus": settings.gateway_cpus},
    )
    return gateway.bind(engine.bind(args, settings.source()))
