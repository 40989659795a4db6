"""Hidden tests: what is cut out of them, what counts as an answer, what can't be asked."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from headway.rollout.code.hidden_tests import DRIVER, decoded, driver_input, grade, questions_of
from headway.rollout.code.repositories import files_of

SOURCE = """
import pytest
from shapes import area, sides

START = [2, 3]

def test_area():
    assert area(START) == 6
    assert area([0.1, 3]) == 0.3
    with pytest.raises(ValueError):
        area([-1, 2])

def test_sides():
    with open("/dev/null") as file:
        assert sides(file.read()) == {"a": (1, b"x"), "b": {3, 4}}
    assert sides(None) is None
    assert not sides
"""
RIGHT = """
def area(sides):
    if min(sides) < 0:
        raise ValueError("negative")
    return sides[0] * sides[1]

class sides:
    def __new__(cls, text):
        return None if text is None else {"b": {4, 3}, "a": (1, b"x")}

class _None(type): pass
"""


def ask(source: str, tested: str, folder: Path):
    """As in a sandbox: (questions, what the driver says)."""
    (folder / "shapes.py").write_text(tested)
    questions = questions_of(source, "shapes")
    given = driver_input(questions, [str(folder)])
    done = subprocess.run([sys.executable, "-I", "-B", "-c", DRIVER], input=given, capture_output=True, timeout=60)
    return questions, done.stdout


def test_what_is_expected_is_cut_out():
    questions = questions_of(SOURCE, "shapes")
    assert questions.tests == ("test_area", "test_sides")
    for literal in ("==", "0.3", "b'x'", "{3, 4}", "pytest", "ValueError"):
        assert literal not in questions.source, questions.source
    values = [answer.value for answer in questions.answers if not (answer.raises or answer.end)]
    assert values == [6, 0.3, {"a": (1, b"x"), "b": {3, 4}}, None, False]
    assert [answer.raises for answer in questions.answers if answer.raises] == ["ValueError"]


def test_right_answers_pass_and_wrong_ones_are_told_apart(tmp_path):
    source = SOURCE.replace("assert not sides\n", "")
    questions, said = ask(source, RIGHT, tmp_path)
    assert grade(questions, said, 1e-9).passed == ("test_area", "test_sides")
    questions, said = ask(source, RIGHT.replace("sides[0] *", "sides[0] +"), tmp_path)
    assert grade(questions, said, 1e-9).wrong == ("test_area",)
    questions, said = ask(source, RIGHT.replace("ValueError", "KeyError"), tmp_path)
    assert grade(questions, said, 1e-9).wrong == ("test_area",)
    questions, said = ask(source, RIGHT.replace("return None if", "return 1 / 0 if"), tmp_path)
    assert grade(questions, said, 1e-9) == grade(questions, said, 1e-9)
    assert grade(questions, said, 1e-9).unanswered == ("test_sides",)
    questions, said = ask(source, "import os; os._exit(0)", tmp_path)
    assert grade(questions, said, 1e-9).unanswered == ("test_area", "test_sides")


def test_a_test_that_fails_after_its_last_question_has_not_passed(tmp_path):
    source = "from shapes import area\ndef test_it():\n    assert area(1) == 1\n    assert area(2) == 2\n    area(3)\n"
    questions, said = ask(source, "def area(x):\n    assert x < 3\n    return x\n", tmp_path)
    assert grade(questions, said, 0.0).unanswered == ("test_it",)


QUESTIONS = questions_of("def test_it():\n    assert f() == 1\n    assert f() == [2.5]\n", "it")
END = [2, None]


def lines(*said) -> bytes:
    return b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in said)


@pytest.mark.parametrize(
    ("said", "state"),
    [
        (lines([0, {"int": "0x1"}], [1, {"list": [{"float": (2.5).hex()}]}], END), "passed"),
        (lines(END, [1, {"list": [{"float": (2.5).hex()}]}], [0, True]), "passed"),  # True == 1, as in Python
        (lines([0, {"int": "0x1"}], [0, {"int": "0x1"}], [1, {"list": [{"float": "2.5"}]}], END), "wrong"),
        (lines([0, {"int": "0x1"}], [1, {"tuple": [{"float": "2.5"}]}], END), "wrong"),
        (lines([0, {"other": "Anything"}], [1, {"list": []}], END), "wrong"),
        (lines([0, 1], END), "wrong"),  # a bare number isn't how the driver says it
        (lines([0, {"dict": [[{"list": []}, None]]}], END), "wrong"),
        (lines([0, {"int": "1", "float": "1"}], END), "wrong"),
        (lines([0, {"set": [{"int": hex(k)} for k in range(5000)]}], END), "wrong"),
        (lines([0, {"int": "0x1"}], END), "unanswered"),
        (lines("passed", b"OK", b"\xff\xfe", [], [0], {"0": 1}, b"1 passed", [True, 1]), "unanswered"),
        (b"[" * 100_000, "unanswered"),
        (lines(b"[0, " + b'{"list": [' * 5000 + b"]}" * 5000 + b"]"), "unanswered"),
        (b"", "unanswered"),
    ],
)
def test_whatever_a_driver_says(said, state):
    assert getattr(grade(QUESTIONS, said, 1e-9), state) == ("test_it",)


@pytest.mark.parametrize("value", [None, True, -5, 2.5, "x", b"\0", [1, (2,)], {"k": {1}}, float("inf")])
def test_values_come_back_as_they_were(value):
    said: dict = {}
    body = DRIVER.split("def _encoded")[1].split("def _say")[0]
    exec("def _encoded" + body, said)
    assert decoded(json.loads(json.dumps(said["_encoded"](value)))) == value


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("    assert f() == g()\n", "line 2: what is expected must be a literal"),
        ("    assert f() != 1\n", "must be a literal"),
        ("    assert f() < 1\n", "must be a literal"),
        ("    for x in [1]:\n        assert f(x) == 1\n", "line 3: an assert must stand in a test itself"),
        ("    with pytest.raises(ValueError, match='x'):\n        f()\n", "line 2: valid: with pytest.raises"),
        ("    with raises(ValueError) as error:\n        f()\n", "line 2: valid: with pytest.raises"),
        ("    f()\n", "has no assert"),
        ("    assert f() == 1\n", "a constant passes all of it"),
        ("    assert f(1)\n    assert f(2)\n", "a constant passes all of it"),
        ("    assert f( == 1\n", "line 2: "),
    ],
)
def test_what_cannot_be_asked_is_told(body, what):
    with pytest.raises(ValueError, match=what):
        questions_of("def test_it():\n" + body, "it")
    with pytest.raises(ValueError, match="decorators or arguments"):
        questions_of("def test_it(tmp_path):\n    assert f(1) == 1\n    assert f(2) == 2\n", "it")


PYTEST = "is pytest's, which isn't there"


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pytest\nF = pytest.mark\n{}", f"line 2: pytest {PYTEST}"),
        ("from pytest import approx as near\n{}    near(1)\n", f"line 5: near {PYTEST}"),
        ("import pytest as pt\n{}    pt.skip()\n", f"line 5: pt {PYTEST}"),
        ("import os, pytest\n{}", f"line 1: import os, pytest {PYTEST}"),
        ("{}    import pytest\n    with pytest.raises(KeyError):\n        f(3)\n", f"line 4: import pytest {PYTEST}"),
        ("{}    assert f(3) == 1j\n", "line 4: it expects 1j, which no answer can be"),
        ("{}    assert f(3) == [1, (2, ...)]\n", "line 4: it expects .*Ellipsis|line 4: it expects"),
        ("{}    assert f(3) == {{1: {{2j}}}}\n", "line 4: it expects {1: {2j}}, which"),
        ("{}    assert f(3) == {{{}}}\n", "line 4: it expects {0, 1, 2"),
    ],
)
def test_what_no_code_could_pass_is_refused(source, what):
    test = "def test_it():\n    assert f(1) == 1\n    assert f(2) == 2\n"
    with pytest.raises(ValueError, match=what):
        questions_of(source.format(test, ", ".join(map(str, range(3000)))), "it")


@pytest.mark.parametrize(
    ("first", "second", "tolerance", "constant"),
    [
        ("1", "1.0", 0.0, True),
        ("True", "1", 0.0, True),
        ("1.0", "1.05", 0.1, True),
        ("1.0", "1.05", 0.01, False),
        ("{1: 2}", "{1: 2.0}", 0.0, True),
        ("[1]", "(1,)", 0.0, False),
        ("1", "2", 5.0, False),  # whole numbers are compared as they are
    ],
)
def test_values_that_would_be_taken_for_each_other_are_one(first, second, tolerance, constant):
    source = f"def test_it():\n    assert f(1) == {first}\n    assert f(2) == {second}\n"
    if not constant:
        assert len(questions_of(source, "it", tolerance).answers) == 3
        return
    with pytest.raises(ValueError, match="a constant passes all of it"):
        questions_of(source, "it", tolerance)


def test_repositories(tmp_path):
    assert files_of({"files": {"a/b.py": "x"}}) == {"a/b.py": (b"x", 0o644)}
    folder = tmp_path / "folder"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git" / "config").write_text("x")
    (folder / "run.sh").write_text("echo")
    (folder / "run.sh").chmod(0o755)
    (folder / "secret").symlink_to("/etc/passwd")
    assert files_of({"repository": str(folder)}) == {"run.sh": (b"echo", 0o755)}
    with tarfile.open(tmp_path / "it.tar", "w") as archive:
        archive.add(folder / "run.sh", "./sub/run.sh")
        archive.add(folder / "secret", "secret")
    assert files_of({"repository": str(tmp_path / "it.tar")}) == {"sub/run.sh": (b"echo", 0o755)}
    for wrong in ({}, {"files": {}}, {"files": {"a": ""}, "repository": "x"}, {"files": {"../a": ""}}):
        with pytest.raises(ValueError, match="repository"):
            files_of(wrong)
