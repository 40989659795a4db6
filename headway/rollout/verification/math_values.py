r"""Parsing of mathematical answers to values: numbers, times, lists, sets, intervals, matrices, or else expressions.

Two values are equal only where both were parsed completely: other texts are compared as texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from typing import Any

_GROUPED = r"(?:[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d{0,2}(?: \d{3})+|\d+)"
_DECIMAL = rf"(?:{_GROUPED}(?:\.\d*)?|\.\d+)"
_SIGNED = rf"[-+]?{_DECIMAL}"
_FORMS = {
    name: re.compile(pattern)
    for name, pattern in {
        "decimal": rf"({_DECIMAL})",
        "repeating": r"(\d*)\.(\d*)(?:\\(?:overline|bar)\{(\d+)\}|\\dot\{(\d)\}|\((\d+)\))",
        "power_of_ten": rf"({_DECIMAL})(?:\\times|\\cdot|\*|x) ?10(?:\^|\*\*)\{{?([-+]?\d{{1,3}})\}}?",
        "exponent": r"(\d+(?:\.\d*)?|\.\d+)[eE]([-+]?\d{1,3})",
        "power": r"(\d{1,6})(?:\^|\*\*)(?:\{([-+]?\d{1,3})\}|([-+]?\d{1,3}))",
        "fraction": rf"(?:\\frac\{{({_SIGNED})\}}\{{({_SIGNED})\}}|({_DECIMAL})/({_DECIMAL}))",
        "mixed": r"(\d+)(?: ?\\frac\{(\d+)\}\{(\d+)\}| (\d+)/(\d+))",
    }.items()
}
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_WRITTEN_ON = "mm|cm|dm|km|mg|kg|ml|mL|kW|Hz|kHz|MHz|GHz|kB|MB|GB|mph|min|hrs?|sec|ft|lbs?|oz|yd"
_NO_UNITS = (
    "more|less|fewer|least|most|pi|sin|cos|tan|log|ln|exp|sqrt|inf|infinity|and|or|to|mod|at|by|of|if|is|not|from|then"
)
_WORD = rf"(?!(?:{_NO_UNITS})\b)[A-Za-zµμΩ]{{2,}}"
_EXPONENT = r"(?:\^(?:\{-?\d\}|-?\d|\\circ))"
_UNIT_PART = rf"(?:\\text\{{[^{{}}\d]*\}}|{_WORD}|[A-Za-z](?=[/^])|(?<=/)[A-Za-z](?![A-Za-z])){_EXPONENT}?"
_UNIT = re.compile(
    rf"(?P<number>[-+]?[€£¥]?[-+]?(?:\\frac\{{)?[\d.](?:.*?[\d}}.])??)(?P<unit>"
    rf"\^\\circ ?[CFK]?| ?[€£¥]| ?\\text\{{[^{{}}\d]*\}}{_EXPONENT}?(?:[/ ]{_UNIT_PART})*"
    rf"|(?: |(?=(?:{_WRITTEN_ON})(?![A-Za-z]))){_UNIT_PART}(?:[/ .]?{_UNIT_PART})*| ?[a-zA-Z]/[a-zA-Z]{_EXPONENT}?)"
)
_MEASURED = re.compile(  # without a variable
    rf"((?:\\(?:frac|sqrt|pi|cdot|times)|[^\\A-Za-z])+(?<=[\d}})i]))(\\text\{{[^{{}}\d]*\}}{_EXPONENT}?)"
)
_ABBREVIATED = {
    name: short
    for short, names in {
        "in": "inch inche", "ft": "foot feet", "yd": "yard", "mi": "mile", "m": "meter metre", "g": "gram",
        "kg": "kilogram", "km": "kilometer kilometre", "cm": "centimeter centimetre", "mm": "millimeter millimetre",
        "lb": "pound lbs", "oz": "ounce", "h": "hour hr hrs", "min": "minute mins", "s": "second sec secs",
        "l": "liter litre L",
    }.items()
    for name in names.split()
}  # fmt: skip
_BASES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_LETTER_UNIT = re.compile(rf"({_SIGNED}) ([mgshLlNJWVAKCF])(\^\d)?")
_UNSET = re.compile(r"\\text\{ *([^{}]*?) *\}")
_TIME = re.compile(r"(\d{1,2}):([0-5]\d)(?::([0-5]\d))?(?: ?([aApP])\.?[mM]\.?)?")
_MONTH = r"(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DATE = re.compile(
    r"(?P<y>\d{4})[-/](?P<m>\d\d?)[-/](?P<d>\d\d?)"
    rf"|(?P<M>{_MONTH}) (?P<D>\d\d?)(?:st|nd|rd|th)?(?:,? ?(?P<Y>\d{{4}}))?"
    rf"|(?P<d2>\d\d?)(?:st|nd|rd|th)? (?:of )?(?P<m2>{_MONTH}),?(?: (?P<y2>\d{{4}}))?",
    re.IGNORECASE,
)
_SLASHED = re.compile(r"\d+([/-])\d+(?:\1\d+)+")
_BASE = re.compile(r"([0-9A-Fa-f]*[0-9][0-9A-Fa-f.]*|[A-F]+(?=_\{?16\}?$))_(?:\{(\\text\{[^{}]+\}|[^{}]+)\}|(\d))")
_ENVIRONMENT = re.compile(r"[(\[|]?\\begin\{(\w+)\*?\}(.*)\\end\{\1\*?\}[)\]|]?(\.?)", re.DOTALL)
_MATRICES = ("matrix", "pmatrix", "bmatrix", "Bmatrix", "smallmatrix", "array")
_COLUMNS = re.compile(r"^ *\{[lcr| ]*\}")
_ASSIGNED = re.compile(r"([A-Za-z](?:_\{?\w\}?)?)(=|\\in(?![A-Za-z]))(?=.)(.*)", re.DOTALL)
_RELATION = re.compile(r"(<|>|\\leq(?![A-Za-z])|\\geq(?![A-Za-z]))")
_VARIABLE = re.compile(r"[A-Za-z](?:_\{?\w\}?)?")
_AND_OR = re.compile(r"(?:,|;)? ?(?:\\text\{ *(?:and|or) *\}|\b(?:and|or)\b) ?")
_OPENING, _CLOSING = ("(", "[", "\\{", "\\langle"), (")", "]", "\\}", "\\rangle")
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
# math-verify drops these or parses letters around them as products: such texts are compared as texts
_UNREAD = re.compile(
    r"\\(?:ldots|overline|overrightarrow|widehat|hat|vec|bar|tilde|angle|triangle|parallel|perp|sim|cong|equiv|text|"
    r"to|rightarrow|forall|exists|begin|mid|nmid|dot|underline|square)(?![A-Za-z])|['!?:;&#@\"]{1}(?<!!)|%|_\{?\d{2,}|\^(?:T(?![A-Za-z])|\{T\})"
)


@dataclass(frozen=True, kw_only=True)
class Number:
    """A number; ``last_place``: the unit of its last decimal, 0 for an exact number. ``unit``: of measure; ``bare``:
    the number without it is the same answer."""

    value: Fraction
    last_place: Fraction = Fraction(0)
    unit: str = ""
    bare: bool = True
    computed: bool = False  # of an irrational one, to 60 digits


@dataclass(frozen=True, kw_only=True)
class ValueList:
    """Values in brackets: a tuple, an interval or a set; or a list without brackets, in any order. ``variable``: of the
    inequality as which an interval was written."""

    opening: str
    closing: str
    items: tuple[Value, ...]
    variable: str = ""

    @property
    def ordered(self) -> bool:
        return self.opening not in ("", "\\{") or any(
            item == Tagged(kind="text", parts=("\\ldots",)) for item in self.items
        )


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Rows of values; ``kind``: matrix, or the environment's name where that means something else."""

    kind: str
    rows: tuple[tuple[Value, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A variable and its value: ``x = 3``."""

    variable: str
    value: Value


@dataclass(frozen=True, kw_only=True)
class Tagged:
    """A time, date, ratio, number in a base, union or text: equal where the kind and all parts are equal."""

    kind: str
    parts: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Expression:
    """Any other text: math-verify parses it, or (not ``exact``) finds an answer in it."""

    text: str
    exact: bool = True
    unit: str = ""
    bare: bool = True  # as of `Number`


_Measured = Number | Expression
_COMPUTED = Fraction(1, 10**40)
Value = Number | ValueList | Matrix | Assignment | Tagged | Expression
Same = Callable[[Value, Value], bool]  # compares where a side is an Expression


def read_value(text: str) -> Value | None:
    """Return the value of a text that `plain_text` made; None where it has neither letter nor digit."""
    environment = _ENVIRONMENT.fullmatch(text)
    if environment and "\\begin" not in environment[2]:
        return _matrix(environment[1], environment[2])
    if not any(character.isalnum() for character in text):
        return None
    return _number(text) or _fixed(text) or _relation(text) or _several(text) or _expression(text)


def _matrix(name: str, inside: str) -> Value:
    row_texts = [
        row for row in re.split(r"\\\\(?:\[[^\]]*\])?", _COLUMNS.sub("", inside).replace("\\hline", "")) if row.strip()
    ]
    cell_rows = [[cell.strip() for cell in row.split("&")] for row in row_texts]
    value_rows = tuple(tuple(_part(cell) for cell in row) for row in cell_rows)
    return Matrix(kind="matrix" if name in _MATRICES else name, rows=value_rows)


def _part(text: str) -> Value:
    return read_value(text.strip()) or Tagged(kind="text", parts=(text.strip(),))


def _number(text: str) -> Number | None:
    if letter_match := _LETTER_UNIT.fullmatch(text):
        number = _plain_number(letter_match[1])
        return number and replace(number, unit=letter_match[2] + (letter_match[3] or ""), bare=False)
    if text.endswith("%") or text.lower().endswith((" percent", "\\text{percent}", "\\text{ percent}")):
        number = _plain_number(re.split(r"%$| ?(?:\\text\{ ?)?percent\}?$", text, flags=re.IGNORECASE)[0])
        return number and replace(number, value=number.value / 100, last_place=number.last_place / 100)
    if number := _plain_number(text):
        return number
    match = _UNIT.fullmatch(text)
    number = match and _plain_number(re.sub("[€£¥]", "", match["number"]))
    if not match or not number:
        currency_match = re.fullmatch(r"([-+]?)([€£¥])([-+]?.*)", text)
        number = currency_match and _plain_number(currency_match[1] + currency_match[3])
        return replace(number, unit=currency_match[2]) if currency_match and number else None
    unit = _unit(match["unit"])
    if re.search(rf"\b(?:{_NO_UNITS})\b", unit):
        return None  # "5 or more" isn't 5 of anything
    if unit in _SCALES:
        scale = _SCALES[unit]
        return replace(number, value=number.value * scale, last_place=number.last_place * scale)
    return None if unit.split(" ")[0] in _SCALES else replace(number, unit=unit)


def _unit(text: str) -> str:
    """Return a unit in one spelling: words in lower case without a plural s, abbreviations unchanged."""
    text = re.sub(r"\bper\b", "/", _UNSET.sub(r" \1 ", text)).replace("{", "").replace("}", "")
    text = text.replace("^\\circ", " degree ")
    words: list[str] = [
        word.lower().rstrip("s") if len(word) > 3 else word for word in re.findall(r"[^\W\d_]+|[^\w ]|\d+", text)
    ]
    return " ".join(_ABBREVIATED.get(word, word) for word in words).removesuffix(" .")


def _plain_number(text: str) -> Number | None:
    sign, text = (-1, text[1:].lstrip()) if text.startswith("-") else (1, text.removeprefix("+").lstrip())
    for name, form in _FORMS.items():
        if match := form.fullmatch(text):
            number = _READERS[name](*(group for group in match.groups() if group is not None))
            return number and replace(number, value=sign * number.value)
    return None


def _decimal(text: str) -> Number:
    digits = text.replace(",", "").replace(" ", "")
    places = len(digits.partition(".")[2])
    return Number(value=Fraction(digits.rstrip(".")), last_place=Fraction(1, 10**places) if places else Fraction(0))


def _repeating(integer: str, fixed: str, cycle: str) -> Number:
    value = Fraction(int(fixed or "0"), 10 ** len(fixed)) + int(integer or "0")
    return Number(value=value + Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(fixed)))


def _scientific(text: str, exponent: str) -> Number:
    number, scale = _decimal(text), Fraction(10) ** int(exponent)
    return Number(value=number.value * scale, last_place=number.last_place * scale)


def _fraction(numerator: str, denominator: str) -> Number | None:
    top, bottom = _plain_number(numerator), _plain_number(denominator)
    if top is None or bottom is None or not bottom.value:
        return None
    quotient = top.value / bottom.value
    return Number(value=quotient, last_place=abs(quotient) if top.last_place or bottom.last_place else Fraction(0))


def _power(base: str, exponent: str) -> Number | None:
    return Number(value=Fraction(int(base)) ** int(exponent)) if int(base) or int(exponent) > 0 else None


def _mixed(integer: str, numerator: str, denominator: str) -> Number | None:
    return Number(value=int(integer) + Fraction(int(numerator), int(denominator))) if int(denominator) else None


_READERS: dict[str, Callable[..., Number | None]] = {
    "decimal": _decimal,
    "repeating": _repeating,
    "power_of_ten": _scientific,
    "exponent": _scientific,
    "power": _power,
    "fraction": _fraction,
    "mixed": _mixed,
}


def _fixed(text: str) -> Tagged | ValueList | None:
    unset_text = re.sub(" +", " ", _UNSET.sub(r" \1", text)).strip()
    if time_match := _TIME.fullmatch(unset_text):
        hour, half_day = int(time_match[1]), (time_match[4] or "").lower()
        if half_day and 1 <= hour <= 12:
            hour = hour % 12 + 12 * (half_day == "p")
        return Tagged(kind="time", parts=(hour, int(time_match[2]), int(time_match[3] or 0)))
    if date := _DATE.fullmatch(unset_text):
        year, month, day = (
            date[a] or date[b] or date[c] for a, b, c in (("y", "Y", "y2"), ("m", "M", "m2"), ("d", "D", "d2"))
        )
        month_number = int(month) if month.isdigit() else _MONTHS.index(month[:3].lower()) + 1
        return Tagged(kind="date", parts=(year and int(year), month_number, int(day)))
    if _SLASHED.fullmatch(unset_text):
        return Tagged(kind="text", parts=(*map(int, re.split("[/-]", unset_text)),))
    if base_match := _BASE.fullmatch(text):
        digits, base_name = base_match[1].upper(), _UNSET.sub(r"\1", base_match[2] or base_match[3]).strip().lower()
        base_name = str(_BASES.index(base_name) + 2) if base_name in _BASES else base_name
        return None if base_name == "10" else Tagged(kind="base", parts=(digits, base_name))
    if re.fullmatch(r"[+-]?(?:\\infty|\\?inf(?:ini)?ty|inf|infinity)", text):
        return Tagged(kind="infinity", parts=(text.startswith("-"),))
    if text == "\\emptyset":
        return Tagged(kind="empty", parts=())
    if text == "\\mathbb{R}":
        ends = tuple(Tagged(kind="infinity", parts=(is_low,)) for is_low in (True, False))
        return ValueList(opening="(", closing=")", items=ends)
    ratio_texts = text.split(":")
    numbers = [_plain_number(piece) for piece in ratio_texts]
    if len(ratio_texts) > 1 and all(numbers):
        return Tagged(kind="ratio", parts=tuple(number.value for number in numbers if number))
    if len(union_parts := re.split(r"\\cup(?![A-Za-z])", text)) > 1:
        return Tagged(kind="union", parts=tuple(sorted((_part(part) for part in union_parts), key=repr)))
    return None


def _relation(text: str) -> Value | None:
    """Parse ``x = 3`` and ``x \\in [1, 2)``, inequalities in one variable as intervals, and those joined by "or" as a
    union."""
    assignment_match = _ASSIGNED.fullmatch(text)
    if assignment_match and not re.search(r"=|<|>|,|\\[lg]eq", assignment_match[3].replace("\\in", "")):
        return Assignment(variable=assignment_match[1], value=_part(assignment_match[3]))
    if assignment_match and assignment_match[2] != "=":
        return Assignment(variable=assignment_match[1], value=_part(assignment_match[3]))
    alternatives = _AND_OR.split(text)
    if len(alternatives) == 2 and re.search(r"\bor\b", text) and all(_RELATION.search(part) for part in alternatives):
        intervals = [_relation(part) for part in alternatives]
        if all(isinstance(interval, ValueList) for interval in intervals):
            return Tagged(kind="union", parts=tuple(sorted(intervals, key=repr)))
    pieces = _RELATION.split(text)
    if len(pieces) not in (3, 5) or "," in text:
        return None
    ends, signs = [piece.strip() for piece in pieces[::2]], pieces[1::2]
    if signs[0] in (">", "\\geq"):
        ends.reverse()
        signs = [{">": "<", "\\geq": "\\leq"}.get(sign, "") for sign in reversed(signs)]
    if any(sign not in ("<", "\\leq") for sign in signs):
        return None
    minus_infinity, plus_infinity = Tagged(kind="infinity", parts=(True,)), Tagged(kind="infinity", parts=(False,))
    if len(ends) == 2:
        if _VARIABLE.fullmatch(ends[0]):
            ends, signs = ["", *ends], ["<", *signs]
        else:
            ends, signs = [*ends, ""], [*signs, "<"]
    if not _VARIABLE.fullmatch(ends[1]) or _VARIABLE.fullmatch(ends[0]) or _VARIABLE.fullmatch(ends[2]):
        return None
    bounds = (_part(ends[0]) if ends[0] else minus_infinity, _part(ends[2]) if ends[2] else plus_infinity)
    opening, closing = "(" if signs[0] == "<" else "[", ")" if signs[1] == "<" else "]"
    return ValueList(opening=opening, closing=closing, items=bounds, variable=ends[1])


def _several(text: str) -> Value | None:
    item_texts, opening, closing = _split(text)
    if item_texts is None:
        return None
    if len(item_texts) == 1 and opening == "":
        alternatives = [part for part in _AND_OR.split(text) if part]
        if len(alternatives) > 1 and all(len(part) < 40 for part in alternatives):
            item_texts = alternatives
        elif text.count("\\pm") == 1 and "\\mp" not in text:
            prefix, _, suffix = text.partition("\\pm")
            item_texts = [f"{prefix}+{suffix}".removeprefix("+"), f"{prefix}-{suffix}"]
        else:
            return None
    if len(item_texts) == 1 and opening == "(":
        return read_value(item_texts[0])
    if opening == "\\{" and re.search(r"\\mid(?![A-Za-z])|\||:", text):
        return None
    values = [_part(item) for item in item_texts]
    if opening in ("", "\\{"):  # flatten nested lists
        values = [member for value in values for member in _flat(value)]
    return ValueList(opening=opening, closing=closing, items=tuple(values))


def _flat(value: Value) -> tuple[Value, ...]:
    return value.items if isinstance(value, ValueList) and value.opening == "" else (value,)


def _split(text: str) -> tuple[list[str] | None, str, str]:
    """Return the items between a text's commas, and the brackets around all of it; None where brackets don't pair."""
    tokens = _TOKEN.findall(text)
    opening, closing, depths = "", "", _depths(tokens)
    if len(tokens) > 1 and tokens[0] in _OPENING and tokens[-1] in _CLOSING and 0 not in depths[:-1] and not depths[-1]:
        opening, closing, tokens = tokens[0], tokens[-1], tokens[1:-1]
        depths = _depths(tokens)
    if min(depths, default=0) < 0 or any(depths[-1:]):
        return None, "", ""
    items = [""]
    for token, depth in zip(tokens, depths, strict=True):
        if token in (",", ";") and not depth:
            items.append("")
        else:
            items[-1] += token
    return [item.strip() for item in items], opening, closing


def _depths(tokens: list[str]) -> list[int]:
    """Return the number of open brackets after each token."""
    return list(accumulate((token in (*_OPENING, "{")) - (token in (*_CLOSING, "}")) for token in tokens))


def _expression(text: str) -> Value:
    if (measured := _MEASURED.fullmatch(text)) and not _UNREAD.search(measured[1]):
        return Expression(text=measured[1], unit=_unit(measured[2]))
    return Tagged(kind="text", parts=(text,)) if _UNREAD.search(text) else Expression(text=text)


# --- equality --------------------------------------------------------------------------------------------


def equal_values(first: Value, second: Value, tolerance: Fraction, same: Same) -> bool:
    """Return whether two values are the same answer. ``tolerance``: the largest relative difference of two numbers of
    which one has decimals; they must agree to the last place of both as well."""
    if first == second:
        return True
    if isinstance(first, Assignment) or isinstance(second, Assignment):
        labels = [side.variable if isinstance(side, Assignment) else "" for side in (first, second)]
        values = [side.value if isinstance(side, Assignment) else side for side in (first, second)]
        return (not all(labels) or labels[0] == labels[1]) and equal_values(values[0], values[1], tolerance, same)
    if isinstance(first, Number) and isinstance(second, Number):
        return _equal_units(first, second) and close_numbers(first, second, tolerance)
    if isinstance(first, ValueList) and isinstance(second, ValueList):
        return _equal_several(first, second, tolerance, same)
    if isinstance(first, Matrix) and isinstance(second, Matrix):
        if first.kind != second.kind or [*map(len, first.rows)] != [*map(len, second.rows)]:
            return False
        cell_pairs = zip((c for row in first.rows for c in row), (c for row in second.rows for c in row), strict=True)
        return all(equal_values(a, b, tolerance, same) for a, b in cell_pairs)
    if isinstance(first, Tagged) and isinstance(second, Tagged) and first.kind == second.kind == "union":
        return len(first.parts) == len(second.parts) and _in_any_order(first.parts, second.parts, tolerance, same)
    if isinstance(first, Expression) or isinstance(second, Expression):
        same_unit = not isinstance(first, _Measured) or not isinstance(second, _Measured) or _equal_units(first, second)
        return same_unit and same(first, second)
    return False


def _equal_units(first: _Measured, second: _Measured) -> bool:
    if first.unit == second.unit:
        return True
    return (not first.unit and second.bare) or (not second.unit and first.bare)


def close_numbers(first: Number, second: Number, tolerance: Fraction) -> bool:
    """Return whether two numbers are equal, exactly where both are exact."""
    limit = max(first.last_place, second.last_place)
    difference = abs(first.value - second.value)
    if first.computed or second.computed:
        limit = max(limit, abs(first.value)) if first.computed and second.computed else limit
        tolerance = tolerance if first.last_place or second.last_place else _COMPUTED
        return (not limit or difference < limit) and difference <= tolerance * max(abs(first.value), abs(second.value))
    if not limit or not difference:
        return not difference
    return difference < limit and difference <= tolerance * max(abs(first.value), abs(second.value))


def _equal_several(first: ValueList, second: ValueList, tolerance: Fraction, same: Same) -> bool:
    if len(first.items) != len(second.items) or (
        first.variable and second.variable and first.variable != second.variable
    ):
        return False
    brackets = {(first.opening, first.closing), (second.opening, second.closing)}
    if len(brackets) > 1 and brackets not in ({("", ""), ("\\{", "\\}")}, {("", ""), ("(", ")")}):
        return False
    if first.ordered or second.ordered:
        return all(equal_values(a, b, tolerance, same) for a, b in zip(first.items, second.items, strict=True))
    return _in_any_order(first.items, second.items, tolerance, same)


def _in_any_order(first: tuple[Value, ...], second: tuple[Value, ...], tolerance: Fraction, same: Same) -> bool:
    remaining = list(second)
    for value in first:
        index = next((i for i, other in enumerate(remaining) if equal_values(value, other, tolerance, same)), None)
        if index is None:
            return False
        del remaining[index]
    return True
