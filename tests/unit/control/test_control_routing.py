"""Routing: who takes requests, who of those has least to do, and what a prompt's beginnings are worth."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.control.routing.replicas import (
    PrefixMemory,
    ReplicaCondition,
    ReplicaLoad,
    Route,
    Standing,
    choose_replica,
    standing_of,
)

STANDINGS: tuple[Standing, ...] = get_args(Standing)
NEVER = ("down", "draining", "behind", "silent", "tripped")
LOADS = st.lists(
    st.builds(
        ReplicaLoad,
        standing=st.sampled_from(STANDINGS),
        outstanding_tokens=st.integers(0, 50),
        saved_tokens=st.integers(0, 20),
        capacity_tokens=st.none() | st.integers(1, 60),
    ),
    max_size=6,
)


def load(tokens: int, standing: Standing = "serving", saved: int = 0, capacity: int | None = None) -> ReplicaLoad:
    return ReplicaLoad(outstanding_tokens=tokens, standing=standing, saved_tokens=saved, capacity_tokens=capacity)


def chosen(*loads: ReplicaLoad, needed: int = 0) -> int | None:
    route = choose_replica(loads, needed)
    return None if route is None else route.replica


@given(loads=LOADS, needed=st.integers(0, 30))
@settings(deadline=None, max_examples=400)
def test_affinity_never_beats_load_by_more_than_it_saves_and_nobody_is_asked_who_mustnt_be(loads, needed):
    route = choose_replica(loads, needed)
    standings = [one.standing for one in loads]
    if route is None:
        assert all(how in NEVER for how in standings)
        return
    best = loads[route.replica]
    assert best.standing not in NEVER
    peers = [one for one in loads if one.standing == best.standing]
    assert best.outstanding_tokens - best.saved_tokens <= min(one.outstanding_tokens for one in peers)
    if best.standing == "idle":
        assert "serving" not in standings
        assert "yielded" not in standings
    if best.standing == "yielded":  # no serving one had room
        serving = [one for one in loads if one.standing == "serving"]
        assert all(one.capacity_tokens is not None for one in serving)
        assert all(one.outstanding_tokens + needed > (one.capacity_tokens or 0) for one in serving)
    assert route.spilled == any(one.saved_tokens > best.saved_tokens for one in loads)


def test_examples():
    assert chosen(load(5), load(3), load(3)) == 1
    assert chosen(load(5), load(3), load(0, "down")) == 1
    assert choose_replica([load(13, saved=10), load(3)]) == Route(0, spilled=False)
    assert choose_replica([load(14, saved=10), load(3)]) == Route(1, spilled=True)
    assert choose_replica([load(3, "tripped", saved=10), load(3)]) == Route(1, spilled=True)
    assert chosen(load(3, "idle"), load(90, "yielded"), load(99, "serving")) == 2
    assert chosen(load(3, "idle"), load(90, "yielded"), load(99, capacity=100), needed=2) == 1
    assert chosen(load(3, "idle"), load(90, "yielded"), load(9, capacity=10), needed=2) == 2
    assert chosen(load(3, "idle"), load(0, "behind")) == 0
    assert chosen(load(3, "silent"), load(0, "behind"), load(0, "draining")) is None


def test_how_a_replica_stands():
    def standing(**changed) -> Standing:
        return standing_of(ReplicaCondition(update=3, **changed), newest_update=3, grace_s=10.0)

    assert standing() == "serving"
    assert standing(live=False, draining=True) == "down"
    assert standing(draining=True, allowed=False) == "draining"
    assert standing(silent=True, idle=True) == "silent"
    assert standing(allowed=False, yielded=True) == "tripped"
    assert standing(idle=True, yielded=True) == "idle"
    assert standing(yielded=True) == "yielded"


def test_older_weights_are_drained_but_not_while_they_are_being_replaced():
    def standing(updating_s: float | None, newest: int = 3) -> Standing:
        return standing_of(ReplicaCondition(update=2, updating_s=updating_s), newest, grace_s=10.0)

    assert standing(None) == "behind"  # its update failed
    assert standing(9.0) == "serving"
    assert standing(11.0) == "behind"
    assert standing(None, newest=2) == "serving"  # nobody has a newer one


# --- what replicas hold --------------------------------------------------------------------------------------

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple), min_size=1, max_size=12)


@pytest.mark.slow
@given(
    prompts=PROMPTS,
    replicas=st.lists(st.integers(0, 2), min_size=12, max_size=12),
    asked=st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple),
    block=st.integers(1, 5),
)
@settings(deadline=None, max_examples=300)
def test_the_longest_common_beginning_in_blocks_is_found(prompts, replicas, asked, block):
    memory = PrefixMemory(block, 1000)
    for prompt, replica in zip(prompts, replicas, strict=False):
        memory.remember(memory.keys(prompt), replica, epoch=0)
    found = memory.cached_tokens(memory.keys(asked), {0: 0, 1: 0, 2: 0})

    def shared(prompt: tuple[int, ...]) -> int:
        if prompt == asked:
            return len(asked)
        common = next((i for i, (a, b) in enumerate(zip(prompt, asked, strict=False)) if a != b), None)
        whole = min(len(prompt), len(asked)) if common is None else common
        return whole - whole % block

    expected: dict[int, int] = {}
    for prompt, replica in zip(prompts, replicas, strict=False):
        expected[replica] = max(expected.get(replica, 0), shared(prompt))
    assert found == {replica: tokens for replica, tokens in expected.items() if tokens}


def test_kv_of_another_adapter_saves_nothing():
    memory = PrefixMemory(2, 100)
    memory.remember(memory.keys((1, 2, 3, 4), "poet"), 0, 0)
    assert memory.cached_tokens(memory.keys((1, 2, 3, 4), "poet"), {0: 0}) == {0: 4}
    assert memory.cached_tokens(memory.keys((1, 2, 3, 4)), {0: 0}) == {}
    assert memory.cached_tokens(memory.keys((1, 2, 3, 4), "critic"), {0: 0}) == {}


def test_a_new_epoch_voids_what_was_remembered_and_the_least_recent_is_forgotten():
    memory = PrefixMemory(2, 3)
    keys = memory.keys((1, 2, 3))
    assert [tokens for tokens, _ in keys] == [2, 3]
    memory.remember(keys, 0, epoch=5)
    assert memory.cached_tokens(keys, {0: 5}) == {0: 3}
    assert memory.cached_tokens(memory.keys((1, 2, 4)), {0: 5}) == {0: 2}
    assert memory.cached_tokens(keys, {0: 6}) == {}
    memory.remember(memory.keys((7, 8, 9)), 1, epoch=0)
    assert len(memory) == 3
    assert memory.cached_tokens(memory.keys((1, 2, 4)), {0: 5, 1: 0}) == {}
    assert memory.cached_tokens(memory.keys((7, 8, 9)), {0: 5, 1: 0}) == {1: 3}
    assert PrefixMemory(2, 0).keys((1, 2, 3)) == []
