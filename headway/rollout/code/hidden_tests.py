"""Hidden tests as questions and answers: questions are asked in the sandbox, answers stay with the worker.

A hidden test is a Python file as for pytest, with functions ``test_...`` whose expected values are literals:

    def test_overlapping():
        assert merge([[1, 3], [2, 4]]) == [[1, 4]]
        with pytest.raises(ValueError):
            merge([[3, 1]])

The tested code runs in one process with its test: it can read the test, patch what it uses, print any text and exit
with code 0. Hence tests don't report themselves whether they pass. Expected values are cut out before the file enters
the sandbox; each ``assert`` becomes a question for the value of its left side, and the worker compares the answer. A
process that the tested code controls still has to give right answers.

A boolean or the name of an exception can be guessed. Hence a file must have at least two different expected values, or
a constant answer would pass; more values are better.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headway.rollout.code.comparison import same_value

_RAISED = "__raised__"
_ASKED = "__asked__"
_MOST_ENTRIES = 2000  # of a set or a dictionary: their keys may be chosen to collide


class HiddenAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The expected answer to a question."""

    test: str  # the function that contains the question
    value: Any = None
    raises: str = ""  # the name of an exception; "": a value
    end: bool = False  # an added question, answered where the test ran to its end


class Questions(msgspec.Struct, frozen=True, kw_only=True):
    """A hidden test file without its answers, and the answers."""

    source: str
    tests: tuple[str, ...]
    answers: tuple[HiddenAnswer, ...]  # by number of the question


class HiddenTestResults(msgspec.Struct, frozen=True, kw_only=True):
    """The tests of a file, by name and result."""

    passed: tuple[str, ...]
    wrong: tuple[str, ...]  # an answer differs
    unanswered: tuple[str, ...]  # an exception was raised, or the process ended


def questions_of(source: str, name: str, tolerance: float = 0.0) -> Questions:
    """Split a hidden test file into questions and answers. ``tolerance``: as of `grade`. Raises ValueError, with the
    line, for an assert that can't be asked without its answer, and for a test that no code could pass."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise _refused(name, error.lineno, str(error.msg)) from None
    answers: list[HiddenAnswer] = []
    tests: list[str] = []
    statements: list[ast.stmt] = []
    pytest_names = {"pytest"}  # names that are undefined in the sandbox
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)) and _imports_pytest(node):
            pytest_names |= {alias.asname or alias.name for alias in node.names}
            continue
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            if node.name in tests or node.decorator_list or ast.unparse(node.args):
                fault = "is defined twice" if node.name in tests else "has decorators or arguments, but none are passed"
                raise _refused(name, node.lineno, f"{node.name} {fault}")
            first_number = len(answers)
            node.body = _split(node.body, answers, node.name, name)
            if len(answers) == first_number:
                raise _refused(name, node.lineno, f"{node.name} has no assert")
            node.body.append(_question_call(_ASKED, len(answers), ast.Constant(value=None)))
            answers.append(HiddenAnswer(test=node.name, end=True))
            tests.append(node.name)
        else:
            _refuse_asserts(node, name)
        statements.append(node)
    _refuse_pytest(statements, pytest_names, name)
    values = [answer.value for answer in answers if not (answer.raises or answer.end)]
    if not values or any(all(same_value(candidate, other, tolerance) for other in values) for candidate in values):
        raise ValueError(f"hidden test {name}: a constant passes all of it; expect at least two different values")
    question_source = ast.unparse(ast.fix_missing_locations(ast.Module(body=statements, type_ignores=[])))
    return Questions(source=question_source, tests=tuple(tests), answers=tuple(answers))


def _split(body: Sequence[ast.stmt], answers: list[HiddenAnswer], test: str, name: str) -> list[ast.stmt]:
    """Return the statements of a test with questions in place of asserts, and append their answers."""
    statements: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.Assert):
            question_node, value = _expected(node, name)
            statements.append(_question_call(_ASKED, len(answers), question_node))
            answers.append(HiddenAnswer(test=test, value=value))
        elif isinstance(node, ast.With) and (exception_name := _raises(node, name)):
            for inner_statement in node.body:
                _refuse_asserts(inner_statement, name)
            statements.append(_attempt(node, len(answers)))
            answers.append(HiddenAnswer(test=test, raises=exception_name))
        elif isinstance(node, ast.With):  # another context manager: a file, a lock
            node.body = _split(node.body, answers, test, name)
            statements.append(node)
        else:
            _refuse_asserts(node, name)
            statements.append(node)
    return statements


def _expected(node: ast.Assert, name: str) -> tuple[ast.expr, Any]:
    """Return an assert's question and its right value. Raises ValueError where a comparison isn't ``QUESTION ==
    LITERAL``."""
    test = node.test
    if isinstance(test, ast.Compare):
        literal, usage = test.comparators[0], "what is expected must be a literal; valid: assert QUESTION == LITERAL"
        if len(test.ops) > 1 or not isinstance(test.ops[0], (ast.Eq, ast.Is)):
            raise _refused(name, node.lineno, usage)
        try:
            value = ast.literal_eval(literal)
        except (ValueError, TypeError):
            raise _refused(name, node.lineno, usage) from None
        if not _encodable(value):
            problem = (
                f"{ast.unparse(literal)[:80]}, which no answer can be; valid: texts, numbers, tuples, lists, sets and "
            )
            problem += f"dictionaries, of at most {_MOST_ENTRIES} entries the last two"
            raise _refused(name, node.lineno, f"it expects {problem}")
        return test.left, value
    is_negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    question_node = test.operand if is_negated and isinstance(test, ast.UnaryOp) else test
    return _call("bool", question_node), not is_negated


def _raises(node: ast.With, name: str) -> str:
    """Return the exception's name in ``with pytest.raises(ValueError):``; "" for any other ``with``."""
    (context_item, *more_items), call = node.items, node.items[0].context_expr
    if not isinstance(call, ast.Call) or _last_name(call.func) != "raises":
        return ""
    if more_items or context_item.optional_vars or call.keywords or len(call.args) != 1 or not _last_name(call.args[0]):
        raise _refused(name, node.lineno, "valid: with pytest.raises(EXCEPTION):")
    return _last_name(call.args[0])


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _attempt(node: ast.With, number: int) -> ast.Try:
    handler = ast.ExceptHandler(
        type=ast.Name(id="BaseException", ctx=ast.Load()),
        name="__error__",
        body=[_question_call(_RAISED, number, ast.Name(id="__error__", ctx=ast.Load()))],
    )
    no_error_call = _question_call(_RAISED, number, ast.Constant(value=None))
    return ast.Try(body=node.body, handlers=[handler], orelse=[no_error_call], finalbody=[])


def _question_call(function: str, number: int, subject: ast.expr) -> ast.Expr:
    return ast.Expr(value=_call(function, ast.Constant(value=number), subject))


def _call(function: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(func=ast.Name(id=function, ctx=ast.Load()), args=[*arguments], keywords=[])


def _refuse_asserts(node: ast.stmt, name: str) -> None:
    """Raise ValueError for a nested assert, which might be skipped or repeated: each question is asked exactly once."""
    for inner_node in ast.walk(node):
        if isinstance(inner_node, ast.Assert) or (isinstance(inner_node, ast.With) and _raises(inner_node, name)):
            problem = "an assert must stand in a test itself, not in a loop, a condition or a function of its own"
            raise _refused(name, inner_node.lineno, problem)


def _refuse_pytest(body: Sequence[ast.stmt], pytest_names: set[str], name: str) -> None:
    """Raise ValueError where pytest is still used: the sandbox doesn't have it, so that every run would fail."""
    for node in body:
        for inner in ast.walk(node):
            is_pytest = isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load) and inner.id in pytest_names
            if isinstance(inner, ast.Import):
                is_pytest = any(alias.name.partition(".")[0] == "pytest" for alias in inner.names)
            elif isinstance(inner, ast.ImportFrom):
                is_pytest = (inner.module or "").partition(".")[0] == "pytest"
            if is_pytest:
                valid_text = "import pytest at the top, on a line of its own, and with pytest.raises(EXCEPTION)"
                problem = f"{ast.unparse(inner)} is pytest's, which isn't there; valid: {valid_text}"
                raise _refused(name, getattr(inner, "lineno", 0), problem)


def _refused(name: str, line: int | None, problem: str) -> ValueError:
    return ValueError(f"hidden test {name}, line {line}: {problem}")


def _encodable(value: Any) -> bool:
    """Return whether the driver can encode ``value`` and `decoded` can decode it."""
    if isinstance(value, (set, dict)) and len(value) > _MOST_ENTRIES:
        return False
    if isinstance(value, dict):
        return _encodable([*value.keys(), *value.values()])
    if isinstance(value, (list, tuple, set)):
        return all(map(_encodable, value))
    return value is None or isinstance(value, (bool, int, float, str, bytes))


def _imports_pytest(node: ast.Import | ast.ImportFrom) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "pytest"
    return [alias.name for alias in node.names] == ["pytest"]


# --- driver in the sandbox, and its answers -------------------------------------------------------------------------

# Runs a test file from stdin and prints the answers. Its output is no more trustworthy than the code that it tests.
DRIVER = """\
import json, os, sys
_answers = os.dup(1)
os.dup2(2, 1)
_given = json.loads(sys.stdin.buffer.read())
sys.stdin = open(os.devnull)
sys.path[:0] = _given["paths"]
def _encoded(value):
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return {"int": hex(value)}
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    for kind, name in ((tuple, "tuple"), (list, "list"), (frozenset, "set"), (set, "set")):
        if isinstance(value, kind):
            return {name: [_encoded(one) for one in value]}
    if isinstance(value, dict):
        return {"dict": [[_encoded(key), _encoded(one)] for key, one in value.items()]}
    return {"other": type(value).__name__}
def _say(answer):
    line = json.dumps(answer).encode() + b"\\n"
    while line:
        line = line[os.write(_answers, line):]
def __asked__(number, value):
    _say([number, _encoded(value)])
def __raised__(number, error):
    _say([number, [kind.__name__ for kind in type(error).__mro__] if error is not None else []])
def _main():
    names = {"__name__": "hidden", "__asked__": __asked__, "__raised__": __raised__}
    exec(compile(_given["source"], "hidden", "exec"), names)
    for test in _given["tests"]:
        try:
            names[test]()
        except BaseException as error:
            print(test, type(error).__name__, error, file=sys.stderr)
_main()
"""


def driver_input(questions: Questions, paths: Sequence[str]) -> bytes:
    """Return the driver's standard input, as JSON."""
    return json.dumps({"source": questions.source, "tests": questions.tests, "paths": list(paths)}).encode()


def grade(questions: Questions, output: bytes, tolerance: float) -> HiddenTestResults:
    """Compare a driver's output, which is untrusted, with the right answers. A question that was answered twice, or
    with an unknown value, counts as wrong."""
    encoded_by_number: dict[int, Any] = {}
    repeated_numbers: set[int] = set()
    for line in filter(None, output.split(b"\n")):
        number, encoded = _answer_of(line)
        if number in encoded_by_number:
            repeated_numbers.add(number)
        encoded_by_number[number] = encoded
    state: dict[str, str] = dict.fromkeys(questions.tests, "passed")
    for number, answer in enumerate(questions.answers):
        if number not in encoded_by_number:
            state[answer.test] = "unanswered" if state[answer.test] == "passed" else state[answer.test]
        elif number in repeated_numbers or not _is_right(answer, encoded_by_number[number], tolerance):
            state[answer.test] = "wrong"
    kinds = HiddenTestResults.__struct_fields__
    return HiddenTestResults(**{outcome: tuple(test for test in state if state[test] == outcome) for outcome in kinds})


def decoded(value: Any) -> Any:
    """Decode a value of the driver's ``_encoded``. Raises ValueError, TypeError or RecursionError for other input."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError("not an encoded value")
    ((type_name, contents),) = value.items()
    if type_name in ("set", "dict") and len(contents) > _MOST_ENTRIES:
        raise ValueError("too many entries")
    return _DECODERS[type_name](contents)


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float.fromhex,
    "bytes": bytes.fromhex,
    "tuple": lambda entries: tuple(map(decoded, entries)),
    "list": lambda entries: [*map(decoded, entries)],
    "set": lambda entries: {*map(decoded, entries)},
    "dict": lambda entries: {decoded(key): decoded(one) for key, one in entries},
}


_UNKNOWN = object()  # equal to nothing


def _answer_of(line: bytes) -> tuple[int, Any]:
    try:
        number, value = json.loads(line)
        return (number, value) if type(number) is int else (-1, _UNKNOWN)
    except (ValueError, TypeError, RecursionError):
        return -1, _UNKNOWN


def _is_right(answer: HiddenAnswer, encoded: Any, tolerance: float) -> bool:
    if answer.raises:
        return isinstance(encoded, list) and answer.raises in encoded
    try:
        return same_value(decoded(encoded), answer.value, tolerance)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return False
