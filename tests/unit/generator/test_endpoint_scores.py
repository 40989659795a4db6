"""Scored prompts at the endpoint: large answers beside the event loop, and clients that leave during a pass."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from endpoint_server import Served, play, until
from openai import AsyncOpenAI

from headway.generator.endpoint.completions import Completions
from headway.records.generation import PromptLogprobs
from headway.records.tokens import TokenIds

SCORED = {"model": "headway", "echo": True, "logprobs": 20, "max_tokens": 0}


async def score(ids: TokenIds, top: int, adapter: str) -> PromptLogprobs:
    likeliest = np.tile(np.arange(top, dtype=np.int32), (len(ids), 1))
    logprobs = np.full((len(ids), top), -2.0, np.float32)
    return PromptLogprobs(version=0, logprobs=logprobs[:, 0], top_ids=likeliest, top_logprobs=logprobs)


def test_large_answers_are_encoded_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, encode = dict[int, threading.Thread](), Completions.scored_body

    def scored_body(self: Completions, parsed: Any, prompt_ids: TokenIds, *rest: Any) -> dict[str, Any]:
        threads[len(prompt_ids)] = threading.current_thread()
        return encode(self, parsed, prompt_ids, *rest)

    async def test(server: Served, client: AsyncOpenAI) -> None:
        for length in (5, 200):
            status, _, answer = await server.post("/v1/completions", SCORED | {"prompt": [5] * length})
            assert (status, len(answer["choices"][0]["logprobs"]["top_logprobs"])) == (200, length)

    monkeypatch.setattr(Completions, "scored_body", scored_body)
    play(test, prompt_logprobs=score)
    assert threads[5] is threading.main_thread()
    assert threads[200] is not threading.main_thread()


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_a_client_that_leaves_ends_its_pass(max_tokens: int) -> None:
    passes: list[str] = []

    async def hang(ids: TokenIds, top: int, adapter: str) -> PromptLogprobs:
        passes.append("began")
        try:
            await asyncio.Event().wait()
        finally:
            passes.append("ended")
        raise AssertionError

    async def test(server: Served, client: AsyncOpenAI) -> None:
        body: dict[str, Any] = SCORED | {"prompt": [5, 6], "max_tokens": max_tokens}
        call = asyncio.create_task(client.completions.create(**body))
        await until(lambda: passes)
        call.cancel()
        await until(lambda: passes == ["began", "ended"] and not server.session.busy)

    play(test, prompt_logprobs=hang)
