"""Exporter to a user's own function: ``hooks.logging`` is called with every line of the ledger."""

from __future__ import annotations

from headway.records.ledger import LedgerLine
from headway.runtime.hooks import Hook, load_hook
from headway.telemetry.exporters.exporters import Exporter, Start

KEY = "hooks.logging"


class OwnLogging(Exporter):
    """Calls ``function(line)`` with `StepRecord`, `EvaluationRecord` and `EventRecord` as they are recorded, one after
    another, in a thread of its own. An error costs that line; the result is ignored."""

    def __init__(self, start: Start) -> None:
        """Load the function. Raises ConfigurationError where it can't be imported or takes other arguments."""
        self._hook = load_own_logging(start.experiment.hooks.logging)
        self.place = self._hook.name

    def line(self, line: LedgerLine) -> None:
        self._hook(line)


def load_own_logging(name: str) -> Hook:
    """Load the function that ``hooks.logging`` names. Raises ConfigurationError."""
    return load_hook(KEY, name, {}, ("line",))
