"""Codes of observations and actions: letters, bounds, grammars, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headway.config.simulation import PolicyConfig
from headway.embodied.records import Box, Discrete
from headway.embodied.tokens.codes import ActionCode, ObservationCode
from headway.records.errors import ConfigurationError

FREE = Box(np.full(4, -np.inf), np.full(4, np.inf))


def settings(**keys: Any) -> PolicyConfig:
    return PolicyConfig(**keys)


def test_prompts_have_the_bins_of_numbers_and_differences_between_bounds():
    policy = settings(template="go {inputs}!", inputs=("2-0 in -1..1", "3 in 0..10"), observation_bins=21)
    observations = np.array([[0.5, 9, 0.5, 0], [0, 9, 0.26, 5], [3, 9, 0, 99]])
    assert ObservationCode(policy, FREE).texts(observations) == ["go k a!", "go n k!", "go a u!"]


def test_all_numbers_are_inputs_by_their_own_bounds_where_none_is_named():
    box = Box(np.zeros((2, 2), np.float32), np.ones((2, 2), np.float32))
    observations = np.array([[[0, 1], [0.5, 0.26]]])
    assert ObservationCode(settings(observation_bins=3), box).texts(observations) == ["a c b b"]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (settings(inputs=("7 in 0..1",)), "numbers from 0 to 3"),
        (settings(inputs=("1",)), "finite bounds"),
        (settings(inputs=("1 in 2..2",)), "finite bounds"),
        (settings(inputs=("one",)), '"36-0 in -0.3..0.3"'),
    ],
)
def test_inputs_that_have_no_code_are_refused(policy: PolicyConfig, message: str):
    with pytest.raises(ConfigurationError, match=message):
        ObservationCode(policy, FREE)


def test_pictures_are_refused_by_name():
    picture = Box(np.zeros((4, 4, 3), np.uint8), np.full((4, 4, 3), 255, np.uint8))
    with pytest.raises(ConfigurationError, match="observations are pictures"):
        ObservationCode(settings(), picture)


def test_a_chunk_has_the_letters_of_its_actions_one_after_another():
    bounds = np.array([1, 0.5], np.float32)
    code = ActionCode(settings(chunk=2, action_bins=5), Box(-bounds, bounds))
    actions = code.actions("a c e b")
    np.testing.assert_allclose(actions, [-1, 0, 1, -0.25])
    assert (code.text(actions), code.letters) == ("a c e b", 4)
    assert code.grammar == "start: /[abcde]( [abcde]){3}/\n"
    np.testing.assert_array_equal(code.chunk.high, [1, 0.5, 1, 0.5])


def test_choices_are_letters_too():
    code = ActionCode(settings(), Discrete(3))
    assert [float(code.actions(letter)[0]) for letter in "abc"] == [0, 1, 2]


@pytest.mark.parametrize("actions", [FREE, Discrete(63)])
def test_actions_without_a_code_are_refused(actions: Box | Discrete):
    with pytest.raises(ConfigurationError, match=r"valid with \[model\]: a Box with bounds"):
        ActionCode(settings(), actions)


@pytest.mark.parametrize("response", ["a", "a b c", "a f"])
def test_responses_outside_of_the_grammar_are_errors(response: str):
    bounds = np.ones(2, np.float32)
    with pytest.raises(ValueError, match="is no chunk of actions"):
        ActionCode(settings(action_bins=5), Box(-bounds, bounds)).actions(response)
