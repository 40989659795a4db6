"""The tests of programming tasks: the forms they come in, what is the same, which block of an answer is the program."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zlib

import pytest

from headway.rollout.code.code_tests import CodeTest, code_tests
from headway.rollout.code.comparison import same_text, same_value
from headway.rollout.environments.code import last_program


def test_own_form():
    tests = code_tests({"tests": [{"stdin": "1\n", "stdout": "2\n"}, {"stdout": "3", "public": True}], "timeout_s": 2})
    assert tests.tests == (CodeTest(stdout="3", public=True), CodeTest(stdin="1\n", stdout="2\n"))
    assert tests.timeout_s == 2
    assert tests.tolerance is None
    called = code_tests({"function": "add", "tests": [{"arguments": [1, 2], "returns": 3}]})
    assert (called.function, called.tests) == ("add", (CodeTest(arguments=(1, 2), returns=(3,)),))


def test_apps_and_taco():
    text = json.dumps({"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", ["7"]]})
    assert code_tests({"input_output": text, "public_tests": 1}).tests == (
        CodeTest(stdin="1 2\n", stdout="3\n", public=True),
        CodeTest(stdin="3\n4", stdout="7"),
    )
    called = code_tests({"tests": {"inputs": [[[1, 2]], [[]]], "outputs": [[3], []], "fn_name": "total"}})
    assert called.function == "total"
    assert called.tests == (CodeTest(arguments=([1, 2],), returns=([3], 3)), CodeTest(arguments=([],), returns=([],)))


def packed(value: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def test_livecodebench():
    public = json.dumps([{"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"}])
    private = packed(json.dumps([{"input": "[]\n0", "output": "[]", "testtype": "functional"}]))
    row = {
        "public_test_cases": public,
        "private_test_cases": private,
        "metadata": json.dumps({"func_name": "add_to_all"}),
    }
    tests = code_tests(row)
    assert tests.function == "add_to_all"
    assert tests.tests == (
        CodeTest(arguments=([1, 2], 3), returns=([4, 5],), public=True),
        CodeTest(arguments=([], 0), returns=([],)),
    )
    plain = code_tests({"public_test_cases": [{"input": "a", "output": "b", "testtype": "stdin"}]})
    assert plain.tests == (CodeTest(stdin="a", stdout="b", public=True),)


class Harmful:
    def __reduce__(self):
        return os.system, ("touch /tmp/harmed",)


def test_packed_tests_are_texts_and_run_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"must be a text, not posix\.system"):
        code_tests({"private_test_cases": packed(Harmful())})


@pytest.mark.parametrize(
    ("metadata", "what"),
    [
        ({}, "there are none"),
        ({"tests": []}, "there are none"),
        ({"tests": [{"stdin": "1"}]}, "KeyError: 'stdout'"),
        ({"tests": [{"stdout": "1", "answer": "1"}]}, "a test has answer; valid: stdin, stdout, public"),
        ({"input_output": '{"inputs": ["1"], "outputs": []}'}, "1 inputs and 0 outputs"),
        ({"input_output": "{"}, "JSONDecodeError"),
        ({"public_test_cases": [{"input": "1", "output": "1", "testtype": "functional"}]}, "func_name"),
        ({"tests": [{"stdout": "1"}], "timeout_s": "soon"}, "soon"),
    ],
)
def test_what_cannot_be_read_is_told(metadata, what):
    with pytest.raises(ValueError, match=what):
        code_tests(metadata)


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1 2\n3\n", "1 2 3", True),
        ("1 2", "1 2 3", False),
        ("0.1000000001", "0.1", True),
        ("0.1001", "0.1", False),
        ("1.0", "1", True),
        ("1e3", "1000", True),
        ("1.0000000001", "1", False),
        ("1", "1.0000000001", True),
        ("0010", "10", False),  # whole numbers are texts: "0010" is a string of bits
        ("+5", "5", False),
        ("50000000000000001", "50000000000000000", False),
        ("1e999999", "1e999998", False),
        ("1e9999999999", "1.0", False),
        ("nan", "nan", True),
        ("nan", "1.0", False),
        ("1.0.0", "1.0", False),
        ("٣.٠", "3.0", False),
        ("Yes", "YES", False),
        ("", "", True),
        ("x", "", False),
    ],
)
def test_words(printed, expected, same):
    assert same_text(printed, expected, "tokens", 1e-9) is same


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("a b \nc\n\n", "a b\nc", True),
        ("a b c", "a b\nc", False),
        ("a  b", "a b", False),
        ("  *\n ***", "  *\n ***", True),
        ("*\n ***", "  *\n ***", False),
        ("x 0.50000000001", "x 0.5", True),
    ],
)
def test_lines(printed, expected, same):
    assert same_text(printed, expected, "lines", 1e-9) is same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        ([1, [2.0000000001]], [1, [2.0]], True),
        ([1, [2.0000000001]], [1, [2]], False),  # a whole number is that number
        ([1, [2.0]], [1, [2]], True),
        (2, 2.0000000001, True),
        (1.0, True, True),
        ([1, 2], [1, 2, 3], False),
        ((1, 2), [1, 2], False),
        ({"a": 0.1 + 0.2}, {"a": 0.3}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (True, 1, True),
        ("1", 1, False),
        (1.0, "1.0", False),
        (float("inf"), 1e300, False),
        (1.0, float("inf"), False),
        (10**400, 1.5, False),
        (float("nan"), float("nan"), True),
        ([], {}, False),
        (None, 0, False),
    ],
)
def test_values(value, expected, same):
    assert same_value(value, expected, 1e-9) is same


def test_values_nested_too_deep_differ():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert same_value(deep, deep[0], 1e-9) is False


def test_the_last_block_of_python_is_the_program():
    assert last_program("```python\nprint(1)\n```\nor\n```\nprint(2)\n```\n```json\n{}\n```") == "print(2)\n"
    assert last_program("````python\n'''\n```\n'''\n````") == "'''\n```\n'''\n"
    assert last_program("say `print(1)`") is None
    assert last_program("```python\nprint(1)") is None, "cut: nobody knows what would have come"
    assert last_program("```cpp\nint main(){}\n```") is None
