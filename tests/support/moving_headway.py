"""The `headway` command with changes of placement forced on its run: ``python moving_headway.py JOURNAL MOVES ...``.

MOVES is a JSON list of ``[version, generator devices, trainer devices, rate before]``, the last of which may be left
out: the run is told to move there at the boundary after which ``version`` steps are completed. Every worker's name and
process id go to JOURNAL, and "move VERSION" as each move begins. Its pulse beats ten times as fast: what is short is in
its trace.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from faulty_headway import note_workers

from headway.cli.main import main
from headway.orchestrator import queue_snapshots
from headway.orchestrator.actors.placement_changer import PlacementChanger
from headway.records.plan import PlannedMove, RunPlacement


def force(moves: dict[int, PlannedMove], journal: Path) -> None:
    original = PlacementChanger.apply_planned

    def apply_planned(self: Any) -> Awaitable[None]:
        state = self._run.state
        if (move := moves.pop(state.version, None)) is not None:
            state.pending_move = move
            with journal.open("a") as file:
                file.write(f"move {state.version}\n")
        return original(self)

    PlacementChanger.apply_planned = apply_planned  # type: ignore[method-assign]


def move_to(generator: list[str], trainer: list[str], rate: float = 1.0) -> PlannedMove:
    placement = RunPlacement(generator=tuple(generator), trainer=tuple(trainer))
    return PlannedMove(placement=placement, gain=1.0, rate=rate, cost_s=1.0)


if __name__ == "__main__":
    journal_path, wanted, *command = sys.argv[1:]
    note_workers(journal_path)
    queue_snapshots.SNAPSHOT_INTERVAL_S = 0.1
    force({version: move_to(*rest) for version, *rest in json.loads(wanted)}, Path(journal_path))
    sys.exit(main(command))
