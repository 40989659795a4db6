"""The live view, `show`, and the tables that commands end with."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import msgspec
import pytest
from recorded import record_texts, spelt
from rich.console import Console
from step_records import step_of
from synthetic_run import evaluation, step_record, synthetic_lines

from headway.cli.printing import print_json
from headway.config.load import validate_experiment
from headway.config.schema import Experiment
from headway.records.errors import ConfigurationError
from headway.records.ledger import Distribution, EventRecord, KernelShare, TeacherStatistics
from headway.report.dry_run import dry_run_rows
from headway.report.live_view import LiveState, LiveView, bar, evaluation_line, screen, sparkline, step_line
from headway.report.progress_bars import SftProgress
from headway.report.recorded_samples import RecordedSample, RecordedSamples, SampleSelection, show_samples, visible
from headway.report.tables import mapping_rows, print_rows, print_summary, sft_rows, summary_rows
from headway.report.verdict import judge, judge_learning
from headway.rollout.hosting.service import scores_itself
from headway.telemetry.metrics import scalars
from headway.telemetry.summary import summarise


def experiment(**queue: object) -> Experiment:
    raw = {
        "run": {"directory": "runs/x", "steps": 200},
        "model": {"path": "m"},
        "tasks": {"train": {"path": "t.jsonl"}},
        "queue": queue,
    }
    return validate_experiment(raw, "test")


class Screen:
    """A console that writes to memory."""

    def __init__(self, terminal: bool = False, width: int = 100) -> None:
        self.buffer = io.StringIO()
        self.console = Console(file=self.buffer, force_terminal=terminal, width=width, highlight=False)

    @property
    def text(self) -> str:
        return self.buffer.getvalue()


def drawn(state: LiveState, width: int = 100) -> str:
    out = Screen(width=width)
    out.console.print(screen(state))
    return out.text


# --- live ------------------------------------------------------------------------------------------------


def test_screen_answers_the_three_questions() -> None:
    state = LiveState(experiment())
    for line in synthetic_lines(60):
        state.take(line)
    text = drawn(state)
    assert "Who waits?" in text
    assert "25%" in text
    assert "generation-bound" in text
    assert "worst 3 of 4" in text
    assert "solve rate" in text
    assert "before 0.452" in text
    assert "step 60/200" in text
    assert "left" not in text  # the run has ended
    assert "trained 3,840 · filtered 960" in text


def test_streams_and_teachers_have_figures_where_there_are_several() -> None:
    """Means of the steps for streams with tokens, totals of the teachers; nothing in a run of one stream."""
    streams = {"policy": (0.25, 100.0, 1.5), "teacher": (-0.5, 2000.0, 3.0), "imitate": (0.0, 0.0, 0.0)}
    metrics = {
        f"stream_{name}_{figure}": number
        for name, figures in streams.items()
        for figure, number in zip(("loss", "tokens", "slope"), figures, strict=True)
    }
    teaching = TeacherStatistics(rollouts=30, failures=2, tokens=4000, cost=0.5, busy_s=0.5)
    state = LiveState(experiment())
    state.take(step_record(0))
    sentences = judge([step_record(0)], summarise([step_record(0)]), 4).sentences
    for text in (drawn(state), step_line(state), *sentences.values()):
        assert "slope" not in text
        assert "rollouts scored" not in text
    steps = [step_record(step, step_s=1.0, metrics=metrics, teaching=teaching) for step in (1, 2)]
    state = LiveState(experiment())
    for step in steps:
        state.take(step)
    stream_text = "policy: loss +0.25, 100 tokens, slope 1.5; teacher: loss -0.5, 2,000 tokens, slope 3"
    teaching_text = "30 rollouts scored, 2 failed, 4,000 tokens read, at a cost of 0.5, busy 50% of the time"
    assert f"{stream_text} · {teaching_text}" in step_line(state)
    assert "60 rollouts scored, 4 failed" in drawn(state)
    assert "imitate" not in step_line(state)
    sentences = judge(steps, summarise(steps), 4).sentences
    assert sentences["From which streams?"] == stream_text
    assert sentences["What do teachers do?"].startswith("60 rollouts scored, 4 failed, 8,000 tokens read")


def test_screen_shows_an_alert_until_it_is_over() -> None:
    state = LiveState(experiment())
    alert = EventRecord(event="alert", detail="kl: KL is 0.2 nats per token", data={"rule": "kl"})
    state.take(alert)
    assert [line.split()[1] for line in drawn(state).splitlines() if "KL is 0.2" in line] == ["Alert", "Event"]
    state.take(EventRecord(event="alert_cleared", detail="kl: no longer found", data={"rule": "kl"}))
    assert [line.split()[1] for line in drawn(state).splitlines() if "KL is 0.2" in line] == ["Event"]


def test_screen_before_the_first_step_and_with_odd_numbers() -> None:
    state = LiveState(experiment())
    assert "Starting" in drawn(state)
    state.take(step_of(0, version=0, skipped=True, rewards__solve_rate=math.nan, metrics={"loss": math.nan}))
    drawn(state)
    state.take(EventRecord(event="worker_died", detail="[bold]trainer-0[/bold]\nTraceback"))
    assert "[bold]trainer-0[/bold]" in drawn(state)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_screen_fits_its_width(width: int) -> None:
    state = LiveState(experiment())
    for line in synthetic_lines(30):
        state.take(line)
    assert max(len(row) for row in drawn(state, width).splitlines()) <= width


def test_time_left_is_by_steps_or_by_the_limit() -> None:
    state = LiveState(experiment())
    for step in range(50):
        state.take(step_record(step, step_s=2.0, time_s=2.0 * (step + 1)))
    assert state.remaining_s() == pytest.approx(150 * 2.0)
    limited = state.experiment.model_copy(
        update={"run": state.experiment.run.model_copy(update={"time_limit_s": 130.0})}
    )
    state.experiment = limited
    assert state.remaining_s() == pytest.approx(30.0)


def test_recent_waits_forget_the_past_and_weigh_by_time() -> None:
    state = LiveState(experiment())
    for step in range(30):
        state.take(step_record(step, trainer_wait_ratio=1.0))
    for step in range(30, 50):
        state.take(step_record(step, trainer_wait_ratio=0.0 if step % 2 else 0.5, step_s=3.0 if step % 2 else 1.0))
    assert state.recent_mean(lambda step: step.trainer_wait_ratio) == pytest.approx(0.5 / 4)


def test_a_broken_budget_shows_and_the_histogram_has_the_budget_in_it() -> None:
    state = LiveState(experiment(budget=2))
    state.take(step_record(0, trajectory_staleness=Distribution(mean=1.0, max=3.0, histogram={"0": 8, "3": 1})))
    assert "worst 3 of 2 · 0█ 1▁ 2▁ 3▂" in drawn(state)


def test_bars_and_sparklines() -> None:
    assert bar(0.5, 10, "blue").plain == "█████░░░░░"
    assert bar(7.0, 4, "blue").plain == "████"
    assert bar(math.nan, 4, "blue").plain == "░░░░"
    assert sparkline([0.0, 0.5, 1.0, math.nan], 10) == "▁▅█ "
    assert sparkline([float(i >= 50) for i in range(100)], 2) == "▁█"
    assert sparkline([], 5) == ""


def test_without_a_terminal_it_prints_a_line_now_and_then() -> None:
    out, time_s = Screen(), [0.0]
    with LiveView(experiment(), out.console, now=lambda: time_s[0]) as view:
        for step in range(12):
            view(step_record(step))
            time_s[0] += 1.0
        view(evaluation("during", 12, 0.5, "validation"))
    lines = out.text.splitlines()
    assert [line.split()[1].split("/")[0] for line in lines if line.startswith("step")] == ["1", "6", "11", "12"]
    assert any(line.startswith("validation during: solve rate 0.500 ± 0.022") for line in lines)
    assert not any("\x1b" in line for line in lines)


def test_on_a_terminal_it_redraws_at_most_twice_a_second_and_leaves_the_last_state() -> None:
    out, time_s = Screen(terminal=True), [0.0]
    with LiveView(experiment(), out.console, now=lambda: time_s[0]) as view:
        for step in range(20):
            view(step_record(step))
            time_s[0] += 0.1
    assert 4 <= out.text.count("Who waits?") <= 6
    assert "step 20/200" in out.text.rpartition("headway · runs/x")[2]


# --- show ------------------------------------------------------------------------------------------------


def sample(step: int, group: int, member: int = 0, **changes: object) -> dict[str, object]:
    return {
        "step": step,
        "group": group,
        "member": member,
        "prompt": "8+3=",
        "response": "11",
        "reward": 1.0,
        "solved": True,
        "advantage": 0.7,
        "versions": [[step - 1, 2], [step, 1]],
        "finish_reason": "stop",
        "ending": "trained",
        "pruned": None,
        **changes,
    }


def kept_run(folder: Path, *samples: dict[str, object]) -> Path:
    record_texts(folder, samples)
    return folder


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    samples = [sample(1, 10), sample(1, 11, solved=False, reward=0.0), sample(2, 12), sample(3, 13)]
    return kept_run(tmp_path, *samples)


def read_samples(run: Path, selection: SampleSelection = SampleSelection()) -> list[RecordedSample]:
    samples = RecordedSamples(run)
    return list(samples.read(samples.select(selection)[0]))


def test_selection(kept: Path) -> None:
    for selection, groups in (
        (SampleSelection(), [10, 11, 12, 13]),
        (SampleSelection(step=1), [10, 11]),
        (SampleSelection(group=12), [12]),
        (SampleSelection(solved=False), [11]),
        (SampleSelection(solved=True, limit=2), [12, 13]),
        (SampleSelection(ending="filtered"), []),
    ):
        assert [sample.group for sample in read_samples(kept, selection)] == groups


def test_show_prints_prompt_response_reward_and_versions(kept: Path) -> None:
    out = Screen()
    show_samples(kept, SampleSelection(step=2), decode=spelt, console=out.console)
    for words in (
        "8+3=",
        "11",
        "solved",
        "reward 1",
        "advantage +0.700",
        "versions 1 (×2), 2 (×1), staleness 1",
        "trained",
    ):
        assert words in out.text


def test_show_says_who_was_pruned_and_who_was_audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hit = {"pruner": "repetition", "reason": "a loop of 7 tokens", "at_tokens": 64, "saved_tokens": 190.4,
           "audited": False, "cut_reward": None}  # fmt: skip
    lines = [sample(1, 1, pruned=hit), sample(1, 2, pruned=hit | {"audited": True, "saved_tokens": 0, "cut_reward": 0})]
    show_samples(kept_run(tmp_path, *lines), SampleSelection(), console=Console(width=200))
    out = capsys.readouterr().out
    assert "pruned by repetition at 64 tokens: a loop of 7 tokens; about 190 tokens saved" in out
    assert "audited, else pruned by repetition at 64 tokens: a loop of 7 tokens; pruning would have given 0" in out


def test_show_says_why_a_rollout_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cause = "KeyError: 'bo\x1bom' (coins.py:31 in reply)"
    failure = {"boundary": "environment", "cause": cause, "infrastructure": False}
    kept = kept_run(tmp_path, sample(1, 1, ending="failed", failure=failure))
    show_samples(kept, SampleSelection(ending="failed"), console=Console(width=200))
    out = capsys.readouterr().out
    assert "failed at the environment: KeyError: 'bo\\x1bom' (coins.py:31 in reply)" in out
    show_samples(kept, SampleSelection(ending="failed"), as_json=True)
    assert json.loads(capsys.readouterr().out)["failure"]["cause"] == cause


def test_show_says_what_took_how_long(tmp_path: Path) -> None:
    times = {"calls": [[1, 1.25, 1.5, 7], [4, 0, 6, 0]], "tools": [["se\x1barch", 1.5, 3.7, False], ["", 6, 6, True]]}
    out = Screen()
    show_samples(kept_run(tmp_path, sample(1, 1, **times)), SampleSelection(), console=out.console)
    shown = " ".join(out.text.replace("│", " ").split())
    words = "call of 7 tokens 500 ms · se\\x1barch 2.2 s · call of 0 tokens 2.0 s · unknown tool 0 ms (error)"
    assert words in shown


def test_show_json(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show_samples(kept, SampleSelection(limit=1), decode=spelt, as_json=True)
    assert json.loads(capsys.readouterr().out) == sample(3, 13) | {
        "value": None,
        "failure": None,
        "pruned": None,
        "calls": [],
        "tools": [],
    }
    show_samples(kept, SampleSelection(step=99), as_json=True)
    assert capsys.readouterr().out == ""


def test_show_says_what_there_is(kept: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="it holds steps 1 to 3"):
        show_samples(kept, SampleSelection(step=99))
    with pytest.raises(ConfigurationError, match="rollouts may be none"):
        read_samples(tmp_path / "nothing")


def test_a_response_cannot_drive_the_terminal(tmp_path: Path) -> None:
    hostile = "\x1b]0;owned\x07 [bold red]x[/] \x9b31m é\t1"
    out = Screen()
    kept = kept_run(tmp_path, sample(1, 1, response=hostile))
    show_samples(kept, SampleSelection(), decode=spelt, console=out.console)
    assert "\x1b" not in out.text
    assert "\x07" not in out.text
    assert "[bold red]x[/]" in out.text
    assert visible(hostile) == "\\x1b]0;owned\\x07 [bold red]x[/] \\x9b31m é\t1"


# --- tables ----------------------------------------------------------------------------------------------


def test_summary_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    summary = summarise(synthetic_lines(20))
    out = Screen()
    print_summary(summary, "runs/x", out.console)
    for words in (
        "0.452 before → 0.930 after, of version 20",
        "trainer 25.0%",
        "balanced",
        "headway report runs/x",
        "1,280 trained",
    ):
        assert words in out.text
    print_json(summary)
    assert json.loads(capsys.readouterr().out)["solve_rate_after"] == 0.93


def test_evaluation_and_mapping() -> None:
    out = Screen()
    print_rows(mapping_rows({"final_loss": 0.123456, "dropped": 3}), console=out.console)
    line = evaluation_line(evaluation("after", 9, 0.75, failed=2, failure_cause="KeyError: 'x'"))
    assert (
        "solve rate 0.750 ± 0.019 of 500 (500 tasks, version 9, the last); 2 of 502 attempts failed: KeyError" in line
    )
    assert "(500 tasks, version 7, the best by validation of 9)" in evaluation_line(
        evaluation("after", 9, 0.75, first_version=7, last_version=7)
    )
    rare = evaluation_line(evaluation("before", 0, 1.0, samples=5, failed=91, failure_cause="KeyError: 'x'"))
    assert rare.endswith("; MOST FAILED, and count in no rate: 91 of 96 attempts failed: KeyError: 'x'")
    assert "final loss   0.1235" in out.text


def test_plan_names_the_numbers_that_matter() -> None:
    rows = dry_run_rows(experiment(groups_per_step=16, budget=3))
    assert "16 groups × 8 rollouts = 128 samples a step" in rows["batch"]
    assert "at most 64 groups open" in rows["queue"]
    assert "synchronous" in dry_run_rows(experiment(budget=0))["queue"]


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ({"path": "t.jsonl", "limit": 1000}, "t.jsonl, the first 1,000"),
        ({"source": "function", "name": "game:tasks", "parameters": {"part": "train"}}, "game:tasks(part='train')"),
        (
            {"source": "reasoning-gym", "name": "chain_sum", "parameters": {"seed": 3}},
            "reasoning-gym chain_sum, 1,000 tasks, seed 3",
        ),
    ],
)
def test_plan_names_where_tasks_come_from(source: dict[str, object], shown: str) -> None:
    raw = experiment().model_dump(exclude_unset=True) | {"tasks": {"train": source}}
    assert dry_run_rows(validate_experiment(raw, "test"))["train on"] == shown


@pytest.mark.parametrize(
    ("environment", "label", "scorer"),
    [
        ({}, "verifier", "exact, 10 s limit"),
        ({"name": "agent", "agent": ["agent"]}, "verifier", "exact, 10 s limit"),
        ({"name": "agent", "agent": "a:b"}, "verifier", "exact, 10 s limit, where agent gives no reward"),
        ({"name": "python_tool"}, "verifier", "exact, 10 s limit, where python_tool gives no reward"),
        ({"name": "code", "timeout_s": 400.0}, "scored by", "code, 400 s limit"),
        (
            {"name": "verifiers", "parameters": {"taskset": {"id": "x"}}},
            "scored by",
            "its environment of the package verifiers",
        ),
    ],
)
def test_plan_names_whoever_scores(environment: dict[str, object], label: str, scorer: str) -> None:
    raw = experiment().model_dump(exclude_unset=True) | {"environment": environment}
    planned = validate_experiment(raw, "test")
    rows = dry_run_rows(planned, scores_itself(planned.environment))
    assert {key: rows[key] for key in ("verifier", "scored by") if key in rows} == {label: scorer}


def test_plan_says_what_a_preset_came_to() -> None:
    def objective(**algorithm: object) -> str:
        raw = experiment().model_dump(exclude_unset=True) | {"algorithm": algorithm}
        return dry_run_rows(validate_experiment(raw, "test"))["objective"]

    assert objective() == (
        "decoupled_ppo, advantage group_mean_std, clip 0.8 to 1.28, weights at most 2, token_mean, "
        "groups of equal rewards filtered"
    )
    assert objective(preset="grpo", behaviour_weight_cap=5.0, token_mask=[0.5, 5.0]) == (
        "preset grpo, ppo_clip, advantage group_mean_std, clip 0.8 to 1.2, weights at most 5, seq_mean_token_mean, "
        "KL 0.04 (k3, in the loss) to m, token weights within 0.5 to 5"
    )
    masks = {
        "sequence_mask": [0.99, 1.01],
        "second_moment_limit": 0.04,
        "overlong": "mask",
        "parameters": {"dual_clip": 3.0},
    }
    assert objective(preset="gspo", clip_high=0.5, **masks) == (
        "preset gspo, gspo, advantage group_mean_std, clip 0.9997 to 1.5, dual clip 3, seq_mean_token_mean, "
        "response weights (mean) within 0.99 to 1.01, second moment at most 0.04, overlong responses: mask, "
        "groups of equal rewards filtered"
    )
    assert "weights at most 1.28, token_mean" in objective(preset="cispo")
    assert "dppo, advantage group_mean_std, tv divergence at most 0.15, weights at most 2" in objective(loss="dppo")
    assert "dro, advantage group_mean_std, squared log ratio by 0.05, token_mean" in objective(loss="dro")
    assert "gmpo, advantage group_mean_std, log ratios clipped to -0.4 to 0.4, seq_mean" in objective(preset="gmpo")
    assert "sapo, advantage group_mean_std, gate 1 and 1.05, token_mean" in objective(loss="sapo")
    assert "KL 0.01 (k1, in the reward)" in objective(preset="reinforce++")
    assert "KL 0.04 at first, for 0.1 nats per token (k3, in the loss)" in objective(preset="grpo", kl_target=0.1)
    assert "clip" not in objective(preset="rloo")


def test_sft_progress_prints_now_and_then_and_evaluations_at_once() -> None:
    out, time_s = Screen(), [0.0]
    with SftProgress(console=out.console, now=lambda: time_s[0]) as progress:
        for step in range(5):
            progress({"step": step, "steps": 1000, "loss": 0.5})
            time_s[0] += 1.0
        kernels = {"faster": KernelShare(value=0.25, interval=(0.125, 0.5), count=2, rollouts=8, untimed=3)}
        progress({"step": 5, "steps": 1000, "solve_rate": 0.25, "kernels": kernels})
    assert out.text.splitlines() == [
        "step 0/1000 · loss 0.5",
        "step 2/1000 · loss 0.5",
        "step 4/1000 · loss 0.5",
        "step 5/1000 · solve rate 0.25 · faster 0.250 [0.125, 0.500] (2 of 8, 3 correct ones untimed)",
    ]
    record = msgspec.structs.replace(evaluation("during", 3, 0.5), kernels=kernels)
    assert evaluation_line(record).endswith("; faster 0.250 [0.125, 0.500] (2 of 8, 3 correct ones untimed)")
    assert scalars(record)["evaluation/test_kernels_faster"] == 0.25
    shown = sft_rows({"step": 5, "kernels": kernels, "evaluations": [{"step": 5}]})
    assert shown == {"step": "5", "faster": "0.250 [0.125, 0.500] (2 of 8, 3 correct ones untimed)"}


def test_a_step_in_which_no_group_finished_has_no_solve_rate() -> None:
    state = LiveState(experiment())
    state.take(step_record(0, rewards__solve_rate=0.5))
    state.take(step_record(1, rewards=None))
    assert "solve –" in step_line(state)
    text = drawn(state)
    assert "solve rate – " in text
    assert "reward" not in text


def test_a_solve_rate_without_data_is_a_dash_everywhere() -> None:
    none_finished = step_record(30, rewards=None)
    assert "reward/solve_rate" not in scalars(none_finished)
    assert scalars(step_record(30, rewards__solve_rate=0.0))["reward/solve_rate"] == 0.0
    lines = [step_record(step, rewards__solve_rate=0.5) for step in range(20)]
    lines += [msgspec.structs.replace(none_finished, step=step, version=step + 1) for step in range(20, 40)]
    assert "from 0.500 (first fifth of the steps) to 0.500 (last fifth)" in judge_learning(lines)[3]
    rows = summary_rows(summarise([*lines, EventRecord(event="end")]))
    assert rows["solve rate"] == "– before → – after"
    assert rows["best version"] == "none was judged: best/ holds the last"
