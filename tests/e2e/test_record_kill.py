"""kill -9 in the middle of recording: what was written is exact, what wasn't is counted, the next process goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.buffer.store import GroupBuffer
from headway.config.schema import LedgerConfig
from headway.runtime.clock import RealClock
from headway.telemetry.rollouts.reader import RolloutRecord
from headway.telemetry.rollouts.recorder import EVENT_ROLLOUTS_LOST, RolloutRecorder
from headway.telemetry.rollouts.segments import list_segments
from tests.support.recorded import random_group, rollouts_in

pytestmark = pytest.mark.real
ROOT = Path(__file__).resolve().parents[2]

# Finishes groups as fast as it can, in segments of 200 kB, and acknowledges each once it is committed.
WRITER = """
import os, sys, time
from pathlib import Path
from headway.buffer.store import GroupBuffer
from headway.config.schema import LedgerConfig
from headway.records.rollout import Batch
from headway.runtime.clock import RealClock
from headway.telemetry.rollouts import recorder
from headway.telemetry.rollouts.recorder import RolloutRecorder
from tests.support.recorded import random_group
recorder.FLUSH_S = 0.05

run = Path(sys.argv[1])
recorder = RolloutRecorder(run, LedgerConfig(), RealClock(), lambda *a, **k: None, segment_bytes=200_000)
buffer = GroupBuffer(run / "buffer.db", 64, recorder=recorder)
pending = buffer.pending_batch()
if pending is not None:
    buffer.complete_step(pending.step, "trained")
ready = []
for record in buffer.open_groups():
    index = record.group.index
    if record.state == "open":
        buffer.finish_group(random_group(index, 4))
    ready.append(index)
while True:
    while len(ready) < 8:
        group = random_group(buffer.next_index, 4)
        buffer.admit(group.group)
        buffer.finish_group(group)
        ready.append(group.group.index)
        os.write(1, b"%f\\n" % time.monotonic())
    step = buffer.completed_steps
    batch, ready = ready[:8], ready[8:]
    buffer.commit_batch(Batch(step=step, groups=tuple(batch)))
    buffer.complete_step(step, "trained")
"""


def require_exact(run: Path, start: int = 0) -> int:
    """Every recorded rollout from number ``start`` on is there once, and as it was finished; their number."""
    written = rollouts_in(run, start)
    assert len({(rollout.group, rollout.member) for rollout in written}) == len(written), "each once"
    expected = {group: random_group(group, 4).rollouts for group in {rollout.group for rollout in written}}
    assert all(rollout == expected[rollout.group][rollout.member] for rollout in written)
    return len(written)


@pytest.mark.slow
def test_kills_lose_what_was_not_flushed_and_say_so(tmp_path: Path) -> None:
    chance, told = random.Random(3), list[tuple[str, dict[str, Any]]]()
    count = lost = 0
    for _ in range(6):
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
        assert writer.stdout is not None
        finished_s = [float(writer.stdout.readline()) for _ in range(chance.randrange(1, 400))]
        os.kill(writer.pid, signal.SIGKILL)
        finished_s += [float(line) for line in writer.stdout.readlines() if line.endswith(b"\n")]
        assert writer.wait() == -signal.SIGKILL

        record = RolloutRecord(tmp_path)
        before, count = count, record.count()
        assert before + require_exact(tmp_path, before) == count
        # The next process, which records nothing more here, counts what is missing.
        told.clear()
        again = RolloutRecorder(
            tmp_path, LedgerConfig(), RealClock(), lambda name, _, **data: told.append((name, data))
        )
        buffer = GroupBuffer(tmp_path / "buffer.db", 64, recorder=again)
        finished = buffer.rollout_counts()["admitted"] - sum(
            len(one.rollouts) or one.group.size for one in buffer.open_groups() if one.state == "open"
        )
        ended = {*range(buffer.next_index)} - {one.group.index for one in buffer.open_groups()}
        buffer.close()
        again.close()
        assert set(RolloutRecord(tmp_path).endings()) == ended, "those after the last flush out of the books"
        missing = finished - count - lost
        recent = sum(finished_s[-1] - at_s < 0.05 for at_s in finished_s)
        assert missing <= 4 * (recent + 1), "at most what has finished since the last flush, and the group that it cut"
        assert told == ([(EVENT_ROLLOUTS_LOST, {"rollouts": missing})] if missing else [])
        lost += missing
    assert require_exact(tmp_path) == count, "nor did a later kill harm what was written before"
    assert lost > 0
    assert len(list_segments(tmp_path / "rollouts" / "finished")) > 12, "each process began segments of its own"
