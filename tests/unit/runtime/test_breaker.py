"""The breaker: nothing is sent to an open one, probes go one at a time, cool-downs grow."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config.router import RouterConfig
from headway.runtime.retries import Breaker


def breaker(**changed) -> Breaker:
    return Breaker(RouterConfig(**{"failures_to_open": 1, "successes_to_close": 1, "cool_down_s": 1.0, **changed}))


def test_the_example_of_the_docstring():
    one = breaker()
    assert one.send(0.0) is False
    assert one.fail(0.0, probe=False)
    assert (one.state(0.5), one.allows(0.5), one.opens_s()) == ("open", False, 1.0)
    with pytest.raises(ValueError, match="open"):
        one.send(0.5)
    assert one.send(1.0) is True
    assert (one.state(2.0), one.allows(2.0)) == ("half_open", False)  # the probe is under way
    with pytest.raises(ValueError, match="half_open"):
        one.send(2.0)
    assert one.fail(3.0, probe=True)
    assert one.opens_s() == 5.0  # twice as long
    assert one.send(5.0)
    assert one.succeed(6.0, probe=True)
    assert one.state(6.0) == "closed"
    one.fail(7.0, probe=False)
    assert one.opens_s() == 8.0  # it is as if it had never been open


def test_failures_in_a_row_within_the_window_open_it():
    one = breaker(failures_to_open=3, failure_window_s=10.0)
    assert not one.fail(0.0, probe=False)
    assert not one.fail(1.0, probe=False)
    one.succeed(2.0, probe=False)  # not in a row any more
    assert not one.fail(3.0, probe=False)
    assert not one.fail(4.0, probe=False)
    assert not one.fail(14.0, probe=False)  # the first of the three is too long ago
    assert one.fail(14.0, probe=False)


def test_several_probes_close_it_each_after_the_one_before():
    one = breaker(successes_to_close=2)
    one.fail(0.0, probe=False)
    assert one.send(1.0)
    assert not one.succeed(1.5, probe=True)
    assert one.send(1.5)
    assert one.succeed(2.0, probe=True)
    assert one.send(2.0) is False


def test_what_was_sent_before_it_opened_changes_nothing():
    one = breaker()
    one.fail(0.0, probe=False)
    assert not one.fail(0.5, probe=False)
    assert not one.succeed(0.5, probe=False)
    assert one.opens_s() == 1.0
    assert one.send(1.0)
    assert not one.succeed(1.5, probe=False)
    assert not one.fail(1.5, probe=False)
    assert not one.allows(1.5)  # the probe alone decides
    one.withdraw()
    assert one.send(1.6)  # it was cancelled: another goes
    assert one.trip(2.0)
    assert not one.succeed(2.5, probe=True)  # nor does a probe of before the trip
    assert one.state(2.5) == "open"


def test_with_nowhere_else_to_go_it_stays_closed():
    one = breaker()
    assert not one.fail(0.0, probe=False, alone=True)
    assert one.state(0.0) == "closed"
    one.fail(0.0, probe=False)
    one.send(1.0)
    assert not one.fail(1.0, probe=True, alone=True)
    assert one.state(1.0) == "closed"


def test_a_death_opens_and_the_answer_of_its_successor_closes():
    one = breaker(cool_down_s=30.0)
    assert one.trip(0.0)
    assert not one.trip(1.0)
    assert one.reset()
    assert not one.reset()
    assert one.state(2.0) == "closed"


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["send", "succeed", "fail", "late", "trip", "reset", "withdraw", "alone"]),
        st.floats(0, 3, allow_nan=False),
    ),
    max_size=60,
)


@given(events=EVENTS, failures=st.integers(1, 3), successes=st.integers(1, 3), growth=st.floats(1, 3))
@settings(deadline=None, max_examples=300)
def test_whatever_happens_nothing_goes_to_an_open_one_and_one_probe_at_a_time(events, failures, successes, growth):
    one = breaker(
        failures_to_open=failures,
        successes_to_close=successes,
        cool_down_growth=growth,
        longest_cool_down_s=4.0,
        failure_window_s=5.0,
    )
    now, probing, opened_s = 0.0, False, None
    for what, wait_s in events:
        now += wait_s
        state = one.state(now)
        if what == "send":
            assert one.allows(now) == (state == "closed" or (state == "half_open" and not probing))
            if one.allows(now):
                probing = one.send(now)
                assert probing == (state == "half_open")
        elif what in ("succeed", "fail", "alone") and probing:
            changed = (
                one.succeed(now, probe=True) if what == "succeed" else one.fail(now, probe=True, alone=what == "alone")
            )
            probing = False
            if what == "fail" and changed:
                opened_s = now
        elif what == "late":
            if one.fail(now, probe=False):
                assert state == "closed"
                opened_s = now
        elif what == "trip":
            if one.trip(now):
                opened_s = now
            probing = probing and state == "open"
        elif what == "reset":
            assert one.reset() == (state != "closed")
            assert one.state(now) == "closed"
            probing = False
        elif what == "withdraw" and probing:
            one.withdraw()
            probing = False
        until_s = one.opens_s()
        if until_s is not None and opened_s is not None and one.state(now) == "open":
            assert until_s - opened_s <= 4.0 + 1e-9
    if one.state(now) != "closed":  # it always comes back
        now = max(now, one.opens_s() or 0.0)
        if probing:
            one.withdraw()
        for _ in range(successes):
            if one.state(now) == "closed":
                break
            assert one.send(now)
            one.succeed(now, probe=True)
        assert one.state(now) == "closed"
