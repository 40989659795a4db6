"""Verifiers: the built-in ones, a user's own, and what they may return."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config.schema import VerifierConfig
from headway.config.sources import TaskSource
from headway.records.errors import ConfigurationError
from headway.records.rollout import Failure, Verdict
from headway.records.task import Task
from headway.rollout.verification.extraction import extract_answer, last_number
from headway.rollout.verification.service import VerifierService
from headway.rollout.verification.verdicts import to_verdict
from headway.rollout.verification.verifiers import VERIFIERS, resolve_verifier
from headway.tasks.sources import load_tasks


def task(answer: str = "16", **metadata: Any) -> Task:
    return Task(task_id="t", prompt="8+3+5=", answer=answer, metadata=metadata)


def score(name: str, response: str, answer: str = "16", **parameters: Any) -> object:
    return resolve_verifier(VerifierConfig(name=name, parameters=parameters))(task(answer), response)


@pytest.mark.parametrize(
    ("extract", "response", "found"),
    [
        ("all", " a\nb ", " a\nb "),
        ("last_line", "a\nb", "b"),
        ("last_line", "a\nb\n \n", "b"),
        ("last_line", "", ""),
        ("answer_tag", "<answer>1</answer> no, <answer> 2 </answer>.", " 2 "),
        ("answer_tag", "</answer><answer>", None),
        ("answer_tag", "<answer>1", None),
        ("answer_tag", "1</answer>", None),
    ],
)
def test_extraction(extract: Any, response: str, found: str | None):
    assert extract_answer(response, extract) == found


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8+3+5=11+5=16", "16"),
        ("x = -3", "-3"),
        ("\u22127", "-7"),
        ("5-3", "3"),
        ("(2)-3", "3"),
        ("it costs $1,234,567.50.", "1234567.50"),
        ("12,34", "34"),
        ("2E-2", "0.02"),
        ("-.5", "-0.5"),
        ("3.", "3"),
        ("none", None),
        ("", None),
    ],
)
def test_last_number(text: str, number: str | None):
    found = last_number(text)
    assert found is None if number is None else float(found or 0) == float(number)


@settings(deadline=None, max_examples=200)
@given(st.integers() | st.floats(allow_nan=False, allow_infinity=False), st.text(alphabet=" =:$\n", max_size=5))
def test_any_printed_number_is_read_back(value: float, before: str):
    found = last_number(before + repr(value))
    assert found is not None
    assert (int(found) if isinstance(value, int) else float(found)) == value


class TestBuiltIn:
    def test_exact(self):
        assert score("exact", " 16\n") == 1.0
        assert score("exact", " 16\n", strip=False) == 0.0
        assert score("exact", "8+8\n16", extract="last_line") == 1.0
        assert score("exact", "8+8\n16") == 0.0
        assert score("exact", "<answer>16</answer>", extract="answer_tag") == 1.0
        assert score("exact", "16", extract="answer_tag") == 0.0

    @pytest.mark.parametrize("name", ["exact", "numeric"])
    def test_a_task_without_an_answer_fails_its_responses(self, name: str):
        [empty, other] = VerifierService(None, verifier={"name": name}).score(task(answer=""), ["", "16"])
        for verdict in (empty, other):
            assert verdict.failure is not None
            assert (verdict.reward, verdict.failure.boundary, verdict.failure.infrastructure) == (0.0, "reward", False)
            assert "task t" in verdict.failure.cause

    def test_numeric(self):
        assert score("numeric", "8+8=16.0") == 1.0
        assert score("numeric", "16 or 17") == 0.0
        assert score("numeric", "nothing") == 0.0
        assert score("numeric", "#### 16 (not 17)", marker="####") == 1.0
        assert score("numeric", "16", marker="####") == 0.0
        assert score("numeric", "16.4", tolerance=0.5) == 1.0
        assert score("numeric", "16.6", tolerance=0.5) == 0.0
        assert score("numeric", "1e999999999", tolerance=0.5) == 0.0
        assert score("numeric", "1e999999999999999999999") == 0.0
        huge = 10**40
        assert score("numeric", str(huge + 1), answer=str(huge)) == 0.0
        assert score("numeric", "10,000", answer="10000") == 1.0

    def test_regex(self):
        assert score("regex", "so x=3, x=16", pattern=r"x=(\d+)") == 1.0
        assert score("regex", "so x=16, x=3", pattern=r"x=(\d+)") == 0.0
        assert score("regex", "16", pattern=r"\d+") == 1.0
        assert score("regex", "a16", pattern=r"(?P<letter>a)(?P<n>\d+)", group="n") == 1.0
        assert score("regex", "b", pattern=r"(a)?b") == 0.0
        assert score("regex", "fine", answer="", pattern=r"fine") == 1.0
        assert score("regex", "bad", answer="", pattern=r"fine") == 0.0
        layout = r"(?s)<think>.+</think>\s*<answer>.+</answer>"  # what the pattern names is there
        assert score("regex", "<think>a</think>\n<answer>b</answer>", answer="", pattern=layout) == 1.0
        assert score("regex", "<think>a\n<answer>b</answer>", answer="", pattern=layout) == 0.0

    def test_numeric_reference_that_is_no_number_fails_the_response_not_the_process(self):
        [verdict] = VerifierService(None, verifier={"name": "numeric"}).score(task(answer="sixteen"), ["16"])
        assert verdict.failure is not None
        assert "'sixteen' is not a number" in verdict.failure.cause

    def test_reasoning_gym_uses_the_generators_own_scorer(self):
        scorer = resolve_verifier(VerifierConfig(name="reasoning-gym"))
        source = {"source": "reasoning-gym", "name": "basic_arithmetic", "parameters": {"size": 3, "seed": 1}}
        for one in load_tasks(TaskSource.model_validate(source)):
            assert scorer(one, f" {one.answer}\n") == 1.0
            assert scorer(one, "x" + one.answer) == len(one.answer) / (len(one.answer) + 1)  # its partial credit
            assert scorer(one, "") == 0.0

    @pytest.mark.parametrize("name", ["rearc", "game_of_life_halting", "countdown", "knights_knaves", "graph_color"])
    def test_reasoning_gym_entries_score_the_same_after_storage(self, name: str):
        from reasoning_gym import create_dataset

        [one] = load_tasks(TaskSource(source="reasoning-gym", name=name, parameters={"size": 1, "seed": 5}))
        stored = Task(task_id=one.task_id, prompt=one.prompt, metadata=json.loads(json.dumps(one.metadata)))
        dataset = create_dataset(name, seed=5, size=1)
        entry = dataset[0]
        for answer in (entry["answer"], "no such answer"):
            if answer is not None:
                expected = dataset.score_answer(answer.strip(), entry)
                assert resolve_verifier(VerifierConfig(name="reasoning-gym"))(stored, answer) == expected

    def test_reasoning_gym_without_its_package_names_the_command(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setitem(sys.modules, "reasoning_gym", None)
        with pytest.raises(ConfigurationError, match=r"needs .*: pip install 'headway\[reasoning-gym\]'"):
            resolve_verifier(VerifierConfig(name="reasoning-gym"))

    def test_reasoning_gym_needs_its_entry(self):
        [verdict] = VerifierService(None, verifier={"name": "reasoning-gym"}).score(task(), ["16"])
        assert verdict.failure is not None
        assert "source = 'reasoning-gym'" in verdict.failure.cause

    def test_names_of_the_built_in_ones(self):
        assert set(VERIFIERS) == {"exact", "numeric", "math", "regex", "reasoning-gym", "weighted", "judge"}


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("exat", {}, "'exat' is unknown; did you mean 'exact'"),
        ("zzz", {}, "valid: exact, judge, math, numeric, reasoning-gym, regex, weighted or module:function"),
        ("exact", {"extrct": "all"}, "extrct.*valid: extract, strip"),
        ("exact", {"extract": "lastline"}, "extract = 'lastline': valid: 'all', 'last_line', 'answer_tag'"),
        ("numeric", {"tolerance": -1}, "tolerance = -1: Input should be greater than or equal to 0"),
        ("numeric", {"tolerance": "x"}, "tolerance = 'x'"),
        ("regex", {}, "missing a required argument: 'pattern'"),
        ("regex", {"pattern": "("}, r"pattern = '\(':"),
        ("regex", {"pattern": "(a)", "group": 2}, "group = 2: the pattern has"),
        (":f", {}, "expected module:function"),
        ("own.missing:f", {}, "own.missing can't be imported: ModuleNotFoundError"),
        ("own.broken:f", {}, "own.broken can't be imported: ZeroDivisionError"),
        ("own.good:scor", {}, "own.good has no 'scor'; did you mean 'score'"),
        ("own.good:LIMIT", {}, "must be a plain function"),
        ("own.good:later", {}, "not async"),
        ("own.good:score", {"bonuss": 1}, "bonuss.*valid: bonus"),
    ],
)
def test_what_cannot_be_resolved_is_named(name: str, parameters: dict[str, Any], message: str, own_modules: None):
    with pytest.raises(ConfigurationError, match=message):
        resolve_verifier(VerifierConfig(name=name, parameters=parameters))


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Modules in the working directory, which is not on the path: as for an installed command."""
    package = tmp_path / "own"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "broken.py").write_text("1 / 0\n")
    (package / "good.py").write_text(
        "LIMIT = 3\n"
        "def score(task, response, bonus=0.0):\n    return float(task.answer == response) + bonus\n"
        "async def later(task, response):\n    return 1.0\n"
        "class Judge:\n    @staticmethod\n    def score(task, response):\n        return 0.25\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(Path.cwd()))])
    yield
    for name in [name for name in sys.modules if name == "own" or name.startswith("own.")]:
        del sys.modules[name]


def test_a_users_function(own_modules: None):
    assert score("own.good:score", "16", bonus=0.5) == 1.5
    assert score("own.good:Judge.score", "16") == 0.25


class TestReturnValues:
    @pytest.mark.parametrize(
        ("returned", "reward", "solved"),
        [
            (1, 1.0, True),
            (0.99, 0.99, False),
            (2.3, 2.3, True),
            (True, 1.0, True),
            (np.float32(0.5), 0.5, False),
            (np.array(1.0), 1.0, True),
            ({"reward": 0.2, "solved": True}, 0.2, True),
            ({"reward": 1.0, "solved": np.bool_(False)}, 1.0, False),
            ({"reward": 1}, 1.0, True),
            (Verdict(reward=0.3, solved=True), 0.3, True),
        ],
    )
    def test_usable(self, returned: object, reward: float, solved: bool):
        verdict = to_verdict(returned)
        assert verdict.failure is None
        assert (verdict.reward, verdict.solved) == (pytest.approx(reward), solved)
        assert type(verdict.reward) is float
        assert type(verdict.solved) is bool

    @pytest.mark.parametrize(
        ("returned", "cause"),
        [
            (math.nan, "the reward is nan"),
            (-math.inf, "the reward is -inf"),
            (Verdict(reward=math.nan, solved=True), "the reward is nan"),
            ({"reward": math.inf}, "the reward is inf"),
            (None, "returned None"),
            ("1.0", "returned '1.0'"),
            ([1.0], r"returned \[1.0\]"),
            (np.arange(3), "returned array"),
            ({"solved": True}, "'reward'"),
            ({"reward": 1.0, "why": object()}, "detail can't be stored"),
        ],
    )
    def test_unusable(self, returned: object, cause: str):
        verdict = to_verdict(returned)
        assert verdict.failure is not None
        assert verdict.failure.boundary == "reward"
        assert not verdict.failure.infrastructure
        assert (verdict.reward, verdict.solved) == (0.0, False)
        assert re.search(cause, verdict.failure.cause), verdict.failure.cause

    def test_further_keys_become_plain_detail(self):
        verdict = to_verdict({"reward": 1, "parts": np.arange(2), 3: "x"})
        assert verdict.detail == {"parts": [0, 1], "3": "x"}

    def test_a_verdicts_own_failure_stays(self):
        failure = Failure(boundary="sandbox", cause="no sandbox", infrastructure=True)
        assert to_verdict(Verdict(reward=1.0, solved=True, failure=failure)).failure == failure


def raises(task: Task, response: str) -> float:
    if response == "raise":
        raise RuntimeError("the checker broke")
    if response == "exit":
        sys.exit(3)
    if response == "refused":
        raise ConnectionRefusedError("nobody listens")
    if response == "late":
        raise TimeoutError
    return float(response == task.answer)


class TestService:
    def test_one_bad_response_costs_only_itself(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.syspath_prepend(str(Path(__file__).parent))
        service = VerifierService(None, verifier={"name": "test_verifiers:raises"})
        good, raised, exited, wrong = service.score(task(), ["16", "raise", "exit", "1"])
        assert (good.reward, good.solved, good.failure) == (1.0, True, None)
        assert (wrong.reward, wrong.solved, wrong.failure) == (0.0, False, None)
        assert raised.failure is not None
        assert raised.failure.cause == "the verifier raised RuntimeError: the checker broke"
        assert "Traceback" in raised.failure.detail
        assert "in raises" in raised.failure.detail
        assert exited.failure is not None
        assert exited.failure.cause == "the verifier raised SystemExit: 3"
        assert not raised.failure.infrastructure
        assert all(verdict.verify_s > 0 for verdict in (good, raised, exited, wrong))

    def test_an_operating_systems_error_is_infrastructure(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.syspath_prepend(str(Path(__file__).parent))
        service = VerifierService(None, verifier={"name": "test_verifiers:raises"})
        verdicts = service.score(task(), ["refused", "late", "raise"])
        failures = [verdict.failure for verdict in verdicts]
        assert [failure is not None and failure.infrastructure for failure in failures] == [True, True, False]

    def test_a_configuration_that_cannot_be_resolved_is_an_error_at_the_start(self):
        with pytest.raises(ConfigurationError, match="nowhere can't be imported"):
            VerifierService(None, verifier={"name": "nowhere:f"})


NAMED = {
    "loose": {"name": "numeric", "parameters": {"tolerance": 1}},
    "own": {"name": "test_verifiers:raises", "timeout_s": 3},
}


class TestChosenByTasks:
    def test_the_task_decides_and_each_is_made_once(self, monkeypatch: pytest.MonkeyPatch):
        made: list[object] = []
        numeric = VERIFIERS["numeric"]
        monkeypatch.setitem(VERIFIERS, "numeric", lambda **parameters: made.append(1) or numeric(**parameters))
        service = VerifierService(None, verifier={"name": "exact"}, named=NAMED)
        for _ in range(3):
            rewards = [
                service.score(Task(task_id="t", prompt="p", answer="15", verifier=name), ["16"])[0].reward
                for name in ("", "loose")
            ]
            assert rewards == [0.0, 1.0]
        assert len(made) == 1

    def test_one_that_is_not_there_fails_the_responses_and_says_so(self):
        service = VerifierService(None, verifier={"name": "exact"}, named=NAMED)
        verdicts = service.score(Task(task_id="feed", prompt="p", verifier="strict"), ["1", "2"])
        assert [verdict.failure.cause for verdict in verdicts if verdict.failure] == [
            "task feed names the verifier 'strict'; valid: loose, own"
        ] * 2

    @pytest.mark.parametrize(
        ("key", "settings", "message"),
        [
            (
                "loose",
                {"name": "numeric", "parameters": {"tol": 1}},
                r"^verifiers\.loose\.parameters = .*valid: extract, ",
            ),
            (
                "a:b",
                {"name": "a:b"},
                r"^a task source's, row's or pruner's verifier\.name = 'a:b': a can't be imported",
            ),
        ],
    )
    def test_one_that_cannot_be_made_is_named(self, key: str, settings: dict[str, Any], message: str):
        with pytest.raises(ConfigurationError, match=message):
            VerifierService(None, verifier={"name": "exact"}, named={key: settings})


def test_a_response_of_blanks_takes_no_time() -> None:
    scorer = resolve_verifier(VerifierConfig(name="numeric"))
    assert scorer(Task(task_id="feed", prompt="p", answer="5"), " " * 300_000 + "5") == 1.0  # was quadratic: an hour
