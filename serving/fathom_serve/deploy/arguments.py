"""Arguments of the Serve application."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fathom.errors import ConfigError
from fathom_serve.deploy.source import Source, resolve
from fathom_serve.engine.limits import EngineLimits


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


def parse(args: dict[str, Any]) -> DeployArgs:
    """Read ``args`` of a Serve configuration.

    Raises:
        ConfigError: an argument is unknown or wrong; names it.
    """
    try:
        return DeployArgs(**args)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"deploy: {'.'.join(map(str, first['loc'])) or 'arguments'}: {first['msg']}",
            f"known arguments: {', '.join(DeployArgs.model_fields)}",
        ) from error
