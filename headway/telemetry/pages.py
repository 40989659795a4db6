"""Addresses of the sections of docs/troubleshooting.md that stalls, alerts and verdicts are printed with."""

from __future__ import annotations

import re


def troubleshooting(title: str) -> str:
    """Address of a section by its title: "docs/troubleshooting.md#alert-kl" of "Alert: kl"."""
    return "docs/troubleshooting.md#" + re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def stall_page(kind: str) -> str:
    """Section about stalls of a kind of wait: that of all calls of a worker's role is one ("verifier.score")."""
    return troubleshooting(f"Stall: {re.split('[.-]', kind)[0]}")


def alert_page(rule: str) -> str:
    """Section about alerts of a rule."""
    return troubleshooting(f"Alert: {rule}")
