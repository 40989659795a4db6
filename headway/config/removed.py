"""Keys of earlier experiment files that went, and what stands in their place: for the error that names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_SETTING_OF_NAME = "name a verifier of [verifiers.NAME], whose parameters and timeout_s it has"

# section -> key of it that went -> what stands in its place; a part that is * stands for one name. A name of a table
# stands for all keys inside it.
REMOVED: Mapping[str, Mapping[str, str]] = {
    "run": {"worker_start_timeout_s": "it is 600 s, and 1 s more for each 50 MB of the model"},
    "model": {"adapter.kind": "an adapter is low-rank (LoRA)"},
    "tasks": {
        "*.columns.metadata": "a verifier is given all other columns, or what 'convert' returns",
        "*.size": "set parameters.size of the same source",
        "*.seed": "set parameters.seed of the same source",
        "*.verifier": _SETTING_OF_NAME,
    },
}


def instead(location: Sequence[object]) -> str:
    """Return what stands in the place of the key at ``location``, the end of a sentence; "" for one that never was."""
    parts = [str(part) for part in location if not isinstance(part, int)]
    for key, sentence in REMOVED.get(parts[0], {}).items() if parts else ():
        pattern = key.split(".")
        given = parts[1 : 1 + len(pattern)]
        if len(given) == len(pattern) and all(own in ("*", part) for own, part in zip(pattern, given, strict=True)):
            return sentence
    return ""
