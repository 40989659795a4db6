"""Deficit round robin of tenants by tokens: whose work a shared device does next. Pure.

M. Shreedhar and G. Varghese, "Efficient Fair Queueing Using Deficit Round Robin" (1996), in the form that charges an
item after it was served, since a pass's tokens and a sample's length aren't known before (surplus round robin).
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class DeficitRoundRobin(Generic[Item]):
    """Tenants take turns; at each turn a tenant may have ``quantum_tokens`` more served, and its debt is repaid first.

    Invariant: of two tenants that always have work, neither is served more tokens than the other by more than two
    quanta and two of the largest items. A tenant without work saves up at most a quantum, and its debt shrinks with
    the turns that it misses. Example: with a quantum of 10, after an item of 35 tokens other tenants have three turns.
    """

    def __init__(self, quantum_tokens: float) -> None:
        self._quantum_tokens = quantum_tokens
        self._queues: dict[str, deque[Item]] = {}  # of tenants with work; the first one has its turn
        self._deficits: dict[str, float] = {}  # tokens that these may have served before their turn ends
        self._idle: dict[str, tuple[float, float]] = {}  # of the others: their deficit, in the round in which they left
        self._round = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def waiting(self, tenant: str) -> int:
        """Return the number of a tenant's items."""
        return len(self._queues.get(tenant, ()))

    def add(self, tenant: str, item: Item) -> None:
        """Add an item behind the tenant's others."""
        if tenant not in self._queues:
            deficit, round_number = self._idle.pop(tenant, (0.0, self._round))
            missed_tokens = self._quantum_tokens * (self._round - round_number)
            self._queues[tenant] = deque()
            self._deficits[tenant] = min(self._quantum_tokens, deficit + missed_tokens)
        self._queues[tenant].append(item)

    def take(self) -> tuple[str, Item] | None:
        """Return the next item with its tenant, which is to be charged for it; None: there is none."""
        if not self._queues:
            return None
        if (rounds := int(min(-deficit for deficit in self._deficits.values()) / self._quantum_tokens)) > 0:
            self._round += rounds  # in which all repay debts
            self._deficits = {tenant: debt + rounds * self._quantum_tokens for tenant, debt in self._deficits.items()}
        while self._deficits[tenant := next(iter(self._queues))] <= 0:
            self._queues[tenant] = self._queues.pop(tenant)  # behind the others
            self._deficits[tenant] += self._quantum_tokens
            self._round += 1 / len(self._queues)
        item = self._queues[tenant].popleft()
        if not self._queues[tenant]:
            del self._queues[tenant]
            self._idle[tenant] = self._deficits.pop(tenant), self._round
        return tenant, item

    def charge(self, tenant: str, tokens: float) -> None:
        """Charge a tenant for tokens that were served; negative: for fewer than it was charged before."""
        if tenant in self._deficits:
            self._deficits[tenant] -= tokens
        else:
            deficit, round_number = self._idle.get(tenant, (0.0, self._round))
            self._idle[tenant] = min(self._quantum_tokens, deficit - tokens), round_number
