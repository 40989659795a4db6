"""Answers as they were meant: matrices and numbers that were once misread."""

from __future__ import annotations

from pathlib import Path

import pytest
from judged_answers import SOLVED, WRONG, judged, left_out
from packages import needs

needs("math_verify")

# --- matrices and other environments; texts with several formulas -----------------------------------------


def rows_of(environment: str, *rows: str) -> str:
    return f"\\begin{{{environment}}} " + " \\\\ ".join(rows) + f" \\end{{{environment}}}"


COLUMN = rows_of("pmatrix", "1", "2")
SQUARE = rows_of("bmatrix", "1 & 2", "3 & 4")
ARRAY = "\\left[\\begin{array}{cc} 1 & 2 \\\\ 3 & 4 \\end{array}\\right]"
MATRICES = {
    "column": COLUMN,
    "column without blanks": "\\begin{pmatrix}1\\\\2\\end{pmatrix}",
    "square": SQUARE,
    "square without blanks": SQUARE.replace(" ", ""),
    "fractions": rows_of("pmatrix", "\\frac{1}{2} & 0", "0 & \\frac{1}{3}"),
    "negative": rows_of("pmatrix", "-3", "0", "5"),
    "letters": rows_of("bmatrix", "a & b", "c & d"),
    "roots": rows_of("pmatrix", "\\sqrt{2}", "\\pi"),
}


@pytest.mark.parametrize("reference", MATRICES.values(), ids=MATRICES)
@pytest.mark.parametrize("form", ["{}", "\\boxed{{{}}}", "So the answer is $\\boxed{{{}}}$."])
def test_a_matrix_equals_itself(reference: str, form: str) -> None:
    assert judged("math", reference, form.format(reference)) == SOLVED


@pytest.mark.parametrize("reference", MATRICES.values(), ids=MATRICES)
def test_a_boxed_matrix_equals_a_boxed_reference(reference: str) -> None:
    assert judged("math", f"\\boxed{{{reference}}}", f"\\boxed{{{reference}}}") == SOLVED
    assert judged("math", reference, f"\\boxed{{{reference}}}", extract="boxed") == SOLVED


@pytest.mark.parametrize(
    ("reference", "response"),
    [
        (COLUMN, rows_of("pmatrix", "\\frac{2}{2}", "2.0")),
        (SQUARE, rows_of("pmatrix", "1 & 2", "3 & 4")),
        (rows_of("pmatrix", "\\frac{1}{2}", "3"), rows_of("pmatrix", "\\dfrac12", "3")),
        (f"${COLUMN}$", f"\\[{COLUMN}\\]"),
    ],
    ids=["entries by value", "brackets", "dfrac", "dollars"],
)
def test_a_matrix_in_another_spelling(reference: str, response: str) -> None:
    assert judged("math", reference, f"\\boxed{{{response}}}") == SOLVED


@pytest.mark.parametrize("extract", ["all", "boxed"])
@pytest.mark.parametrize(
    ("reference", "response"),
    [
        (COLUMN, "2"),
        (COLUMN, "1"),
        (COLUMN, rows_of("pmatrix", "1", "3")),
        (COLUMN, rows_of("pmatrix", "2", "1")),
        (COLUMN, rows_of("pmatrix", "1 & 2")),
        (COLUMN, rows_of("pmatrix", "1", "2", "2")),
        (SQUARE, "4"),
        (SQUARE, rows_of("bmatrix", "1 & 2", "3 & -4")),
        (SQUARE, rows_of("bmatrix", "1 & 3", "2 & 4")),
        (SQUARE, rows_of("bmatrix", "9 & 9", "9 & 4")),
        (ARRAY, "4"),
        (ARRAY, "\\left[\\begin{array}{cc} 1 & 2 \\\\ 3 & 5 \\end{array}\\right]"),
        (rows_of("bmatrix", "a & b", "c & d"), "d"),
        (rows_of("cases", "x & x>0", "-x & x \\le 0"), "0"),
        ("2", COLUMN),
        ("2", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
        ("4", SQUARE),
        ("4", ARRAY),
        ("5", rows_of("pmatrix", "-3", "0", "5")),
        ("7", rows_of("vmatrix", "1 & 2", "3 & 7")),
        ("d", rows_of("bmatrix", "a & b", "c & d")),
    ],
)
def test_a_matrix_is_not_its_last_entry(reference: str, response: str, extract: str) -> None:
    assert judged("math", reference, f"\\boxed{{{response}}}", extract=extract) != SOLVED


@pytest.mark.parametrize(
    "reference",
    [
        ARRAY,
        ARRAY.replace(" ", ""),
        rows_of("vmatrix", "1 & 2", "3 & 4"),
        "\\left(\\begin{matrix} 1 \\\\ 2 \\end{matrix}\\right)",
        rows_of("cases", "x & x>0", "-x & x \\le 0"),
        rows_of("aligned", "x &= 1", "y &= 2"),
        rows_of("smallmatrix", "1 & 2", "3 & 4"),
    ],
)
def test_another_environment_equals_itself_or_its_task_is_left_out(
    reference: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = judged("math", reference, f"\\boxed{{{reference}}}")
    assert found != WRONG or left_out(tmp_path, "math", reference, capsys, extract="boxed")


@pytest.mark.parametrize(
    ("reference", "response"),
    [
        ("$5$ apples and $6$ pears", "6"),
        ("$3$ red, $2$ blue", "2"),
        ("\\(3\\) cats and \\(4\\) dogs", "4"),
        ("$7$ left, $1$ right", "1"),
        ("$x=1$ then $y=9$", "9"),
        ("$10$ boys and $12$ girls", "12"),
    ],
)
@pytest.mark.parametrize("form", ["{}", "\\boxed{{{}}}"])
def test_a_mixed_text_is_not_its_last_formula(reference: str, response: str, form: str) -> None:
    assert judged("math", reference, form.format(response)) != SOLVED


# --- numbers ----------------------------------------------------------------------------------------------

NO_ONE_NUMBER = [
    ("1/2", "2", "0.5"),
    ("10^5", "5", "100000"),
    ("3 1/2", "2", "3.5"),
    ("12 cm^2", "2", "12"),
    ("12:30", "30", ""),
    ("12:30", "1:30", ""),
    ("10**6", "6", "1000000"),
    ("2*3", "3", "6"),
    ("\\frac{3}{4}", "4", "0.75"),
    ("\\sqrt{3}", "3", ""),
    ("5\\times10^3", "3", "5000"),
    ("5×10^3", "3", "5000"),
    ("3.5 m/s^2", "2", "3.5"),
    ("1 km 200 m", "200", ""),
    ("2 or 3", "3", ""),
    ("10 - 20", "20", ""),
    ("2024-05-17", "17", ""),
    ("50 of 100", "100", ""),
    ("12 ± 3", "3", ""),
    ("(1, 2)", "2", ""),
    ("3, 4", "4", ""),
    ("1,5", "5", "1.5"),
    ("x^2", "2", ""),
]


@pytest.mark.parametrize(("reference", "last", "value"), NO_ONE_NUMBER)
def test_a_reference_of_several_numbers_is_not_its_last(reference: str, last: str, value: str) -> None:
    assert judged("numeric", reference, last) != SOLVED
    if value:
        assert judged("numeric", reference, value) != WRONG  # read as it is meant, or refused


@pytest.mark.parametrize(
    ("reference", "response"),
    [
        ("16", "16"),
        ("16 apples", "16"),
        ("$1,234.50", "1234.5"),
        ("50%", "50"),
        ("x = 3", "3"),
        ("5 + 3 = 8\n#### 8", "the answer is 8"),
        ("1 + 1 = 2\n#### -5", "-5"),
        ("-0.5", "so -.5"),
        ("5e3", "5000"),
    ],
)
def test_a_reference_of_one_number_stays(reference: str, response: str) -> None:
    assert judged("numeric", reference, response) == SOLVED


@pytest.mark.parametrize(
    "response",
    [
        "- 5",
        "= - 5",
        "x = - 5",
        "–5",
        "answer: – 5",
        "-$5",
        "-\\$5",
        "−$5",
        "-€5",
        "( - 5)",
        "so:- 5",
        "7 - 12 = - 5",
        "-5",
        "−5",
        "$-5",
        "\\boxed{-5}",
        "− 5",
        "-  5",
    ],
)
def test_a_sign_apart_from_its_digits_counts(response: str) -> None:
    assert judged("numeric", "-5", response) == SOLVED
    assert judged("numeric", "5", response) != SOLVED


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("7 - 5", "5"),
        ("10-5", "5"),
        ("10 – 5", "5"),
        ("x -5", "5"),
        ("a-5", "5"),
        ("(2) - 5", "5"),
        ("[7] - 5", "5"),
        ("apples - 5", "5"),
        ("5 -3", "3"),
        ("12 -4", "4"),
        ("x_{1} - 5", "5"),
        ("8 −3", "3"),
        ("(4) -1", "1"),
    ],
)
def test_a_difference_ends_in_its_last_number(response: str, number: str) -> None:
    assert judged("numeric", number, response) == SOLVED
    assert judged("numeric", f"-{number}", response) != SOLVED


GROUPED = [
    ("1000", "1 000"),
    ("1000", "1{,}000"),
    ("1000", "1\\,000"),
    ("1000", "1\u202f000"),
    ("1000", "1\u00a0000"),
    ("1000", "1\u2009000"),
    ("1000000", "1{,}000{,}000"),
    ("1234567", "1\\,234\\,567"),
    ("12345678", "12 345 678"),
    ("-1000", "-1 000"),
    ("1234.5", "1 234.5"),
    ("1000", "1,000"),
]


@pytest.mark.parametrize(("number", "spelling"), GROUPED)
def test_separators_of_thousands(number: str, spelling: str) -> None:
    assert judged("numeric", number, f"it is {spelling}") == SOLVED
    assert judged("numeric", spelling, number) == SOLVED
    assert judged("numeric", "0", spelling) != SOLVED
    assert judged("numeric", number.lstrip("-")[-3:], spelling) != SOLVED


# --- small and large numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "response"),
    [
        ("1.6\\times10^{-19}", "9.1\\times10^{-31}"),
        ("0.0000001", "0.0000002"),
        ("6.626\\times 10^{-34}", "1.055\\times 10^{-34}"),
        ("0.00000012", "0.00000013"),
        ("\\frac{1}{30000000}", "0.00000004"),
        ("(0.0000001, 2)", "(0.0000003, 2)"),
        ("-0.0000002", "0.0000002"),
        ("8.85\\times10^{-12}", "8.86\\times10^{-12}"),
        ("0.0000004", "0"),
        ("0", "10^{-9}"),
        ("10^{-10}", "10^{-11}"),
        ("6.02\\times10^{23}", "6.03\\times10^{23}"),
        ("123456789", "123456788"),
        ("\\frac{1000001}{1000000}", "1"),
        ("0.333333", "0.3"),
        ("\\sqrt{2}", "1.4"),
    ],
)
@pytest.mark.parametrize("form", ["{}", "\\boxed{{{}}}"])
def test_numbers_are_compared_relatively(reference: str, response: str, form: str) -> None:
    assert judged("math", reference, form.format(response)) != SOLVED
    assert judged("math", response, form.format(reference)) != SOLVED


@pytest.mark.parametrize(
    ("reference", "response"),
    [
        ("1.6\\times10^{-19}", "16\\times10^{-20}"),
        ("1.6\\times10^{-19}", "1.60\\times10^{-19}"),
        ("6.02\\times10^{23}", "602\\times10^{21}"),
        ("2.5\\times10^{30}", "25\\times10^{29}"),
        ("123456789\\sqrt{2}", "174594265.4"),
        ("1000000\\sqrt{2}", "1414213.56"),
        ("0.333333", "1/3"),
        ("\\sqrt{2}", "1.414214"),
        ("0.5", "\\frac{1}{2}"),
    ],
)
def test_equal_numbers_of_any_size(reference: str, response: str) -> None:
    assert judged("math", reference, f"\\boxed{{{response}}}") == SOLVED
