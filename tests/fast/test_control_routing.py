"""Routing: least loaded live replica; a prompt's siblings together while it costs no more than it saves."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.control.routing import ReplicaLoad, choose_replica

LOADS = st.lists(
    st.builds(ReplicaLoad, live=st.booleans(), outstanding_tokens=st.integers(0, 50)), min_size=0, max_size=6
)


def load(tokens: int, live: bool = True) -> ReplicaLoad:
    return ReplicaLoad(live=live, outstanding_tokens=tokens)


@given(loads=LOADS, prompt=st.integers(0, 20), preferred=st.none() | st.integers(-1, 7))
@settings(deadline=None, max_examples=200)
def test_choice_is_live_and_no_further_ahead_than_the_prompt(loads, prompt, preferred):
    chosen = choose_replica(loads, prompt, preferred)
    live = [one for one in loads if one.live]
    if not live:
        assert chosen is None
        return
    assert chosen is not None
    assert loads[chosen].live
    least = min(one.outstanding_tokens for one in live)
    assert loads[chosen].outstanding_tokens <= least + (prompt if chosen == preferred else 0)


def test_examples():
    assert choose_replica([load(5), load(3), load(3)]) == 1
    assert choose_replica([load(5), load(3), load(0, live=False)]) == 1
    assert choose_replica([load(13), load(3)], 10, preferred=0) == 0
    assert choose_replica([load(14), load(3)], 10, preferred=0) == 1
    assert choose_replica([load(3, live=False), load(3)], 10, preferred=0) == 1
