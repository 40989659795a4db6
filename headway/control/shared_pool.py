"""Simulates tenants that share a pool: slots idle behind one's stragglers are filled with another's rollouts. Pure."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence

import msgspec


class SharedPool(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of tenants on one pool, relative to each running alone on that pool, one after the other."""

    tenants: int
    busy_share: float  # of the slots' time
    saving: float  # share of the device-time, and so of the dollars, that a sample costs less
    slowdown: float  # of each tenant's own steps


class TenantLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of each tenant: synchronous steps of ``rollouts``, all waited for, then ``train_s`` on the one trainer."""

    slots: int  # rollouts that the pool generates at once
    rollouts: int  # of a step
    mean_s: float  # of a rollout
    spread: float  # p99 / median of a rollout's time, log-normal; 1: all equal
    train_s: float
    steps: int


def shared_pool(load: TenantLoad, tenants: int, seed: int = 0) -> SharedPool:
    """Simulate ``tenants`` with ``load`` each.

    A rollout takes as long beside others as alone: the saving is that of idle slots, without the effects of fuller
    batches or shared base weights. Tenants differ only in the order of their rollouts' lengths.
    """
    seconds_by_tenant = [_lengths(load, random.Random(seed + tenant)) for tenant in range(tenants)]
    together_s = _finish_s(load, seconds_by_tenant)
    alone_times = [_finish_s(load, [tenant_seconds]) for tenant_seconds in seconds_by_tenant]
    work_s = sum(sum(map(sum, tenant_seconds)) for tenant_seconds in seconds_by_tenant)
    return SharedPool(
        tenants=tenants,
        busy_share=work_s / (load.slots * together_s),
        saving=1 - together_s / sum(alone_times),
        slowdown=together_s * tenants / sum(alone_times),
    )


def _lengths(load: TenantLoad, chance: random.Random) -> list[list[float]]:
    """Draw the seconds of each rollout, step by step."""
    sigma = math.log(load.spread) / 2.3263  # the standard normal's quantile at 0.99
    median_s = load.mean_s * math.exp(-(sigma**2) / 2)
    return [[median_s * chance.lognormvariate(0, sigma) for _ in range(load.rollouts)] for _ in range(load.steps)]


def _finish_s(load: TenantLoad, lengths: Sequence[list[list[float]]]) -> float:
    """Return the seconds until every tenant has done its steps.

    Slots go to waiting rollouts in order of arrival, the trainer to batches in order of completion."""
    slot_free_s = [0.0] * load.slots
    trainer_s = 0.0
    heap = [(0.0, tenant, 0, False) for tenant in range(len(lengths))]  # (time, tenant, step, all of it generated)
    while heap:
        now_s, tenant, step, is_generated = heapq.heappop(heap)
        if is_generated:
            trainer_s = max(trainer_s, now_s) + load.train_s
            if step + 1 < len(lengths[tenant]):
                heapq.heappush(heap, (trainer_s, tenant, step + 1, False))
            continue
        generated_s = now_s
        for seconds in lengths[tenant][step]:
            rollout_end_s = max(now_s, heapq.heappop(slot_free_s)) + seconds
            heapq.heappush(slot_free_s, rollout_end_s)
            generated_s = max(generated_s, rollout_end_s)
        heapq.heappush(heap, (generated_s, tenant, step, True))
    return trainer_s
