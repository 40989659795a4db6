"""Addresses of sections of docs/troubleshooting.md, which are printed with stalls, alerts and verdicts."""

from __future__ import annotations

import re


def troubleshooting(title: str) -> str:
    """The address of a section by its title: "docs/troubleshooting.md#alert-kl" for "Alert: kl"."""
    return "docs/troubleshooting.md#" + re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def stall_page(kind: str) -> str:
    """The section on stalls of a kind of wait; all calls of a worker's role ("verifier.score") share a section."""
    return troubleshooting(f"Stall: {re.split('[.-]', kind)[0]}")


def alert_page(rule: str) -> str:
    """The section on alerts of a rule."""
    return troubleshooting(f"Alert: {rule}")
