"""The code and the experiment files of docs/hooks.md and docs/inputs.md are what they say."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headway.algorithms.advantages import resolve as resolve_advantage
from headway.algorithms.groups.hook_conformance import hook_violations
from headway.algorithms.groups.hooks import ARGUMENTS, resolve_hooks
from headway.config.hooks import HOOKS, HooksConfig
from headway.config.load import validate_experiment
from headway.config.sources import VerifierSettings
from headway.orchestrator.preflight.hooks import function_findings
from headway.rollout.makers.user_function import load_rollout_function
from headway.rollout.verification.verifiers import resolve_verifier
from headway.tasks.sources import load_tasks
from headway.telemetry.exporters.callback import load_logging_callback
from headway.trainer.loss_conformance import loss_violations
from headway.trainer.losses import resolve as resolve_loss
from tests.support.simulated_run import simulate

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "hooks.md").read_text(encoding="utf-8")


def blocks(language: str, page: str = PAGE) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def my_hooks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The page's module."""
    module = ModuleType("my_hooks")
    exec(compile(blocks("python")[0], "my_hooks.py", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "my_hooks", module)
    return module


def experiment(tmp_path: Path, **changed: Any) -> Any:
    raw: dict[str, Any] = tomllib.loads(blocks("toml")[0])
    raw |= {
        "run": {"directory": str(tmp_path), "steps": 3},
        "model": {"path": "none"},
        "rollout": {"group_size": 4, "max_response_tokens": 100},
        "queue": {"groups_per_step": 2},
        "evaluation": {"test": "never"},
    }
    return validate_experiment(raw | changed, "docs/hooks.md")


def test_every_key_is_in_the_table_and_has_an_example(tmp_path: Path) -> None:
    given = experiment(tmp_path)
    for key in HOOKS:
        assert f"| `hooks.{key}`" in PAGE
        assert getattr(given.hooks, key).startswith("my_hooks:")
    for key, arguments in ARGUMENTS.items():
        [row] = re.findall(rf"^\| `hooks.{key}` \| (.*?) \|", PAGE, re.MULTILINE)
        assert re.findall(r"[a-z]+", row.replace("(all)", "").replace("(valid)", "")) == list(arguments)
    for reason in ("group_timeout", "overlong", "too_few_valid", "too_few_kept", "zero_variance", "low_advantage"):
        assert reason in PAGE


def test_the_examples_keep_their_contracts(tmp_path: Path) -> None:
    given = experiment(tmp_path)
    tasks = load_tasks(given.tasks.train)
    assert (len(tasks), tasks[7].prompt, tasks[7].answer) == (100, "7+7=", "14")
    assert function_findings(given, tasks[0]) == []
    assert list(hook_violations(resolve_hooks(given.hooks), tasks[0])) == []
    assert list(loss_violations(resolve_loss(given.algorithm.loss))) == []
    resolve_advantage(given.algorithm.advantage)
    load_rollout_function(given.hooks.rollout)
    load_logging_callback(given.hooks.logging)
    resolve_verifier(given.verifier)


def test_they_train_together(tmp_path: Path, my_hooks: ModuleType) -> None:
    hooks = {
        "reward": "my_hooks:shorter_is_better",
        "group_meta": "my_hooks:lengths",
        "is_valid_group": "my_hooks:not_too_easy",
        "filter_item": "my_hooks:short_enough",
        "normalize_group": "my_hooks:ranks",
        "pad_group": "my_hooks:best_again",
    }
    given = experiment(tmp_path, hooks=hooks)

    def reward(task: Any, response: str) -> dict[str, Any]:
        return {"reward": int(response) % 3, "long": int(response) % 5 == 0}

    outcome = simulate(given, reward=reward)
    assert [step.version for step in outcome.steps] == [1, 2, 3]
    assert outcome.event("accounting").data["balanced"] == 1
    assert sum(step.filtered.get("user:long", 0) for step in outcome.steps) > 0
    assert all(step.group_meta["longest_tokens"] > 1 for step in outcome.steps)


def test_the_broken_one_is_told_so() -> None:
    quoted = next(block for block in blocks("text") if "hooks.filter_item" in block).strip()
    sys.modules["my_hooks"].short_enough = lambda group, rollout: 1  # type: ignore[attr-defined]
    task = load_tasks(experiment(Path("unused")).tasks.train)[0]
    [found] = hook_violations(resolve_hooks(HooksConfig(filter_item="my_hooks:short_enough")), task)
    assert found.startswith(quoted)


def test_verifiers_of_the_other_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    module = ModuleType("my_format")
    module.score = lambda task, response: 1.0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_format", module)
    page = (DOCS / "inputs.md").read_text(encoding="utf-8")
    found = [tomllib.loads(text)["verifier"] for text in blocks("toml", page) if text.startswith("[verifier]")]
    assert [one["name"] for one in found] == ["weighted", "judge"]
    for one in found:
        one.pop("workers", None)
        resolve_verifier(VerifierSettings.model_validate(one))
