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
        answer_schema = {"type": "object", "properties": dialect.answer, "required": list(dialect.answer)}
        request_schema = fields.schema_of(dialect.all_fields(settings))
        stream_content = {"text/event-stream": {"schema": _EVENT}}
        paths[path] = {"post": operation(path, answer_schema, request_schema, stream=stream_content, session=True)}
    count_fields = dialects["/v1/messages"].all_fields(settings)
    del count_fields["max_tokens"]
    route, schema = "/v1/messages/count_tokens", {"type": "object", "properties": {"input_tokens": {"type": "integer"}}}
    paths[route] = {"post": operation(route, schema, fields.schema_of(count_fields), session=True)}
    reward_path = "/v1/rollouts/{rollout}/reward"
    paths[reward_path] = {"post": operation(reward_path, _ANY, fields.schema_of(REWARD), "rollout")}
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
    error_schema = ANTHROPIC_ERROR if path.startswith("/v1/messages") else OPENAI_ERROR
    answer_content = {**({"application/json": {"schema": answer}} if answer is not None else {}), **(stream or {})}
    parameters: list[Part] = []
    if named:
        parameters.append({"name": named, "in": "path", "required": True, "schema": {**_TEXT, "minLength": 1}})
    if session:
        parameters.append({"name": "X-Session-ID", "in": "header", "schema": {**_TEXT, "maxLength": 256}})
    error_response = {"description": "an error", "content": {"application/json": {"schema": error_schema}}}
    spec: dict[str, Any] = {
        "parameters": parameters,
        "responses": {
            "200": {"description": "the answer", "content": answer_content},
            **{str(status): error_response for status in STATUSES},
        },
    }
    if asked is not None:
        spec["requestBody"] = {"required": True, "content": {"application/json": {"schema": asked}}}
    return spec
