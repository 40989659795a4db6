"""The tests of a programming task, parsed from the forms of several data sets.

A task's metadata holds them in one of these forms:

- our own: ``tests``, a list of ``{"stdin": ..., "stdout": ...}``, or of ``{"arguments": [...], "returns": ...}`` with
  the name of the function as ``function``; ``"public": true`` marks those that the policy may see;
- of APPS and TACO: ``input_output`` (or ``tests``), ``{"inputs": [...], "outputs": [...], "fn_name": ...}``, also as
  JSON; the first ``public_tests`` of them are public;
- of LiveCodeBench: ``public_test_cases`` and ``private_test_cases``, lists of ``{"input": ..., "output": ...}``, also
  as JSON or compressed as in its files, and the function as ``func_name``.

In all forms, ``timeout_s`` (of each test) and ``tolerance`` replace those of the environment.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import zlib
from collections.abc import Mapping
from typing import Any

import msgspec


class CodeTest(msgspec.Struct, frozen=True, kw_only=True):
    """A program's input and its expected result."""

    stdin: str = ""
    stdout: str = ""
    arguments: tuple[Any, ...] = ()  # of a function
    returns: tuple[Any, ...] = ()  # correct values; more than one where a data set is ambiguous
    public: bool = False


class CodeTests(msgspec.Struct, frozen=True, kw_only=True):
    """All tests of a task, public ones first."""

    tests: tuple[CodeTest, ...]
    function: str = ""  # the tested function; "": the whole program is run
    timeout_s: float | None = None  # of each; None: the environment's
    tolerance: float | None = None


def code_tests(metadata: Mapping[str, Any]) -> CodeTests:
    """Parse the tests in a task's metadata. Raises ValueError that says what is wrong with them."""
    function = str(metadata.get("function") or metadata.get("fn_name") or metadata.get("func_name") or "")
    try:
        raw_tests = _parse_json(metadata.get("tests") or metadata.get("input_output"))
        if "public_test_cases" in metadata or "private_test_cases" in metadata:
            function = function or _function_of(metadata.get("metadata"))
            tests = _livecodebench(metadata, function)
        elif isinstance(raw_tests, dict):
            function = str(raw_tests.get("fn_name") or function)
            tests = _pairs(raw_tests, function, int(metadata.get("public_tests", 0)))
        elif isinstance(raw_tests, list):
            tests = [_native_test(raw_test, function) for raw_test in raw_tests]
        else:
            raise ValueError("there are none: valid: 'tests', 'input_output', 'public_test_cases'")
        limits = {name: float(metadata[name]) for name in ("timeout_s", "tolerance") if metadata.get(name) is not None}
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the task's tests can't be read: {type(error).__name__}: {error}") from None
    if not tests:
        raise ValueError("the task's tests can't be read: the list is empty")
    tests.sort(key=lambda test: not test.public)
    return CodeTests(tests=tuple(tests), function=function, **limits)


def _parse_json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) and value else value


def _native_test(entry: dict[str, Any], function: str) -> CodeTest:
    test_keys = ("arguments", "returns") if function else ("stdin", "stdout")
    if unknown_keys := set(entry) - {*test_keys, "public"}:
        raise ValueError(f"a test has {', '.join(sorted(unknown_keys))}; valid: {', '.join(test_keys)}, public")
    is_public = bool(entry.get("public", False))
    if function:
        return CodeTest(arguments=tuple(entry["arguments"]), returns=(entry["returns"],), public=is_public)
    return CodeTest(stdin=_text(entry.get("stdin", "")), stdout=_text(entry["stdout"]), public=is_public)


def _pairs(form: dict[str, Any], function: str, public: int) -> list[CodeTest]:
    """Parse tests of APPS or TACO, where a function's expected value may be wrapped in a list."""
    inputs, outputs = list(form["inputs"]), list(form["outputs"])
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    tests: list[CodeTest] = []
    for index, (raw_input, expected) in enumerate(zip(inputs, outputs, strict=True)):
        if not function or isinstance(raw_input, str):
            tests.append(_text_test(raw_input, expected, function, index < public))
            continue
        arguments = tuple(raw_input) if isinstance(raw_input, list) else (raw_input,)
        right_values = (expected, expected[0]) if isinstance(expected, list) and len(expected) == 1 else (expected,)
        tests.append(CodeTest(arguments=arguments, returns=right_values, public=index < public))
    return tests


def _livecodebench(metadata: Mapping[str, Any], function: str) -> list[CodeTest]:
    tests: list[CodeTest] = []
    for field, is_public in (("public_test_cases", True), ("private_test_cases", False)):
        for case in _cases(metadata.get(field)):
            if case.get("testtype") == "functional" and not function:
                raise ValueError("its tests call a function, and func_name doesn't say which")
            tests.append(_text_test(case["input"], case["output"], function, is_public))
    return tests


def _cases(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, str):
        return list(value or ())
    if not value.strip():
        return []
    try:
        return json.loads(value)
    except ValueError:
        unpickler = _TextUnpickler(io.BytesIO(zlib.decompress(base64.b64decode(value))))
        return json.loads(unpickler.load())


class _TextUnpickler(pickle.Unpickler):
    """Unpickles a text; raises ValueError for any global, so that a file can't create other objects."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise ValueError(f"packed tests must be a text, not {module_name}.{global_name}")


def _function_of(value: Any) -> str:
    fields = _parse_json(value)
    return str(fields.get("func_name") or "") if isinstance(fields, dict) else ""


def _text_test(raw_input: Any, expected: Any, function: str, public: bool) -> CodeTest:
    """Parse a test given as texts: of a program, or of a function in LiveCodeBench's form, with an argument a line."""
    if not function:
        return CodeTest(stdin=_text(raw_input), stdout=_text(expected), public=public)
    arguments = tuple(json.loads(line) for line in raw_input.split("\n") if line.strip())
    return CodeTest(arguments=arguments, returns=(json.loads(expected),), public=public)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(map(str, value))
    if not isinstance(value, str):
        raise ValueError(f"a text is expected, not {type(value).__name__}")
    return value
