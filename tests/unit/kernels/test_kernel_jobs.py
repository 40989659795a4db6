"""Task files, evaluations of answer files, conversations for supervised training: counts against hand-made files."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from scripted_kernels import ScriptedEvaluator, kernel_task, scripted

from headway.config.sources import SftSource, TaskSource
from headway.kernels.client import KernelRequestRefused, KernelServiceFailed
from headway.kernels.jobs.evaluate import JudgeSettings, evaluate_answers, kernel_report, read_answers
from headway.kernels.jobs.judging import judge_all
from headway.kernels.jobs.markdown import markdown_report
from headway.kernels.jobs.sft_data import SftCounts, SftData, SftSettings, source_key
from headway.kernels.jobs.task_files import KernelTaskFile, distinct_tasks, split_tasks, task_row, write_rows
from headway.kernels.prompts import feedback, kernel_prompt
from headway.kernels.tasks import builtin_tasks
from headway.records.errors import ConfigurationError, HeadwayError
from headway.records.kernels import KernelEvaluation, KernelSubmission, KernelTask
from headway.tasks.demonstrations import Conversation, read_demonstrations
from headway.tasks.sources import load_tasks, require_disjoint

TASKS = [kernel_task("a"), kernel_task("b"), kernel_task("c", level=2)]


def lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def book(tmp_path: Path) -> KernelTaskFile:
    write_rows(tmp_path / "tasks.jsonl", map(task_row, TASKS))
    return KernelTaskFile(tmp_path / "tasks.jsonl")


def fenced(source: str) -> str:
    return f"```python\n{source.rstrip()}\n```"


# --- task files ------------------------------------------------------------------------------------------


def test_tasks_survive_the_way_through_headways_task_files(tmp_path: Path):
    tasks = builtin_tasks("torch")
    write_rows(tmp_path / "t.jsonl", map(task_row, tasks))
    read = load_tasks(TaskSource(path=str(tmp_path / "t.jsonl")))
    assert [msgspec.convert(one.metadata["kernel"], KernelTask) for one in read] == tasks
    assert [one.prompt for one in read] == list(map(kernel_prompt, tasks))
    assert [task.kernel for task in KernelTaskFile(tmp_path / "t.jsonl").tasks.values()] == tasks


def test_split_is_by_level_disjoint_and_independent_of_the_order(tmp_path: Path):
    tasks = builtin_tasks()
    kept, held = split_tasks(tasks, 0.25, seed=3)
    assert sorted([*kept, *held], key=tasks.index) == tasks
    assert [sum(task.level == level for task in held) for level in (1, 2, 3, 4)] == [3, 2, 2, 2]
    again, held_again = split_tasks(tasks[::-1], 0.25, seed=3)
    assert (again[::-1], held_again[::-1]) == (kept, held)
    assert split_tasks(tasks, 0.25, seed=4)[1] != held
    for name, part in (("kept", kept), ("held", held)):
        write_rows(tmp_path / name, map(task_row, part))
    require_disjoint({name: load_tasks(TaskSource(path=str(tmp_path / name))) for name in ("kept", "held")})


def test_tasks_of_one_prompt_are_one():
    same = msgspec.structs.replace(TASKS[0], name="other")
    assert distinct_tasks([*TASKS, same]) == TASKS


def test_rows_find_their_task_by_name_id_or_prompt(book: KernelTaskFile):
    read = load_tasks(TaskSource(path=str(book.path)))
    rendered = f"<|im_start|>user\n{read[1].prompt}<|im_end|>\n<|im_start|>assistant\n"
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": read[1].prompt}]
    for row in ({"task": "b"}, {"task_id": read[1].task_id}, {"prompt": rendered}, {"messages": said}):
        assert book.name_of(row, "x") == "b"
    for row in ({"task": "z"}, {"task_id": "0" * 16}, {"prompt": "Hi"}):
        assert book.name_of(row, "x") == ""
    with pytest.raises(ConfigurationError, match=r'f:3: no task: it has source; valid: "task"'):
        book.name_of({"source": ""}, "f:3")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "Hi"}], '"Hi": metadata.kernel is no kernel task: Expected `object`, got `null`'),
        ([{"prompt": "Hi", "metadata": {"kernel": {"name": "a"}}}], "is no kernel task: Object missing .* `source`"),
        ([task_row(TASKS[0]), {**task_row(TASKS[0]), "prompt": "Hi"}], "two tasks are named 'a'"),
    ],
)
def test_files_of_other_tasks_are_refused(tmp_path: Path, rows: list[dict[str, Any]], message: str):
    with pytest.raises(ConfigurationError, match=message):
        KernelTaskFile(lines(tmp_path / "t.jsonl", *rows))


# --- evaluation ------------------------------------------------------------------------------------------


def test_answers_of_all_forms_are_judged_and_none_is_lost(book: KernelTaskFile, tmp_path: Path):
    path = lines(
        tmp_path / "answers.jsonl",
        {"task": "a", "source": scripted("correct", 1, 2.5)},
        {"task": "a", "text": f"<think>hm</think>{fenced(scripted('wrong', 2))}"},
        {"prompt": kernel_prompt(TASKS[1]), "response": fenced(scripted("infrastructure"))},
        {"task": "b", "text": "I can't."},
        {"task": "a", "source": scripted("correct", 3, None)},
        {"task": "a", "source": scripted("correct", 4)},
        {"task": "b", "source": scripted("refused")},
    )
    answers, surplus = read_answers(path, book, 3)
    assert ({name: len(found) for name, found in answers.items()}, surplus) == ({"a": 3, "b": 3, "c": 0}, 1)
    judge, settings, seen = ScriptedEvaluator(), JudgeSettings(correct_trials=3), []
    judged = asyncio.run(
        evaluate_answers(
            partial(judge_all, judge, concurrent=2, on_judged=lambda done, total: seen.append((done, total))),
            book,
            answers,
            settings,
        )
    )
    assert seen == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]
    assert judge.peak == 2
    assert {one.correct_trials for one in judge.submissions} == {3}
    report = kernel_report(judged, [1, 2], settings, "m", ("t", "f"), surplus)
    scores = report.scores
    assert (scores.tasks, scores.candidates, scores.missing, scores.unanswered, scores.untimed) == (3, 4, 2, 1, 1)
    assert scores.correct["1"].value == pytest.approx((2 / 3 + 0) / 2, abs=1e-12)
    assert sorted(report.missing) == [("b", "its reference fails"), ("b", "the zygote has died")]
    assert report.row["correct_pass@1"] == [scores.correct["1"].value, *scores.correct["1"].interval]
    assert report.row | {"missing": 2, "unanswered": 1, "untimed": 1} == report.row
    text = markdown_report(report)
    for said in (
        "2 of 6 candidates were not evaluated",
        "1 of 3 tasks have no answer",
        "1 correct candidates have no speed-up",
        "pass@2 is over 1 of 3 tasks",
        "| m | 2 of 3 | 4 (2 missing) | 0.500 [",
        "- b: the zygote has died",
        "1 answers beyond -n",
    ):
        assert said in text
    assert report.tasks == {"a": ["correct", "wrong", "correct"], "b": ["", "not compiled", ""], "c": []}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"task": "z", "source": "x"}, r"answers.jsonl:1: task = 'z' isn't a task of"),
        ({"prompt": "Hi", "source": "x"}, "its prompt's task isn't a task of"),
        ({"task": "a", "code": "x"}, 'it has code, task; needed: "source"'),
    ],
)
def test_answers_without_task_or_source_are_refused(
    book: KernelTaskFile, tmp_path: Path, row: dict[str, Any], message: str
):
    with pytest.raises(ConfigurationError, match=message):
        read_answers(lines(tmp_path / "answers.jsonl", row), book, None)
    with pytest.raises(ConfigurationError, match="no answers"):
        read_answers(lines(tmp_path / "none.jsonl"), book, None)


class Failing:
    def __init__(self, *errors: Exception | None) -> None:
        self.errors = list(errors)

    async def evaluate(self, submission: KernelSubmission) -> KernelEvaluation:
        error = self.errors.pop(0)
        if error is not None:
            raise error
        return KernelEvaluation(compiled=True)


def test_a_service_that_fails_leaves_named_gaps_and_one_that_refuses_the_key_ends_the_command():
    submissions = [KernelSubmission(task=TASKS[0], source=scripted("correct", number)) for number in range(3)]
    judge = Failing(
        KernelServiceFailed("no machine"), None, KernelRequestRefused("http://a", 400, "its reference fails")
    )
    found = asyncio.run(judge_all(judge, submissions, concurrent=1))
    assert [one.infrastructure for one in found] == [
        "no machine", "", "http://a refuses an evaluation (HTTP 400): its reference fails"
    ]  # fmt: skip
    with pytest.raises(KernelRequestRefused, match="incorrect API key"):
        asyncio.run(
            judge_all(
                Failing(KernelRequestRefused("http://a", 401, "incorrect API key")), submissions[:1], concurrent=4
            )
        )
    long = KernelSubmission(task=TASKS[0], source="x" * (2 << 20))
    (one,) = asyncio.run(judge_all(Failing(), [long], concurrent=1))
    assert (one.fault, one.infrastructure) == ("unknown", "")


def test_no_evaluation_at_all_is_an_error(book: KernelTaskFile):
    judge = partial(judge_all, ScriptedEvaluator(), concurrent=1)
    with pytest.raises(HeadwayError, match="none of 1 evaluations succeeded; the first: the zygote has died"):
        asyncio.run(evaluate_answers(judge, book, {"a": [scripted("infrastructure")]}, JudgeSettings()))


# --- supervised data -------------------------------------------------------------------------------------


def made(
    book: KernelTaskFile, path: Path, judge: ScriptedEvaluator | None = None, **settings: Any
) -> tuple[list[dict[str, Any]], SftCounts]:
    chosen = SftSettings(**{"shortest_tokens": 0, **settings})
    data = SftData(book, chosen, lambda text: math.ceil(len(text) / 4))
    return asyncio.run(data.make(path, partial(judge_all, judge or ScriptedEvaluator(), concurrent=3)))


def answers_of(row: dict[str, Any]) -> list[str]:
    return [one["content"] for one in row["messages"] if one["role"] == "assistant"]


def conversation(task: KernelTask, *answers: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": kernel_prompt(task)}]
    for answer in answers:
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Again."}]
    return {"messages": messages}


HAND_MADE = [
    {"task": "z", "source": scripted("correct", 1)},  # unknown task
    {"task": "a", "text": "I can't."},  # no source
    {"task": "a", "source": "class ModelNew: ..."},  # too short
    {"task": "a", "text": "hm " * 20_000 + fenced(scripted("correct", 2))},  # too long
    {"task": "a", "source": scripted("infrastructure", 3)},  # not evaluated
    {"task": "a", "source": scripted("cheat", 4)},  # cheat
    {"task": "a", "source": scripted("not compiled", 5)},  # not compiled
    {"task": "a", "source": scripted("wrong", 6)},  # wrong
    {"task": "a", "source": scripted("illegal_memory_access", 7)},  # wrong
    {"task": "a", "source": scripted("correct", 8)},  # written, with the last two before it
    {"task": "a", "source": "# again\n" + scripted("correct", 8)},  # duplicate
    {"task": "b", "source": scripted("correct", 8)},  # written: another task's
    {"task": "a", "source": scripted("wrong at seed 44", 9)},  # wrong
    {"task": "b", "source": scripted("correct", 10, 0.9)},  # written; "faster": slow
    {"task": "b", "source": scripted("correct", 11, None)},  # written; "faster": untimed
    conversation(TASKS[2], fenced(scripted("wrong", 12)), "<think>Aha.</think>" + fenced(scripted("correct", 13))),
    conversation(TASKS[2], fenced(scripted("wrong", 14)), "Sorry."),  # wrong
    conversation(TASKS[2], "No.", fenced(scripted("correct", 13))),  # duplicate
]
PROMPT_TOKENS = math.ceil(len(kernel_prompt(TASKS[0])) / 4)
LENGTHS = {"shortest_tokens": PROMPT_TOKENS + 12, "longest_tokens": 8192}


def counted(turns: dict[str, int], **left_out: int) -> dict[str, Any]:
    return {
        "rows": len(HAND_MADE),
        "written": sum(turns.values()),
        "left_out": {name.replace("_", " "): count for name, count in left_out.items()},
        "turns": turns,
    }


BEFORE = {"unknown_task": 1, "no_source": 1, "too_short": 1, "too_long": 1, "not_evaluated": 1, "cheat": 1}


@pytest.mark.parametrize(
    ("need", "expected"),
    [
        ("compiled", counted({"1": 9, "2": 1}, **BEFORE, not_compiled=1, duplicate=1)),
        ("correct", counted({"1": 3, "2": 1, "3": 1}, **BEFORE, not_compiled=1, wrong=4, duplicate=2)),
        (
            "faster",
            counted({"1": 1, "2": 1, "3": 1}, **BEFORE, not_compiled=1, wrong=4, untimed=1, slow=1, duplicate=2),
        ),
    ],
)
def test_counts_equal_those_of_a_file_made_by_hand(
    book: KernelTaskFile, tmp_path: Path, need: str, expected: dict[str, Any]
):
    rows, counts = made(book, lines(tmp_path / "rows.jsonl", *HAND_MADE), need=need, **LENGTHS)
    found = msgspec.to_builtins(counts)
    del found["settings"]
    assert found == expected
    assert counts.rows == counts.written + sum(counts.left_out.values())
    assert list(counts.left_out) == list(expected["left_out"])
    assert len(rows) == counts.written
    written = "".join(answers_of(row)[-1] for row in rows)
    for bad in ("cheat", "infrastructure", "not compiled", *(("wrong", "illegal") if need != "compiled" else ())):
        assert bad not in written


def test_wrong_answers_become_turns_with_the_evaluators_feedback(book: KernelTaskFile, tmp_path: Path):
    rows, _ = made(book, lines(tmp_path / "rows.jsonl", *HAND_MADE), **LENGTHS)
    evaluate = ScriptedEvaluator().evaluate
    first, chat = rows[0]["messages"], rows[-1]["messages"]
    assert [one["role"] for one in first] == ["user", "assistant"] * 3
    assert first[0]["content"] == kernel_prompt(TASKS[0])
    for place, number, outcome in ((1, 6, "wrong"), (3, 7, "illegal_memory_access")):
        source = scripted(outcome, number)
        assert first[place]["content"] == fenced(source)
        judged = asyncio.run(evaluate(KernelSubmission(task=TASKS[0], source=source)))
        assert first[place + 1]["content"] == feedback(judged)
    assert first[5]["content"] == fenced(scripted("correct", 8))
    assert answers_of(rows[-1]) == [
        fenced(scripted("wrong", 12)),
        "<think>Aha.</think>" + fenced(scripted("correct", 13)),
    ]
    assert "is right in 4 of 5 trials" in chat[2]["content"]
    assert "Again." not in json.dumps(rows)


def test_a_wrong_answer_stands_in_one_conversation_at_most(book: KernelTaskFile, tmp_path: Path):
    wrong = {"task": "a", "source": scripted("wrong", 1)}
    good = [{"task": "a", "source": scripted("correct", number)} for number in (2, 3)]
    rows, counts = made(book, lines(tmp_path / "rows.jsonl", wrong, wrong, good[0], wrong, good[1]))
    assert (counts.turns, counts.left_out) == ({"1": 1, "2": 1}, {"wrong": 3})
    single, counts = made(book, tmp_path / "rows.jsonl", turns=1)
    assert (counts.turns, [answers_of(row)[-1] for row in rows]) == ({"1": 2}, [answers_of(row)[0] for row in single])


def test_turns_that_make_a_conversation_too_long_are_left_out(book: KernelTaskFile, tmp_path: Path):
    before = [{"task": "a", "text": "hm " * 1000 + fenced(scripted("wrong", number))} for number in (1, 2)]
    path = lines(tmp_path / "rows.jsonl", *before, {"task": "a", "source": scripted("correct", 3)})
    for further, turns in ((1700, "3"), (1000, "2"), (780, "1"), (100, "1")):
        longest = PROMPT_TOKENS + further
        rows, counts = made(book, path, longest_tokens=longest)
        assert (list(counts.turns), len(answers_of(rows[0]))) == ([turns], int(turns))
        assert sum(math.ceil(len(one["content"]) / 4) for one in rows[0]["messages"]) <= longest


def test_candidates_are_checked_by_all_seeds_and_timed_once(book: KernelTaskFile, tmp_path: Path):
    sources = [
        scripted("correct", 1),
        scripted("wrong", 2),
        scripted("correct", 3, 0.9),
        scripted("wrong at seed 43", 4),
    ]
    path = lines(tmp_path / "rows.jsonl", *({"task": "a", "source": one} for one in [*sources, *sources]))
    judge = ScriptedEvaluator()
    _, counts = made(book, path, judge, need="faster", seeds=4, trials=7)
    assert [judge.seen[one] for one in sources] == [4, 1, 1, 2]  # equal rows are evaluated once
    assert [(one.seed, one.timed) for one in judge.submissions if one.source == sources[0]] == [
        (42, True), (43, False), (44, False), (45, False)
    ]  # fmt: skip
    assert {one.correct_trials for one in judge.submissions} == {7}
    assert counts.left_out == {"wrong": 4, "slow": 2, "duplicate": 1}


def test_written_rows_are_read_by_headway_sft(book: KernelTaskFile, tmp_path: Path):
    rows, _ = made(book, lines(tmp_path / "rows.jsonl", *HAND_MADE), **LENGTHS)
    write_rows(tmp_path / "sft.jsonl", rows)
    read = [one for _, one in read_demonstrations(SftSource(path=str(tmp_path / "sft.jsonl")))]
    assert [list(one.messages) for one in read if isinstance(one, Conversation)] == [row["messages"] for row in rows]


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        ("x = 1  # one\n", "x=1", True),
        ("class A:\n    '''Doc.'''\n    y = 1\n", "class A:\n    y = 1\n", True),
        ('c = r"""int  f();\n\n"""', 'c = "int f();"', True),
        ("x = 1", "x = 2", False),
        ("x = 1", "y = 1", False),
        ("x = (", "x =  (\n", True),
        ("x = (", "x = [", False),
    ],
)
def test_sources_that_differ_by_layout_are_equal(first: str, second: str, equal: bool):
    assert (source_key(first) == source_key(second)) is equal


def test_malformed_rows_are_refused_with_their_line(book: KernelTaskFile, tmp_path: Path):
    cases: Sequence[tuple[dict[str, Any], str]] = (
        ({"source": "x"}, r"rows.jsonl:1: no task"),
        ({"task": "a"}, r"rows.jsonl:1: it has task; needed"),
        ({"task": "a", "messages": [{"role": "robot", "content": ""}]}, "role = 'robot'"),
    )
    for row, message in cases:
        with pytest.raises(ConfigurationError, match=message):
            made(book, lines(tmp_path / "rows.jsonl", row))
    with pytest.raises(ConfigurationError, match="no rows"):
        made(book, lines(tmp_path / "rows.jsonl"))
