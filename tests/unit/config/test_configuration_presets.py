"""Presets stand for keys, keys given win; objectives that mean nothing are refused."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any, get_args

import pytest

from headway.config import schema
from headway.config.load import load_experiment, require_resumable, validate_experiment
from headway.config.presets import PRESETS, apply_preset
from headway.config.schema import Experiment
from headway.records.errors import ConfigurationError
from headway.trainer.losses import loss_settings

RAW: dict[str, Any] = {"run": {"directory": "r"}, "model": {"path": "m"}, "tasks": {"train": {"path": "t.jsonl"}}}
KEYS = [(name, section, key) for name, keys in PRESETS.items() for section in keys for key in keys[section]]
OTHERWISE: dict[str, Any] = {  # a valid value that no preset has
    "advantage": "numpy:negative",
    "loss": "dppo",
    "clip_low": 0.111,
    "clip_high": 0.333,
    "aggregation": "seq_mean_token_sum",
    "kl_coefficient": 0.5,
    "kl_estimator": "k3_unbiased",
    "overlong": "mask",
    "proximal": "current",
    "gae": (0.9, 0.5),
    "warmup_steps": 7,
}


def experiment(**sections: dict[str, Any]) -> Experiment:
    return validate_experiment({**RAW, **sections}, "test")


def refusal(**sections: dict[str, Any]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        experiment(**sections)
    return str(caught.value)


def test_schema_lists_all_presets() -> None:
    assert get_args(schema.Preset) == tuple(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_keys_it_stands_for_and_nothing_else(name: str) -> None:
    by_name = experiment(algorithm={"preset": name})
    by_hand = experiment(**copy.deepcopy(PRESETS[name]))
    for section, keys in PRESETS[name].items():
        for key, value in keys.items():
            assert getattr(getattr(by_name, section), key) == value
    assert by_name.algorithm.model_copy(update={"preset": None}) == by_hand.algorithm
    assert by_name.model_copy(update={"algorithm": by_hand.algorithm}) == by_hand


@pytest.mark.parametrize(("name", "section", "key"), KEYS)
def test_keys_that_are_given_win(name: str, section: str, key: str) -> None:
    theirs = PRESETS[name][section]
    mine = (not theirs[key]) if isinstance(theirs[key], bool) else OTHERWISE.get(key)
    if key == "aggregation" and theirs[key] == mine:
        mine = "fixed"
    if key == "kl_in":
        return  # only together with its estimator: below
    if (name, key) == ("vapo", "advantage"):
        return  # only without its critic: test_configuration_critic.py
    if key == "kl_estimator" and theirs.get("kl_in") == "reward":
        return
    given = {"algorithm": {"preset": name}}
    given[section] = given.get(section, {}) | {key: mine}
    found = getattr(experiment(**given), section)
    assert getattr(found, key) == mine != theirs[key]
    others = {other: getattr(found, other) for other in theirs if other != key}
    assert others == {other: value for other, value in theirs.items() if other != key}


def test_where_the_penalty_is_put_can_be_given_with_its_estimator() -> None:
    moved = {"preset": "reinforce++", "kl_in": "loss", "kl_estimator": "k2"}
    assert experiment(algorithm=moved).algorithm.kl_in == "loss"
    assert "kl_estimator = 'k1' has no gradient" in refusal(algorithm={"preset": "reinforce++", "kl_in": "loss"})
    assert "kl_in = 'reward' takes kl_estimator = 'k1'" in refusal(algorithm={"preset": "grpo", "kl_in": "reward"})


@pytest.mark.parametrize("name", PRESETS)
def test_a_stored_experiment_is_read_back_as_it_was(name: str) -> None:
    """The run directory and every worker get the validated experiment; a later change of a preset must not reach it."""
    first = experiment(algorithm={"preset": name, "clip_low": 0.123})
    assert validate_experiment(json.loads(first.model_dump_json()), "stored") == first
    assert validate_experiment(first.model_dump(), "stored") == first


def test_apply_preset_does_not_modify_input() -> None:
    raw = {**copy.deepcopy(RAW), "algorithm": {"preset": "dapo", "loss": "gspo"}}
    before = copy.deepcopy(raw)
    assert apply_preset(raw)["algorithm"]["loss"] == "gspo"
    assert apply_preset(raw)["queue"] == {"filter_zero_variance": True}
    assert raw == before
    assert PRESETS["dapo"]["algorithm"]["loss"] == "ppo_clip"
    for odd in (None, 3, [], {}, {"algorithm": 3}, {"algorithm": {}}, {"algorithm": {"preset": ["grpo"]}}):
        assert apply_preset(odd) == odd
    assert apply_preset({"algorithm": {"preset": "grpo"}, "queue": 3})["queue"] == 3


def test_preset_from_file_and_override(tmp_path: Path) -> None:
    file = tmp_path / "experiment.toml"
    text = '[run]\ndirectory = "r"\n[model]\npath = "m"\n[tasks.train]\npath = "t"\n'
    file.write_text(text + '[algorithm]\npreset = "rloo"\n[queue]\nbudget = 1\n', encoding="utf-8")
    found = load_experiment(file)
    assert (found.algorithm.loss, found.queue.filter_zero_variance, found.queue.budget) == ("reinforce", False, 1)
    changed = load_experiment(file, ["--algorithm.preset=areal", "--algorithm.clip_high=0.5"]).algorithm
    assert (changed.loss, changed.proximal, changed.clip_low, changed.clip_high) == (
        "decoupled_ppo", "recompute", 0.2, 0.5,
    )  # fmt: skip


def test_errors_name_what_would_be_valid() -> None:
    assert "algorithm.preset = 'grpp'" in refusal(algorithm={"preset": "grpp"})
    assert "'reinforce++-baseline'" in refusal(algorithm={"preset": "grpp"})
    assert "algorithm.preset = ['grpo']" in refusal(algorithm={"preset": ["grpo"]})
    assert "unknown key 'algorithm.presets'; did you mean 'preset'?" in refusal(algorithm={"presets": "grpo"})


def test_penalties_without_meaning_are_refused() -> None:
    said = refusal(algorithm={"kl_coefficient": 0.1, "kl_estimator": "k1"})
    assert "algorithm.kl_estimator = 'k1' has no gradient in expectation when algorithm.kl_in = 'loss'" in said
    for estimator in ("k2", "k3", "k1_unbiased", "k3_unbiased"):
        algorithm = {"kl_coefficient": 0.1, "kl_estimator": estimator}
        assert experiment(algorithm=algorithm).algorithm.kl_in == "loss"
        assert f"not '{estimator}'" in refusal(algorithm=algorithm | {"kl_in": "reward"})
    assert experiment(algorithm={"kl_coefficient": 0.1, "kl_estimator": "k1", "kl_in": "reward"})
    # Without a coefficient there is no penalty to be wrong.
    assert experiment(algorithm={"kl_estimator": "k1"}).algorithm.kl_coefficient == 0.0
    assert experiment(algorithm={"kl_in": "reward"}).algorithm.kl_coefficient == 0.0


def test_empty_bounds_are_refused() -> None:
    for key in ("token_mask", "sequence_mask"):
        assert getattr(experiment(algorithm={key: [0.5, 5]}).algorithm, key) == (0.5, 5.0)
        assert f"algorithm.{key} = [5, 0.5]: the range is empty" in refusal(algorithm={key: [5, 0.5]})
        assert f"algorithm.{key}" in refusal(algorithm={key: [0.5]})
        assert f"algorithm.{key}" in refusal(algorithm={key: [-1, 2]})


def test_a_way_to_weigh_responses_needs_bounds() -> None:
    assert "algorithm.sequence_mask_by = 'max' masks nothing" in refusal(algorithm={"sequence_mask_by": "max"})
    assert experiment(algorithm={"sequence_mask_by": "max", "sequence_mask": (0.5, 2.0)})


def test_advantages_of_whole_attempts_are_refused_where_they_say_nothing() -> None:
    for advantage in ("length_weighted", "pass_at_k"):
        said = refusal(algorithm={"advantage": advantage, "turn_discount": 1.0}, rollout={"group_size": 8})
        assert f"algorithm.advantage = '{advantage}' compares whole attempts" in said
    said = refusal(algorithm={"advantage": "pass_at_k", "parameters": {"k": 8}}, rollout={"group_size": 8})
    assert "algorithm.parameters.k = 8 for groups of 8" in said
    assert experiment(algorithm={"advantage": "pass_at_k", "parameters": {"k": 7}}, rollout={"group_size": 8})


def test_a_loss_takes_its_own_parameters_and_no_others() -> None:
    assert experiment(algorithm={"loss": "dro", "parameters": {"beta": 0.4}}).algorithm.parameters.beta == 0.4
    assert refusal(algorithm={"loss": "sapo", "parameters": {"beta": 0.4}}) == (
        "test: algorithm.parameters.beta = 0.4 is of dro: the loss 'sapo' and the advantage 'group_mean_std' take "
        "temperature_positive, temperature_negative"
    )
    assert "unknown key 'algorithm.parameters.bta'; did you mean 'beta'?" in refusal(
        algorithm={"parameters": {"bta": 1}}
    )
    assert "algorithm.parameters.beta = 0" in refusal(algorithm={"loss": "dro", "parameters": {"beta": 0}})
    assert "dro_beta' was removed: set beta in [algorithm.parameters]" in refusal(algorithm={"dro_beta": 0.1})


@pytest.mark.parametrize(
    ("algorithm", "written"),
    [
        ({"loss": "reinforce"}, {}),
        ({"loss": "dppo"}, {"divergence": "tv", "divergence_limit": 0.15}),
        ({"loss": "dro", "advantage": "pass_at_k", "parameters": {"k": 3}}, {"beta": 0.05, "k": 3}),
        (
            {"loss": "mine:loss", "parameters": {"width": [1, 2], "beta": -1, "copy": 3}},
            {"width": [1, 2], "beta": -1, "copy": 3},
        ),
        ({"loss": "mine:loss", "advantage": "pass_at_k", "parameters": {"clip_low": "x"}}, {"k": 2, "clip_low": "x"}),
    ],
)
def test_a_run_keeps_the_parameters_that_it_takes(algorithm: dict[str, Any], written: dict[str, Any]) -> None:
    chosen = experiment(algorithm=algorithm, rollout={"group_size": 8})
    kept = chosen.model_dump(mode="json")
    assert kept["algorithm"]["parameters"] == written
    assert validate_experiment(kept, "kept") == chosen
    own = loss_settings(chosen.algorithm)
    assert own.parameters == (written if ":" in chosen.algorithm.loss else {})
    assert own.clip_low == 0.2


def test_what_a_run_cannot_keep_is_refused() -> None:
    for value in (math.nan, math.inf, {1, 2}):
        said = refusal(algorithm={"loss": "mine:loss", "parameters": {"width": value}})
        assert "algorithm.parameters" in said
        assert "finite numbers" in said


def test_keys_that_went_from_a_pruner_are_told_by_their_place() -> None:
    pruner = {"kind": "verifier", "verifier": "m", "timeout_s": 3}
    said = refusal(pruning={"pruners": [pruner]}, verifiers={"m": {"name": "math"}})
    assert "the key 'pruning.pruners.0.timeout_s' was removed: " in said
    said = refusal(pruning={"pruners": [{"kind": "verifier", "verifier": "m", "blow": 3}]})
    assert "unknown key 'pruning.pruners.0.blow'; did you mean 'below'?" in said
    assert "pruning.pruners.0.verifier = 3" in refusal(pruning={"pruners": [{"kind": "verifier", "verifier": 3}]})
    assert refusal(environment={"agent": 5}).count("environment.agent = 5") == 2
    assert refusal(model={"path": "m", "dtype": "bf16"}).count("bf16") == 1


def test_a_run_may_be_resumed_with_a_models_dtype_in_place_of_both_sides() -> None:
    sides = {"trainer": {"dtype": "bfloat16"}, "generator": {"dtype": "bfloat16"}}
    require_resumable(experiment(**sides), experiment(model={"path": "m", "dtype": "bfloat16"}))
    with pytest.raises(ConfigurationError, match=r"trainer\.dtype"):
        require_resumable(experiment(), experiment(model={"path": "m", "dtype": "bfloat16"}))


def test_updates_end_early_only_where_a_batch_has_several() -> None:
    said = refusal(algorithm={"early_stop_ratio": 0.1})
    assert "algorithm.early_stop_ratio = 0.1 skips the later updates" in said
    several = {"trainer": {"optimizer_steps_per_batch": 2}}
    assert experiment(algorithm={"early_stop_ratio": 0.1}, **several)
    assert "groups_per_part" in refusal(algorithm={"early_stop_ratio": 0.1}, queue={"groups_per_part": 1}, **several)
    assert "algorithm.early_stop_kl = 0.1 skips the later updates" in refusal(algorithm={"early_stop_kl": 0.1})
    assert experiment(algorithm={"early_stop_kl": 0.1}, trainer={"passes": 2})


def test_passes_need_the_whole_batch_and_count_as_optimiser_steps() -> None:
    twice = {"trainer": {"passes": 2, "optimizer_steps_per_batch": 3}}
    parts = refusal(queue={"groups_per_part": 1}, trainer={"passes": 2})
    assert "trainer.passes = 2 repeats all of it" in parts
    said = refusal(queue={"budget": 1, "max_optimizer_step_staleness": 10}, **twice)
    assert "trainer.optimizer_steps_per_batch = 3 in trainer.passes = 2 turns a staleness of 1" in said
    assert "up to 11; valid: queue.budget = 0" in said
    assert experiment(queue={"budget": 1, "max_optimizer_step_staleness": 11}, **twice)


def test_a_schedule_has_a_lowest_rate_and_a_decay_that_it_can_reach() -> None:
    assert experiment(trainer={"schedule": "linear", "schedule_steps": [5, 9], "warmup_steps": 5})
    wrong = refusal(trainer={"schedule": "linear", "schedule_steps": [4, 9], "warmup_steps": 5})
    assert (
        "trainer.schedule_steps = [4, 9]; valid: [first, last] with trainer.warmup_steps = 5 <= first < last" in wrong
    )
    assert "[9, 9]" in refusal(trainer={"schedule": "cosine", "schedule_steps": [9, 9]})
    floor = {"learning_rate": 1e-3, "min_learning_rate": 1e-4}
    assert experiment(trainer={**floor, "schedule": "cosine"})
    assert "trainer.min_learning_rate = 0.0001" in refusal(trainer=floor)
    assert "schedule that decays" in refusal(trainer={**floor, "learning_rate": 1e-5, "schedule": "linear"})


def test_fixed_micro_batches_are_given_with_their_size() -> None:
    assert "'fixed' needs trainer.micro_batch_samples" in refusal(trainer={"packing": "fixed"})
    assert "'balanced' doesn't use trainer.micro_batch_samples" in refusal(trainer={"micro_batch_samples": 4})
    assert experiment(trainer={"packing": "fixed", "micro_batch_samples": 4})


def test_a_target_needs_a_coefficient_to_begin_with() -> None:
    assert "algorithm.kl_target = 0.1 multiplies the coefficient" in refusal(algorithm={"kl_target": 0.1})
    assert experiment(algorithm={"kl_target": 0.1, "kl_coefficient": 0.02})


def test_a_step_that_could_end_the_penalty_for_good_is_refused_with_a_target() -> None:
    """A step of so many samples takes at most 0.2 x samples / 10,000 of the coefficient away."""
    algorithm = {"kl_target": 0.1, "kl_coefficient": 0.02}
    said = refusal(algorithm=algorithm, queue={"groups_per_step": 10_000}, rollout={"group_size": 5})
    assert "a step of 50000 samples could take all of the coefficient away" in said
    assert "fewer than 50000" in said
    assert experiment(algorithm=algorithm, queue={"groups_per_step": 9_999}, rollout={"group_size": 5})


def test_pass_at_a_k_that_no_group_reaches_is_refused() -> None:
    said = refusal(ledger={"pass_at": [2, 16]}, rollout={"group_size": 8}, evaluation={"samples_per_task": 4})
    assert "ledger.pass_at has 16" in said
    assert "1 to 8" in said
    assert experiment(ledger={"pass_at": [16]}, rollout={"group_size": 8}, evaluation={"samples_per_task": 16})
