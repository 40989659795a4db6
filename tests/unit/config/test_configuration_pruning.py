"""The section [pruning]: what is refused, and with which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.config.load import flatten, is_resumable
from headway.config.pruning import PRUNERS
from headway.orchestrator.task_sets import named_verifiers
from headway.records.errors import ConfigurationError
from tests.support.simulated_run import experiment_of


def of(*pruners: dict[str, Any], audit_share: float = 0.05, **sections: dict[str, Any]) -> Any:
    rollout = {"group_size": 8, "max_response_tokens": 512}
    pruning = {"audit_share": audit_share, "pruners": list(pruners)}
    return experiment_of(Path("unused"), **{"pruning": pruning, "rollout": rollout, **sections})


def test_it_is_off_by_default_and_each_table_is_a_pruner() -> None:
    assert of().pruning.kinds == ()
    everything = of(
        {"kind": "length", "tokens": 99},
        {"kind": "verifier", "verifier": "numeric"},
        *({"kind": kind} for kind in ("relative_length", "budget", "repetition", "group")),
        {"kind": "value", "below": 0.1},
    ).pruning
    assert everything.kinds == PRUNERS
    assert [everything.mode_of(name) for name in PRUNERS] == ["score"] * 4 + ["drop"] * 3
    assert everything.needs_rewards
    assert {kind: judge.verifier for kind, judge in everything.verifier_pruners.items()} == {"verifier": "numeric"}


@pytest.mark.parametrize(
    ("pruner", "message"),
    [
        ({"kind": "length"}, "missing key 'pruning.pruners.0.tokens'"),
        ({"kind": "length", "tokens": 0}, "pruning.pruners.0.tokens = 0"),
        ({"kind": "length", "tokens": 512}, "length checks responses of that many tokens, 512, and never prunes any"),
        ({"kind": "lenght", "tokens": 9}, "kind = 'lenght': valid: length, relative_length, "),
        ({"tokens": 9}, "kind = None: valid: length, relative_length, "),
        ({"kind": "length", "tokens": 9, "mode": "both"}, "pruning.pruners.0.mode = 'both'"),
        ({"kind": "repetition", "repeat": 1}, "unknown key 'pruning.pruners.0.repeat'; did you mean 'repeats'?"),
        (
            {"kind": "repetition", "ngram": 1},
            "the key 'pruning.pruners.0.ngram' was removed: runs of 4 tokens",
        ),
        ({"kind": "repetition", "repeats": 1}, "pruning.pruners.0.repeats = 1"),
        ({"kind": "value"}, "value with below = 0.02 never prunes anything: when 7 of"),
        ({"kind": "verifier"}, "missing key 'pruning.pruners.0.verifier'"),
        ({"kind": "group", "confidence": 0.99}, "all but one, the last one does with probability 0.938"),
        ({"kind": "group", "mode": "score"}, "unknown key 'pruning.pruners.0.mode'"),
    ],
)
def test_impossible_pruners_are_refused(pruner: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        of(pruner)
    assert message in str(caught.value)


def test_limits_of_the_run_leave_pruners_something_to_prune() -> None:
    short = {"group_size": 3, "max_response_tokens": 64}
    for pruner, message in (
        ({"kind": "verifier", "verifier": "numeric"}, "must be below rollout.max_response_tokens = 64"),
        ({"kind": "group", "confidence": 0.5}, "wants that many finished members, 3, and never prunes anything"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            of(pruner, rollout=short | ({"max_response_tokens": 512} if pruner["kind"] == "group" else {}))
        assert message in str(caught.value)
    with pytest.raises(ConfigurationError, match=r"pruning.audit_share = 1.0"):
        of(audit_share=1.0)
    with pytest.raises(ConfigurationError, match="two pruners are of kind 'group'"):
        of({"kind": "group"}, {"kind": "group"})
    with pytest.raises(ConfigurationError, match=r"key 'pruning.length' was removed: set pruning.pruners = \[\{ kind"):
        of(pruning={"length": {"tokens": 9}})


def test_pruners_are_a_list() -> None:
    for given in ({"kind": "repetition"}, {"0": {"kind": "repetition"}}, "repetition"):
        with pytest.raises(ConfigurationError, match=r"pruning\.pruners.*: valid: a list of tables"):
            experiment_of(Path("unused"), pruning={"pruners": given})


def test_a_deterministic_run_can_not_prune() -> None:
    with pytest.raises(ConfigurationError, match=r"run.deterministic = true excludes pruning.pruners: repetition"):
        of({"kind": "repetition"}, run={"directory": "x", "deterministic": True})


def test_everything_may_change_on_resume() -> None:
    for pruners in ([{"kind": "group"}, {"kind": "length", "tokens": 9}], [{"kind": "group"}], []):
        keys = [key for key in flatten(of(*pruners)) if key.startswith("pruning.")]
        assert keys
        assert all(is_resumable(key) for key in keys)


def test_judges_have_settings_of_a_named_verifier() -> None:
    named = {"early": {"name": "a:b", "parameters": {"x": 1}, "timeout_s": 3.0}}
    experiment = of({"kind": "value", "verifier": "early"}, verifiers=named)
    [(key, settings)] = named_verifiers(experiment, {"train": []}).items()
    assert key == "early"
    assert (settings.name, settings.parameters, settings.timeout_s) == ("a:b", {"x": 1}, 3.0)
    with pytest.raises(ConfigurationError, match=r"pruning.pruners: value: verifier = 'erly' is unknown; did you mean"):
        named_verifiers(of({"kind": "value", "verifier": "erly"}, verifiers=named), {"train": []})
