"""The kernel service answers requests made of its OpenAPI document as that document says, and never with a failure."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st
from kernel_service import REFERENCE, candidate, served_kernels


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


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_answers_are_what_the_document_says(address: str, mode: str) -> None:
    from documented_answers import document_at, require_documented_answers

    require_documented_answers(document_at(address), mode, operations=10)  # all but /openapi.json


@hypothesis.seed(1)
@hypothesis.settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@hypothesis.given(data=st.data())
def test_requests_with_whole_sources_are_judged_or_refused(address: str, data: st.DataObject) -> None:
    from documented_answers import document_at, draw_right, require_documented_answer

    case = draw_right(data, document_at(address), "/eval", "POST")
    sources = {"original_model_src": REFERENCE, "custom_model_src": candidate(), "backend": "torch"}
    case.body = {**case.body, **sources, "original_model_src_b64": None, "custom_model_src_b64": None}
    response = require_documented_answer(case)
    assert response.status_code in (200, 400)
    if response.status_code == 400:
        assert not response.json()["error"]["param"].endswith(("_src", "_src_b64"))
