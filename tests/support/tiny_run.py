"""Whole runs of `headway train` on a model of a few thousand weights, as processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import warm_programs

from headway.buffer.audit import AuditReport, audit_run
from headway.config.load import load_experiment
from headway.config.schema import Experiment
from headway.models.initialise import initialise_model
from headway.orchestrator.train import run_identity
from headway.records.ledger import EventRecord, LedgerLine, StepRecord
from headway.telemetry.ledger import read_ledger

HERE = Path(__file__).resolve().parent
FAULTY = HERE / "faulty_headway.py"
MOVING = HERE / "moving_headway.py"
LIMIT_S = 150.0  # for whatever a test waits for; pytest's own limit comes later
POLL_S = 0.02

# --- inputs ----------------------------------------------------------------------------------------------


def write_inputs(folder: Path) -> None:
    """A random model (``folder/model``) and 200 tasks (``folder/tasks.jsonl``)."""
    prompts = [f"{a}+{b}=" for a in range(10, 30) for b in range(10)]
    rows = [json.dumps({"prompt": prompt, "answer": "1"}) for prompt in prompts]
    (folder / "tasks.jsonl").write_text("\n".join(rows) + "\n")
    initialise_model(
        folder / "model", prompts, layers=1, width=32, heads=2, kv_heads=1, intermediate=48, character_level=True
    )


def write_experiment(folder: Path, **sections: dict[str, Any]) -> Path:
    """``folder/experiment.toml``: small, on cores 0 and 1, verified by `tiny_verifiers.parity`. ``sections`` are merged
    in, where None takes a key out."""
    raw: dict[str, dict[str, Any]] = {
        "run": {"directory": str(folder / "run"), "steps": 6, "seed": 7},
        "model": {"path": str(folder / "model")},
        "tasks.train": {"path": str(folder / "tasks.jsonl")},
        "verifier": {"name": "tiny_verifiers:parity"},
        "rollout": {"group_size": 4, "max_prompt_tokens": 16, "max_response_tokens": 12},
        "generator": {"slots": 16},
        "trainer": {"learning_rate": 2e-3},
        "queue": {"groups_per_step": 4, "budget": 2, "filter_zero_variance": False},
        "checkpoint": {"every_steps": 3},
        "evaluation": {"test": "never"},
        "ledger": {"trackers": []},
    }
    for name, values in sections.items():
        raw[name] = {**raw.get(name, {}), **values}
    lines = []
    for name, values in raw.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {toml(value)}" for key, value in values.items() if value is not None]
    config = folder / "experiment.toml"
    config.write_text("\n".join(lines) + "\n")
    return config


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


def experiment_of(config: Path) -> Experiment:
    return load_experiment(str(config), [])


# --- running ---------------------------------------------------------------------------------------------


@dataclass
class Command:
    """A `headway` command under way."""

    process: subprocess.Popen[str]
    run: Path
    journal: Path  # "NAME PID" of every worker it starts, and the fault when it strikes
    output: str = field(default="")

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Wait for its end; its output is in ``output`` then."""
        try:
            self.output, _ = self.process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.output, _ = self.process.communicate()
            raise AssertionError(f"still running after {limit_s} s:\n{self.output}\n{tail_of(self.run)}") from None
        return self.process.returncode

    def workers(self) -> list[tuple[str, int]]:
        """(name, process id) of every worker started so far, dead ones too."""
        with contextlib.suppress(FileNotFoundError):
            pairs = [line.split() for line in self.journal.read_text().splitlines() if line.startswith("worker ")]
            return [(name, int(pid)) for _, name, pid in pairs]
        return []

    def pid_of(self, worker: str) -> int:
        """Process id of the newest worker called ``worker``."""
        return [pid for name, pid in self.workers() if name == worker][-1]

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until ``condition`` holds. Fails when the command ends first."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            ended = self.process.poll() is not None
            if condition():
                return
            assert not ended, f"ended before {what}:\n{self.process.communicate()[0]}\n{tail_of(self.run)}"
            assert time.monotonic() < deadline, f"no {what} within {LIMIT_S} s\n{tail_of(self.run)}"
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(POLL_S)


@contextmanager
def headway(
    *arguments: str | Path,
    run: Path,
    fault: str = "none",
    moves: Sequence[tuple[int, list[str], list[str]]] | None = None,
    warm: bool = True,
) -> Iterator[Command]:
    """Start ``headway ARGUMENTS`` with ``fault`` (see faulty_headway.py), or with ``moves`` (see moving_headway.py);
    killed when the block is left early. ``warm``: from a process that has imported its modules (see warm_programs.py),
    not in a new interpreter."""
    journal = run.with_name(run.name + ".journal")
    journal.write_text("")
    program = [str(FAULTY), str(journal), fault] if moves is None else [str(MOVING), str(journal), json.dumps(moves)]
    words = [*program, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HEADWAY_TRACEBACK": "0"}
    outputs: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    if warm:
        process = warm_programs.start(*words, environment=environment, **outputs)
    else:
        process = subprocess.Popen([sys.executable, *words], env=environment, text=True, **outputs)
    command = Command(process, run, journal)
    try:
        yield command
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def train(config: Path, *arguments: str, limit_s: float = LIMIT_S, **how: Any) -> Command:
    """Run `headway train CONFIG --quiet ARGUMENTS` to its end; ``how``: see `headway`."""
    with headway("train", config, "--quiet", *arguments, run=config.parent / "run", **how) as command:
        command.wait(limit_s)
    return command


def output_of(*arguments: str | Path) -> str:
    """Standard output of a `headway` command that must succeed."""
    code, output, errors = run_program(warm_programs.HEADWAY, *arguments)
    assert code == 0, output + errors
    return output


def refused(*arguments: str | Path) -> str:
    """Output of a `headway` command that must end with exit code 2 and no traceback."""
    code, *outputs = run_program(warm_programs.HEADWAY, *arguments)
    output = "".join(outputs)
    assert code == 2, output
    assert "Traceback" not in output
    return output


def run_program(program: str | Path, *arguments: str | Path, namespace: str = "") -> tuple[int, str, str]:
    """The exit code and both outputs of a program: see `warm_programs.start`."""
    words, outputs = map(str, arguments), {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    how: dict[str, Any] = {"environment": dict(os.environ), "namespace": namespace, "cwd": HERE}
    with warm_programs.start(str(program), *words, **how, **outputs) as process:
        try:
            output, errors = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    return process.returncode, output, errors


def minimal_losses(config: Path) -> list[float]:
    """Losses of examples/minimal_loop.py on the same experiment."""
    code, output, errors = run_program(HERE / "minimal_losses.py", HERE.parents[1] / "examples", config)
    assert code == 0, errors
    return json.loads(output.splitlines()[-1])


# --- what a run left -------------------------------------------------------------------------------------


def steps_of(run: Path) -> list[StepRecord]:
    return [line for line in lines_of(run) if isinstance(line, StepRecord)]


def events_of(run: Path, name: str) -> list[EventRecord]:
    return [line for line in lines_of(run) if isinstance(line, EventRecord) and line.event == name]


def lines_of(run: Path) -> list[LedgerLine]:
    return read_ledger(run) if (run / "ledger.jsonl").exists() else []


def tail_of(run: Path) -> str:
    """The ends of a run's ledger and logs, for a failed test's message."""
    files = [run / "ledger.jsonl", *sorted((run / "logs").glob("*.log"))]
    return "\n".join(f"--- {file.name}\n{file.read_text()[-1500:]}" for file in files if file.exists())


def audited(run: Path) -> AuditReport:
    """The audit's report; fails on violations."""
    report = audit_run(run)
    assert not report.violations, report.violations
    return report


def require_whole(run: Path, steps: int, *, drained: bool = True) -> None:
    """The run is complete: books, log, checkpoints and ledger tell the same history of ``steps`` steps.

    ``drained``: no step more would have been possible, so no finished group is left.
    """
    report = audited(run)
    assert report.completed_steps == steps
    assert report.pending_step is None
    assert report.max_staleness <= 2
    assert report.checkpoints[-1] == steps
    assert set(report.groups) <= {"trained", "failed"} | (set() if drained else {"buffered", "open"})
    (books,) = events_of(run, "accounting")[-1:]
    assert books.data["balanced"] == 1, books.detail
    recorded = steps_of(run)
    assert [step.step for step in recorded] == list(range(steps))  # a kill before a step's line costs its times alone
    assert sum(step.samples for step in recorded) == report.rollouts["trained"]


def exit_of(process_id: int) -> bool:
    """Whether a process is gone (a zombie counts as gone: its parent is about to reap it)."""
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


def leftovers(run: Path) -> list[str]:
    """Shared memory and half-written folders of a run that nobody holds."""
    shared = Path("/dev/shm").glob(f"headway-{run_identity(run)}*")
    scratch = [path for path in run.rglob("*") if re.search(r"\.(tmp|old)$", path.name)]
    return sorted(map(str, [*shared, *scratch]))


def wait_for_exits(command: Command) -> None:
    """Until every worker of a command that ended is gone too; fails after 10 s."""
    deadline = time.monotonic() + 10.0
    while alive := [worker for worker in command.workers() if not exit_of(worker[1])]:
        assert time.monotonic() < deadline, f"workers outlive their run: {alive}"
        with contextlib.suppress(subprocess.TimeoutExpired):  # a pause
            subprocess.run(["sleep", str(POLL_S)], check=True)


def require_nothing_left(command: Command) -> None:
    """After a run's end: its workers are gone, and so are its shared memory and half-written folders."""
    wait_for_exits(command)
    left = leftovers(command.run)
    assert not left, f"left over: {left}"


def inputs_in(folder: Path) -> dict[str, dict[str, Any]]:
    """Sections for `write_experiment` that use the inputs another folder holds."""
    return {"model": {"path": str(folder / "model")}, "tasks.train": {"path": str(folder / "tasks.jsonl")}}
