"""`[tinker]`: the service of many tenants' adapters, `headway serve-tinker`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from headway.config.section import Positive, Seconds, Section


class TinkerConfig(Section):
    """The keys of `headway serve-tinker`, beside model, devices and address: docs/tinker.md."""

    store: str  # folder of the log, the adapters' states and the checkpoints; of one base and one service
    store_gb: Annotated[float, Field(gt=0)] = 20.0  # gigabytes of checkpoints that a tenant may keep
    keys: str = ""  # file of keys, NAME SCOPES SHA-256 in each line; "": no key is needed, and all are one tenant's
    max_rank: Positive = 64  # largest rank of an adapter
    alpha: Annotated[float, Field(gt=0)] = 32.0  # every adapter's product is scaled by alpha / rank
    models_per_tenant: Positive = 8  # models of living sessions
    # As many as memory has room for: one that isn't resident is loaded at its next request
    resident_adapters: Positive = 32  # adapters in the trainer's memory, and in the engine's
    session_timeout_s: Seconds = 300.0  # a session without a heartbeat for so long is dead, and its memory freed
    stable_reinforce: Literal["refuse", "importance_sampling", "ppo"] = "refuse"  # the loss that is computed for it
    prices: str = ""  # services.NAME, or a device's hour, as headway cost has them; "": tenants' dollars aren't counted
    co_batch: bool = False  # a pass has rows of several tenants, whose gradients are then equal to rounding

    @property
    def substitutes(self) -> Mapping[str, str]:
        """Return the losses that others stand for."""
        return {} if self.stable_reinforce == "refuse" else {"stable_reinforce": self.stable_reinforce}
