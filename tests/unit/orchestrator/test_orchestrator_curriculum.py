"""Whole runs with a curriculum in virtual time, against tasks that are trivial, impossible or between; kills; and what
`headway explain-task` says of them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import msgspec
import numpy as np
import pytest

from headway.cli.main import main
from headway.config import schema
from headway.config.curriculum import CurriculumConfig
from headway.config.schema import AlgorithmConfig
from headway.control.curriculum.beta import mixed_probability
from headway.orchestrator.jobs.explain_task import RunHistory
from headway.orchestrator.run import Run
from headway.orchestrator.task_selection import AdaptiveSelector, evidence_of
from headway.records.curriculum import Draw, DrawnGroup, TaskEvidence
from headway.records.errors import ConfigurationError
from headway.records.ledger import StepRecord
from headway.records.rollout import Failure, FinishedGroup, Group, Rollout
from headway.records.task import Task
from headway.report.curriculum_text import overview_text, task_text
from headway.runtime.clock import VirtualClock
from headway.runtime.run_directory import RunDirectory
from headway.telemetry.ledger import Ledger, read_ledger
from headway.telemetry.metrics import scalars
from tests.support import simulated_run
from tests.support.simulated_run import experiment_of, simulate

TASKS = [Task(task_id=str(i), prompt=str(i)) for i in range(50)]  # as simulate makes them
TRIVIAL, IMPOSSIBLE = range(0, 27), range(27, 37)  # the rest is in between


def chance(number: int, seed: str) -> float:
    return int.from_bytes(hashlib.blake2b(f"{number}:{seed}".encode(), digest_size=4).digest(), "little") / 2**32


class Learner:
    """Solves what it is trained on a little more often: the trainer's batches are what it has learnt from."""

    def __init__(self) -> None:
        self.trainer = None

    def spoil(self, trainer: object) -> None:
        self.trainer = trainer

    def reward(self, task: Task, response: str) -> float:
        number = int(task.task_id)
        learnt = 0.0 if self.trainer is None else min(0.3, 0.005 * len(self.trainer.batches))
        rate = 1.0 if number in TRIVIAL else 0.0 if number in IMPOSSIBLE else 0.4 + learnt
        return float(chance(number, response) < rate)


def run_of(tmp_path: Path, *, steps: int = 25, learner: Learner | None = None, **options: object):
    sections = options.pop("sections", {})
    experiment = experiment_of(
        tmp_path,
        run={"steps": steps},
        rollout={"group_size": 6, "max_response_tokens": 200},
        queue={"groups_per_step": 4, "budget": 2},
        curriculum={"mode": "adaptive"} | sections,
        generator={"slots": 30},
    )
    learner = learner or Learner()
    chosen = CurriculumConfig(**experiment.curriculum.model_dump(), replay_after_groups=20)
    with patch.object(CurriculumConfig, "of", lambda section: chosen), patch(f"{schema.__name__}.REPEAT_STEPS", 4):
        return simulate(experiment, reward=learner.reward, spoil=learner.spoil, **options)


def generated(outcome) -> int:
    return sum(outcome.endings.values())


@pytest.mark.slow
def test_a_curriculum_needs_fewer_groups_for_the_same_steps(tmp_path):
    adaptive = run_of(tmp_path, steps=40)
    uniform = run_of(tmp_path, steps=40, sections={"mode": "uniform"})
    assert len(adaptive.steps) == len(uniform.steps) == 40
    assert generated(adaptive) < 0.6 * generated(uniform)
    assert uniform.steps[-1].curriculum is None
    for outcome in (adaptive, uniform):
        assert outcome.event("accounting").data["balanced"] == 1
        assert outcome.audit == []


def test_the_ledger_says_what_was_drawn_and_why(tmp_path):
    outcome = run_of(tmp_path)
    records = [step.curriculum for step in outcome.steps]
    assert all(sum(record.tasks.values()) == 50 for record in records)
    drawn = Counter()
    for record in records:
        drawn.update(record.draws)
    assert outcome.admitted_groups - sum(drawn.values()) <= 12  # opened while the last step was trained
    assert drawn["band"] > drawn["cursor"] > 0
    with Ledger(tmp_path, VirtualClock()) as ledger:
        for line in outcome.lines:
            ledger.record(line)
    read = [line.curriculum for line in read_ledger(tmp_path) if isinstance(line, StepRecord)]
    assert read == records
    assert scalars(outcome.steps[-1])["curriculum/trivial_tasks"] == records[-1].tasks["trivial"]
    last = records[-1]
    assert last.tasks["trivial"] >= 20
    assert 5 <= last.tasks["unsolved"] <= 16
    assert all(record.group_size_mean == 6 for record in records if sum(record.draws.values()))


def test_groups_of_several_sizes_keep_to_the_generators_concurrency(tmp_path):
    seen: list[int] = []
    sizes: Counter[int] = Counter()
    opened = simulated_run.assemble

    def watched(experiment, actors, clock, path, stack):
        run = opened(experiment, actors, clock, path, stack)
        admit, state = run.context.buffer.admit, run.context.state

        def noted(group, *arguments, **named):
            admit(group, *arguments, **named)
            sizes[group.size] += 1
            seen.append(state.running_rollouts + group.size)

        run.context.buffer.admit = noted
        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulated_run, "assemble", watched)
        outcome = run_of(
            tmp_path,
            steps=40,
            sections={"min_group_size": 3, "max_group_size": 12},
        )
    assert outcome.event("accounting").data["balanced"] == 1
    assert outcome.audit == []
    assert len(sizes) > 2
    assert min(sizes) >= 3
    assert max(sizes) <= 12
    assert max(seen) <= outcome.experiment.concurrent_rollouts


@pytest.fixture
def concluded(monkeypatch):
    """What every session's drawing was at its end, beside a fold over its buffer."""
    pairs: list[tuple[AdaptiveSelector, AdaptiveSelector]] = []
    conclude = Run.conclude

    async def compared(self: Run) -> None:
        run = self.context
        again = AdaptiveSelector(run.experiment, TASKS, {"none": 1.0})
        again.replay(run.buffer.drawn_groups())
        pairs.append((run.task_selector, again))
        await conclude(self)

    monkeypatch.setattr(Run, "conclude", compared)
    return pairs


@pytest.mark.parametrize("kills_s", [(), (0.4,), (1.1, 0.7, 1.9)])
def test_the_posterior_is_what_the_finished_groups_say_however_often_it_was_killed(tmp_path, concluded, kills_s):
    outcome = run_of(tmp_path, steps=20, kills_s=kills_s)
    assert outcome.event("accounting").data["balanced"] == 1
    ((live, again),) = concluded
    mine, folded = live.curriculum.sources[0], again.curriculum.sources[0]
    for name in ("solved", "failed", "alpha", "beta", "signal", "version", "drawn_at", "due", "misses"):
        np.testing.assert_array_equal(getattr(mine, name), getattr(folded, name), err_msg=name)
    assert live.curriculum.band.limit == again.curriculum.band.limit
    assert live.next_index == again.next_index == outcome.admitted_groups
    assert [live.take() for _ in range(100)] == [again.take() for _ in range(100)]


def test_failed_groups_are_no_evidence_and_filtered_ones_are(tmp_path, concluded):
    learner = Learner()

    def reward(task: Task, response: str) -> float:
        return float("nan") if int(task.task_id) == 3 else learner.reward(task, response)

    class Failing(Learner):
        pass

    failing = Failing()
    failing.reward = reward  # type: ignore[method-assign]
    outcome = run_of(tmp_path, learner=failing)
    assert outcome.endings["failed"] >= 6
    assert outcome.endings["filtered"] > 0
    ((live, _),) = concluded
    source = live.curriculum.sources[0]
    assert source.drawn_at[3] >= 0
    assert source.region(3) == "unseen"
    assert sum(source.region(number) == "trivial" for number in TRIVIAL) >= 15  # all of them filtered


def test_what_a_filter_took_out_was_judged_and_what_failed_or_was_pruned_was_not():
    def member(position: int, solved: bool, **fields: object) -> Rollout:
        return Rollout(group=7, member=position, prompt_ids=(1,), reward=float(solved), solved=solved, **fields)

    failure = Failure(boundary="reward", cause="raised", infrastructure=False)
    group = Group(index=7, task=TASKS[0], prompt_ids=(1,), size=5, admitted_version=3, admitted_s=0.0)
    rollouts = (
        member(0, True),
        member(1, False, removal="filtered", removal_reason="overlong"),
        member(2, False, removal="pruned", removal_reason="cap"),
        member(3, False, failure=failure),
        member(4, False, removal="discarded", removal_reason="timeout"),
    )
    shown = TaskEvidence(group=7, solved=1, valid=2, zero_variance=False, version=3)
    assert evidence_of(FinishedGroup(group=group, rollouts=rollouts), AlgorithmConfig()) == shown
    assert evidence_of(FinishedGroup(group=group, rollouts=rollouts[2:]), AlgorithmConfig()) is None
    distilled, equal = AlgorithmConfig(teacher="larger"), FinishedGroup(group=group, rollouts=rollouts[:1])
    assert evidence_of(equal, AlgorithmConfig()) == msgspec.structs.replace(shown, valid=1, zero_variance=True)
    assert evidence_of(equal, distilled) == msgspec.structs.replace(shown, valid=1)


def test_sources_keep_their_shares(tmp_path):
    tasks = [Task(task_id=f"{s}{i}", prompt=f"{s}{i}", source=s) for s in "ab" for i in range(20)]
    experiment = experiment_of(tmp_path, curriculum={"mode": "adaptive"})
    drawing = AdaptiveSelector(experiment, tasks, {"a": 3.0, "b": 1.0})
    drawn = Counter(drawing.take().task.source for _ in range(100))
    assert drawn == {"a": 75, "b": 25}


# -- explain-task --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept_run(tmp_path_factory):
    """The folder of a finished simulated run."""
    folder = tmp_path_factory.mktemp("run") / "kept"
    conclude = Run.conclude

    async def keep(self: Run) -> None:
        await conclude(self)
        self.context.buffer.make_durable()
        shutil.copytree(self.context.directory, folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "conclude", keep)
        outcome = run_of(folder, steps=25, sections={"min_group_size": 4, "max_group_size": 10})
    settings = outcome.experiment.run.model_copy(update={"directory": str(folder)})
    stored = outcome.experiment.model_copy(update={"run": settings})
    RunDirectory(folder).store(stored)
    return folder


def test_every_draw_of_a_task_is_explained(kept_run):
    history = RunHistory(kept_run, TASKS)
    explained = [history.explain(task) for task in TASKS]
    assert sum(len(found.draws) for found in explained) == len(history.groups)
    for found in explained:
        rates = [draw.posterior_after for draw in found.draws if draw.posterior_after is not None]
        if rates:
            assert rates[-1] == found.now
        for draw in found.draws:
            assert draw.reason in ("cursor", "explore", "band", "replay")
            assert draw.explanation
            assert draw.size_explanation
            assert (draw.solved is None) == (draw.posterior_after is None)
    assert explained[0].region == "trivial"
    assert explained[30].region == "unsolved"
    in_band = [found for found in explained if found.region == "band"]
    assert in_band
    assert all((found.band_probability > 0) == (found.rests_groups == 0) for found in in_band)


def test_the_overview_counts_what_there_is(kept_run):
    history = RunHistory(kept_run, TASKS)
    found = history.overview()
    assert sum(found.regions.values()) == found.tasks == 50
    assert sum(found.solve_rates) == 50 - found.regions["unseen"]
    assert sum(found.draws.values()) == found.groups == len(history.groups)
    assert found.zero_variance_share["band"] < 0.5 < found.zero_variance_share["cursor"]
    assert [draw.group for draw in found.following] == list(range(found.groups, found.groups + 5))


def test_tasks_are_found_by_id_prefix_and_text():
    history = object.__new__(RunHistory)
    history.tasks = [
        Task(task_id="aa11", prompt="1+2="), Task(task_id="aa22", prompt="3+4="), Task(task_id="bb33", prompt="3+5="),
    ]  # fmt: skip
    assert history.find("aa22").task_id == "aa22"
    assert history.find("bb").task_id == "bb33"
    assert history.find("1+").task_id == "aa11"
    with pytest.raises(ConfigurationError, match=r"'aa': 2 tasks match.*aa11.*aa22"):
        history.find("aa")
    with pytest.raises(ConfigurationError, match=r"'aa12': none of the 3 training tasks.*nearest: .*aa11"):
        history.find("aa12")


GOLDEN = Path(__file__).parents[2] / "golden" / "explain_task.txt"


def test_explain_task_golden(tmp_path):
    """Four groups made by hand: what is printed of them, word for word."""
    history = object.__new__(RunHistory)
    history.experiment = experiment_of(
        tmp_path, curriculum={"mode": "adaptive", "min_group_size": 4, "max_group_size": 12}
    )
    history.adaptive = True
    history.settings = CurriculumConfig(**history.experiment.curriculum.model_dump(), member_gain=0.03)
    rows = enumerate([("1", ""), ("2", ""), ("7+5=", "12")])
    history.tasks = [Task(task_id=str(i), prompt=p, answer=a, source="none") for i, (p, a) in rows]

    def group(index, task, why, alpha, beta, size, solved, valid, **ending):
        draw = Draw(
            reason=why, probability=0.999, alpha=alpha, beta=beta, signal=mixed_probability(alpha, beta, 8),
            min_signal=0.5, size=size,
        )  # fmt: skip
        flat = solved in (0, valid)
        shown = (
            TaskEvidence(group=index, solved=solved, valid=valid, zero_variance=flat, version=index) if valid else None
        )
        return DrawnGroup(index=index, task_id=task, size=size, admitted_version=max(0, index - 1), draw=draw,
                          evidence=shown, finished_as=index + 1, **ending)  # fmt: skip

    history.groups = [
        group(0, "0", "explore", 1.0, 1.0, 7, 7, 7, ending="filtered", reason="zero_variance"),
        group(1, "2", "explore", 1.0, 1.0, 7, 3, 7, ending="trained", step=0),
        group(2, "1", "explore", 1.0, 1.0, 7, 0, 7, ending="filtered", reason="zero_variance"),
        group(3, "2", "band", 4.5, 5.5, 6, 6, 6, ending="filtered", reason="zero_variance"),
        group(4, "2", "cursor", 10.0, 5.5, 7, None, 0, ending=None),
    ]
    assert task_text(history.explain(history.find("7+5"))) + "\n" == GOLDEN.read_text(encoding="utf-8")


def test_explain_task_prints_one_screen(kept_run, monkeypatch, capsys):
    monkeypatch.setattr("headway.orchestrator.jobs.explain_task.load_task_sets", lambda experiment: {"train": TASKS})
    assert main(["explain-task", str(kept_run), "40"]) == 0
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) <= 50
    assert printed == task_text(RunHistory(kept_run).explain(TASKS[40])) + "\n"
    assert main(["explain-task", str(kept_run), "40", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["task_id"] == "40"
    assert main(["explain-task", str(kept_run)]) == 0
    assert capsys.readouterr().out == overview_text(RunHistory(kept_run).overview()) + "\n"
    assert main(["explain-task", str(kept_run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tasks"] == 50


def test_explain_task_says_what_is_wrong(kept_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("headway.orchestrator.jobs.explain_task.load_task_sets", lambda experiment: {"train": TASKS})
    assert main(["explain-task", str(kept_run), "no such task"]) == 2
    assert "nearest" in capsys.readouterr().err
    assert main(["explain-task", str(tmp_path / "nowhere")]) == 2
    assert "holds no run" in capsys.readouterr().err
