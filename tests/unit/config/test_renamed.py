"""Old public names raise an error that has the new one, out of one table."""

from __future__ import annotations

import pytest

import headway.api
from headway.config.removed import RENAMED
from headway.rollout.environment import Episode


@pytest.mark.parametrize(("old", "new"), RENAMED["headway.api"].items())
def test_an_old_name_of_the_api_says_the_new_one(old: str, new: str):
    with pytest.raises(AttributeError, match=rf"{old} is called {new} now"):
        getattr(headway.api, old)
    assert getattr(headway.api, new)


@pytest.mark.parametrize(("old", "new"), RENAMED["Episode"].items())
def test_calling_or_overriding_an_old_method_says_the_new_one(old: str, new: str):
    with pytest.raises(AttributeError, match=rf"{old} is called {new} now"):
        getattr(Episode.__new__(Episode), old)
    with pytest.raises(TypeError, match=rf"{old} is called {new} now"):
        type("OldEpisode", (Episode,), {old: None})
    assert getattr(Episode, new)


def test_a_name_that_never_existed_is_still_an_attribute_error():
    assert not hasattr(Episode.__new__(Episode), "no_such_name")
