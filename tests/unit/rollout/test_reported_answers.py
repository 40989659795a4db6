"""Answers as they were meant: the verifiers' comparisons on references and responses that were once misread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from packages import needs

from headway.cli import main as cli
from headway.config.sources import VerifierSettings
from headway.records.errors import ConfigurationError
from headway.records.task import Task
from headway.rollout.verification.scorers import score_guarded
from headway.rollout.verification.verifiers import resolve_verifier
from headway.tokens.training import train_byte_fallback_tokenizer

needs("math_verify")

# right for every verifier: the response earns it, doesn't, or the task is refused because of its reference
SOLVED, WRONG, REFUSED = "solved", "wrong", "refused"


def judged(name: str, answer: str, response: str, **parameters: Any) -> str:
    scorer = resolve_verifier(VerifierSettings(name=name, parameters=parameters))
    verdict = score_guarded(scorer, Task(task_id="t", prompt="p", answer=answer), response)
    if verdict.failure is not None:
        return REFUSED
    return SOLVED if verdict.solved else WRONG


def left_out(folder: Path, name: str, answer: str, capsys: pytest.CaptureFixture[str], **parameters: Any) -> bool:
    """Whether `headway check` refuses a file of two tasks whose second has this reference."""
    tokenizer = train_byte_fallback_tokenizer(["1+2=3", "40+50=90"], 300, folder / "model")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": tokenizer.vocabulary_size,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 64,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }
    (folder / "model" / "config.json").write_text(json.dumps(config))
    (folder / "model" / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")  # no tensors
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "the other=", "answer": answer}]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = "".join(f"{key} = {json.dumps(value)}\n" for key, value in parameters.items())
    (folder / "e.toml").write_text(
        f'[run]\ndirectory = "{folder / "run"}"\n[model]\npath = "{folder / "model"}"\n'
        f'[tasks.train]\npath = "{folder / "tasks.jsonl"}"\n[verifier]\nname = "{name}"\n'
        f"[verifier.parameters]\n{given}[trainer]\nlearning_rate = 1e-4\n"
    )
    code = cli.main(["check", str(folder / "e.toml"), "--no-calibrate"])
    assert code in (0, 2), capsys.readouterr()
    return code == 2


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
