"""The replicas that the router looks at closely: the choice among them is the choice among all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headway.control.routing.replicas import ReplicaLoad, choose_replica
from headway.generator.routing.router import Router

LOADED = st.tuples(
    st.sampled_from(["serving", "serving", "yielded", "idle", "down", "behind"]),
    st.integers(0, 9),
    st.integers(0, 9),
)  # (standing, tenths of its capacity that are used, tokens that it saves)


@given(st.lists(LOADED, min_size=1, max_size=6), st.integers(0, 40))
def test_candidates_alone_give_the_choice_among_all_replicas(replicas: list[tuple[Any, int, int]], needed: int) -> None:
    known: Any = [
        SimpleNamespace(index=index, outstanding_tokens=10 * used, capacity_tokens=100)
        for index, (_, used, _) in enumerate(replicas)
    ]
    saved = {index: tokens for index, (_, _, tokens) in enumerate(replicas) if tokens}
    loads = [
        ReplicaLoad(standing=how, outstanding_tokens=10 * used, saved_tokens=tokens, capacity_tokens=100)
        for how, used, tokens in replicas
    ]
    router: Any = SimpleNamespace(
        _replicas=known, standings=lambda now, those: [replicas[one.index][0] for one in those]
    )
    few = Router._candidates(router, 0.0, saved, needed)  # pyright: ignore[reportPrivateUsage]
    chosen = choose_replica([loads[one.index] for one in few], needed)
    among_all = choose_replica(loads, needed)
    assert (chosen is None) == (among_all is None)
    if chosen is not None and among_all is not None:
        assert (few[chosen.replica].index, chosen.spilled) == (among_all.replica, among_all.spilled)
