"""Ledgers of real runs in tests/support/ledgers, with the columns that the rules of control/alerts.py look at.

arithmetic-0 and -1: `examples/arithmetic` on two cores, which learns (0.49 -> 0.92). kernels: a small model that learns
to write kernels. collapsed: the same at ten times its learning rate: the policy leaves its samples behind within five
steps, then writes until it is cut.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from headway.records.ledger import LedgerLine

FOLDER = Path(__file__).resolve().parent / "ledgers"
HEALTHY = ("arithmetic-0", "arithmetic-1", "kernels")


def kept_ledger(name: str) -> list[LedgerLine]:
    lines = (FOLDER / f"{name}.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=LedgerLine) for line in lines]
