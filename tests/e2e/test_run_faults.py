"""Whole runs under interrupts, full disks, damaged files and verifiers that misbehave."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from tiers import first
from tiny_trainer import Context

from headway.records.errors import StorageFailed
from headway.trainer.checkpoints import checkpoint_path, find_checkpoints, read_state
from headway.trainer.service import TrainerService

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]
ENDLESS = 1_000_000


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("inputs")
    tiny_run.write_inputs(folder)
    return tiny_run.inputs_in(folder)


def rows(run: Path, query: str) -> list[Any]:
    with sqlite3.connect(f"file:{run / 'buffer.db'}?mode=ro", uri=True, timeout=10.0) as connection:
        return connection.execute(query).fetchall()


def newest_weights(run: Path) -> bytes:
    return (find_checkpoints(run)[-1] / "model" / "model.safetensors").read_bytes()


# --- exactness ---------------------------------------------------------------------------------------------


def test_a_killed_and_resumed_run_ends_with_the_very_same_weights(inputs: Any, tmp_path: Path) -> None:
    """Budget 0, run.deterministic: not one bit differs."""
    finals: list[bytes] = []
    for name, faults in (("undisturbed", ()), ("disturbed", ("batch-committed:3", "group-finished:6", "published:3"))):
        folder = tmp_path / name
        folder.mkdir()
        config = tiny_run.write_experiment(
            folder,
            run={"steps": 9, "deterministic": True},
            queue={"budget": 0},
            checkpoint={"every_steps": 4},
            **inputs,
        )
        resume: list[str] = []
        for fault in faults:
            assert tiny_run.train(config, *resume, fault=fault).process.returncode == -signal.SIGKILL
            resume = ["--resume"]
        command = tiny_run.train(config, *resume)
        assert command.process.returncode == 0, command.output
        assert tiny_run.audited(folder / "run").completed_steps == 9
        finals.append(newest_weights(folder / "run"))
    assert finals[0] == finals[1]


@pytest.mark.slow
def test_synchronous_training_is_exact_and_equals_the_minimal_loop(inputs: Any, tmp_path: Path) -> None:
    config = tiny_run.write_experiment(tmp_path, run={"steps": 5, "deterministic": True}, queue={"budget": 0}, **inputs)
    command = tiny_run.train(config, warm=False)  # as a user starts it
    assert command.process.returncode == 0, command.output
    steps = tiny_run.steps_of(tmp_path / "run")
    assert len(steps) == 5
    assert max(step.metrics["mismatch_max"] for step in steps) <= 1e-4
    assert max(step.trajectory_staleness.max for step in steps) == 0
    assert max(step.tokens.staleness.max for step in steps) == 0
    losses = [step.metrics["loss"] for step in steps]
    assert any(abs(loss) > 1e-4 for loss in losses)
    assert tiny_run.minimal_losses(config) == pytest.approx(losses, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "steps"), [("wrong-rope", 0), ("stale-layer", 1)])
def test_an_engine_that_computes_otherwise_is_refused_and_nothing_is_lost(
    inputs: Any, tmp_path: Path, fault: str, steps: int
) -> None:
    config = tiny_run.write_experiment(tmp_path, queue={"budget": 0}, **inputs)
    command = tiny_run.train(config, fault=fault)
    assert command.process.returncode == 2, command.output
    assert f"error: trainer and engine disagree at version {steps}: the engine's prefill" in command.output
    assert "Their hidden states diverge in layer 0 of 1 (model.layers.0)" in command.output
    assert "docs/troubleshooting.md#trainer-and-engine-disagree" in command.output
    assert "Traceback" not in command.output
    assert len(tiny_run.steps_of(command.run)) == steps
    *_, event = tiny_run.events_of(command.run, "agreement")
    assert (event.data["version"], event.data["agrees"]) == (steps, 0)
    resumed = tiny_run.train(config, "--resume")
    assert resumed.process.returncode == 0, resumed.output
    assert tiny_run.audited(command.run).completed_steps == 6
    agreed = [event for event in tiny_run.events_of(command.run, "agreement") if event.data["agrees"]]
    assert {"packed", "prefill", "decode"} <= agreed[-1].data.keys()
    assert max(event.data[name] for event in agreed for name in ("packed", "prefill", "decode")) < 1e-4


# --- in-flight updates -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", first(1, ["keep", "recompute", "abort", "drain"], pytest.mark.long))
def test_rollouts_cross_updates(inputs: Any, tmp_path: Path, mode: str) -> None:
    config = tiny_run.write_experiment(
        tmp_path,
        run={"steps": 20},
        rollout={"max_response_tokens": 300},
        generator={"update_mode": mode},
        trainer={"learning_rate": 1e-4},
        queue={"budget": 3},
        **inputs,
    )
    run = tmp_path / "run"
    command = tiny_run.train(config)
    assert command.process.returncode == 0, command.output
    shown = tiny_run.output_of("show", run, "--ending", "trained", "--limit", "1000", "--json").strip().split("\n")
    samples = [json.loads(line) for line in shown]
    assert all(sample["advantage"] is not None for sample in samples)
    assert len(samples) == 20 * 16
    crossed = [sample for sample in samples if len(sample["versions"]) > 1]
    assert bool(crossed) is (mode != "drain")
    for sample in crossed:
        versions = [version for version, _ in sample["versions"]]
        assert versions == sorted(set(versions))
        assert sample["step"] - versions[0] <= 3
    report = tiny_run.audited(run)
    assert report.rollouts == {"trained": 320, "open": 0}
    assert report.max_staleness <= 3

    summary = json.loads(tiny_run.output_of("report", run, "--json"))
    assert summary["accounting_balanced"] is True
    assert summary["max_trajectory_staleness"] == max(step.trajectory_staleness.max for step in tiny_run.steps_of(run))
    assert {
        "solve_rate_before",
        "solve_rate_after",
        "trainer_wait_ratio",
        "generator_wait_ratio",
        "length_bias_ks",
    } <= summary.keys()
    shown = [json.loads(line) for line in tiny_run.output_of("show", run, "--step", "19", "--json").strip().split("\n")]
    assert len(shown) == 16


# --- shared devices ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0, 2])
def test_both_sides_on_the_same_cores(inputs: Any, tmp_path: Path, budget: int) -> None:
    """Colocated: synchronous at budget 0; else what is in flight waits while the trainer has the cores."""
    cores = ["cpu:0", "cpu:1"]
    config = tiny_run.write_experiment(
        tmp_path,
        run={"steps": 8},
        rollout={"max_response_tokens": 40},
        generator={"devices": cores, "slots": 8},
        trainer={"devices": cores, "learning_rate": 1e-4},
        queue={"budget": budget},
        **inputs,
    )
    run = tmp_path / "run"
    command = tiny_run.train(config)
    assert command.process.returncode == 0, command.output
    steps = tiny_run.steps_of(run)
    assert sum(step.generator_yielded_ratio for step in steps) > 0
    report = tiny_run.audited(run)
    assert report.rollouts == {"trained": 8 * 16, "open": 0}
    assert report.max_staleness <= budget


# --- interrupts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_interrupts(inputs: Any, tmp_path: Path, number: signal.Signals) -> None:
    """Once: drained, checkpointed. Twice: at once. While workers start: at once. Resumable each time."""
    gate = tmp_path / "gate"
    verifier = {"name": "tiny_verifiers:gated", "parameters.gate": str(gate), "timeout_s": 600.0}
    config = tiny_run.write_experiment(tmp_path, run={"steps": ENDLESS}, verifier=verifier, **inputs)
    run = tmp_path / "run"

    with tiny_run.headway("train", config, "--quiet", run=run) as command:
        command.until(lambda: command.workers(), "a worker")
        command.process.send_signal(number)
        assert command.wait() == 130, command.output
    tiny_run.require_nothing_left(command)

    with tiny_run.headway("train", config, "--quiet", "--resume", run=run) as command:
        command.until(lambda: len(tiny_run.steps_of(run)) >= 3, "three steps")
        command.process.send_signal(number)
        assert command.wait() == 130, command.output
    assert "--resume" in command.output
    tiny_run.require_nothing_left(command)
    report = tiny_run.audited(run)
    assert report.checkpoints[-1] == report.completed_steps  # all that was done is in the checkpoint
    assert report.groups["open"] == 0  # drained: what was running is finished and kept
    kept = report.groups["buffered"]

    with tiny_run.headway("train", config, "--quiet", "--resume", run=run) as command:
        command.until(lambda: len(tiny_run.steps_of(run)) >= report.completed_steps + 3, "three more steps")
        gate.touch()  # from now on draining would never end
        command.process.send_signal(number)
        command.until(lambda: tiny_run.events_of(run, "interrupt")[1:], "the interrupt")
        command.process.send_signal(number)
        assert command.wait(30.0) == 130, command.output
    assert "stopped at once" in command.output
    gate.unlink()
    tiny_run.require_nothing_left(command)

    steps = tiny_run.audited(run).completed_steps + 3
    command = tiny_run.train(config, "--resume", f"--run.steps={steps}")
    assert command.process.returncode == 0, command.output
    assert tiny_run.audited(run).completed_steps == steps
    assert kept <= tiny_run.audited(run).groups["trained"]
    tiny_run.require_nothing_left(command)


@pytest.mark.slow
def test_hanging_run_ends_within_its_grace_and_keeps_what_was_generated(inputs: Any, tmp_path: Path) -> None:
    """A verifier that doesn't answer: the responses that it has are kept, and no token of them is sampled twice."""
    gate = tmp_path / "gate"
    verifier = {"name": "tiny_verifiers:gated", "parameters.gate": str(gate), "timeout_s": 600.0}
    config = tiny_run.write_experiment(
        tmp_path, run={"steps": ENDLESS, "stop_grace_s": 16.0}, verifier=verifier, **inputs
    )
    run = tmp_path / "run"
    with tiny_run.headway("train", config, "--quiet", run=run) as command:
        command.until(lambda: len(tiny_run.steps_of(run)) >= 2, "two steps")
        gate.touch()
        # Of the eight that the budget allows, up to three may have been scored before: too few for a batch.
        command.until(lambda: rows(run, "SELECT count(*) FROM groups WHERE state = 'open'") >= [(5,)], "open groups")
        time.sleep(1.0)  # they are sampled, and wait for the verifier
        command.process.send_signal(signal.SIGUSR1)
        started_s = time.monotonic()
        assert command.wait(30.0) == 130, command.output
    assert time.monotonic() - started_s <= 16.0
    gate.unlink()
    tiny_run.require_nothing_left(command)
    report = tiny_run.audited(run)
    assert report.checkpoints[-1] == report.completed_steps
    (parked,) = tiny_run.events_of(run, "parked")
    assert parked.data["complete"] > 0
    kept = rows(run, "SELECT count(*) FROM partials")[0][0]
    assert kept >= parked.data["complete"]

    steps = report.completed_steps + 2
    command = tiny_run.train(config, "--resume", f"--run.steps={steps}")
    assert command.process.returncode == 0, command.output
    tiny_run.require_whole(run, steps, drained=False)


def test_one_run_at_a_time_and_none_is_overwritten(inputs: Any, tmp_path: Path) -> None:
    config = tiny_run.write_experiment(tmp_path, run={"steps": ENDLESS}, **inputs)
    run = tmp_path / "run"
    with tiny_run.headway("train", config, "--quiet", run=run) as first:
        first.until(lambda: tiny_run.steps_of(run), "a step")
        for resume in ([], ["--resume"]):
            second = tiny_run.refused("train", config, "--quiet", *resume)
            assert f"process {first.process.pid}" in second
        first.process.send_signal(signal.SIGINT)
        assert first.wait() == 130
    assert "--resume" in tiny_run.refused("train", config, "--quiet")
    tiny_run.audited(run)


# --- damage ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_corrupt_checkpoint_is_replaced_by_an_older_one_and_the_log(inputs: Any, tmp_path: Path) -> None:
    exact = {"run": {"steps": 8, "deterministic": True}, "queue": {"budget": 0}}
    config = tiny_run.write_experiment(tmp_path, **exact, **inputs)
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert tiny_run.train(config).process.returncode == 0
    older, newest = find_checkpoints(run)
    shutil.copytree(run, whole)
    assert tiny_run.train(config, "--resume", "--run.steps=9").process.returncode == 0
    expected = newest_weights(run)
    shutil.rmtree(run)
    whole.rename(run)
    weights = newest / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100] + bytes(100))

    command = tiny_run.train(config, "--resume", "--run.steps=9")
    assert command.process.returncode == 0, command.output
    (corrupt,) = tiny_run.events_of(run, "checkpoint_corrupt")
    assert "model.safetensors" in corrupt.detail
    (restored,) = tiny_run.events_of(run, "restored")
    assert restored.data["replayed"] == 8 - read_state(older).version
    assert tiny_run.audited(run).completed_steps == 9
    assert newest_weights(run) == expected  # the replay led to the same weights

    # Neither is a damaged state.json, nor is it a reason to stop when old checkpoints are counted later.
    (find_checkpoints(run)[-1] / "state.json").write_text("{")
    command = tiny_run.train(config, "--resume", "--run.steps=14")
    assert command.process.returncode == 0, command.output
    assert tiny_run.audited(run).completed_steps == 14
    left = sorted(path.name for path in (run / "checkpoints").glob("*.corrupt"))
    assert left == ["step_00000008.corrupt", "step_00000009.corrupt"]

    for path in find_checkpoints(run):
        (path / "state-1-of-1.safetensors").write_bytes(b"")
    refusal = tiny_run.refused("train", config, "--quiet", "--resume", "--run.steps=15")
    assert "state-1-of-1.safetensors" in refusal


@pytest.mark.slow
def test_a_resume_without_its_ledger_or_its_buffer(inputs: Any, tmp_path: Path) -> None:
    config = tiny_run.write_experiment(tmp_path, run={"steps": 6}, checkpoint={"every_steps": 2}, **inputs)
    run = tmp_path / "run"
    assert tiny_run.train(config).process.returncode == 0
    (find_checkpoints(run)[-1] / "state.json").write_text(
        (find_checkpoints(run)[-1] / "state.json").read_text().replace('"version": 6', '"version": 7')
    )
    (run / "ledger.jsonl").unlink()
    command = tiny_run.train(config, "--resume", "--run.steps=8")
    assert command.process.returncode == 0, command.output
    (lost,) = tiny_run.events_of(run, "ledger_incomplete")
    assert "ledger.jsonl lacks the steps from 0 on (was it removed, or cut?)" in lost.detail
    (corrupt,) = tiny_run.events_of(run, "checkpoint_corrupt")
    assert "step_00000006/state.json: checksum" in corrupt.detail
    assert tiny_run.events_of(run, "accounting")[-1].data["balanced"] == 1
    report = tiny_run.audited(run)
    assert (report.completed_steps, report.rollouts["trained"]) == (8, 8 * 16)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["untimed_steps"], summary["samples_trained"]) == (8, 6, 8 * 16)

    (run / "buffer.db").rename(tmp_path / "buffer.db")
    before, ledger = sorted(run.rglob("*")), (run / "ledger.jsonl").read_bytes()
    assert "buffer.db is missing" in tiny_run.refused("train", config, "--quiet", "--resume", "--run.steps=9")
    assert sorted(run.rglob("*")) == before
    assert (run / "ledger.jsonl").read_bytes() == ledger


@pytest.mark.slow
def test_killed_and_stopped_workers_are_in_the_ledger_and_the_report(inputs: Any, tmp_path: Path) -> None:
    config = tiny_run.write_experiment(tmp_path, run={"steps": ENDLESS}, **inputs)
    run = tmp_path / "run"
    with tiny_run.headway("train", config, "--quiet", run=run) as command:
        for worker in ("verifier-0", "trainer-0"):
            done = len(tiny_run.steps_of(run))
            command.until(lambda done=done: len(tiny_run.steps_of(run)) > done, "a step")
            os.kill(command.pid_of(worker), signal.SIGKILL)
        command.until(lambda: tiny_run.events_of(run, "trainer_restored"), "a new trainer")
        os.kill(command.pid_of("generator-0"), signal.SIGSTOP)
        command.until(lambda: tiny_run.events_of(run, "worker_stalled"), "a word about the stopped worker")
        os.kill(command.pid_of("generator-0"), signal.SIGCONT)
        command.until(lambda: tiny_run.events_of(run, "worker_answers"), "a word about its return")
        command.process.send_signal(signal.SIGINT)
        assert command.wait() == 130, command.output
    (verifier,) = tiny_run.events_of(run, "verifier_died")
    assert (verifier.worker, verifier.found_by) == ("verifier-0", "exit")
    assert verifier.cause.startswith("killed by SIGKILL (9)")
    assert tiny_run.events_of(run, "verifier_restarted")[0].lost_s > 0
    (trainer,) = tiny_run.events_of(run, "worker_died")
    assert trainer.detail.startswith("trainer-0: killed by SIGKILL (9)")
    (stopped,) = tiny_run.events_of(run, "worker_answers")
    assert (stopped.worker, stopped.found_by) == ("generator-0", "health")
    assert stopped.lost_s >= 7.5
    text = " ".join(tiny_run.output_of("report", run).split())
    assert "Workers: died: trainer-0, verifier-0; stalled: generator-0; 2 brought back" in text


def test_a_verifier_that_raises_hangs_and_returns_nan(inputs: Any, tmp_path: Path) -> None:
    verifier = {"name": "tiny_verifiers:troubled", "parameters.folder": str(tmp_path), "timeout_s": 1.0}
    config = tiny_run.write_experiment(tmp_path, run={"steps": 5}, verifier=verifier, **inputs)
    run = tmp_path / "run"
    command = tiny_run.train(config)
    assert command.process.returncode == 0, command.output
    report = tiny_run.audited(run)
    assert report.completed_steps == 5
    causes = [cause for (cause,) in rows(run, "SELECT cause FROM rollouts WHERE ending = 'failed'")]
    assert len(causes) == report.rollouts["failed"] > 5
    for words in ("the checker broke", "timed out after 1 s", "nan"):
        assert any(words in cause for cause in causes), causes
    # a failure is never a reward: those rollouts carry none into training
    assert rows(run, "SELECT count(*) FROM rollouts WHERE ending = 'trained' AND boundary IS NOT NULL") == [(0,)]
    failures = sum(step.failures.get("reward", 0) for step in tiny_run.steps_of(run))
    assert failures == len(causes)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small file system can't be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path, spare_bytes: int) -> Path:
    """A file that takes all the space but ``spare_bytes``."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    os.truncate(filler, max(0, filler.stat().st_size - spare_bytes))
    return filler


def test_a_checkpoint_that_does_not_fit(inputs: Any, tmp_path: Path, disk: Path) -> None:
    config = tiny_run.write_experiment(tmp_path, run={"directory": str(disk / "run")}, **inputs)
    experiment = tiny_run.experiment_of(config).model_dump(mode="json")
    trainer = TrainerService(Context(), experiment=experiment, run_id="full-disk")
    first, second = checkpoint_path(disk / "run", 1), checkpoint_path(disk / "run", 2)
    trainer.save_checkpoint(str(first), {})
    for spare_kb in (1, 40, 100):  # hardly a folder; the model only; a part of the optimiser
        filler = fill(disk, spare_kb * 1024)
        with pytest.raises(StorageFailed, match=r"step_00000002 can't be written.*(?i:no space left)"):
            trainer.save_checkpoint(str(second), {})
        filler.unlink()
        assert find_checkpoints(disk / "run") == [first]
        assert tiny_run.leftovers(disk / "run") == []
    trainer.save_checkpoint(str(second), {})
    assert find_checkpoints(disk / "run") == [first, second]


@pytest.mark.parametrize(
    "spare_kb", [0, pytest.param(150, marks=pytest.mark.slow)], ids=["nothing-fits", "a-little-fits"]
)
def test_a_full_disk(inputs: Any, tmp_path: Path, disk: Path, spare_kb: int) -> None:
    config = tiny_run.write_experiment(
        tmp_path, run={"steps": ENDLESS, "directory": str(disk / "run")}, checkpoint={"every_steps": 5}, **inputs
    )
    run = disk / "run"
    with tiny_run.headway("train", config, "--quiet", run=tmp_path / "run") as command:
        command.until(lambda: find_checkpoints(run), "a checkpoint")
        filler = fill(disk, spare_kb * 1024)
        assert command.wait() == 1, command.output
    assert "Traceback" not in command.output
    assert "no space left" in command.output.lower(), command.output
    filler.unlink()
    steps = tiny_run.audited(run).completed_steps + 3
    again = tiny_run.train(config, "--resume", f"--run.steps={steps}")
    assert again.process.returncode == 0, again.output
    assert tiny_run.audited(run).completed_steps == steps
    assert tiny_run.leftovers(run) == []


# --- bad input ---------------------------------------------------------------------------------------------


def test_bad_input_is_refused_with_the_key(inputs: Any, tmp_path: Path) -> None:
    config = tiny_run.write_experiment(tmp_path, **inputs)

    def refusal(*overrides: str) -> str:
        return tiny_run.refused("train", config, "--quiet", *overrides)

    assert re.search("queue.budgte.*budget", refusal("--queue.budgte=3"), re.DOTALL)
    assert "model.path" in refusal("--model.path=/nowhere/at/all")
    assert re.search("tasks.train.*/nowhere/tasks.jsonl", refusal("--tasks.train.path=/nowhere/tasks.jsonl"), re.DOTALL)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert "tasks.train" in refusal(f"--tasks.train.path={empty}")
    model = tmp_path / "no-eos"
    shutil.copytree(inputs["model"]["path"], model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("eos_token")
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    for name in ("config.json", "generation_config.json"):
        if (model / name).exists():
            config_json = json.loads((model / name).read_text())
            config_json.pop("eos_token_id", None)
            (model / name).write_text(json.dumps(config_json))
    said = refusal(f"--model.path={model}")
    assert "model.path" in said
    assert "eos" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_mistake_found_at_the_start_leaves_the_folder_free(inputs: Any, tmp_path: Path) -> None:
    """The verifier is imported by its process, after the run has taken its folder."""
    config = tiny_run.write_experiment(tmp_path, **inputs)
    assert "did you mean 'exact'?" in tiny_run.refused("train", config, "--quiet", "--verifier.name=exakt")
    assert "nosuch" in tiny_run.refused("train", config, "--quiet", "--algorithm.loss=nosuch:loss")
    tiny_run.output_of("train", config, "--quiet", "--run.steps=1")
