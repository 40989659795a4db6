"""`headway kernels`: files that it writes, a real kernel service over a scripted judge, bad input."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kernel_service import candidate, served_kernels

from headway.cli import main as cli
from headway.config.sources import TaskSource
from headway.kernels.tasks import builtin_tasks
from headway.tasks.sources import load_tasks

KEY = "a-key-of-sixteen-characters"
Captured = pytest.CaptureFixture[str]


def lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(capsys: Captured, *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["kernels", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def tasks(tmp_path: Path, capsys: Captured) -> Path:
    assert run(capsys, "tasks", tmp_path / "tasks.jsonl", "--backend", "torch", "--level", 1)[0] == 0
    return tmp_path / "tasks.jsonl"


@contextmanager
def service(**settings: Any) -> Iterator[str]:
    """Address of a kernel service in a thread, over ScriptedJudge."""
    started, stop = threading.Event(), asyncio.Event()
    found: dict[str, Any] = {}

    async def serve() -> None:
        async with served_kernels(**settings) as served:
            found.update(address=served.address, loop=asyncio.get_running_loop())
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(20)
    try:
        yield found["address"]
    finally:
        found["loop"].call_soon_threadsafe(stop.set)
        thread.join(20)
    assert not thread.is_alive()


# --- tasks -----------------------------------------------------------------------------------------------


def test_builtin_tasks_are_written_by_level_with_a_held_out_part(tmp_path: Path, capsys: Captured):
    out = tmp_path / "t.jsonl"
    code, said, _ = run(capsys, "tasks", out, "--level", 2, "--level", 1, "--held-out", 0.25, "--seed", 7)
    assert code == 0
    assert f"{out}: 17 tasks (level 1: 9, level 2: 8)" in said
    held = tmp_path / "t.held-out.jsonl"
    assert f"{held}: 5 tasks held out (level 1: 3, level 2: 2)" in said
    both = [load_tasks(TaskSource(path=str(file))) for file in (out, held)]
    assert [len(part) for part in both] == [17, 5]
    names = {task.metadata["kernel"]["name"] for part in both for task in part}
    assert names == {task.name for task in builtin_tasks(levels=(1, 2))}


def test_tasks_of_kernelbench_and_jsonl_are_written(tmp_path: Path, capsys: Captured):
    source = builtin_tasks()[0].source
    folder = tmp_path / "KernelBench" / "KernelBench" / "level1"
    folder.mkdir(parents=True)
    (folder / "19_ReLU.py").write_text(source.replace("COLUMNS = 2048", "COLUMNS = 999983"))
    bench = tmp_path / "KernelBench"
    code, said, _ = run(capsys, "tasks", tmp_path / "a.jsonl", "--kernelbench", bench, "--level", 1)
    assert (code, "1 tasks (level 1: 1)" in said) == (0, True)
    assert run(capsys, "tasks", tmp_path / "b.jsonl", "--kernelbench", bench, "--level", 1, "--full-size")[0] == 0
    assert ["COLUMNS = 999983" in (tmp_path / name).read_text() for name in ("a.jsonl", "b.jsonl")] == [False, True]
    rows = [{"name": name, "source": source, "level": 7, "backend": "torch"} for name in ("one", "two")]
    code, said, _ = run(capsys, "tasks", tmp_path / "c.jsonl", "--jsonl", lines(tmp_path / "raw.jsonl", *rows))
    assert "1 tasks left out: an earlier one has the same prompt" in said
    (task,) = load_tasks(TaskSource(path=str(tmp_path / "c.jsonl")))
    assert (task.metadata["kernel"]["level"], task.metadata["kernel"]["backend"]) == (7, "torch")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tasks", "there.jsonl"], "there.jsonl exists"),
        (["tasks", "no/such/t.jsonl"], "there is no folder no/such"),
        (["tasks", "t.jsonl", "--level", "5"], "--level 5: valid: 1, 2, 3, 4"),
        (["tasks", "t.jsonl", "--jsonl", "raw.jsonl", "--level", "2"], "--level 2: valid: 1"),
        (["tasks", "t.jsonl", "--backend", "rust"], "--backend rust: valid: torch, cpp, triton, cuda"),
        (["tasks", "t.jsonl", "--kernelbench", "nowhere"], "nowhere: not a checkout of KernelBench"),
        (["tasks", "t.jsonl", "--jsonl", "nowhere.jsonl"], "no such file: nowhere.jsonl"),
        (["tasks", "t.jsonl", "--jsonl", "raw.jsonl", "--kernelbench", "x"], "valid: one of them"),
        (["tasks", "t.jsonl", "--held-out", "1.0"], "--held-out 1: valid: from 0 to below 1"),
        (["tasks", "t.jsonl", "--held-out", "0.01"], "leaves one file without tasks"),
        (["tasks", "t.jsonl", "--full-size"], "--full-size: valid: with --kernelbench"),
        (["eval", "--tasks", "nowhere", "--answers", "rows", "--out", "r", "--local"], "no such file: nowhere"),
        (["eval", "--tasks", "tasks.jsonl", "--answers", "nowhere", "--out", "r", "--local"], "no such file: nowhere"),
        (["eval", "--tasks", "rows", "--answers", "rows", "--out", "r", "--local"], 'missing "prompt"'),
        (["eval", "--tasks", "tasks.jsonl", "--answers", "rows", "--out", "there"], "there.json exists"),
        (["eval", "--tasks", "tasks.jsonl", "--answers", "rows", "--out", "r"], "either --addresses"),
        (
            ["eval", "--tasks", "tasks.jsonl", "--answers", "rows", "--out", "r", "--addresses", "a:1"],
            "http://HOST:PORT",
        ),
        (
            ["eval", "--tasks", "tasks.jsonl", "--answers", "rows", "--out", "r", "-k", "2"],
            "-k 2: no task has more than 1",
        ),
        (["sft-data", "--tasks", "tasks.jsonl", "--conversations", "rows", "--out", "there.jsonl"], "exists"),
        (
            ["sft-data", "--tasks", "tasks.jsonl", "--conversations", "rows", "--out", "s", "--need", "x"],
            "--need x: valid",
        ),
        (
            ["sft-data", "--tasks", "tasks.jsonl", "--conversations", "rows", "--out", "s", "--longest", "9"],
            "--shortest 100: valid: at most --longest, 9",
        ),
        (["sft-data", "--tasks", "tasks.jsonl", "--conversations", "rows", "--out", "s"], "either --addresses"),
        (
            ["sft-data", "--tasks", "tasks.jsonl", "--conversations", "rows", "--out", "s", "--model", "nowhere"],
            "nowhere",
        ),
    ],
)
def test_bad_input_ends_with_2_and_writes_nothing(
    tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, arguments: list[str], message: str
):
    monkeypatch.chdir(tasks.parent)
    lines(Path("raw.jsonl"), {"name": "one", "source": builtin_tasks()[0].source})
    lines(Path("rows"), {"task": "elu", "source": "class ModelNew: ..."})
    for name in ("there.jsonl", "there.json"):
        Path(name).touch()
    before = sorted(Path().iterdir())
    code, _, error = run(capsys, *arguments)
    assert (code, message in error) == (2, True), error
    assert error.startswith("error: ")
    assert sorted(Path().iterdir()) == before


# --- eval and sft-data against a service ------------------------------------------------------------------


def test_answers_are_scored_by_a_service(tasks: Path, capsys: Captured):
    folder = tasks.parent
    (folder / "key").write_text(KEY)
    answers = lines(
        folder / "answers.jsonl",
        {"task": "elu", "source": candidate(speedup=2.5)},
        {"task": "elu", "source": candidate(fault="timeout")},
        {"task": "mish", "text": f"```python\n{candidate(speedup=0.9)}```"},
        {"task": "softplus", "source": candidate(fault="syntax_error")},
        {"task": "hardswish", "source": candidate(task_fails="its reference fails")},
    )
    options = ["--tasks", tasks, "--answers", answers, "--model", "small", "-k", 1, "-k", 2, "--timeout-s", 30]
    with service(keys=[KEY], retries=0) as address:
        code, said, error = run(
            capsys, "eval", *options, "--out", folder / "report", "--addresses", address, "--key-file", folder / "key"
        )
        assert code == 0, error
        assert "5 of 5 evaluated" in error
        assert "| small | 4 of 12 | 4 (1 missing) | 0.667 [" in said
        refused = run(capsys, "eval", *options, "--out", folder / "other", "--addresses", address)
    assert refused[0] == 1
    assert "no API key" in refused[2]
    assert not (folder / "other.json").exists()
    report = json.loads((folder / "report.json").read_text())
    assert report["row"]["correct_pass@1"][0] == pytest.approx((0.5 + 1 + 0) / 3)
    assert report["row"]["correct_pass@2"][0] == 1.0
    assert [report["row"][f"fast_{p}"][0] for p in ("0.8", "1", "1.5", "2")] == pytest.approx(
        [0.5, 0.5 / 3, 0.5 / 3, 0.5 / 3]
    )
    assert [name for name, _ in report["missing"]] == ["hardswish"]
    assert report["scores"]["outcomes"] == {"correct": 2, "timeout": 1, "syntax_error": 1}
    text = (folder / "report.md").read_text()
    assert all(line in text for line in said.splitlines()[:3])


def test_conversations_are_written_from_a_services_evaluations(tasks: Path, capsys: Captured):
    folder = tasks.parent
    rows = lines(
        folder / "rows.jsonl",
        {"task": "elu", "source": candidate(fault="timeout") + "first = 1\n"},
        {"task": "elu", "source": candidate(speedup=2.5) + "second = 1\n"},
        {"task": "mish", "source": candidate(cheat="it looks") + "third = 1\n"},
        {"task": "nothing", "source": candidate()},
    )
    options = ["--tasks", tasks, "--conversations", rows, "--seeds", 2, "--timeout-s", 30]
    with service() as address:
        code, said, error = run(capsys, "sft-data", *options, "--addresses", address, "--out", folder / "sft.jsonl")
        assert code == 0, error
        assert "1 of 4 rows written: 1 of 2 turns" in said
        assert "1 left out: unknown task\n1 left out: cheat\n1 left out: wrong\n" in said
        bad = ["--need", "faster", "--least-speedup", 3, "--addresses", address, "--out", folder / "none.jsonl"]
        code, _, error = run(capsys, "sft-data", *options, *bad)
    assert (code, "no conversation passed" in error) == (1, True)
    assert not (folder / "none.jsonl").exists()
    assert json.loads((folder / "none.counts.json").read_text())["left_out"]["slow"] == 1
    (row,) = map(json.loads, (folder / "sft.jsonl").read_text().splitlines())
    assert [one["role"] for one in row["messages"]] == ["user", "assistant", "user", "assistant"]
    assert "ends with timeout" in row["messages"][2]["content"]
    counts = json.loads((folder / "sft.counts.json").read_text())
    assert (counts["rows"], counts["written"], counts["turns"]) == (4, 1, {"2": 1})
    assert counts["settings"]["counted_by"] == "characters / 4"


@pytest.mark.parametrize("command", ["tasks", "eval", "sft-data"])
def test_each_command_has_help_with_an_example(command: str, capsys: Captured):
    code, said, _ = run(capsys, command, "--help")
    assert (code, f"Example: headway kernels {command}" in " ".join(said.split())) == (0, True)
