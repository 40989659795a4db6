"""`headway serve` answers requests made of its OpenAPI document as that document says, and never with a failure."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from documented_answers import document_at, require_documented_answers
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from test_serve import inputs, serving  # noqa: F401
from tiers import first

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture(scope="module")
def document(inputs: Path) -> Iterator[Any]:
    """Of a server whose answers are short, and which takes any name for its model."""
    with serving(inputs, "--context", "64", "--generator.slots=4", '--endpoint.aliases=["*"]') as (process, url):
        yield document_at(url.removesuffix("/v1"))
        assert process.poll() is None


@pytest.mark.parametrize("mode", first(1, ["negative", "positive"], pytest.mark.long))
def test_answers_are_what_the_document_says(document: Any, mode: str) -> None:
    require_documented_answers(document, mode, operations=10)


def test_metrics_count_responses_sessions_and_routed_requests(inputs: Path) -> None:
    with serving(inputs, "--context", "64", "--generator.slots=4") as (_, url):
        client = OpenAI(base_url=url, api_key="any", default_headers={"X-Session-ID": "mine"}, max_retries=0)
        for _ in range(2):
            client.completions.create(model="headway", prompt="12+3=", max_tokens=4)
        with urllib.request.urlopen(f"{url.removesuffix('/v1')}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    families = {family.name: family.samples for family in text_string_to_metric_families(text)}
    [responses] = families["headway_serve_responses"]
    assert (responses.labels, responses.value) == ({"route": "/v1/completions", "status": "200"}, 2)
    assert [sample.value for sample in families["headway_router_routed"]] == [2]
    assert [sample.value for sample in families["headway_serve_sessions"]] == [1]
    assert [sample.value for sample in families["headway_worker_up"]] == [1]
