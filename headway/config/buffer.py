"""`[buffer]`: the buffer as a service of outside workers."""

from __future__ import annotations

from headway.config.section import Seconds, Section


class BufferServiceConfig(Section):
    """Members of groups leased over HTTP to rollout workers of your own, where environment.name = "remote"; they are
    served at endpoint.address: docs/buffer-service.md."""

    keys: str = ""  # a file of API keys, one a line; required where other machines reach endpoint.address
    lease_s: Seconds = 60.0  # without a sign of life from its worker a member is offered again


class BufferConfig(Section):
    service: BufferServiceConfig = BufferServiceConfig()  # members leased over HTTP: docs/buffer-service.md
