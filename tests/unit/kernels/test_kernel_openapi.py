"""The kernel service answers requests made of its OpenAPI document as that document says, and never with a failure."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from kernel_service import REFERENCE, candidate, served_kernels
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a service in a thread of its own."""
    ready, over, found = threading.Event(), asyncio.Event(), list[Any]()

    async def main() -> None:
        async with served_kernels(queue=64) as service:
            found.extend((service.address, asyncio.get_running_loop()))
            ready.set()
            await over.wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert ready.wait(20)
    yield found[0]
    found[1].call_soon_threadsafe(over.set)
    thread.join(20)


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_answers_are_what_the_document_says(address: str, mode: GenerationMode) -> None:
    document = schemathesis.openapi.from_url(f"{address}/openapi.json")
    operations = [found.ok() for found in document.get_all_operations()]
    assert len(operations) == 10, [operation.label for operation in operations]  # all but /openapi.json
    for operation in operations:

        @hypothesis.seed(1)
        @hypothesis.settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            case.call_and_validate(checks=CHECKS, timeout=60)

        with contextlib.suppress(Unsatisfiable):  # nothing about it can be wrong
            check()


@hypothesis.seed(1)
@hypothesis.settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@hypothesis.given(data=st.data())
def test_requests_with_whole_sources_are_judged_or_refused(address: str, data: st.DataObject) -> None:
    document = schemathesis.openapi.from_url(f"{address}/openapi.json")
    case: Any = data.draw(document["/eval"]["POST"].as_strategy(generation_mode=GenerationMode.POSITIVE))
    sources = {"original_model_src": REFERENCE, "custom_model_src": candidate(), "backend": "torch"}
    case.body = {**case.body, **sources, "original_model_src_b64": None, "custom_model_src_b64": None}
    response = case.call_and_validate(checks=CHECKS[:-1], timeout=60)
    assert response.status_code in (200, 400)
    if response.status_code == 400:
        assert not response.json()["error"]["param"].endswith(("_src", "_src_b64"))
