"""Injects infrastructure failures into a source of sandboxes, to test a whole run (`injected_share`)."""

from __future__ import annotations

import contextlib
import os
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from headway.records.errors import ConfigurationError
from headway.records.sandbox import Capabilities, SandboxError, SandboxSpec, infrastructure_failure
from headway.runtime.clock import Clock
from headway.sandbox.protocol import Sandbox, SandboxSource
from headway.sandbox.wrapper import SandboxWrapper

CREATE_FAULTS = ("refused", "slow", "unanswered")
EXEC_FAULTS = ("lost", "unanswered")
GRACE_S = 10.0  # after a command's own time limit, until the wait for its answer ends, as in backends

SHARE = "HEADWAY_INJECT_SANDBOX_FAULTS"  # environment variable: the share of calls that fail on purpose


def injected_share() -> float:
    """Return the share of calls to fail on purpose, from the environment variable `SHARE`; 0 if it isn't set. Raises
    ConfigurationError."""
    text = os.environ.get(SHARE) or "0"
    with contextlib.suppress(ValueError):
        if 0 <= (share := float(text)) < 1:
            return share
    raise ConfigurationError(f"{SHARE} = {text!r}: valid: 0 or more, below 1")


class FaultyBackend:
    """A `SandboxSource` in which a ``share`` of a backend's `create` and `exec` calls fails, drawn from ``seed``.

    - A start is *refused*, is *slow* (``slow_s`` more), or never answers (*unanswered*: until the caller times out).
    - A command's sandbox is *lost* in the middle of it, or never answers (*unanswered*): `GRACE_S` after the command's
      own time limit the sandbox is ended, as in the real backends.

    All other calls go to the backend. ``injected`` counts faults by call and kind: "create refused", ...
    """

    def __init__(
        self, backend: SandboxSource, clock: Clock, *, share: float, slow_s: float = 30.0, seed: int = 0
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._share = share
        self._slow_s = slow_s
        self._random = random.Random(seed)
        self.injected: Counter[str] = Counter()

    def draw(self, call: str, kinds: Sequence[str]) -> str:
        """Draw the kind of fault to inject into a call, and count it; "": none."""
        if self._random.random() >= self._share:
            return ""
        kind = self._random.choice(kinds)
        self.injected[f"{call} {kind}"] += 1
        return kind

    async def create(self, spec: SandboxSpec, **options: Any) -> Sandbox:
        kind = self.draw("create", CREATE_FAULTS)
        if kind == "refused":
            raise SandboxError(infrastructure_failure("a start was refused (a fault that was injected)"))
        if kind == "slow":
            await self._clock.sleep(self._slow_s)
        while kind == "unanswered":
            await self._clock.sleep(3600.0)
        return FaultySandbox(await self._backend.create(spec, **options), self, self._clock)

    async def capabilities(self) -> Capabilities:
        return await self._backend.capabilities()


class FaultySandbox(SandboxWrapper):
    """A sandbox of `FaultyBackend`, whose commands may fail."""

    def __init__(self, box: Sandbox, faults: FaultyBackend, clock: Clock) -> None:
        super().__init__(box)
        self._faults = faults
        self._clock = clock
        self._cause = ""

    def inner(self) -> Sandbox:
        if self._cause:
            raise SandboxError(infrastructure_failure(f"sandbox {self.id} {self._cause} (a fault that was injected)"))
        return self._box

    async def before_exec(self, timeout_s: float) -> None:
        kind = self._faults.draw("exec", EXEC_FAULTS) if not self._box.ended else ""
        if kind == "unanswered":
            await self._clock.sleep(timeout_s + GRACE_S)
        if kind:
            self._cause = "has died" if kind == "lost" else "didn't answer"
            with contextlib.suppress(SandboxError):
                await self._box.terminate()
