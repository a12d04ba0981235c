"""Registered models: a version is a URI and a digest, never bytes on the tracking server."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fathom.errors import ModelError, ServiceError
from fathom.storage import files
from fathom.tracking.server import connect, default_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient

SOURCE_TAG = "fathom.source"
DIGEST_TAG = "fathom.digest"
MODEL_URI = re.compile(r"models:/([^/@]+)(?:@([^/@]+)|/(\d+))")


class ModelSource(NamedTuple):
    """A registered version.

    Attributes:
        name: of the registered model.
        version: a number, as MLflow writes it.
        source: folder or ``s3://`` URI of the published model.
        digest: of its manifest; empty for a version that Fathom did not register.
        aliases: such as ``champion``.
        run_id: the run that made it.
    """

    name: str
    version: str
    source: str
    digest: str
    aliases: tuple[str, ...] = ()
    run_id: str = ""


def resolve_model(uri: str, tracking_uri: str | None = None) -> ModelSource:
    """The version that ``models:/NAME@ALIAS`` or ``models:/NAME/VERSION`` means now.

    Args:
        uri: what to look up.
        tracking_uri: default the local stack's server, else ``$MLFLOW_TRACKING_URI``.

    Raises:
        ModelError: malformed, unknown, or not registered by Fathom.
        ServiceError: no server is known, or it does not answer.
    """
    from mlflow.exceptions import MlflowException

    match = MODEL_URI.fullmatch(uri)
    if match is None:
        raise ModelError(f"{uri!r} names no model version", "write models:/NAME@ALIAS or models:/NAME/VERSION")
    name, alias, number = match.groups()
    client, server = _client(tracking_uri)
    try:
        found = client.get_model_version_by_alias(name, alias) if alias else client.get_model_version(name, number)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            known = ", ".join(_wanted(version) for version in list_models(server)) or "none"
            raise ModelError(f"{uri}: not registered at {server}", f"registered: {known}") from error
        raise _failed(server, error) from error
    # the version itself lists no aliases in every server version; the registered model does
    version = _as_source(found, {alias: found.version} if alias else {})
    if not version.digest:
        raise ModelError(f"{uri} was not registered by Fathom: it has no digest", "register it with a Fathom run")
    return version


def list_models(tracking_uri: str | None = None) -> list[ModelSource]:
    """Every registered version, by name, newest first.

    Raises:
        ServiceError: no server is known, or it does not answer.
    """
    from mlflow.exceptions import MlflowException

    client, server = _client(tracking_uri)
    try:
        aliases = {model.name: model.aliases for model in _pages(client.search_registered_models)}
        versions = [
            _as_source(version, aliases.get(version.name, {})) for version in _pages(client.search_model_versions)
        ]
    except MlflowException as error:
        raise _failed(server, error) from error
    return sorted(versions, key=lambda version: (version.name, -int(version.version)))


def register_version(client: "MlflowClient", name: str, source_uri: str, digest: str, alias: str, run_id: str) -> str:
    """Register a published folder and point an alias at it; the same folder of the same run only once.

    MLflow refuses local paths outside its own artifact store as a source, because a server could be made to read
    them. So a folder is registered as ``folder:///path``, which no server opens, and its exact place is in a tag.

    Returns:
        the version.
    """
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    place = files.absolute(source_uri)
    same = [
        version.version
        for version in _pages(client.search_model_versions, filter_string=f"name = '{name}' and run_id = '{run_id}'")
        if version.tags.get(SOURCE_TAG) == place and version.tags.get(DIGEST_TAG) == digest
    ]
    if same:
        number = str(same[0])
    else:
        source = place if "://" in place else f"folder://{Path(place).resolve().as_posix()}"
        tags = {SOURCE_TAG: place, DIGEST_TAG: digest}
        made = client.create_model_version(name, source, run_id=run_id, tags=tags, await_creation_for=0)
        number = str(made.version)
    client.set_registered_model_alias(name, alias, number)
    return number


def _client(tracking_uri: str | None) -> "tuple[MlflowClient, str]":
    server = default_uri(tracking_uri)
    if server is None:
        raise ServiceError(
            "no tracking server is known", "start the local stack with `fathom up`, or set MLFLOW_TRACKING_URI"
        )
    return connect(server), server


def _pages(search: Any, **arguments: Any) -> list[Any]:
    """Everything a paged search returns."""
    found: list[Any] = []
    token = None
    while True:
        page = search(page_token=token, **arguments)
        found.extend(page)
        token = page.token
        if not token:
            return found


def _as_source(version: Any, aliases: dict[str, Any]) -> ModelSource:
    tags = version.tags or {}
    mine = sorted(alias for alias, number in aliases.items() if str(number) == str(version.version))
    return ModelSource(
        name=version.name,
        version=str(version.version),
        source=tags.get(SOURCE_TAG) or str(version.source or ""),
        digest=tags.get(DIGEST_TAG, ""),
        aliases=tuple(mine),
        run_id=version.run_id or "",
    )


def _wanted(version: ModelSource) -> str:
    return (
        f"models:/{version.name}@{version.aliases[0]}"
        if version.aliases
        else f"models:/{version.name}/{version.version}"
    )


def _failed(server: str, error: Exception) -> ServiceError:
    return ServiceError(f"MLflow at {server} failed: {error}", "look at the server's log")
