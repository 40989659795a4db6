"""When a run whose rollouts fail, or whose groups end untrained, is unrecoverable, and how it is said why."""

from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headway.control.common_failures import CommonFailureDetector, failure_kind, mostly_solved, same_reward
from headway.records.rollout import Failure
from headway.records.task import Task


def failure(cause: str, place: str = "", infrastructure: bool = False) -> Failure:
    return Failure(boundary="environment", cause=cause, infrastructure=infrastructure, raised_at=place)


KINDS = {
    "worked": None,
    "boom": failure("KeyError: 'boom' (coins.py:31 in reply)", "coins.py:31 in reply"),
    "bam": failure("KeyError: 'bam' (coins.py:31 in reply)", "coins.py:31 in reply"),
    "other": failure("ValueError: no"),
    "outage": failure("ConnectionError: no route", infrastructure=True),
}
COUNTS_AS = {"boom": "place", "bam": "place", "other": "other"}


def after(groups: list[list[str]], groups_per_step: int, accepted: int = 0) -> CommonFailureDetector:
    """Of groups of these kinds, of which the first ``accepted`` can be trained on."""
    alike = CommonFailureDetector(groups_per_step=groups_per_step)
    for number, group in enumerate(groups):
        alike = alike.after((KINDS[kind] for kind in group), accepted=number < accepted)
    return alike


def some_groups(kinds: set[str]) -> st.SearchStrategy[list[list[str]]]:
    """Up to 40 groups of rollouts of these kinds alone, the first kind twenty times as often as the others."""
    often = [sorted(kinds)[0]] * 20 + sorted(kinds)[1:]
    groups = st.lists(st.lists(st.sampled_from(often), min_size=1, max_size=3), min_size=1, max_size=4)
    return st.tuples(groups, st.integers(1, 10)).map(lambda drawn: drawn[0] * drawn[1])


@given(st.sets(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3).flatmap(some_groups), st.integers(1, 20))
@example([["boom", "bam"]] * 16, 8)
@example([["boom"], ["bam"]] * 8, 1)
@example([["boom"]] * 31, 16)
@example([["outage"]] * 40, 1)
@example([["worked"], *[["other"]] * 40], 1)
@example([["other"] * 9 + ["worked"]] * 16, 1)
@example([["other"] * 8 + ["worked"]] * 16, 1)
def test_a_window_of_which_nine_in_ten_failed_alike_is_hopeless(groups: list[list[str]], groups_per_step: int) -> None:
    last = groups[-max(16, 2 * groups_per_step) :]
    rollouts = [kind for group in last for kind in group]
    most = max(Counter(COUNTS_AS[kind] for kind in rollouts if kind in COUNTS_AS).values(), default=0)
    full = len(last) == max(16, 2 * groups_per_step)
    said = after(groups, groups_per_step).unrecoverable
    assert bool(said) == (full and most >= 0.9 * len(rollouts))
    assert not said or said.startswith(f"{most} of the {len(rollouts)} rollouts of the last {len(last)} groups failed")


def test_a_step_s_worth_of_trainable_groups_ends_the_look_for_good() -> None:
    assert after([["other"]] * 40, 4, accepted=3).unrecoverable
    assert not after([["other"]] * 40, 4, accepted=4).unrecoverable


@pytest.mark.parametrize(
    "cause",
    [
        "ValueError: task {id} has no answer",
        "ValueError: no answer to {prompt}",
        "KeyError: '{row}'",
        "the verifier raised ValueError: {row} of {place} isn't in the list",
        'expected "{prompt}", got {number}',
    ],
)
def test_causes_that_differ_in_what_is_their_task_s_own_are_one(cause: str) -> None:
    alike = CommonFailureDetector(groups_per_step=1)
    for number in range(16):
        letters = chr(ord("a") + number) * 5
        own = {"row": f"row-{number}", "place": letters.upper()}
        task = Task(task_id=f"{number:016x}", prompt=f"{letters} sorted", answer="no", metadata=own)
        failed = failure(cause.format(id=task.task_id, prompt=task.prompt, number=number / 7, **own))
        alike = alike.after([failed] * 4, task)
    assert alike.unrecoverable.endswith(failed.cause)


def test_other_causes_stay_apart() -> None:
    task = Task(task_id="0" * 16, prompt="no", answer="an")
    kinds = {failure_kind(failure(cause), task) for cause in ("no answer", "an answer", "it doesn't, it isn't", "no")}
    assert kinds == {"no answer", "an answer", "it doesn't, it isn't", "no"}


@pytest.mark.parametrize(
    ("alike", "solved", "words"),
    [
        ({(0.0, False): 64}, False, "the same reward, 0 (no task was solved: run `headway sft` first, or use easier"),
        ({(1.0, True): 64}, True, "the same reward, 1 (most tasks are solved already: use harder"),
        ({(1.0, True): 9, (0.5, False): 3}, True, "the same reward, 1 in 9 groups, 0.5 in 3 groups (most tasks are"),
        (
            {(0.0, False): 5, (1.0, True): 3},
            False,
            "0 in 5 groups, 1 in 3 groups (some tasks are always solved, the others never",
        ),
    ],
)
def test_the_reward_that_all_attempts_got_is_named(
    alike: dict[tuple[float, bool], int], solved: bool, words: str
) -> None:
    assert mostly_solved(alike) == solved
    assert words in same_reward(alike)
