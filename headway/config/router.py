"""The router's keys: the choice of a replica for a request, and limits on foreign callers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headway.config.section import NonNegative, Positive, Rate, Seconds, Section


class RouterSection(Section):
    """The choice of a replica for a request. The limits at the end bind foreign callers; a run's rollouts wait
    instead."""

    affinity: Annotated[float, Field(ge=0)] = 1.0  # tokens of load accepted for a prompt token in the KV; 0: load alone
    update_grace_s: Seconds = 60.0  # a replica that lags behind others by more in applying weights is drained
    retries: NonNegative = 2  # retries of a request that a replica didn't accept, each on another replica
    requests_per_s: Rate | None = None  # rate of all foreign callers together; unset: no limit
    tokens_per_s: Rate | None = None  # prompt and response tokens of foreign callers; unset: no limit
    queue_requests: NonNegative = 256  # foreign requests that wait for these limits; more are refused (HTTP 429)
    queue_s: Seconds = 30.0  # longest wait of such a request; then it is refused


class RouterConfig(RouterSection):
    """Settings of router, breakers and limits: the keys of the file, and values that no file can set."""

    prefix_block_tokens: Positive = 64  # block size for the comparison of prompts: shorter ones save little prefill
    remembered_prefixes: NonNegative = 65536  # blocks whose replicas are kept, by last use: 4 million tokens; 0: none
    health_interval_s: Seconds = 5.0  # time between two requests for a replica's counters
    health_timeout_s: Seconds = 30.0  # a replica whose counters are overdue by this takes no requests until they come
    failures_to_open: Positive = 5  # failures in a row that open a breaker: one alone is often the request's own
    failure_window_s: Seconds = 60.0  # time within which those failures count
    cool_down_s: Seconds = 1.0  # time until an open breaker lets through one request at a time
    cool_down_growth: Annotated[float, Field(ge=1)] = 2.0  # factor on the next cool-down after a failed request
    longest_cool_down_s: Seconds = 30.0  # upper limit of the cool-down: a replica that is back is found within it
    successes_to_close: Positive = 2  # successful requests in a row that close the breaker
    burst_s: Seconds = 2.0  # size of a burst: the rates times this
    overcommit: Rate = 2.0  # foreign callers' open requests may need this times the KV: most end before their limit
