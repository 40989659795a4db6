"""Client of kernel services on several machines. Torch-free."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headway.config.router import RouterConfig
from headway.kernels.wire import evaluation_of, request_of
from headway.records.errors import ConfigurationError, HeadwayError
from headway.records.kernels import KernelEvaluation, KernelSubmission
from headway.runtime.clock import Clock
from headway.runtime.retries import Breaker, backoff_s

_CONNECT_S = 10.0
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.2, 10.0
_PROBE_POLL_S = 0.1  # while another request probes the only machine
_MAX_QUOTED_CHARACTERS = 300  # characters of an answer in an error
_TRANSIENT = (408, 425)  # 4xx after which the same request may pass


class KernelRequestRefused(HeadwayError):
    """A service refuses the request: its key, task or limits. ``status``: of HTTP; ``param``: the refused field."""

    def __init__(self, address: str, status: int, message: str, param: str | None = None) -> None:
        super().__init__(f"{address} refuses an evaluation (HTTP {status}): {message}")
        self.status = status
        self.param = param


class KernelServiceFailed(HeadwayError):
    """No result arrived in time, or within all retries: an infrastructure failure, which is no evidence on the
    candidate and gives no reward."""


@dataclass(eq=False)
class _Machine:
    address: str
    breaker: Breaker
    open: int = 0  # requests under way
    resumes_s: float = 0.0  # no request before this time: its Retry-After


class KernelClient:
    """Evaluates candidates through the kernel services of several machines, with a KernelEvaluator's interface.

    A submission goes to the machine with the fewest open requests whose breaker is closed. A failure of the
    infrastructure (no connection, HTTP 5xx, a malformed answer) is retried up to ``retries`` times, on another machine
    if there is one. A machine with a full queue (429) is avoided, or waited for if all queues are full. A refusal of
    the candidate's source is its result.
    Example: ``async with KernelClient(["http://a:8010"], RealClock()) as client: evaluation = await
    client.evaluate(submission)``.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        clock: Clock,
        *,
        breaker: RouterConfig = RouterConfig(),
        key: str = "",
        retries: int = 2,
        queue_s: float = 600.0,
    ) -> None:
        """``addresses``: each http://HOST:PORT. ``breaker``: settings of each machine's breaker. ``queue_s``: longest
        time that a submission waits and is retried, beside its own ``timeout_s``. Raises ConfigurationError."""
        if not addresses or any(not address.startswith(("http://", "https://")) for address in addresses):
            raise ConfigurationError(f"addresses of kernel services = {list(addresses)}: valid: http://HOST:PORT, ...")
        self._machines = [_Machine(address.rstrip("/"), Breaker(breaker)) for address in addresses]
        self._clock = clock
        self._retries = retries
        self._queue_s = queue_s
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._http: Any = None

    async def __aenter__(self) -> KernelClient:
        self._connection()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; the next request opens others."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    def _connection(self) -> Any:
        """The HTTP connections; the first call opens them."""
        if self._http is None:
            import httpx  # here: a process that uses no service doesn't wait for the import

            self._transport_error: type[Exception] = httpx.TransportError
            self._http = httpx.AsyncClient(
                headers=self._headers,
                timeout=httpx.Timeout(None, connect=_CONNECT_S),  # an evaluation's own limit holds for the rest
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
                follow_redirects=False,  # the key goes nowhere else
                trust_env=False,  # no proxy
            )
        return self._http

    async def evaluate(self, submission: KernelSubmission) -> KernelEvaluation:
        """Evaluate a submission. Raises KernelRequestRefused, KernelServiceFailed."""
        body, causes = msgspec.json.encode(request_of(submission)), list[str]()
        limit_s = self._queue_s + submission.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._evaluate_with_retries(body, causes)
        except TimeoutError:
            causes.append(f"no result within {limit_s:g} s")
        raise KernelServiceFailed("; then: ".join(causes))

    async def require_backends(self, needed: Iterable[str]) -> None:
        """Raise ConfigurationError unless each of ``needed`` is a back end of a responding service."""
        http, available_backends, machine_texts = self._connection(), set[str](), list[str]()
        for machine in self._machines:
            try:
                response = await http.get(f"{machine.address}/backend_info", timeout=_CONNECT_S)
                if response.status_code == 200:
                    backends = msgspec.json.decode(response.content, type=_Backends).supported_backends
                    machine_texts.append(f"{machine.address} has {', '.join(backends) or 'none'}")
                    available_backends.update(backends)
                else:
                    message, _ = _error_of(response.content)
                    machine_texts.append(f"{machine.address}: HTTP {response.status_code}: {message}")
            except (self._transport_error, ValueError) as error:
                machine_texts.append(f"{machine.address}: {type(error).__name__}: {error}")
        if missing := sorted(set(needed) - available_backends):
            raise ConfigurationError(f"no kernel service for back end {', '.join(missing)}: {'; '.join(machine_texts)}")

    async def _evaluate_with_retries(self, body: bytes, causes: list[str]) -> KernelEvaluation:
        """Try one machine after another; append each failure to ``causes``."""
        failed_machines: set[_Machine] = set()
        while True:
            machine = await self._choose_machine(failed_machines)
            try:
                evaluation = await self._attempt(machine, body)
            except KernelServiceFailed as error:
                causes.append(f"{machine.address}: {error}")
                if len(causes) > self._retries:
                    raise KernelServiceFailed("; then: ".join(causes)) from None
                failed_machines.add(machine)
                if len(failed_machines) == len(self._machines):
                    failed_machines.clear()
                    wait_s = backoff_s(len(causes), _FIRST_BACKOFF_S, _LONGEST_BACKOFF_S)
                    await self._clock.sleep(wait_s * random.uniform(0.5, 1.0))
                continue
            if evaluation is not None:
                return evaluation

    async def _choose_machine(self, failed: set[_Machine]) -> _Machine:
        """Wait for a machine that takes requests, and choose the least loaded; a machine in ``failed`` is the last
        choice."""
        while True:
            now = self._clock.now()
            ready = [machine for machine in self._machines if machine.breaker.allows(now) and now >= machine.resumes_s]
            if ready:
                return min(ready, key=lambda machine: (machine in failed, machine.open))
            soonest_s = min(max(machine.resumes_s, machine.breaker.opens_s() or now) for machine in self._machines)
            await self._clock.sleep(max(_PROBE_POLL_S, soonest_s - now))

    async def _attempt(self, machine: _Machine, body: bytes) -> KernelEvaluation | None:
        """Send one request; None: the machine's queue is full. Raises KernelServiceFailed, KernelRequestRefused."""
        http, is_probe = self._connection(), machine.breaker.send(self._clock.now())
        machine.open += 1
        try:
            outcome = self._parse_response(machine, await http.post(f"{machine.address}/eval", content=body))
        except (self._transport_error, KernelServiceFailed) as error:
            machine.breaker.fail(self._clock.now(), probe=is_probe, alone=len(self._machines) == 1)
            class_prefix = "" if isinstance(error, KernelServiceFailed) else f"{type(error).__name__}: "
            raise KernelServiceFailed(f"{class_prefix}{error}") from None
        except BaseException:  # cancelled: no evidence about the machine
            if is_probe:
                machine.breaker.withdraw()
            raise
        finally:
            machine.open -= 1
        machine.breaker.succeed(self._clock.now(), probe=is_probe)
        if isinstance(outcome, KernelRequestRefused):
            raise outcome
        return outcome

    def _parse_response(self, machine: _Machine, response: Any) -> KernelEvaluation | KernelRequestRefused | None:
        """The evaluation in a response, or its refusal; None: the machine's queue is full."""
        status: int = response.status_code
        if status == 200:
            try:
                return evaluation_of(response.content)
            except ValueError as error:
                raise KernelServiceFailed(f"its answer is no evaluation: {error}") from None
        message, param = _error_of(response.content)
        if status == 429 or status >= 500 or status in _TRANSIENT:
            wait_s = _retry_after_s(response)
            machine.resumes_s = self._clock.now() + (max(_FIRST_BACKOFF_S, wait_s) if status == 429 else wait_s)
            if status == 429:
                return None
            raise KernelServiceFailed(f"HTTP {status}: {message}")
        if param is not None and param.startswith("custom_model_src"):
            return KernelEvaluation(fault="unknown", text=message)
        return KernelRequestRefused(machine.address, status, message, param)


def _retry_after_s(response: Any) -> float:
    try:
        return max(0.0, float(response.headers.get("retry-after", "0")))
    except ValueError:  # a date
        return 1.0


def _error_of(body: bytes) -> tuple[str, str | None]:
    """Message and field of an error's response, which may come from a proxy in between."""
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
    except msgspec.DecodeError:
        return body[:_MAX_QUOTED_CHARACTERS].decode(errors="replace"), None
    return error.message, error.param


class _Backends(msgspec.Struct):
    supported_backends: list[str]


class _Error(msgspec.Struct):
    message: str
    param: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error
