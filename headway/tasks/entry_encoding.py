"""Encoding of a generator's entry in JSON types and back, so that its own scorer can be called later.

reasoning-gym's entries hold tuples, dictionaries with integer keys and NumPy scalars, and some of its
scorers compare by type: a tuple that came back as a list scores 0.05 instead of 1. A task's metadata
holds JSON types only (it is stored and sent), so those shapes are tagged.
"""

from __future__ import annotations

from typing import Any

_TUPLE = "__tuple__"
_PAIRS = "__pairs__"
_SET = "__set__"


def pack_entry(value: Any) -> Any:
    """Encode ``value`` in JSON types for ``unpack_entry``. Raises TypeError for a type that has no such form."""
    if value is None or isinstance(value, bool):
        return value
    # exact types first: a numpy.str_ or numpy.float64 is a subclass and must become the plain one
    for plain_type in (int, float, str):
        if isinstance(value, plain_type):
            return plain_type(value)
    if isinstance(value, list):
        return [pack_entry(item) for item in value]
    if isinstance(value, tuple):
        return {_TUPLE: [pack_entry(item) for item in value]}
    if isinstance(value, (set, frozenset)):
        return {_SET: sorted((pack_entry(item) for item in value), key=repr)}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and not value.keys() & {_TUPLE, _PAIRS, _SET}:
            return {str(key): pack_entry(item) for key, item in value.items()}
        return {_PAIRS: [[pack_entry(key), pack_entry(item)] for key, item in value.items()]}
    if hasattr(value, "tolist"):  # NumPy scalars and arrays
        return pack_entry(value.tolist())
    raise TypeError(f"an entry holds a {type(value).__name__}, which has no JSON form")


def unpack_entry(value: Any) -> Any:
    """Undo ``pack_entry``."""
    if isinstance(value, list):
        return [unpack_entry(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        if _TUPLE in value:
            return tuple(unpack_entry(item) for item in value[_TUPLE])
        if _SET in value:
            return {unpack_entry(item) for item in value[_SET]}
        if _PAIRS in value:
            return {unpack_entry(key): unpack_entry(item) for key, item in value[_PAIRS]}
    return {key: unpack_entry(item) for key, item in value.items()}
