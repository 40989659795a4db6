"""The `headway` command with changes of placement forced on its run: ``python moving_headway.py JOURNAL MOVES ...``.

MOVES is a JSON list of ``[version, generator devices, trainer devices]``: the run is told to move there at the boundary
after which ``version`` steps are completed. Every worker's name and process id go to JOURNAL, and "move VERSION" as
each move begins.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from faulty_headway import note_workers

from headway.cli.main import main
from headway.orchestrator.actors.moves import Moves
from headway.records.plan import PlannedMove, RunPlacement


def force(moves: dict[int, RunPlacement], journal: Path) -> None:
    original = Moves.at_boundary

    def at_boundary(self: Any) -> Awaitable[None]:
        state = self._run.state
        if (placement := moves.pop(state.version, None)) is not None:
            state.wanted_move = PlannedMove(placement=placement, gain=1.0, rate=1.0, cost_s=1.0)
            with journal.open("a") as file:
                file.write(f"move {state.version}\n")
        return original(self)

    Moves.at_boundary = at_boundary  # type: ignore[method-assign]


if __name__ == "__main__":
    journal_path, wanted, *command = sys.argv[1:]
    note_workers(journal_path)
    force({v: RunPlacement(generator=tuple(g), trainer=tuple(t)) for v, g, t in json.loads(wanted)}, Path(journal_path))
    sys.exit(main(command))
