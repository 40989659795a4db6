"""A teacher's scores: what is refused, and that stored rows are read as they were written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from headway.algorithms.teacher_scores import read_scores, score_fault, score_rows
from headway.records.generation import PromptLogprobs
from headway.records.rollout import Rollout
from headway.records.tokens import TEACHER, decoder, encoder

IDS = np.array([4, 7, 3, 9], np.int32)
SCORED = np.array([False, True, False, True])


def scores() -> PromptLogprobs:
    return PromptLogprobs(
        version=0,
        logprobs=np.array([np.nan, -0.5, -1.0, -2.0], np.float32),
        top_ids=np.array([[-1, -1], [7, 3], [1, 3], [2, 9]], np.int32),
        top_logprobs=np.array([[np.nan, np.nan], [-0.5, -1.2], [-0.2, -1.0], [-0.3, -2.0]], np.float32),
    )


def test_good_scores_have_no_fault() -> None:
    assert score_fault(scores(), IDS, SCORED, 2) == ""
    assert score_fault(scores(), IDS, SCORED, 1) == ""


def put(field: str, index: tuple[int, ...], value: float) -> Callable[[PromptLogprobs], PromptLogprobs]:
    def change(given: PromptLogprobs) -> PromptLogprobs:
        array = getattr(given, field).copy()
        array[index] = value
        return msgspec.structs.replace(given, **{field: array})

    return change


FAULTS: dict[str, tuple[Callable[[PromptLogprobs], PromptLogprobs], str]] = {
    "NaN": (put("logprobs", (1,), np.nan), "log-probability nan"),
    "infinite": (put("logprobs", (3,), -np.inf), "log-probability -inf"),
    "above 0": (put("logprobs", (1,), 0.2), "log-probability 0.2"),
    "NaN of another": (put("top_logprobs", (1, 1), np.nan), "likeliest token's log-probability nan"),
    "out of order": (put("top_logprobs", (1, 1), -0.1), "out of order"),
    "missing id": (put("top_ids", (3, 1), -1), "missing"),
    "twice": (put("top_ids", (3, 1), 2), "twice"),
    "two values": (put("top_logprobs", (1, 0), -0.1), "two log-probabilities"),
    "fewer tokens": (
        lambda s: PromptLogprobs(
            version=0, logprobs=s.logprobs[:3], top_ids=s.top_ids[:3], top_logprobs=s.top_logprobs[:3]
        ),
        "scores of 3 tokens where 4",
    ),
    "fewer others": (
        lambda s: PromptLogprobs(
            version=0, logprobs=s.logprobs, top_ids=s.top_ids[:, :1], top_logprobs=s.top_logprobs[:, :1]
        ),
        "1 likeliest tokens where 2",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named(name: str) -> None:
    change, message = FAULTS[name]
    assert message in score_fault(change(scores()), IDS, SCORED, 2)


def test_tokens_that_are_not_scored_may_have_anything() -> None:
    assert score_fault(put("logprobs", (2,), np.nan)(scores()), IDS, SCORED, 2) == ""


@given(data=st.data(), tokens=st.integers(1, 8), top=st.integers(0, 4))
def test_rows_are_read_as_they_were_written(data: Any, tokens: int, top: int) -> None:
    floats = st.floats(-50, 0, width=32)
    given_scores = PromptLogprobs(
        version=0,
        logprobs=data.draw(arrays.arrays(np.float32, tokens, elements=floats)),
        top_ids=data.draw(arrays.arrays(np.int32, (tokens, top), elements=st.integers(0, 2**31 - 1))),
        top_logprobs=data.draw(arrays.arrays(np.float32, (tokens, top), elements=floats)),
    )
    is_scored = data.draw(arrays.arrays(np.bool_, tokens))
    rollout = Rollout(group=0, member=0, prompt_ids=(), token_rows={TEACHER: score_rows(given_scores, is_scored)})
    stored = decoder(Rollout).decode(encoder().encode(rollout))
    indices = np.flatnonzero(is_scored)
    restored = read_scores(stored.token_rows, indices)
    np.testing.assert_array_equal(restored.logprobs, given_scores.logprobs[indices])
    if len(indices):
        np.testing.assert_array_equal(restored.top_ids, given_scores.top_ids[indices])
        np.testing.assert_array_equal(restored.top_logprobs, given_scores.top_logprobs[indices])


def test_a_token_without_scores_is_an_error() -> None:
    rows = {TEACHER: score_rows(scores(), SCORED)}
    with pytest.raises(ValueError, match="rows of 0, 5 numbers"):
        read_scores(rows, np.array([1, 2]))
    with pytest.raises(ValueError, match="rows of 0 numbers"):
        read_scores({}, np.array([1]))
