"""Requests made of an OpenAPI document: a server answers each as the document says. Importing this takes seconds."""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

import hypothesis
import schemathesis
from hypothesis import HealthCheck
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

EXAMPLES = hypothesis.settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
OF_RIGHT_ONES = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
CHECKS = [*OF_RIGHT_ONES, negative_data_rejection]


@cache
def document_at(address: str) -> Any:
    return schemathesis.openapi.from_url(f"{address}/openapi.json")


def require_documented_answers(document: Any, mode: str, operations: int) -> None:
    """Make requests that the document allows (``mode``: "positive") or forbids ("negative") of all its operations."""
    found = [one.ok() for one in document.get_all_operations()]
    assert len(found) == operations, [one.label for one in found]
    for one in found:

        @hypothesis.seed(1)
        @EXAMPLES
        @hypothesis.given(case=one.as_strategy(generation_mode=GenerationMode(mode)))
        def check(case: Any) -> None:
            case.call_and_validate(checks=CHECKS, timeout=60)

        with contextlib.suppress(Unsatisfiable):  # nothing about it can be wrong
            check()


def require_documented_answer(case: Any) -> Any:
    """Make a request that the document allows; its answer."""
    return case.call_and_validate(checks=OF_RIGHT_ONES, timeout=60)


def draw_right(data: Any, document: Any, path: str, method: str) -> Any:
    """Draw a request that the document allows."""
    return data.draw(document[path][method].as_strategy(generation_mode=GenerationMode.POSITIVE))
