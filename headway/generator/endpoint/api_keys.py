"""API keys of the HTTP services: their file, and the check of a request's key."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from pathlib import Path

from headway.generator.recording.sessions import KeyRefused, key_digest
from headway.records.errors import ConfigurationError
from headway.runtime.addresses import is_loopback

_SHORTEST = 16  # characters


class ApiKeys:
    """The accepted keys of a service, kept as digests; none: every request is accepted."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [key_digest(key) for key in keys]

    def require(self, key: str) -> None:
        """Raise KeyRefused unless ``key`` is accepted. Compares in constant time."""
        digest = key_digest(key)
        if self._digests and not any([hmac.compare_digest(digest, known) for known in self._digests]):
            raise KeyRefused("incorrect API key provided" if key else "no API key: send 'Authorization: Bearer KEY'")


def read_keys(file: str, option: str) -> tuple[str, ...]:
    """Read a file of keys, one a line; () for no file. ``option``: the command's, for errors. Raises
    ConfigurationError: a file that can't be read, holds no key, or one that is too easily guessed."""
    if not file:
        return ()
    try:
        lines = Path(file).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{option} {file}: {error}") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigurationError(f"{option} {file}: holds no key; one key a line is needed")
    if short := [key for key in keys if len(key) < _SHORTEST]:
        raise ConfigurationError(
            f"{option} {file}: {len(short)} keys are shorter than {_SHORTEST} characters: too easily guessed"
        )
    return keys


def require_keys(keys: tuple[str, ...], address: str, named: str, option: str) -> None:
    """Raise ConfigurationError for an address that other machines reach without keys. ``named``: the address with its
    key or option, as the error shows it; ``option``: the one for keys."""
    if not keys and not is_loopback(address):
        raise ConfigurationError(
            f"{named}: other machines reach it, so keys are required: {option} FILE, one key a line"
        )
