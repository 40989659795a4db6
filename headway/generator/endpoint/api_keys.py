"""API keys of the HTTP services: the check of a request's key."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from headway.generator.recording.sessions import KeyRefused, key_digest


class ApiKeys:
    """The accepted keys of a service, kept as digests; none: every request is accepted."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [key_digest(key) for key in keys]

    def require(self, key: str) -> None:
        """Raise KeyRefused unless ``key`` is accepted. Compares in constant time."""
        digest = key_digest(key)
        if self._digests and not any([hmac.compare_digest(digest, accepted) for accepted in self._digests]):
            raise KeyRefused("incorrect API key provided" if key else "no API key: send 'Authorization: Bearer KEY'")
