"""The section [pruning]: what is refused, and with which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.config.load import flatten
from headway.config.pruning import PRUNERS
from headway.config.schema import is_resumable
from headway.orchestrator.task_sets import named_verifiers
from headway.records.errors import ConfigurationError
from tests.support.simulated_run import experiment_of


def of(pruning: dict[str, Any], **sections: dict[str, Any]) -> Any:
    rollout = {"group_size": 8, "max_response_tokens": 512}
    return experiment_of(Path("unused"), pruning=pruning, rollout=rollout, **sections)


def test_it_is_off_by_default_and_each_table_is_a_pruner() -> None:
    assert of({}).pruning.on == ()
    everything = of(
        {
            "length": {"tokens": 99},
            "verifier": {"name": "numeric"},
            **{name: {} for name in ("relative_length", "budget", "repetition", "group")},
            "value": {"below": 0.1},
        }
    ).pruning
    assert everything.on == PRUNERS
    assert [everything.mode_of(name) for name in PRUNERS] == ["score"] * 4 + ["drop"] * 3
    assert everything.needs_rewards
    assert set(everything.judges) == {"verifier"}


@pytest.mark.parametrize(
    ("pruning", "message"),
    [
        ({"length": {}}, "missing key 'pruning.length.tokens'"),
        ({"length": {"tokens": 0}}, "pruning.length.tokens = 0"),
        ({"length": {"tokens": 512}}, "pruning.length.tokens = 512 never prunes anything: it must be below"),
        ({"lenght": {"tokens": 9}}, "unknown key 'pruning.lenght'; did you mean 'length'?"),
        ({"length": {"tokens": 9, "mode": "both"}}, "pruning.length.mode = 'both'"),
        ({"audit_share": 1.0}, "pruning.audit_share = 1.0"),
        ({"every_tokens": 600, "repetition": {}}, "pruning.every_tokens = 600 never prunes anything"),
        ({"repetition": {"ngram": 9, "window_tokens": 8}}, "ngram = 9 must be smaller than window_tokens = 8"),
        ({"repetition": {"repeats": 1}}, "pruning.repetition.repeats = 1"),
        ({"relative_length": {"least_finished": 8}}, "pruning.relative_length.least_finished = 8 never prunes"),
        ({"value": {}}, "pruning.value.below = 0.02 never prunes anything: with pruning.value.prior = 0.5, when 7 of"),
        ({"value": {"timeout_s": 3.0}}, "'timeout_s' has no effect with name = ''"),
        ({"value": {"name": "a:b", "prior": 1.0}}, "'prior' has no effect with name = 'a:b'"),
        ({"verifier": {}}, "missing key 'pruning.verifier.name'"),
        ({"verifier": {"name": "numeric", "every_tokens": 512}}, "pruning.verifier.every_tokens = 512 never prunes"),
        ({"group": {"confidence": 0.99}}, "all but one, the last one does with probability 0.938"),
        ({"group": {"mode": "score"}}, "pruning.group.mode = 'score'"),
    ],
)  # fmt: skip
def test_impossible_pruners_are_refused(pruning: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        of(pruning)
    assert message in str(caught.value)


def test_a_deterministic_run_can_not_prune() -> None:
    with pytest.raises(ConfigurationError, match=r"run.deterministic = true excludes pruning.repetition"):
        of({"repetition": {}}, run={"directory": "x", "deterministic": True})


def test_everything_may_change_on_resume() -> None:
    experiment = of({"value": {"name": "a:b", "parameters": {"x": 1}}, "group": {}, "length": {"tokens": 9}})
    keys = [key for key in flatten(experiment) if key.startswith("pruning.")]
    assert "pruning.value.parameters.x" in keys
    assert all(is_resumable(key) for key in keys)


def test_judges_have_separate_verifier_settings() -> None:
    experiment = of({"value": {"name": "a:b", "parameters": {"x": 1}, "timeout_s": 3.0}})
    [(key, settings)] = named_verifiers(experiment, {"train": []}).items()
    assert key == "pruning.value"
    assert (settings.name, settings.parameters, settings.timeout_s) == ("a:b", {"x": 1}, 3.0)
