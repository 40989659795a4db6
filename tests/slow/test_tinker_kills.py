"""`headway serve-tinker` under kills at named points, doubled requests and lost replies: each step happens once, with
the bits of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sqlite3
import statistics
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import warm_programs
from cookbook import KEY, SDK
from faulty_tinker import POINTS
from lossy_relay import lossy_relay
from served_tinker import write_settings
from tiny_run import HERE, write_inputs

pytestmark = [
    pytest.mark.real,
    pytest.mark.long,
    pytest.mark.skipif(not SDK.is_file(), reason="no tinker SDK: make install-clients, or install-cookbook"),
]
KILLS, STEPS = 60, 24
LIMIT_S = 600.0
CLIENT = "client"


class Trial:
    """A service that is started again whenever it dies, and a client that is when it was killed."""

    def __init__(self, folder: Path, model: Path) -> None:
        folder.mkdir()
        self.folder, self._model = folder, model
        self.trouble = folder / "trouble"
        self.trouble.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._file = write_settings(folder, model)
        self._log = (folder / "log").open("w")
        self.service = self._start_service()
        self.struck: list[tuple[float, str]] = []

    def _start_service(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "HEADWAY_TROUBLE": str(self.trouble)}
        command = ["serve-tinker", str(self._file), f"--endpoint.address=127.0.0.1:{self.port}"]
        outputs: dict[str, Any] = {"stdout": self._log, "stderr": self._log}
        return warm_programs.start(str(HERE / "faulty_tinker.py"), *command, environment=environment, **outputs)

    def _start_client(self, address: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": "", "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
        words = [address, KEY, str(self._model), str(STEPS), str(self.folder / "progress")]
        command = [str(SDK), str(HERE / "tinker_steady.py"), *words]
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=(self.folder / "client").open("a"), text=True
        )

    def run(self, points: list[tuple[str, int]], address: str, outage_s: float = 0.0) -> dict[str, Any]:
        """Run the client to its end, with faults one after the other; returns what it has seen."""
        client, until_s, waiting = self._start_client(address), time.monotonic() + LIMIT_S, list(points)
        placed = ""
        while client.poll() is None or client.returncode == -signal.SIGKILL:
            assert time.monotonic() < until_s, f"{placed or 'nothing'} is left, {self.struck}"
            if client.returncode is not None:
                client = self._start_client(address)
            if self.service.poll() is not None:
                assert self.service.returncode == -signal.SIGKILL, (self.folder / "log").read_text()[-4000:]
                time.sleep(outage_s)
                self.service = self._start_service()
            struck = self.trouble / "struck"
            if struck.exists():
                time_s, point = struck.read_text().split()
                self.struck.append((float(time_s), point))
                struck.unlink()
                placed = ""
            if not placed and waiting:
                placed, count = waiting.pop(0)
                if placed == CLIENT:
                    time.sleep(0.3 * count)
                    if client.poll() is None:
                        client.kill()
                        client.wait()
                        self.struck.append((time.time(), placed))
                    placed = ""
                else:
                    (self.trouble / placed).write_text(str(count))
            time.sleep(0.02)
        output, _ = client.communicate()
        assert client.returncode == 0, output[-4000:] + (self.folder / "client").read_text()[-4000:]
        return json.loads(output.strip().splitlines()[-1])

    def end(self) -> None:
        if self.service.poll() is None:
            self.service.send_signal(signal.SIGTERM)
            self.service.wait(60)
        self._log.close()

    def rows(self, text: str) -> list[Any]:
        connection = sqlite3.connect(self.folder / "store" / "log.sqlite")
        with connection:
            return connection.execute(text).fetchall()

    def recoveries_s(self) -> list[float]:
        """From each kill of the service or a worker to the next reply."""
        replied = sorted(time_s for (time_s,) in self.rows("SELECT replied_s FROM requests WHERE replied_s NOT NULL"))
        of_workers = [time_s for time_s, point in self.struck if point != CLIENT]
        later = [next((later_s - time_s for later_s in replied if later_s > time_s), None) for time_s in of_workers]
        return [seconds for seconds in later if seconds is not None]

    def audit(self) -> None:
        """Each step has one reply, and none failed; the numbers of each model whose client lived are whole."""
        assert not self.rows("SELECT * FROM requests WHERE replied_s IS NULL AND kind = 'optim_step'")
        assert not self.rows("SELECT scope, sequence, reply FROM requests WHERE failed = 1")
        models = self.rows("SELECT DISTINCT scope FROM requests WHERE scope LIKE '%:train:%' ORDER BY rowid")
        for (scope,) in models[-1:] if CLIENT in [point for _, point in self.struck] else models:
            rows = self.rows(f"SELECT sequence FROM requests WHERE scope = '{scope}' ORDER BY sequence")
            assert [number for (number,) in rows] == list(range(len(rows)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    write_inputs(folder)
    return folder / "model"


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    trial = Trial(tmp_path_factory.mktemp("quiet") / "trial", model)
    seen = trial.run([], f"http://127.0.0.1:{trial.port}")
    trial.end()
    trial.audit()
    return seen


def same(seen: dict[str, Any], undisturbed: dict[str, Any]) -> None:
    for name in ("losses", "sampled", "last"):
        assert seen[name] == undisturbed[name], name


def test_sixty_kills_change_no_bit(model: Path, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    counts, recoveries_s = Counter[str](), list[float]()
    for number in range(30):
        if sum(counts.values()) >= KILLS:
            break
        chance = random.Random(number)
        points = [(chance.choice([*POINTS, CLIENT]), chance.randint(1, 6)) for _ in range(6)]
        trial = Trial(tmp_path / str(number), model)
        with lossy_relay(trial.port, number) as address:
            seen = trial.run(points, address)
        trial.end()
        trial.audit()
        same(seen, undisturbed)
        counts.update(point for _, point in trial.struck)
        recoveries_s += trial.recoveries_s()
        print(f"trial {number}: {[point for _, point in trial.struck]}", flush=True)
    print(f"{sum(counts.values())} kills {dict(counts)}; recovery median {statistics.median(recoveries_s):.2f} s, "
          f"longest {max(recoveries_s):.2f} s")  # fmt: skip
    assert sum(counts.values()) >= KILLS
    assert statistics.median(recoveries_s) <= 5


def test_an_outage_of_150_seconds_is_waited_for(model: Path, undisturbed: dict[str, Any], tmp_path: Path) -> None:
    trial = Trial(tmp_path / "trial", model)
    seen = trial.run([("after_commit", 25)], f"http://127.0.0.1:{trial.port}", outage_s=150.0)
    trial.end()
    trial.audit()
    assert [point for _, point in trial.struck] == ["after_commit"]
    same(seen, undisturbed)
