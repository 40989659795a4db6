"""Predictions from a profile: what scales with what, and whose profile it is."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import msgspec
import pytest

from headway.config.load import changed_experiment, load_experiment
from headway.config.schema import Experiment
from headway.control.rates.specs import ModelFigures
from headway.planner.catalogue.read import Catalogue
from headway.planner.pool_file import PlanPool, read_pool
from headway.planner.profile import Profile, ProfiledCurves, ProfilePoint, fingerprint
from headway.planner.run_plan import Placement, plan_run, predicted_rate
from headway.records.check_report import Calibration, LengthSummary
from headway.records.errors import ConfigurationError

ROOT = Path(__file__).parents[3]
MODEL = ModelFigures(
    parameters=1e6, active=1e6, layers=4, width=128, vocabulary=300, attended=512, cached=((512, None),)
)
LENGTHS = LengthSummary(
    finished=500, truncated=0, censored=0, longest_tokens=80, mean_tokens=40.0, mean_least_tokens=40.0,
    mean_most_tokens=40.0, p50_tokens=40, p99_tokens=78, p99_seen=True, group_correlation=0.2,
)  # fmt: skip


def calibration(**changes: object) -> Calibration:
    found = Calibration(
        measured_s=10, start_s=2, at_once=True, lengths=LENGTHS, prompt_tokens=10, prefill_tokens_per_s=1e5,
        decode_running=60, decode_tokens_per_s=5e4, decode_beside_tokens_per_s=4e4, decode_fixed_s=2e-4,
        decode_request_s=2e-5, train_tokens_per_s=3e4, train_samples=128, train_fixed_s=5e-3, train_token_s=3e-5,
        publish_s=1e-3, apply_s=2e-3, pause_s=1e-3, verify_response_s=3e-4, groups=400, accepted_groups=360,
        failed_rollouts=0,
    )  # fmt: skip
    return msgspec.structs.replace(found, **changes)


def profile(machine: str = "") -> Profile:
    both = calibration(at_once=False, decode_beside_tokens_per_s=None, train_token_s=1.6e-5, verify_response_s=6e-4)
    points = (
        ProfilePoint(generators=1, trainers=1, slots=64, samples=128, measured=calibration()),
        ProfilePoint(generators=2, trainers=2, slots=64, samples=128, measured=both),
    )
    return Profile(
        machine=machine or fingerprint(),
        date=date(2026, 11, 1),
        device="cpu",
        group_size=8,
        model=MODEL,
        points=points,
        response_tokens=((0.0, 1.0), (1.0, 80.0)),
        missed={"generate": 0.02, "train": 0.15},
    )


@pytest.fixture
def pool(tmp_path: Path) -> PlanPool:
    file = tmp_path / "pool.toml"
    file.write_text('profile = "profile.json"\n[[devices]]\ndevice = "cpu"\ncount = 2\n')
    return read_pool(file, Catalogue.read())


@pytest.fixture
def experiment() -> Experiment:
    return load_experiment(ROOT / "examples" / "arithmetic" / "experiment.toml", ["rollout.group_size=8"])


def test_the_profiled_model_is_predicted_as_it_was_measured(pool: PlanPool, experiment: Experiment):
    curves = ProfiledCurves(experiment, MODEL, pool, profile())
    generation, training = curves.generation(0, 1, 0.0), curves.training(0, 1)
    assert generation is not None
    assert training is not None
    assert (generation.fixed_s, generation.request_s) == pytest.approx((2e-4, 2e-5))
    assert (training.fixed_s, training.token_s) == pytest.approx((5e-3, 3e-5))
    assert curves.error == 0.15
    shared = curves.training(0, 2)
    assert shared is not None
    assert shared.token_s == pytest.approx(1.6e-5)


def test_more_ranks_are_never_slower(pool: PlanPool, experiment: Experiment):
    point, eight = profile().points[0], calibration(train_token_s=3e-5 / 5.6)
    points = (point, msgspec.structs.replace(point, generators=8, trainers=8, measured=eight))
    curves = ProfiledCurves(experiment, MODEL, pool, msgspec.structs.replace(profile(), points=points))
    found = [curves.training(0, count) for count in range(1, 9)]
    times = [one.token_s for one in found if one is not None]
    assert times == sorted(times, reverse=True)
    assert times[5] == pytest.approx(3e-5 / 0.7 / 6)


def test_another_model_costs_by_its_products_layers_and_bytes(pool: PlanPool, experiment: Experiment):
    # the profiled trainer makes 6e6 / 3e-5 = 2e11 FLOP/s: a request's products are 1e-5 s, the other 1e-5 s its own
    deep = msgspec.structs.replace(MODEL, parameters=2e6, active=2e6, layers=8)
    wide = msgspec.structs.replace(MODEL, parameters=4e6, active=4e6)
    for model, fixed_s, request_s, token_s in ((deep, 4e-4, 4e-5, 6e-5), (wide, 2e-4, 5e-5, 12e-5)):
        curves = ProfiledCurves(experiment, model, pool, profile())
        generation, training = curves.generation(0, 1, 0.0), curves.training(0, 1)
        assert generation is not None
        assert training is not None
        assert (generation.fixed_s, generation.request_s) == pytest.approx((fixed_s, request_s))
        assert training.token_s == pytest.approx(token_s)
        assert training.fixed_s > 5e-3


def test_a_verification_is_a_call_for_each_group(pool: PlanPool, experiment: Experiment):
    rates: dict[int, float] = {}
    for size in (4, 16):
        changed = changed_experiment(experiment, {"rollout.group_size": str(size)})
        curves = ProfiledCurves(changed, MODEL, pool, profile())
        generation = curves.generation(0, 1, 0.0)
        assert generation is not None
        rates[size] = curves.shared_costs(pool.classes[0], generation).verify_s
    assert rates == pytest.approx({4: 6e-4, 16: 1.5e-4})


def test_the_plan_is_the_best_of_all_placements(pool: PlanPool, experiment: Experiment):
    curves = ProfiledCurves(experiment, MODEL, pool, profile())
    plan = plan_run(experiment, pool, curves, "time").plan
    every = [Placement(0, 1, 0, 1, 0), Placement(0, 2, 0, 2, 2), Placement(0, 2, 0, 1, 1), Placement(0, 1, 0, 1, 1)]
    rates = [predicted_rate(experiment, pool, curves, at) or 0.0 for at in every]
    assert plan.samples_per_s == pytest.approx(max(rates), rel=0.01)
    assert plan.settings["generator.devices"] in ('["cpu:0"]', '["cpu:0", "cpu:1"]')


def test_a_profile_of_another_machine_or_device_is_refused(pool: PlanPool, experiment: Experiment):
    with pytest.raises(ConfigurationError, match="measured on another machine"):
        ProfiledCurves(experiment, MODEL, pool, profile(machine="another"))
    elsewhere = msgspec.structs.replace(profile(), device="cuda")
    with pytest.raises(ConfigurationError, match="the profile is of cuda devices"):
        ProfiledCurves(experiment, MODEL, pool, elsewhere)
