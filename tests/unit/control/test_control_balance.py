"""Who waits for whom: all who say it go by one rule, at its limits too."""

from __future__ import annotations

from pathlib import Path

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_run import calibration_of, lengths_of, shape_of
from synthetic_run import step_record

from headway.control.tuning.balance import WaitShares, balance_of, waits_of
from headway.control.tuning.forecast import binding_constraint, queue_model
from headway.records.check_report import Constraint, QueueOutcome
from headway.records.ledger import LedgerLine, QueueFlow, StepRecord, TeacherStatistics
from headway.report import live_view
from headway.report.verdict import judge
from headway.telemetry.summary import summarise
from tests.support.simulated_run import experiment_of

# Near each limit, and anywhere.
SHARES = st.sampled_from([0.0, 0.0999, 0.1, 0.1001, 0.1999, 0.2, 0.2001, 0.23, 0.3, 0.3001, 0.64]) | st.floats(0, 1)
WAITS = st.builds(
    WaitShares,
    trainer=SHARES,
    generator=SHARES,
    yielded=st.sampled_from([0.0, 0.0, 0.3]),
    environment=st.sampled_from([0.0, 0.4, 0.4001]),
    teaching=st.sampled_from([0.0, 0.8, 0.8001]),
)
# What the doctor may say binds, by what the report says.
FINER: dict[str, set[Constraint]] = {
    "generation-bound": {"generator", "kv", "admission", "verifier"},
    "training-bound": {"trainer"},
    "environment-bound": {"environment"},
    "teacher-bound": {"admission", "verifier", "other"},
    "other-bound": {"admission", "verifier", "other"},
    "matched": {"trainer", "generator", "kv", "admission", "verifier"},
    "synchronous": {"trainer", "generator", "kv", "admission", "verifier"},
    "time-shared": {"trainer", "generator", "kv", "admission", "verifier"},
}


@given(
    WAITS, st.integers(0, 4), st.floats(0, 1), st.sampled_from(["admission", "generator", "verifier", "environment"])
)
def test_the_doctor_names_nothing_that_the_report_rules_out(
    waits: WaitShares, budget: int, stragglers: float, relieved: Constraint
) -> None:
    outcome = QueueOutcome(
        samples_per_s=1.0,
        trainer_wait=waits.trainer,
        straggler_wait=stragglers * waits.trainer,
        generator_wait=waits.generator,
        slots_filled=0.5,
        staleness_mean=1.0,
        staleness_max=1,
    )
    model = queue_model(shape_of(), calibration_of(), lengths_of())
    found, _ = binding_constraint(shape_of(budget=budget), model, outcome, waits, [(relieved, 0.5)])
    assert found in FINER[balance_of(waits, budget)]


@given(st.lists(WAITS, min_size=1, max_size=5), st.integers(0, 4))
@settings(deadline=None)
def test_report_and_live_view_say_the_same_of_the_same_steps(each: list[WaitShares], budget: int) -> None:
    state = live_view.LiveState(experiment_of(Path("none"), queue={"budget": budget}))
    steps: list[StepRecord] = []
    for step, waits in enumerate(each):
        steps.append(
            step_record(
                step,
                trainer_wait_ratio=waits.trainer,
                generator_wait_ratio=waits.generator,
                generator_yielded_ratio=waits.yielded,
                flow=QueueFlow(generating_s=step + 1, environment_s=waits.environment * (step + 1)),
                teaching=TeacherStatistics(busy_s=waits.teaching),
            )
        )
        state.take(steps[-1])
    lines: list[LedgerLine] = [*steps]
    found = judge(lines, summarise(lines), budget).balance
    assert found == balance_of(waits_of(steps), budget)
    assert live_view._waits(state).plain.endswith(found)


@given(WAITS)
def test_the_rule_has_no_favourite_side(waits: WaitShares) -> None:
    mirror = {"generation-bound": "training-bound", "training-bound": "generation-bound"}
    other = msgspec.structs.replace(waits, trainer=waits.generator, generator=waits.trainer)
    one = balance_of(waits, 4)
    assert balance_of(other, 4) == mirror.get(one, one)


def test_a_side_that_waits_a_lot_is_not_what_the_other_waits_for() -> None:
    model = queue_model(shape_of(), calibration_of(), lengths_of())
    for generator, report, doctor in ((0.23, "other-bound", "other"), (0.19, "generation-bound", "generator")):
        waits = WaitShares(trainer=0.64, generator=generator)
        outcome = QueueOutcome(
            samples_per_s=1.0,
            trainer_wait=0.64,
            straggler_wait=0.0,
            generator_wait=generator,
            slots_filled=0.5,
            staleness_mean=1.0,
            staleness_max=1,
        )
        assert balance_of(waits, 2) == report
        assert binding_constraint(shape_of(budget=2), model, outcome, waits, [("generator", 0.3)])[0] == doctor
