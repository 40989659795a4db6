"""The verifier "math": what counts as equal, what is the response's fault and what the data's."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

import pytest
from packages import needs

from headway.config.sources import VerifierSettings
from headway.records.errors import ConfigurationError
from headway.records.rollout import Verdict
from headway.records.task import Task
from headway.rollout.verification.extraction import extract_answer
from headway.rollout.verification.service import score_guarded
from headway.rollout.verification.verifiers import resolve_verifier

needs("math_verify")


def judge(answer: str, response: str, **parameters: Any) -> Verdict:
    scorer = resolve_verifier(VerifierSettings(name="math", parameters=parameters))
    return score_guarded(scorer, Task(task_id="feed", prompt="p", answer=answer), response)


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("42", "42"),
        ("12", "#### 12"),
        ("\\$12.50", "It costs 12.50."),
        ("\\$12", "\\boxed{12\\text{ dollars}}"),
        ("-5", "The answer is \u22125"),
        ("1/3", "0.\\bar{3}"),
        ("90\\degree", "\\boxed{90^\\circ}"),
        ("[1,3)", "\\boxed{\\lbrack 1,3)}"),
        ("A", "\\boxed{a}"),  # a choice
        ("5\\text{ or more}", "\\boxed{5\\text{ or more}}"),
        ("1/2", "We get \\boxed{\\frac{1}{2}}."),
        ("\\frac{1}{2}", "So 2/4 = 1/2"),
        ("$\\frac12$", "0.5"),
        ("0.333333", "\\boxed{1/3}"),
        ("3x+5", "3x+5"),  # both bare: read as one expression, not as their first number
        ("3x+5", "The result is $5 + 3x$."),
        ("x^2+1", "\\boxed{1+x^2}"),
        ("\\{1,2\\}", "\\[\\{2, 1\\}\\]"),
        ("(1,2]", "the interval $(1, 2]$"),
        ("x=3", "$x = 3$"),
        ("1,000", "1000"),
        ("Friday", "\\boxed{\\text{Friday}}"),
        ("yes", "yes"),  # words are compared as a text
        ("even", "Since 4 = 2 * 2, the answer is **Even**."),
        ("\\boxed{\\text{east}}", "She goes $\\textbf{east}$."),
        ("She goes $\\text{east}$.", "East"),
        ("no solution", "\\boxed{\\text{No}\\ \\text{solution}}"),
        ("north-east", "\\boxed{North-East}"),
        ("theta", "$\\theta$"),
        ("infinity", "$\\infty$"),
        ("infinity", "infinity"),
        ("$xy$", "$yx$"),  # a product: letters between dollars
        ("ab-cd", "$-cd+ab$"),
        ("\\$36", "\\$36"),  # a price is its number
        ("\\$36", "\\boxed{\\$36}"),
        ("\\boxed{\\$36}", "It costs \\$36."),
        ("US\\$1,200.50", "$1200.5$"),
        ("-\\$5", "\\boxed{-5}"),
        ("She has 3 and 4, so 3+4 = <<3+4=7>>7\n#### 7", "The answer is 7."),  # a worked solution in GSM8K's manner
        ("5", "first \\boxed{4}, no: \\boxed{5}"),
        ("A", "\\boxed{\\text{A}}"),  # a choice, however it is set
        ("\\text{(A)}", "\\boxed{A}"),
        ("\\textbf{(A)}", "The answer is (A)."),
        ("18", "**18**"),
        ("72", "= 72"),
        (".5", "The answer is .5"),
        ("\\frac{7}{10}\\text{ mile}", "\\boxed{0.7}"),  # a unit behind any number
        ("2\\sqrt{3}\\text{ cm}", "\\boxed{2\\sqrt{3}}"),
        ("12\\pi", "\\boxed{12\\pi\\text{ cm}^2}"),
        ("5, 6", "The answer is $5$ or $6$."),
        ("7", "1 2 3 4 " * 2000 + "\nso it is 7"),  # only its end is searched: the search is quadratic
        ("2\\pi", "\\boxed{2*pi}"),
        ("\\frac{\\pi}{6}", "pi/6"),
        ("e^2", "\\boxed{exp(2)}"),
        ("\\frac{\\sqrt{2}}{2}", "\\boxed{sqrt(2)/2}"),
        ("101_2", "\\boxed{101_{\\text{two}}}"),
        ("\\emptyset", "\\boxed{\\{\\}}"),
        ("(-\\infty,\\infty)", "\\boxed{\\mathbb R}"),
        ("12\\text{ inches}", "\\boxed{12\\text{ in}}"),
        ("3 hours", "\\boxed{3 hrs}"),
    ],
)
def test_equal(answer: str, response: str) -> None:
    verdict = judge(answer, response)
    assert (verdict.reward, verdict.solved, verdict.failure) == (1.0, True, None)


@pytest.mark.parametrize(
    ("answer", "response", "reason"),
    [
        ("3x+5", "3", "not equal to the reference"),
        ("5", "\\boxed{6}", "not equal to the reference"),
        ("A", "\\boxed{\\text{B}}", "not equal to the reference"),
        ("5\\pi\\text{ cm}", "\\boxed{5\\pi\\text{ m}}", "not equal to the reference"),
        ("5 cm", "The answer is 5 kg", "not equal to the reference"),  # the whole answer, not its last number
        ("x=5", "So the answer is $y=5$.", "not equal to the reference"),
        ("5", "The answer is $5$ or $6$", "not equal to the reference"),
        ("x+1", "$y+1$", "not equal to the reference"),
        ("0.333333", "0.3", "not equal to the reference"),
        ("east", "\\boxed{seat}", "not equal to the reference"),  # as products of letters they would be
        ("\\boxed{east}", "The answer is seat.", "not equal to the reference"),
        ("red, blue", "\\boxed{red, lube}", "not equal to the reference"),
        ("no", "The answer is not no.", "not equal to the reference"),
        ("east", "east \\boxed{west}", "not equal to the reference"),
        ("yes", "", "not equal to the reference"),
        ("yes", "\\text{" * 5000, "not equal to the reference"),
        ("\\$36", "\\boxed{\\$63}", "not equal to the reference"),
        ("5", "I don't know", "no mathematical expression found in the response"),
        ("5", "", "no mathematical expression found in the response"),
        ("2", "\\boxed{1+", "no mathematical expression found in the response"),
    ],
)
def test_a_wrong_or_unreadable_response_is_a_reward_of_0_with_a_reason(answer: str, response: str, reason: str) -> None:
    verdict = judge(answer, response)
    assert (verdict.reward, verdict.solved, verdict.failure) == (0.0, False, None)
    assert verdict.detail == {"reason": reason}


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("p-q", "\\boxed{p-Q}"),  # another variable
        ("a+b=1", "The answer is a-b=1"),  # compared whole, not by the number found in it
        ("y = 2x+3", "The answer is y \\ge 2x+3"),
        ("x=5", "The answer is 5x"),
        ("5", "The answer is \u22125"),
        ("5", "\\boxed{5\\text{ or more}}"),
        ("\\$12", "\\boxed{12\\text{ cents}}"),
        ("\\$12", "€12"),
        ("A^T", "\\boxed{A}"),
        ("A^{T}", "\\boxed{A}"),
        ("12\\text{ inches}", "\\boxed{12\\text{ ft}}"),
        ("101_{\\text{two}}", "\\boxed{101_3}"),
    ],
)
def test_unequal(answer: str, response: str) -> None:
    assert judge(answer, response).reward == 0.0


@pytest.mark.parametrize("answer", ["", "???", "The train arrives in the evening after eight", "\\boxed{"])
def test_a_reference_that_is_no_mathematics_is_a_fault_of_the_data(answer: str) -> None:
    verdict = judge(answer, "5")
    assert verdict.failure is not None
    assert not verdict.failure.infrastructure  # another try would not help
    assert "task feed: its answer" in verdict.failure.cause


def test_no_signal_is_used_in_any_thread() -> None:
    before = signal.getsignal(signal.SIGALRM)
    found: list[Verdict] = []
    thread = threading.Thread(target=lambda: found.append(judge("1/2", "\\boxed{0.5}")))
    thread.start()
    thread.join()
    assert found[0].reward == 1.0
    assert signal.getsignal(signal.SIGALRM) is before


def test_where_the_answer_is_and_how_strict() -> None:
    response = "<answer>3x+5</answer> or rather 7"
    assert judge("3x+5", response, extract="answer_tag").reward == 1.0
    assert judge("3x+5", response, extract="all").reward == 0.0
    missing = judge("5", "5", extract="boxed")
    assert missing.detail == {"reason": "the response has no answer (extract = 'boxed')"}
    assert judge("x+1", "$y+1$", strict=False).reward == 1.0
    assert judge("0.33", "1/3").reward == 0.0
    assert judge("0.33", "1/3", float_rounding=2).reward == 1.0


@pytest.mark.parametrize(
    ("response", "inside"),
    [
        ("\\boxed{1} then \\boxed{\\frac{1}{2}} .", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{1", None),
        ("none", None),
        ("\\boxed{}", ""),
    ],
)
def test_the_last_box(response: str, inside: str | None) -> None:
    assert extract_answer(response, "boxed") == inside


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"extract": "box"}, "extract = 'box': valid: 'all', 'last_line', 'answer_tag' or 'boxed'"),
        ({"float_rounding": -1}, "float_rounding = -1: Input should be greater than or equal to 0"),
        ({"strict": "no"}, "strict = 'no': Input should be a valid boolean"),
    ],
)
def test_parameters_that_cannot_be(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        resolve_verifier(VerifierSettings(name="math", parameters=parameters))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    message = r"verifier\.name = 'math' needs the package math-verify.*pip install 'headway\[math\]'"
    with pytest.raises(ConfigurationError, match=message):
        resolve_verifier(VerifierSettings(name="math"))
