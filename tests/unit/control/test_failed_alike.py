"""When a run whose groups end untrained is hopeless, and how it is said which reward they all got."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headway.control.progress import FailedAlike, mostly_solved, same_reward
from headway.records.rollout import Failure


def failure(cause: str, place: str = "", infrastructure: bool = False) -> Failure:
    return Failure(boundary="environment", cause=cause, infrastructure=infrastructure, place=place)


KINDS = {
    "worked": None,
    "boom": failure("KeyError: 'boom' (coins.py:31 in reply)", "coins.py:31 in reply"),
    "bam": failure("KeyError: 'bam' (coins.py:31 in reply)", "coins.py:31 in reply"),
    "other": failure("ValueError: no"),
    "outage": failure("ConnectionError: no route", infrastructure=True),
}


def some_groups(kinds: set[str]) -> st.SearchStrategy[list[list[str]]]:
    """Up to 40 groups of rollouts of these kinds alone."""
    groups = st.lists(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=3), min_size=1, max_size=4)
    return st.tuples(groups, st.integers(1, 10)).map(lambda drawn: drawn[0] * drawn[1])


def test_causes_that_differ_in_their_task_alone_are_one() -> None:
    alike = named = FailedAlike()
    for number in range(16):
        failures = [failure(f"ValueError: task {number:016x} has no answer")] * 4
        alike, named = alike.after(failures), named.after(failures, f"{number:016x}")
    assert (alike.hopeless(1), named.hopeless(1)) == (False, True)


@given(st.sets(st.sampled_from(sorted(KINDS)), min_size=1, max_size=2).flatmap(some_groups), st.integers(1, 20))
@example([["boom", "bam"]] * 16, 8)
@example([["boom"], ["bam"]] * 8, 1)
@example([["boom"]] * 31, 16)
@example([["outage"]] * 40, 1)
@example([["worked"], *[["other"]] * 40], 1)
def test_only_rollouts_that_all_failed_at_one_place_or_of_one_cause_are_hopeless(
    groups: list[list[str]], groups_per_step: int
) -> None:
    alike = FailedAlike()
    for group in groups:
        alike = alike.after(KINDS[kind] for kind in group)
    kinds = {kind for group in groups for kind in group}
    one_kind = kinds <= {"boom", "bam"} or kinds == {"other"}
    assert alike.hopeless(groups_per_step) == (one_kind and len(groups) >= 16 and len(groups) >= 2 * groups_per_step)


@pytest.mark.parametrize(
    ("alike", "solved", "words"),
    [
        ({(0.0, False): 64}, False, "the same reward, 0 (never solved: `headway sft` first, easier"),
        ({(1.0, True): 64}, True, "the same reward, 1 (most are solved already: harder"),
        ({(1.0, True): 9, (0.5, False): 3}, True, "the same reward, 1 in 9 groups, 0.5 in 3 groups (most are solved"),
        (
            {(0.0, False): 5, (1.0, True): 3},
            False,
            "0 in 5 groups, 1 in 3 groups (some always solved, the others never",
        ),
    ],
)
def test_the_reward_that_all_attempts_got_is_named(
    alike: dict[tuple[float, bool], int], solved: bool, words: str
) -> None:
    assert mostly_solved(alike) == solved
    assert words in same_reward(alike)
