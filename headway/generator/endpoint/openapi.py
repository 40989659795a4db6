"""The endpoint's OpenAPI document, generated from the dialects' fields and the error statuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.config.endpoint import EndpointConfig
from headway.generator.endpoint import fields
from headway.generator.endpoint.dialect import Dialect
from headway.generator.endpoint.errors import STATUSES
from headway.generator.endpoint.schemas import ANTHROPIC_ERROR, OPENAI_ERROR, Part

REWARD = {
    "reward": fields.reward(required=True),
    "solved": fields.flag(default=None),
}
_ANY: Part = {"type": "object"}
_TEXT: Part = {"type": "string"}
_EVENT: Part = {"type": "object", "properties": {"event": _TEXT, "data": _TEXT}}


def document(settings: EndpointConfig, dialects: Mapping[str, Dialect], metrics: bool) -> dict[str, Any]:
    """Generate the OpenAPI 3.1 document. ``metrics``: include ``/metrics``."""
    paths: dict[str, Any] = {}
    for path, dialect in dialects.items():
        answer = {"type": "object", "properties": dialect.answer, "required": list(dialect.answer)}
        asked = fields.schema_of(dialect.all_fields(settings))
        stream = {"text/event-stream": {"schema": _EVENT}}
        paths[path] = {"post": operation(path, answer, asked, stream=stream, session=True)}
    counted = dialects["/v1/messages"].all_fields(settings)
    del counted["max_tokens"]
    count, tokens = "/v1/messages/count_tokens", {"type": "object", "properties": {"input_tokens": {"type": "integer"}}}
    paths[count] = {"post": operation(count, tokens, fields.schema_of(counted), session=True)}
    reward = "/v1/rollouts/{rollout}/reward"
    paths[reward] = {"post": operation(reward, _ANY, fields.schema_of(REWARD), "rollout")}
    paths["/v1/models"] = {"get": operation("/v1/models", _ANY)}
    paths["/v1/models/{model}"] = {"get": operation("/v1/models", _ANY, None, "model")}
    paths["/health"] = {"get": operation("/health", _ANY)}
    paths["/openapi.json"] = {"get": operation("/openapi.json", _ANY)}
    if metrics:
        paths["/metrics"] = {"get": operation("/metrics", None, stream={"text/plain": {"schema": _TEXT}})}
    return described("headway", paths)


def described(title: str, paths: Mapping[str, Any]) -> dict[str, Any]:
    """Make the OpenAPI document of a service with these paths, whose API keys are bearer tokens."""
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": "1"},
        "security": [{}, {"bearer": []}],
        "paths": paths,
        "components": {"securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
    }


def operation(
    path: str, answer: Part | None, asked: Part | None = None, named: str = "", *, stream: Part | None = None,
    session: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Describe an operation: request body ``asked``, path parameter ``named``, answers as JSON and as ``stream``."""
    error = ANTHROPIC_ERROR if path.startswith("/v1/messages") else OPENAI_ERROR
    content = {**({"application/json": {"schema": answer}} if answer is not None else {}), **(stream or {})}
    parameters: list[Part] = []
    if named:
        parameters.append({"name": named, "in": "path", "required": True, "schema": {**_TEXT, "minLength": 1}})
    if session:
        parameters.append({"name": "X-Session-ID", "in": "header", "schema": {**_TEXT, "maxLength": 256}})
    failed = {"description": "an error", "content": {"application/json": {"schema": error}}}
    spec: dict[str, Any] = {
        "parameters": parameters,
        "responses": {
            "200": {"description": "the answer", "content": content},
            **{str(status): failed for status in STATUSES},
        },
    }
    if asked is not None:
        spec["requestBody"] = {"required": True, "content": {"application/json": {"schema": asked}}}
    return spec
