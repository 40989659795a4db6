"""Outside workers and the orchestrator killed in mid-group, 20 times: what was acknowledged is in the books."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import tiny_run
from buffer_worker import remote_sections

WORKER = str(tiny_run.HERE / "buffer_worker.py")
STEPS = 40
KILLS = 20
WORKERS = 3


def lines(journal: Path, word: str) -> list[list[str]]:
    found = [line.split() for line in journal.read_text().splitlines()] if journal.exists() else []
    return [words for words in found if words[0] == word]


@pytest.mark.long
def test_what_was_acknowledged_is_trained_on_once_over_twenty_kills(tmp_path: Path) -> None:
    tiny_run.write_inputs(tmp_path)
    sections = remote_sections(tmp_path, lease_s=0.25)
    config = tiny_run.write_experiment(
        tmp_path, run={"steps": STEPS}, rollout={"retries": 50}, ledger={"trackers": [], "trace": False}, **sections
    )
    url, journal, chance = f"http://{sections['endpoint']['address']}", tmp_path / "worker.log", random.Random(11)
    run = tmp_path / "run"

    def worker() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, WORKER, url, str(journal)])

    workers = [worker() for _ in range(WORKERS)]
    killed = Counter[str]()
    resume: list[str] = []
    try:
        while sum(killed.values()) < KILLS:
            with tiny_run.headway("train", config, "--quiet", *resume, run=run, fault="thin-none") as command:
                resume = ["--resume"]
                for victim in chance.choices(("worker", "orchestrator"), k=3):
                    begun = len(lines(journal, "lease"))
                    command.until(lambda before=begun: len(lines(journal, "lease")) > before + 20, "leases")
                    time.sleep(chance.random() * 0.1)
                    killed[victim] += 1
                    if victim == "orchestrator":
                        break
                    place = chance.randrange(WORKERS)
                    workers[place].kill()
                    workers[place].wait()
                    workers[place] = worker()
                assert command.process.poll() is None, command.output
                command.process.kill()
                command.process.communicate()
            assert tiny_run.audited(run).completed_steps < STEPS
        with tiny_run.headway("train", config, "--quiet", "--resume", run=run, fault="thin-none") as command:
            command.wait()
    finally:
        for process in workers:
            process.kill()
            process.wait()
    assert command.process.returncode == 0, command.output
    tiny_run.require_whole(run, STEPS)
    assert min(killed.values()) >= 5, killed
    require_acknowledged(run, lines(journal, "finished"))
    assert tiny_run.events_of(run, "lease_expired")  # of workers that were killed


def require_acknowledged(run: Path, finished: list[list[str]]) -> None:
    """Every finish that was answered is in the books, with its reward, and no member was finished twice."""
    with sqlite3.connect(f"file:{run / 'buffer.db'}?mode=ro", uri=True) as connection:
        rows = connection.execute("SELECT grp || '-' || member, reward, ending FROM rollouts WHERE finished").fetchall()
    booked = {name: (reward, ending) for name, reward, ending in rows}
    acknowledged = [(uid.rpartition(".")[0], float(reward)) for _, uid, reward in finished]
    assert len(acknowledged) >= STEPS * 10
    assert max(Counter(name for name, _ in acknowledged).values()) == 1
    lost = [(name, reward, booked.get(name)) for name, reward in acknowledged if booked.get(name, (None,))[0] != reward]
    assert lost == []
