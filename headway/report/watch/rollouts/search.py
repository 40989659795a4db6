"""Selects and orders the rollouts of a query, and cuts snippets around its matches."""

from __future__ import annotations

import codecs
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.records.errors import ConfigurationError
from headway.records.rollout import ENDINGS
from headway.report.watch.rollouts.columns import OPEN, RolloutTable
from headway.report.watch.rollouts.text_index import BORDER, fold

_BYTES_BEFORE, _BYTES_AFTER = 120, 240  # bytes of a snippet on both sides of the match
Array = NDArray[Any]


class RolloutQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filters of rollouts, their order, and the page; None and "" don't filter."""

    text: str = ""
    reward_from: float | None = None
    reward_to: float | None = None
    tokens_from: int | None = None
    tokens_to: int | None = None
    step_from: int | None = None  # that trained or skipped it
    step_to: int | None = None
    version_from: int | None = None  # at least one of its tokens has a version within
    version_to: int | None = None
    solved: bool | None = None
    task: str = ""  # its id, or its prefix
    ending: str = ""  # or "open"
    group: int | None = None
    failure: bool = False  # only failed rollouts
    order: Literal["newest", "oldest", "reward", "-reward", "tokens", "-tokens"] = "newest"
    limit: int = 50
    after: str = ""  # row of the last rollout on the page before


def query_from(raw: dict[str, Any]) -> RolloutQuery:
    """Make a query from values or their texts. Raises ConfigurationError for invalid ones."""
    try:
        query = msgspec.convert({k: v for k, v in raw.items() if v not in (None, "")}, RolloutQuery, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{error}") from None
    if query.ending not in ("", "open", *ENDINGS):
        raise ConfigurationError(f"ending = {query.ending!r}: valid: open, {', '.join(ENDINGS)}")
    if query.after and not query.after.removeprefix("-").isdecimal():
        raise ConfigurationError(f"after = {query.after!r}: valid: the value from the previous page")
    return msgspec.structs.replace(query, limit=min(max(query.limit, 1), 500))


def select(table: RolloutTable, query: RolloutQuery) -> Array:
    """Return the indices of the rollouts in the table that pass all filters but the text's."""
    selected = table["member"] >= 0
    for name in ("reward", "tokens", "step"):
        low, high = getattr(query, f"{name}_from"), getattr(query, f"{name}_to")
        if low is not None:
            selected &= table[name] >= low
        if high is not None:
            selected &= table[name] <= high
    if query.step_to is not None:
        selected &= table["step"] >= 0
    if query.version_from is not None:
        selected &= table["last_version"] >= query.version_from
    if query.version_to is not None:
        selected &= (table["first_version"] <= query.version_to) & (table["first_version"] >= 0)
    if query.solved is not None:
        selected &= (table["solved"] == query.solved) & table["verified"]
    if query.task:
        exact_tasks = [index for index, name in enumerate(table.names) if name == query.task]
        prefixed_tasks = [index for index, name in enumerate(table.names) if name.startswith(query.task)]
        selected &= np.isin(table["task"], exact_tasks or prefixed_tasks)
    if query.ending:
        selected &= table["ending"] == (OPEN if query.ending == "open" else ENDINGS.index(query.ending))
    if query.group is not None:
        selected &= table["group"] == query.group
    if query.failure:
        selected &= table["boundary"] != 255
    return np.flatnonzero(selected)


def ordered(table: RolloutTable, rows: Array, query: RolloutQuery) -> Array:
    """Sort ``rows`` in the query's order, equal ones newest first, without those up to the end of the page before."""
    column_name, sign = query.order.lstrip("-"), -1 if query.order.startswith("-") else 1
    sort_keys = table[column_name] * sign if column_name in ("reward", "tokens") else None
    rows = rows if query.order == "oldest" else rows[::-1]
    if query.after:
        last = min(max(int(query.after) - table.first, 0), len(table) - 1)
        if sort_keys is not None:
            rows = rows[(sort_keys[rows] > sort_keys[last]) | ((sort_keys[rows] == sort_keys[last]) & (rows < last))]
        else:
            rows = rows[rows > last if query.order == "oldest" else rows < last]
    return rows if sort_keys is None else rows[np.argsort(sort_keys[rows], kind="stable")]


def snippet(text: bytes, pattern: bytes) -> dict[str, str] | None:
    """Return the part of a rollout's ``text`` around the first match of the folded ``pattern``; None: no match."""
    start = fold(np.frombuffer(text, np.uint8).copy()).tobytes().find(pattern)
    if start < 0:
        return None
    stop = start + len(pattern)
    text_before = text[max(0, start - _BYTES_BEFORE) : start].rpartition(BORDER)[2]
    if len(text_before) == _BYTES_BEFORE:  # it may begin inside a character
        text_before = text_before.lstrip(bytes(range(0x80, 0xC0)))
    text_after = text[stop : stop + _BYTES_AFTER].partition(BORDER)[0]
    return {
        "before": text_before.decode("utf-8", "replace"),
        "match": text[start:stop].decode("utf-8", "replace"),
        "after": decode_truncated(text_after),
    }


def decode_truncated(text: bytes) -> str:
    """Decode ``text`` as UTF-8, without a character that is cut off at its end."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(text)
