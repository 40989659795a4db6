"""Exporter to a function of the user: ``hooks.logging`` is called with every line of the ledger."""

from __future__ import annotations

from headway.records.ledger import LedgerLine
from headway.runtime.hooks import Hook, load_hook
from headway.telemetry.exporters.exporters import Exporter, ExporterContext

KEY = "hooks.logging"


class CallbackExporter(Exporter):
    """Calls ``function(line)`` with `StepRecord`, `EvaluationRecord` and `EventRecord` as they are recorded, one after
    another, in its own thread. An error loses that line; the return value is ignored."""

    def __init__(self, context: ExporterContext) -> None:
        """Load the function. Raises ConfigurationError if it can't be imported or takes other arguments."""
        self._hook = load_logging_callback(context.experiment.hooks.logging)
        self.destination = self._hook.name

    def line(self, line: LedgerLine) -> None:
        self._hook(line)


def load_logging_callback(name: str) -> Hook:
    """Load the function that ``hooks.logging`` names. Raises ConfigurationError."""
    return load_hook(KEY, name, {}, ("line",))
