"""The router's keys: which replica takes a request, and who of a foreign caller's waits or is refused."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from headway.config.section import NonNegative, Positive, Seconds, Section

Rate = Annotated[float, Field(gt=0)]


class RouterConfig(Section):
    """Which replica takes a request. The limits at the end bind foreign callers; rollouts of a run wait instead."""

    affinity: Annotated[float, Field(ge=0)] = 1.0  # tokens of load accepted for a prompt token in the KV; 0: load alone
    prefix_block_tokens: Positive = 64  # prompts are compared in blocks of so many, and as a whole
    remembered_prefixes: NonNegative = 65536  # blocks whose replicas are known, least recently used go first; 0: none
    update_grace_s: Seconds = 60.0  # a replica that takes longer than others to apply weights is drained from then on
    health_interval_s: Seconds = 5.0  # a replica is asked for its counters so often
    health_timeout_s: Seconds = 30.0  # ... and takes no requests once an answer is overdue, until it comes
    failures_to_open: Positive = 5  # failures in a row, ...
    failure_window_s: Seconds = 60.0  # ... within so many seconds, open a replica's breaker: it takes no requests
    cool_down_s: Seconds = 1.0  # then it is tried with one request at a time
    cool_down_growth: Annotated[float, Field(ge=1)] = 2.0  # each failed try makes the next cool-down longer
    longest_cool_down_s: Seconds = 30.0  # ... up to this
    successes_to_close: Positive = 2  # tries in a row that succeed before it takes all kinds of load again
    retries: NonNegative = 2  # of a request that a replica didn't accept, each on another one
    requests_per_s: Rate | None = None  # of foreign callers, together; unset: no limit
    tokens_per_s: Rate | None = None  # of foreign callers: prompt and response tokens; unset: no limit
    burst_s: Seconds = 2.0  # what may come at once: the rates times this
    overcommit: Rate = 2.0  # foreign callers' open requests may hold so many times the KV tokens of all replicas
    queue_requests: NonNegative = 256  # foreign requests that wait for the above; more are refused (HTTP 429)
    queue_s: Seconds = 30.0  # one that waits for longer is refused

    @model_validator(mode="after")
    def _possible(self) -> RouterConfig:
        if self.longest_cool_down_s < self.cool_down_s:
            raise ValueError(
                f"longest_cool_down_s = {self.longest_cool_down_s:g} is below cool_down_s = {self.cool_down_s:g}: "
                "valid: at least that"
            )
        if self.requests_per_s is not None and self.requests_per_s * self.burst_s < 1:
            raise ValueError(
                f"requests_per_s = {self.requests_per_s:g} times burst_s = {self.burst_s:g} is less than one request, "
                f"so none would ever pass: valid: burst_s >= {1 / self.requests_per_s:g}"
            )
        return self
