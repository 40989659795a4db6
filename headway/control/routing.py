"""Which generator replica takes a request."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica still has to do."""

    live: bool  # takes requests now
    outstanding_tokens: int  # prompt and still allowed response tokens of its open requests


def choose_replica(loads: Sequence[ReplicaLoad], prompt_tokens: int = 0, preferred: int | None = None) -> int | None:
    """Index of the live replica with the fewest outstanding tokens (ties: the first); None when none is live.

    ``preferred``: the replica that has just been given the same prompt. It is taken while it is ahead of the least
    loaded one by no more than the ``prompt_tokens`` whose prefill that saves.
    """
    live = [index for index, load in enumerate(loads) if load.live]
    if not live:
        return None
    least = min(live, key=lambda index: loads[index].outstanding_tokens)
    if preferred is not None and 0 <= preferred < len(loads) and loads[preferred].live:
        ahead = loads[preferred].outstanding_tokens - loads[least].outstanding_tokens
        if ahead <= prompt_tokens:
            return preferred
    return least
