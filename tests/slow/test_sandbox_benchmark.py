"""The benchmark of sandboxes runs and measures what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.real, pytest.mark.timeout(200)]
ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_its_last_line_has_the_numbers():
    command = [sys.executable, str(ROOT / "benchmarks" / "sandbox.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for measured in (found, found["bubblewrap"], found["docker"]):
        if measured is None:  # bubblewrap or Docker: not here
            continue
        for name in ("cold_start_ms_p50", "exec_ms_p50", "creates_per_s", "mib_per_live", "queued_wait_ms_p99"):
            assert measured[name] > 0, name
        assert measured["queued_lost"] == 0
