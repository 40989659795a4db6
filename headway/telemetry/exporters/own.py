"""A user's own function as an exporter: ``hooks.logging`` is called with every line of the ledger."""

from __future__ import annotations

from headway.records.ledger import LedgerLine
from headway.runtime.hooks import Hook, load_hook
from headway.telemetry.exporters.exporters import Exporter, Start

KEY = "hooks.logging"


class OwnLogging(Exporter):
    """Calls ``function(line)`` with `StepRecord`, `EvaluationRecord` and `EventRecord` as they are recorded, one after
    another, in a thread of its own. Whatever it raises costs that line; what it returns is ignored."""

    def __init__(self, start: Start) -> None:
        """Raises ConfigurationError for a function that can't be imported or takes something else."""
        self._hook = load_own_logging(start.experiment.hooks.logging)
        self.place = self._hook.name

    def line(self, line: LedgerLine) -> None:
        self._hook(line)


def load_own_logging(name: str) -> Hook:
    """The function that ``hooks.logging`` names. Raises ConfigurationError."""
    return load_hook(KEY, name, {}, ("line",))
