"""Collects findings: the problems of a configuration, reported before its run starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headway.records.check_report import Finding, Level
from headway.records.errors import ConfigurationError

_ORDER: tuple[Level, ...] = ("error", "warning", "info")


class Findings(list[Finding]):
    """Findings in the order they were made; ``key``: the configuration key concerned.

    Example: ``with findings.refused("model.path"): Tokenizer.load(folder)`` adds an error where that raises one.
    """

    def error(self, key: str, message: str) -> None:
        self.append(Finding(level="error", key=key, message=message))

    def warning(self, key: str, message: str) -> None:
        self.append(Finding(level="warning", key=key, message=message))

    def info(self, key: str, message: str) -> None:
        self.append(Finding(level="info", key=key, message=message))

    @contextmanager
    def refused(self, key: str) -> Iterator[None]:
        """End the block at a ConfigurationError, which becomes an error of ``key``."""
        try:
            yield
        except ConfigurationError as error:
            self.error(key, str(error).removeprefix(f"{key}: "))

    def by_level(self) -> list[Finding]:
        """All findings, errors first."""
        return sorted(self, key=lambda finding: _ORDER.index(finding.level))
