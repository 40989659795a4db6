"""Rewards that both sides of the TRL comparison compute. Standard library only: two interpreters import this."""

from __future__ import annotations

import re
import zlib

LAST_NUMBER = re.compile(r"\d+(?!.*\d)", re.DOTALL)


def coin(answer: str, response: str) -> float:
    """A coin that the response decides: no two of a group's 8 rewards need be equal, and nothing can be learnt."""
    return float(zlib.crc32(response.encode()) & 1)


def last_number(answer: str, response: str) -> float:
    """1 when the last number of the response is the answer, else 0."""
    found = LAST_NUMBER.search(response)
    return float(found is not None and found[0] == answer)


REWARDS = {"coin": coin, "last_number": last_number}


def verify(task: object, response: str, reward: str) -> float:
    """The same as a Headway verifier, ``parts.trl_task:verify``."""
    return REWARDS[reward](getattr(task, "answer", ""), response)
