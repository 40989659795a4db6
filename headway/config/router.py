"""The router's keys: the choice of a replica for a request, and limits on foreign callers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from headway.config.section import NonNegative, Positive, Rate, Seconds, Section


class RouterConfig(Section):
    """The choice of a replica for a request. The limits at the end bind foreign callers; a run's rollouts wait
    instead."""

    affinity: Annotated[float, Field(ge=0)] = 1.0  # tokens of load accepted for a prompt token in the KV; 0: load alone
    prefix_block_tokens: Positive = 64  # block size for the comparison of prompts, which are compared as a whole too
    remembered_prefixes: NonNegative = 65536  # blocks whose replicas are kept, by last use; 0: none
    update_grace_s: Seconds = 60.0  # a replica that lags behind others by more in applying weights is drained
    health_interval_s: Seconds = 5.0  # between two requests for a replica's counters
    health_timeout_s: Seconds = 30.0  # a replica whose counters are overdue by this takes no requests until they come
    failures_to_open: Positive = 5  # failures in a row that open a replica's breaker: it takes no requests
    failure_window_s: Seconds = 60.0  # time within which those failures count
    cool_down_s: Seconds = 1.0  # time until an open breaker lets through one request at a time
    cool_down_growth: Annotated[float, Field(ge=1)] = 2.0  # factor on the next cool-down after a failed request
    longest_cool_down_s: Seconds = 30.0  # upper limit of the cool-down
    successes_to_close: Positive = 2  # successful requests in a row that close the breaker
    retries: NonNegative = 2  # of a request that a replica didn't accept, each on another replica
    requests_per_s: Rate | None = None  # of foreign callers, together; unset: no limit
    tokens_per_s: Rate | None = None  # of foreign callers: prompt and response tokens; unset: no limit
    burst_s: Seconds = 2.0  # burst allowed at once: the rates times this
    overcommit: Rate = 2.0  # limit on the tokens of foreign callers' open requests: a multiple of all replicas' KV
    queue_requests: NonNegative = 256  # foreign requests that wait for these limits; more are refused (HTTP 429)
    queue_s: Seconds = 30.0  # longest wait of such a request; then it is refused

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
