"""`headway serve` returns log-probabilities of given tokens, by text and by ids, also past a replica's death."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from openai import OpenAI
from test_generator_pool import make_pool, models, requests, until  # noqa: F401
from test_serve import inputs, serving  # noqa: F401

from headway.models.loading import load_model
from headway.records.errors import ConfigurationError, HeadwayError
from headway.records.tokens import TokenIds
from headway.tokens.tokenizer import Tokenizer
from tests.conformance.reference import forced_logprobs

pytestmark = pytest.mark.real
TEXT = "3 plus 4 makes 7, and 5 plus 9 makes 14, say those who count"


@torch.no_grad()
def expected_of(folder: Path, ids: list[int]) -> np.ndarray:
    model = load_model(folder / "model")
    hidden_nd = model.forward_packed(torch.tensor(ids), [len(ids)])
    return torch.log_softmax(model.head(hidden_nd).float(), -1).numpy()[:-1]


def assert_scored(scored, expected_lv: np.ndarray, ids: list[int], top: int) -> None:
    assert scored.token_logprobs[0] is None
    assert scored.token_ids == ids
    np.testing.assert_allclose(scored.token_logprobs[1:], expected_lv[np.arange(len(ids) - 1), ids[1:]], atol=1e-3)
    assert scored.top_logprobs[0] is None
    np.testing.assert_allclose(scored.top_id_logprobs[1:], -np.sort(-expected_lv)[:, :top], atol=1e-3)
    for row_ids, row_logprobs, expected_v in zip(
        scored.top_ids[1:], scored.top_id_logprobs[1:], expected_lv, strict=True
    ):
        np.testing.assert_allclose(expected_v[row_ids], row_logprobs, atol=1e-3)


def test_prompts_and_answers_are_scored(inputs):
    tokenizer = Tokenizer.load(inputs / "model")
    ids = tokenizer.encode(TEXT)
    expected_lv = expected_of(inputs, ids)
    with serving(inputs) as (_, url), OpenAI(base_url=url, api_key="none") as client:
        for prompt in (TEXT, ids):
            whole = client.completions.create(model="model", prompt=prompt, echo=True, logprobs=3, max_tokens=0)
            [choice] = whole.choices
            assert choice.text == TEXT
            assert_scored(choice.logprobs, expected_lv, ids, 3)
            assert "".join(choice.logprobs.tokens) == TEXT
            assert choice.logprobs.text_offset[:2] == [0, len(choice.logprobs.tokens[0])]
            assert whole.usage.completion_tokens == 0
            assert whole.usage.prompt_tokens == len(ids)

        answered = client.completions.create(model="model", prompt=ids, echo=True, logprobs=2, max_tokens=5, n=2)
        for choice in answered.choices:
            assert choice.text.startswith(TEXT)
            answer_ids = choice.logprobs.token_ids
            assert_scored(choice.logprobs, expected_of(inputs, answer_ids), answer_ids, 2)
        only_answer = client.completions.create(model="model", prompt=ids, logprobs=2, max_tokens=5, seed=3)
        [choice] = only_answer.choices
        assert not choice.text.startswith(TEXT)
        assert len(choice.logprobs.token_ids) == only_answer.usage.completion_tokens
        path = ids + choice.logprobs.token_ids
        np.testing.assert_allclose(
            choice.logprobs.token_logprobs,
            expected_of(inputs, path)[np.arange(len(ids) - 1, len(path) - 1), path[len(ids) :]],
            atol=1e-3,
        )
        echoed = client.completions.create(model="model", prompt=ids, echo=True, max_tokens=3)
        assert echoed.choices[0].text.startswith(TEXT)
        assert echoed.choices[0].logprobs is None

        for arguments, reason in (
            ({"max_tokens": 0}, "max_tokens = 0: valid: from 1 on, or echo = true"),
            ({"echo": True, "stream": True}, "stream = True: valid: false with echo = True"),
            ({"logprobs": 21}, "logprobs = 21: valid: an integer from 0 to 20"),
            ({"logprobs": 2, "stream": True}, "stream = True: valid: false with logprobs = 2"),
        ):
            with pytest.raises(openai.BadRequestError, match=reason):
                client.completions.create(model="model", prompt=TEXT, **arguments)


def test_a_replica_that_dies_costs_no_score(models):
    ids = TokenIds(np.random.default_rng(1).integers(0, 280, 1200))
    expected = forced_logprobs(load_model(models[0]), ids[:1], ids[1:], 1.0)

    async def main() -> None:
        events: list[str] = []
        pool = make_pool(models, events)
        await pool.start()
        generations = [asyncio.create_task(pool.generate(one)) for one in requests()]
        calls = [asyncio.create_task(pool.prompts.logprobs(ids, 2)) for _ in range(12)]
        await until(lambda: any(call.done() for call in calls))
        os.kill(pool.pids[0], signal.SIGKILL)
        for scored in await asyncio.gather(*calls):
            np.testing.assert_allclose(scored.logprobs[1:], expected, atol=1e-4)
        assert all(result.finish_reason == "length" for result in await asyncio.gather(*generations))
        await until(lambda: "generator_restarted" in events)
        with pytest.raises(ConfigurationError, match="a token id outside"):
            await pool.prompts.logprobs(TokenIds((1, 10_000)))
        await pool.stop()
        with pytest.raises(HeadwayError, match="stopped"):
            await pool.prompts.logprobs(ids)

    asyncio.run(main())
