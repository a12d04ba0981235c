"""The Ray Serve application: ``import_path: fathom_serve.deploy.app:build``.

Two deployments: ``Gateway`` validates, shapes answers and streams; ``DepthEngine`` holds the model. Their own CPU
requests are small fractions: they only bound what Ray schedules, and so fit beside a stack on two cores.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from fathom_serve.api.app import create_app
from fathom_serve.api.backend import Generation, ModelCard
from fathom_serve.deploy.arguments import parse
from fathom_serve.deploy.source import Source, local_folder
from fathom_serve.engine.request import Event, Failed

GATEWAY_SLACK = 64
CANCEL_GRACE_S = 300.0


class DepthEngine:
    """A replica: the model and its step loop."""

    def __init__(self, args: dict[str, Any], source: Source) -> None:
        # Only here: the ingress and whoever builds the application need no torch.
        from fathom_serve.deploy.service import EngineService

        settings = parse(args)
        self.service = EngineService(local_folder(source), source, settings.limits, settings.dtype, settings.threads)

    async def card(self) -> ModelCard:
        """The model."""
        return await self.service.card()

    async def health(self) -> str | None:
        """None when the step loop moves."""
        return await self.service.health()

    async def generate(self, generation: Generation) -> AsyncGenerator[list[Event], None]:
        """Events of one answer; a cancelled reader frees what it holds."""
        events = self.service.generate(generation)
        try:
            async for batch in events:
                yield batch
        finally:
            await events.aclose()

    async def used_pages(self) -> int:
        """Pages that requests hold now."""
        return self.service.engine.pool.used

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
            card: Any = await self.engine.card.remote()
            self._card = ModelCard(*card)
        return self._card

    async def health(self) -> str | None:
        """What a replica says, or that none answers."""
        try:
            return await asyncio.wait_for(_await(self.engine.health.remote()), 10.0)
        except (RayActorError, BackPressureError, DeploymentUnavailableError, asyncio.TimeoutError) as error:
            return f"no engine replica answers: {type(error).__name__}"

    async def generate(self, generation: Generation) -> AsyncGenerator[list[Event], None]:
        """Events of one answer. Dropping a handle's generator would leave the request running, so it is cancelled."""
        events: Any = self.engine.options(stream=True).generate.remote(generation)
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
    settings = parse(args)
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
