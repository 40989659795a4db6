"""The ranks that compute a model's micro-batches together."""

from __future__ import annotations

from typing import NamedTuple

from headway.models.parallel.context import ContextRanks
from headway.models.parallel.experts import ExpertRanks


class Division(NamedTuple):
    """The ranks among which a model's computation is divided; None: this rank computes all of it."""

    context: ContextRanks | None = None  # these have the same micro-batches, and each a slice of the tokens
    experts: ExpertRanks | None = None  # these have micro-batches of their own, and each a part of the experts
