"""Reads the text of JSONL files, for training a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from headway.records.errors import ConfigurationError


def read_texts(paths: Sequence[str]) -> list[str]:
    """Return every string value of every object of the files, nested ones too. Raises ConfigurationError with file and
    line; also when there is no text at all."""
    from headway.tasks.rows import read_objects

    texts = [text for path in paths for _, raw in read_objects(Path(path)) for text in _strings(raw) if text]
    if not texts:
        raise ConfigurationError(f"no text in {', '.join(paths)}")
    return texts


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
