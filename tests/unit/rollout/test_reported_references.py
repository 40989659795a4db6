"""References as they were meant: mixed numbers, bases, units, intervals, texts, reasoning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from judged_answers import SOLVED, WRONG, judged, left_out
from packages import needs

from headway.config.sources import VerifierSettings
from headway.records.errors import ConfigurationError
from headway.records.task import Task
from headway.rollout.verification.scorers import score_guarded
from headway.rollout.verification.verifiers import resolve_verifier

needs("math_verify")

# --- references that failed on themselves -----------------------------------------------------------------


@pytest.mark.parametrize(
    "reference",
    [
        "12:00",
        "3:45 PM",
        "May 5, 2024",
        "\\angle ABC",
        "20 dollars",
        "8 books",
        "\\int_0^1 x dx",
        "\\overline{AB}",
        "$5$ apples and $6$ pears",
        "7:00",
        "11:00 AM",
        "00:15",
        "June 1, 1999",
        "\\triangle PQR",
        "10:30",
        "2:1",
        "x>5",
        "\\pm 5",
        "½",
        "0.\\overline{3}",
        "(-\\infty, 3) \\cup (5, \\infty)",
        "25\\%",
        "101_2",
    ],
)
@pytest.mark.parametrize("extract", ["all", "boxed", "answer_tag"])
def test_a_reference_equals_itself_or_its_task_is_left_out(
    reference: str, extract: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    form = {"all": "{}", "boxed": "\\boxed{{{}}}", "answer_tag": "<answer>{}</answer>"}[extract]
    found = judged("math", reference, form.format(reference), extract=extract)
    assert found == SOLVED or left_out(tmp_path, "math", reference, capsys, extract=extract)


@pytest.mark.parametrize("reference", ["sixteen", "12 or 13", "1/2 or 3/4", "no number", "a^2 + 3"])
def test_check_refuses_a_reference_that_is_no_number(
    reference: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert left_out(tmp_path, "numeric", reference, capsys)


@pytest.mark.parametrize(("name", "reference"), [("numeric", "16"), ("math", "\\frac{1}{2}"), ("exact", "east")])
def test_check_finds_nothing_where_references_are_right(
    name: str, reference: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not left_out(tmp_path, name, reference, capsys)


# --- mixed numbers, bases, lists, units, times, dates, intervals ------------------------------------------

MEANT = [
    ("3 1/2", "3.5"),
    ("3 1/2", "\\boxed{3.5}"),
    ("2 3/4", "\\boxed{2.75}"),
    ("3.5", "\\boxed{3 1/2}"),
    ("7/2", "\\boxed{3 1/2}"),
    ("-1 1/2", "\\boxed{-1.5}"),
    ("1\\frac{1}{2}", "\\boxed{1.5}"),
    ("1\\,000", "1000"),
    ("1\\,000", "\\boxed{1000}"),
    ("12\\,345", "\\boxed{12345}"),
    ("1\\;000\\;000", "\\boxed{1000000}"),
    ("1000", "\\boxed{1\\,000}"),
    ("25000", "\\boxed{25\\,000}"),
    ("1 000", "\\boxed{1000}"),
    ("1{,}000", "\\boxed{1000}"),
    ("20 dollars", "20"),
    ("8 books", "8"),
    ("20 dollars", "\\boxed{20}"),
    ("20", "\\boxed{20 dollars}"),
    ("8", "\\boxed{8 books}"),
    ("12 pencils", "\\boxed{12}"),
    ("3 tickets", "\\boxed{3}"),
    ("7 kilograms", "\\boxed{7}"),
    ("5 apples", "5"),
    ("15 minutes", "15"),
    ("5 cm", "\\boxed{5 \\text{ cm}}"),
    ("(1,2]", "\\boxed{1 < x \\le 2}"),
    ("x>2", "\\boxed{(2,\\infty)}"),
    ("25\\%", "\\boxed{0.25}"),
    ("½", "\\boxed{0.5}"),
    ("√2", "\\boxed{\\sqrt{2}}"),
    ("0.\\overline{3}", "\\boxed{1/3}"),
    ("2", "so \\boxed{1}, no: \\boxed{2}"),
]


@pytest.mark.parametrize(("reference", "response"), MEANT)
def test_equal_as_meant_or_left_out(
    reference: str, response: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert judged("math", reference, response) != WRONG or left_out(tmp_path, "math", reference, capsys)


@pytest.mark.parametrize(
    ("reference", "response"),
    [
        ("3 1/2", "2"),
        ("2 3/4", "4"),
        ("5 2/3", "3"),
        ("3 1/2", "1/2"),
        ("3 1/2", "31/2"),
        ("3 1/2", "3/2"),
        ("11_2", "11_3"),
        ("101_2", "101_{10}"),
        ("12_8", "12_{16}"),
        ("1010_2", "1010_4"),
        ("77_8", "77_9"),
        ("11_2", "11"),
        ("A3_{16}", "A3_{12}"),
        ("11_{\\text{two}}", "11_{\\text{three}}"),
        ("1, 2, \\ldots, n", "1, 3, 5, \\ldots, 2n-1"),
        ("2, 4, \\ldots, 2n", "1, 2, \\ldots, n"),
        ("1, 2, ..., 10", "1, 3, ..., 10"),
        ("1, 2, \\cdots, 100", "1, 4, \\cdots, 100"),
        ("\\{1, 2, \\ldots, 9\\}", "\\{1, 3, \\ldots, 9\\}"),
        ("0.333\\ldots", "0.333"),
        ("1\\,000", "0"),
        ("1\\,000", "1"),
        ("12\\,345", "345"),
        ("20 dollars", "21"),
        ("8 books", "9"),
        ("5 cm", "5 m"),
        ("5 cm", "5 km"),
        ("3 hours", "3 minutes"),
        ("2 kg", "2 g"),
        ("5 \\text{ cm}", "5 \\text{ m}"),
        ("5 cm^2", "5 cm^3"),
        ("12:30", "12:45"),
        ("10:30", "1:3"),
        ("10:30", "20:60"),
        ("12:30", "\\frac{2}{5}"),
        ("12:00", "12"),
        ("3:45 PM", "3:45 AM"),
        ("2024-05-17", "2024-17-05"),
        ("2024-05-17", "2002"),
        ("May 5, 2024", "May 6, 2024"),
        ("May 5, 2024", "2024"),
        ("(1,2)", "[1,2]"),
        ("(1,2)", "(2,1)"),
        ("x > 2", "x \\ge 2"),
        ("x>2", "[2,\\infty)"),
        ("[1,2]", "1 < x < 2"),
        ("0.\\overline{3}", "0.3"),
        ("√2", "2"),
        ("x²", "x"),
        ("25\\%", "2.5\\%"),
    ],
)
def test_never_a_false_equality(reference: str, response: str) -> None:
    assert judged("math", reference, f"\\boxed{{{response}}}") != SOLVED
    assert judged("math", f"${reference}$", f"${response}$") != SOLVED


# --- booleans, Unicode, regex -----------------------------------------------------------------------------


def says(task: Task, response: str) -> dict[str, Any]:
    return {"reward": 0.5, "solved": json.loads(response)}


@pytest.mark.parametrize("solved", ["False", "false", "no", "0", "true-ish", [False], {"solved": False}, "None"])
def test_a_verdict_whose_solved_is_no_boolean(solved: object) -> None:
    verdict = score_guarded(says, Task(task_id="t", prompt="p"), json.dumps(solved))
    assert not verdict.solved


@pytest.mark.parametrize("solved", [True, 1])
def test_a_verdict_that_is_solved(solved: object) -> None:
    assert score_guarded(says, Task(task_id="t", prompt="p"), json.dumps(solved)).solved


COMPOSED = [
    ("café", "cafe\u0301"),
    ("Ångström", "A\u030angstro\u0308m"),
    ("한글", "\u1112\u1161\u11ab\u1100\u1173\u11af"),
]


@pytest.mark.parametrize(("first", "second"), [*COMPOSED, ("señor", "sen\u0303or")])
@pytest.mark.parametrize("extract", ["all", "answer_tag"])
def test_composed_and_decomposed_texts_are_equal(first: str, second: str, extract: str) -> None:
    form = "<answer>{}</answer>" if extract == "answer_tag" else "{}"
    assert judged("exact", first, form.format(second), extract=extract) == SOLVED
    assert judged("exact", second, form.format(first), extract=extract) == SOLVED


@pytest.mark.parametrize(("answer", "response"), [("café", "cafe"), ("Café", "café"), ("a", "b"), ("x2", "x 2")])
def test_other_texts_stay_unequal(answer: str, response: str) -> None:
    assert judged("exact", answer, response) == WRONG


# --- reasoning is no answer -------------------------------------------------------------------------------

THOUGHTS = [
    ("math", "<think>maybe \\boxed{7}", {}),
    ("math", "<think>\\boxed{7}</think> The answer is 8.", {}),
    ("math", "<think>\nIt is 7.\n</think>\n\\boxed{8}", {}),
    ("math", "<think>\\boxed{7}</think>", {"extract": "boxed"}),
    ("math", "\\boxed{7}\n</think>\n\nIt is 8.", {}),
    ("numeric", "<think>so it is 7", {}),
    ("numeric", "<think>7</think>I don't know", {}),
    ("regex", "<think>#### 7</think>#### 8 or so", {"pattern": "#### (7)"}),
    ("exact", "<think><answer>7</answer>", {"extract": "answer_tag"}),
    ("exact", "<think>one line\n7", {"extract": "last_line"}),
]


@pytest.mark.parametrize(("name", "response", "parameters"), THOUGHTS)
def test_a_thought_is_no_answer(name: str, response: str, parameters: dict[str, Any]) -> None:
    assert judged(name, "7", response, **parameters) == WRONG


@pytest.mark.parametrize("name", ["exact", "numeric", "math"])
@pytest.mark.parametrize("response", ["<think>8?</think>7", "<think>\n8\n</think>\n\n7", "7"])
def test_what_follows_the_thought_is_the_answer(name: str, response: str) -> None:
    assert judged(name, "7", response) == SOLVED


def test_a_pattern_that_has_no_first_group_is_still_an_error() -> None:
    with pytest.raises(ConfigurationError):
        resolve_verifier(VerifierSettings(name="regex", parameters={"pattern": "a", "group": 1}))
