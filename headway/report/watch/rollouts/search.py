"""Which rollouts a query asks for, in its order, and the part of a text that was found."""

from __future__ import annotations

import codecs
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.records.errors import ConfigurationError
from headway.records.rollout import ENDINGS
from headway.report.watch.rollouts.columns import OPEN, RolloutTable
from headway.report.watch.rollouts.texts import BORDER, fold

_BEFORE, _AFTER = 120, 240  # bytes of a snippet on both sides of what was found
Array = NDArray[Any]


class RolloutQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filters of rollouts, their order, and the page. None and "" don't filter."""

    text: str = ""
    reward_from: float | None = None
    reward_to: float | None = None
    tokens_from: int | None = None
    tokens_to: int | None = None
    step_from: int | None = None  # that trained or skipped it
    step_to: int | None = None
    version_from: int | None = None  # of its tokens: one at least lies within
    version_to: int | None = None
    solved: bool | None = None
    task: str = ""  # its id, or the beginning of it
    ending: str = ""  # or "open"
    group: int | None = None
    failure: bool = False  # only those that failed
    order: Literal["newest", "oldest", "reward", "-reward", "tokens", "-tokens"] = "newest"
    limit: int = 50
    after: str = ""  # row of the last one of the page before


def query_of(given: dict[str, Any]) -> RolloutQuery:
    """A query out of values or their texts. Raises ConfigurationError."""
    try:
        query = msgspec.convert({k: v for k, v in given.items() if v not in (None, "")}, RolloutQuery, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{error}") from None
    if query.ending not in ("", "open", *ENDINGS):
        raise ConfigurationError(f"ending = {query.ending!r}: valid: open, {', '.join(ENDINGS)}")
    if query.after and not query.after.removeprefix("-").isdecimal():
        raise ConfigurationError(f"after = {query.after!r}: valid: what the page before has given")
    return msgspec.structs.replace(query, limit=min(max(query.limit, 1), 500))


def select(table: RolloutTable, query: RolloutQuery) -> Array:
    """Places in the table of the rollouts that pass all filters but the text's."""
    taken = table["member"] >= 0
    for name in ("reward", "tokens", "step"):
        low, high = getattr(query, f"{name}_from"), getattr(query, f"{name}_to")
        if low is not None:
            taken &= table[name] >= low
        if high is not None:
            taken &= table[name] <= high
    if query.step_to is not None:
        taken &= table["step"] >= 0
    if query.version_from is not None:
        taken &= table["last_version"] >= query.version_from
    if query.version_to is not None:
        taken &= (table["first_version"] <= query.version_to) & (table["first_version"] >= 0)
    if query.solved is not None:
        taken &= (table["solved"] == query.solved) & table["verified"]
    if query.task:
        exact = [place for place, name in enumerate(table.names) if name == query.task]
        begun = [place for place, name in enumerate(table.names) if name.startswith(query.task)]
        taken &= np.isin(table["task"], exact or begun)
    if query.ending:
        taken &= table["ending"] == (OPEN if query.ending == "open" else ENDINGS.index(query.ending))
    if query.group is not None:
        taken &= table["group"] == query.group
    if query.failure:
        taken &= table["boundary"] != 255
    return np.flatnonzero(taken)


def ordered(table: RolloutTable, places: Array, query: RolloutQuery) -> Array:
    """``places`` in the order that is asked for, equal ones the newest first, behind the page before."""
    name, sign = query.order.lstrip("-"), -1 if query.order.startswith("-") else 1
    keys = table[name] * sign if name in ("reward", "tokens") else None
    places = places if query.order == "oldest" else places[::-1]
    if query.after:
        last = min(max(int(query.after) - table.first, 0), len(table) - 1)
        if keys is not None:
            places = places[(keys[places] > keys[last]) | ((keys[places] == keys[last]) & (places < last))]
        else:
            places = places[places > last if query.order == "oldest" else places < last]
    return places if keys is None else places[np.argsort(keys[places], kind="stable")]


def snippet(text: bytes, found: bytes) -> dict[str, str] | None:
    """The part of a rollout's ``text`` around the first place where ``found``, folded, stands; None: nowhere."""
    at = fold(np.frombuffer(text, np.uint8).copy()).tobytes().find(found)
    if at < 0:
        return None
    behind = at + len(found)
    before = text[max(0, at - _BEFORE) : at].rpartition(BORDER)[2]
    if len(before) == _BEFORE:  # it may begin inside a character
        before = before.lstrip(bytes(range(0x80, 0xC0)))
    after = text[behind : behind + _AFTER].partition(BORDER)[0]
    return {
        "before": before.decode("utf-8", "replace"),
        "match": text[at:behind].decode("utf-8", "replace"),
        "after": beginning(after),
    }


def beginning(text: bytes) -> str:
    """The characters of ``text``, without one that is cut off at its end."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(text)
