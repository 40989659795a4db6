"""`[buffer]`: the buffer as a service for workers outside the run."""

from __future__ import annotations

from headway.config.section import Seconds, Section


class BufferServiceConfig(Section):
    """The HTTP service that leases members of groups to your own rollout workers, where environment.name = "remote"; it
    listens at endpoint.address: docs/buffer-service.md."""

    keys: str = ""  # a file of API keys, one per line; required where other machines reach endpoint.address
    lease_s: Seconds = 60.0  # a member is offered again after this time without a heartbeat of its worker


class BufferConfig(Section):
    service: BufferServiceConfig = BufferServiceConfig()  # members leased over HTTP: docs/buffer-service.md
