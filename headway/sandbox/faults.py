"""A source of sandboxes that injects infrastructure failures, for drills of a whole run (`injected_share`)."""

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

OF_CREATE = ("refused", "slow", "unanswered")
OF_EXEC = ("lost", "unanswered")
GRACE_S = 10.0  # beyond a command's own time, until a missing answer is given up, as backends do

SHARE = "HEADWAY_INJECT_SANDBOX_FAULTS"  # environment variable: the share of calls that fail on purpose


def injected_share() -> float:
    """The share of calls that shall fail on purpose, as the environment says; 0 where it doesn't. Raises
    ConfigurationError."""
    given = os.environ.get(SHARE) or "0"
    with contextlib.suppress(ValueError):
        if 0 <= (share := float(given)) < 1:
            return share
    raise ConfigurationError(f"{SHARE} = {given!r}: valid: 0 or more, below 1")


class FaultyBackend:
    """A `SandboxSource` in which a ``share`` of a backend's `create` and `exec` calls, drawn from ``seed``, fail:

    - a start is *refused*, is *slow* (``slow_s`` more), or never answers (*unanswered*: until the caller gives up);
    - a command's sandbox is *lost* in the middle of it, or never answers (*unanswered*): `GRACE_S` after the command's
      own time the sandbox is given up and ended, as the real backends do.

    Everything else is the backend's own. ``injected`` counts, by call and kind: "create refused", ...
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

    async def create(self, spec: SandboxSpec, **wanted: Any) -> Sandbox:
        kind = self.draw("create", OF_CREATE)
        if kind == "refused":
            raise SandboxError(infrastructure_failure("a start was refused (a fault that was injected)"))
        if kind == "slow":
            await self._clock.sleep(self._slow_s)
        while kind == "unanswered":
            await self._clock.sleep(3600.0)
        made = await self._backend.create(spec, **wanted)
        return FaultySandbox(made, self, self._clock)

    async def capabilities(self) -> Capabilities:
        return await self._backend.capabilities()


class FaultySandbox(SandboxWrapper):
    """A sandbox of `FaultyBackend`, whose commands may fail."""

    def __init__(self, box: Sandbox, faults: FaultyBackend, clock: Clock) -> None:
        super().__init__(box)
        self._faults = faults
        self._clock = clock
        self._died = ""

    def inner(self) -> Sandbox:
        if self._died:
            raise SandboxError(infrastructure_failure(f"sandbox {self.id} {self._died} (a fault that was injected)"))
        return self._box

    async def before_exec(self, timeout_s: float) -> None:
        kind = self._faults.draw("exec", OF_EXEC) if not self._box.ended else ""
        if kind == "unanswered":
            await self._clock.sleep(timeout_s + GRACE_S)
        if kind:
            self._died = "has died" if kind == "lost" else "didn't answer"
            with contextlib.suppress(SandboxError):
                await self._box.terminate()
