r"""Comparison of mathematical answers with the package math-verify: LaTeX and plain expressions, by value.
A reference that consists of words (``east``, ``\text{no solution}``) is compared as text instead.

The package's time limits are signals, which work in the main thread alone and aren't caught by ``except Exception``;
they are disabled here, because the verifier's process has a watchdog of its own (service.py). Its errors, which it
suppresses by default, are enabled, so that "no answer found", "not equal" and an invalid reference differ.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from string import ascii_letters
from typing import Any

from headway.config.section import NonNegative
from headway.records.task import Task
from headway.rollout.verification.extraction import Extract, extract_answer
from headway.rollout.verification.math_text import plain_text
from headway.rollout.verification.math_values import (
    Assignment,
    Expression,
    Matrix,
    Number,
    Tagged,
    Value,
    ValueList,
    close_numbers,
    equal_values,
    read_value,
)
from headway.runtime.imports import import_extra

_LONGEST_TEXT = 4000  # characters at the end of a response that are searched: the search is quadratic in digits
_LONGEST_PARSED = 500  # characters of an expression that is parsed whole; longer texts are searched
_DELIMITERS = ("$", "\\boxed", "\\fbox", "\\(", "\\[", "\\begin")
_COMMAND = re.compile(r"\\(?:text|mathrm|operatorname|mbox)\s*\{[^{}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{3,}")
_TWO_LETTERS = re.compile(r"[A-Za-z]{2}")
_ESCAPED_DOLLAR = re.compile(r"(?<!\\)((?:\\\\)*)(?:\bUSD? ?)?\\\$")  # an even number of backslashes escapes nothing
_PRICE = re.compile(r"(?<!\\)(?:\bUSD? ?)?\\\$ ?([-+]?\d[\d,]*(?:\.\d+)?)(?=\.?\s*(?:\Z|[}$\n]|\\[\])]))")
_DELIMITED = re.compile(r"\$+([^$]+)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_FONT = re.compile(r"\\(?:text[a-z]*|math(?:rm|bf|it|sf|tt)|operatorname|mbox|hbox|emph)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"\\(?:q?quad\b|[ ,;:!])|[~\s]+")
_LETTERS = "[A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f]"  # Latin: a Greek one is a symbol
# next to a comma or hyphen words have three letters: "ab-cd" is a difference, "north-east" none
_TEXT = re.compile(rf"{_LETTERS}{{2,}}(?: {_LETTERS}{{2,}})*|{_LETTERS}{{3,}}(?:(?:,? |-){_LETTERS}{{3,}})*")
_SYMBOLS = ("inf", "infinity")  # words with a value in math-verify: compared as text and by value
_AROUND = " .,;:!*_`'\"$"  # characters around a word in prose or Markdown
_ANSWER_IS = re.compile(r"\banswer\b(?:\s+is\b)?\s*:?", re.IGNORECASE)
_LISTED = re.compile(r"(?:[\s,;.&]|\b(?:and|or)\b)*", re.IGNORECASE)  # separators between the formulas of a list
_BEGINS_A_NUMBER = re.compile(r"[-+\u2212]?[\d.]")
_LARGEST_EXPONENT = 4000
_MOST_WORDS = 2  # in a reference without delimiters; more are a sentence, which would parse as a product of letters


def math_scorer(
    *, extract: Extract = "all", float_rounding: NonNegative = 6, strict: bool = True
) -> Callable[[Task, str], dict[str, Any]]:
    """Score 1 when the answer equals ``task.answer`` as mathematics (the package math-verify), else 0 and the reason.

    Both may be LaTeX ("\\frac{1}{2}", in dollars or \\boxed or bare) or plain ("1/2", "0.5", "50%"). The answer is the
    last boxed expression of a response, or else math-verify's choice in its last 4,000 characters. ``float_rounding``:
    decimals that must agree where a side is no exact number. ``strict``: variables must have the same names, and sets
    and tuples differ. Raises ConfigurationError when math-verify isn't installed. The scorer raises ValueError, naming
    the task, when the *reference* can't be parsed: that is an error in the data and never a reward.
    """
    package = import_extra("math_verify", "math", "verifier.name = 'math'")
    for module in ("parser", "grader"):  # each warns once about the disabled time limit, which the watchdog replaces
        logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)
    tolerance = Fraction(10) ** -float_rounding
    latex_config = (package.LatexExtractionConfig(),)  # alone: else a part of a text that isn't LaTeX would be parsed

    @functools.lru_cache(maxsize=1024)
    def parse(text: str, single_expression: bool = True) -> list[Any]:
        """Parse ``text`` as a single expression, or find the answer in it; [] where there is none."""
        options = {"extraction_config": latex_config} if single_expression else {}
        return package.parse(
            _boxed(text) if single_expression else text, parsing_timeout=None, fallback_mode="no_fallback", **options
        )

    def same(lhs: Value, rhs: Value) -> bool:
        if isinstance(lhs, Expression) and isinstance(rhs, Expression) and _differ_in_case(lhs, rhs):
            return False
        pairs = [(side, parse(side.text, side.exact) if isinstance(side, Expression) else []) for side in (lhs, rhs)]
        [lhs_number, rhs_number] = [side if isinstance(side, Number) else _constant(parsed) for side, parsed in pairs]
        if lhs_number is not None and rhs_number is not None and lhs_number.value and rhs_number.value:
            return close_numbers(lhs_number, rhs_number, tolerance)
        [gold, answer] = [parsed or ([_rational(side)] if isinstance(side, Number) else []) for side, parsed in pairs]
        opts = {"float_rounding": float_rounding, "strict": strict}
        return bool(gold and answer) and package.verify(gold, answer, timeout_seconds=None, raise_on_error=True, **opts)

    @functools.lru_cache(maxsize=1024)
    def reference_of(answer: str) -> tuple[str, Value | None]:
        answer = _without_escaped_dollars(answer)
        words = _reference_words(answer)
        reference = None if words and words not in _SYMBOLS else read_value(plain_text(reference_text(answer)))
        return words, None if isinstance(reference, Expression) and not parse(reference.text) else reference

    def differs(reference: Value, answer: str) -> str:
        """Return why the answer in ``answer`` isn't the reference; "" where it is."""
        candidates, is_decisive = _candidates(answer, may_be_prose=extract == "all")
        read_values = [value for text in candidates if (value := read_value(plain_text(text[:_LONGEST_TEXT])))]
        values = [value for value in read_values if value == reference or not _is_prose(value)]
        if not (is_decisive and values):
            values.append(Expression(text=_end(answer), exact=False))
        if any(equal_values(reference, value, tolerance, same) for value in values):
            return ""
        last_value = values[-1]  # of prose the expression that math-verify finds
        is_unread = isinstance(last_value, Expression) and not parse(last_value.text, last_value.exact)
        return "no mathematical expression found in the response" if is_unread else "not equal to the reference"

    def score(task: Task, response: str) -> dict[str, Any]:
        words, reference = reference_of(task.answer)
        if not words and reference is None:
            raise ValueError(
                f"task {task.task_id}: its answer {task.answer[:80]!r} is no mathematical expression that math-verify "
                "can parse (a LaTeX or plain expression; of a worked solution, what follows the last ####, or \\boxed)"
            )
        answer = extract_answer(response, extract)
        if answer is None:
            return {"reward": 0.0, "reason": f"the response has no answer (extract = {extract!r})"}
        answer = _without_escaped_dollars(answer)
        if words and words in _word_candidates(answer):
            return {"reward": 1.0}
        if reference is None:
            return {"reward": 0.0, "reason": "not equal to the reference"}
        try:
            reason = differs(reference, answer)
        except Exception as error:  # sympy may raise anything for what a policy writes; the reference has parsed
            reason = f"can't be compared: {type(error).__name__}: {str(error)[:200]}"
        return {"reward": 0.0, "reason": reason} if reason else {"reward": 1.0}

    return score


def _differ_in_case(first: Expression, second: Expression) -> bool:
    """Return whether two expressions have the same variables except for their case, which math-verify ignores. A
    single letter may be a choice, in either case."""
    letters, others = ({*_COMMAND.sub("", expression.text)} & {*ascii_letters} for expression in (first, second))
    folded = {letter.lower() for letter in letters} == {letter.lower() for letter in others}
    return letters != others and folded and first.exact and second.exact and min(len(first.text), len(second.text)) > 1


def _constant(read: Sequence[Any]) -> Number | None:
    """Return the real number that math-verify has parsed, to 60 digits; None for other expressions."""
    expression: Any = read[0] if read else None
    if not getattr(expression, "is_number", False) or getattr(expression, "free_symbols", True):
        return None
    evaluated = expression.evalf(60)
    if not (evaluated.is_Float or evaluated.is_Rational) or not evaluated.is_finite:
        return None
    if abs(int(str(evaluated).partition("e")[2] or 0)) > _LARGEST_EXPONENT:
        return None  # its digits would fill the memory
    fraction = Fraction(str(evaluated))
    has_decimals = any(atom.is_Float for atom in expression.atoms())
    return Number(value=fraction, last_place=abs(fraction) if has_decimals else Fraction(0), computed=True)


def _rational(number: Number) -> Any:
    from sympy import Rational  # math-verify's own

    return Rational(number.value.numerator, number.value.denominator)


def _without_escaped_dollars(text: str) -> str:
    r"""Replace prices by their numbers of dollars: ``\$`` is a dollar sign, where ``$`` would begin mathematics."""
    return _ESCAPED_DOLLAR.sub(r"\1", _PRICE.sub(r"\1 dollars", text))


def reference_text(answer: str) -> str:
    """Return the reference as one expression; "" where it is a sentence, or has several formulas in one."""
    text = answer.rpartition("####")[2].strip()
    if "\\boxed{" in text:
        box_texts = [
            box for part in text.split("\\boxed")[1:] if (box := extract_answer("\\boxed" + part, "boxed")) is not None
        ]
        return box_texts[0] if len(set(box_texts)) == 1 else ""
    formulas = _formulas(text)
    outside_text = _DELIMITED.sub(" ", text)
    if len(formulas) == 1 and not any(character.isdigit() for character in outside_text):
        return text if isinstance(read_value(plain_text(text)), Number) else formulas[0]
    if formulas:
        return ", ".join(formulas) if _LISTED.fullmatch(outside_text) else ""
    return (
        ""
        if _is_sentence(text) and isinstance(read_value(plain_text(text)), (Expression, ValueList, Assignment))
        else text
    )


def _is_prose(value: Value) -> bool:
    """Return whether an expression is prose; math-verify would need seconds to find that out."""
    return isinstance(value, Expression) and (len(value.text) > _LONGEST_PARSED or _is_sentence(value.text))


def _is_sentence(text: str) -> bool:
    return len(_WORD.findall(_COMMAND.sub(" ", text))) > _MOST_WORDS


def _reference_words(answer: str) -> str:
    """Return the reference where it consists of words alone; "" where it is mathematics or a sentence.

    As an expression ``east`` would be the product of four letters, equal to ``seat``. Between dollars letters are
    variables, unless they are set as text.
    """
    text = answer.rpartition("####")[2].strip()
    inner_text = extract_answer(text, "boxed")
    if inner_text is None and not any(delimiter in text for delimiter in _DELIMITERS):
        inner_text = "" if _is_sentence(text) else text
    inner_text = text if inner_text is None else inner_text
    formula = next(reversed(_formulas(inner_text)), None)
    if formula is not None and not _FONT.search(formula):
        return ""
    words = _plain_words(inner_text if formula is None else formula)
    return words if _TEXT.fullmatch(words) else ""


def _word_candidates(answer: str) -> tuple[str, ...]:
    """Return the candidate answers of a response to a reference of words: the content of its last box; without a box
    its last line, the text after "answer is" there, and the last formula of that."""
    boxed_text = extract_answer(answer, "boxed")
    if boxed_text is not None:
        return (_with_symbol_names(boxed_text),)
    line = answer.rstrip().rpartition("\n")[2]
    tail = _ANSWER_IS.split(line[-_LONGEST_TEXT:])[-1]
    return _with_symbol_names(line), _with_symbol_names(tail), _with_symbol_names(next(reversed(_formulas(tail)), ""))


def _with_symbol_names(text: str) -> str:
    """Return ``_plain_words`` with symbols by their names: ``\\theta`` is theta."""
    return _plain_words(text[-_LONGEST_TEXT:]).replace("\\", "")


def _formulas(text: str) -> list[str]:
    """Return the contents of the formulas in ``text``."""
    return [next(group for group in match.groups() if group is not None) for match in _DELIMITED.finditer(text)]


def _plain_words(text: str) -> str:
    """Return ``text`` in lower case without typesetting: dollars, fonts, spacing, marks around it."""
    for mark in ("$", "\\(", "\\)", "\\[", "\\]"):
        text = text.replace(mark, "")
    replaced_count = 1
    while replaced_count:  # the innermost first
        text, replaced_count = _FONT.subn(r"\1", text)
    return _SPACING.sub(" ", text).strip(_AROUND).lower()


def _candidates(answer: str, may_be_prose: bool) -> tuple[list[str], bool]:
    """Return texts in ``answer`` that may be the final answer, and whether one of them must be. ``may_be_prose``:
    ``answer`` may be prose, of which the last box counts, or the formula after "answer is", or the last formula."""
    boxed_text = extract_answer(answer, "boxed")
    if boxed_text is not None:
        return [boxed_text], True
    text = _end(answer)
    formulas = _formulas(text)
    if "\n" not in text and not formulas and "\\boxed" not in text:
        is_plain = not may_be_prose or not _TWO_LETTERS.search(_COMMAND.sub(" ", text))
        if is_plain or _is_typed(read_value(plain_text(text))):
            return [text], True
    line = text.rpartition("\n")[2]
    tail = _ANSWER_IS.split(line)[-1].strip(" *_:").rstrip(". *_")
    parsed, tail_formulas = read_value(plain_text(tail)), _formulas(tail)
    if tail_formulas and _LISTED.fullmatch(_DELIMITED.sub(" ", tail)):
        return [", ".join(tail_formulas)], True
    is_symbolic = not formulas and not _TWO_LETTERS.search(_COMMAND.sub(" ", tail))
    if tail != line and (is_symbolic or _is_typed(parsed.value if isinstance(parsed, Assignment) else parsed)):
        return [tail], True
    if formulas:
        begins_with_formula = _DELIMITED.match(tail) is not None
        last_formula = tail_formulas[0] if begins_with_formula else formulas[-1]
        return [last_formula, line], begins_with_formula or not _BEGINS_A_NUMBER.match(tail) or tail == line
    numbers = re.findall(r"\S*\d\S*", line)[-1:]  # a time or a date isn't its last number
    return [tail, line, *numbers], any(_is_typed(read_value(plain_text(number_text))) for number_text in numbers)


def _is_typed(value: Value | None) -> bool:
    """Return whether a text can't be prose, for it was parsed as a single number, matrix, time, date, ..."""
    return isinstance(value, (Number, Matrix)) or (isinstance(value, Tagged) and value.kind != "text")


def _end(text: str) -> str:
    """Return the last characters of a response, in which an answer is searched."""
    text = text.strip()
    if len(text) > _LONGEST_TEXT:
        text = text[-_LONGEST_TEXT:]
        text = text[text.find("\n") + 1 :]  # math in a line is delimited in pairs: begin with a whole one
    return text


def _boxed(text: str) -> str:
    return f"\\boxed{{{text}}}"
