"""A reward that differs between responses of a random model, so that their groups train it."""

from __future__ import annotations

import zlib

from headway.records.task import Task


def score(task: Task, response: str) -> float:
    return zlib.crc32(response.encode()) % 97 / 96
