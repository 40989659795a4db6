"""Columns of the record: rollouts, endings and trained tokens as Arrow batches."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from headway.config.schema import LedgerConfig
from headway.records.generation import VersionSpan
from headway.records.rollout import Branch, CallTimes, Rollout, ToolTimes
from headway.records.tokens import TokenArray, TokenIds, TokenLogprobs, TokenMask, plain

_INTS, _FLOATS, _MASK = pa.list_(pa.int32()), pa.list_(pa.float32()), pa.list_(pa.bool_())
_TIMES = pa.list_(pa.float64())  # seconds of the run's clock
_SEQUENCE = {
    "prompt_ids": _INTS,
    "response_ids": _INTS,
    "response_logprobs": _FLOATS,  # of the engine, nats; 0 where masked
    "response_mask": _MASK,  # True: sampled by the policy
    "span_versions": _INTS,  # version of each span of the response
    "span_tokens": _INTS,  # its tokens
    "turn_ends": _INTS,
    "finish_reason": pa.string(),
}
_INT32 = "copies resumes reprefills turns attempts environment_version calls rewritten"
_INT64 = "judge_tokens abandoned_tokens"
_FLOAT64 = "reward trained_reward opened_s first_token_s generated_s finished_s verify_s judge_cost environment_s"
_SCALARS: dict[str, pa.DataType] = {
    "group": pa.int64(),
    "member": pa.int32(),
    "solved": pa.bool_(),
    "removal": pa.string(),  # the way in which it left its group before training; null: it didn't
    "removal_reason": pa.string(),
    **dict.fromkeys(_INT32.split(), pa.int32()),
    **dict.fromkeys(_INT64.split(), pa.int64()),
    **dict.fromkeys(_FLOAT64.split(), pa.float64()),
}
_JSON = ("verdict", "failure", "pruned")  # null: there is none
_SPANS = ("span_versions", "span_tokens")  # as VersionSpan orders its fields
_CALLS = {"call_starts_s": _TIMES, "call_first_tokens_s": _TIMES, "call_ends_s": _TIMES, "call_tokens": _INTS}
_TOOLS = {"tool_names": pa.list_(pa.string()), "tool_starts_s": _TIMES, "tool_ends_s": _TIMES, "tool_errors": _MASK}

FINISHED = pa.schema(
    {
        **_SCALARS,
        "task_id": pa.string(),  # its id
        "verified": pa.bool_(),  # False: its group ended before it had finished; the record has no tokens of it
        "tokens": pa.int64(),  # of all responses, of an unfinished rollout so far
        **_SEQUENCE,
        "turn_rewards": pa.list_(pa.float64()),
        **dict.fromkeys(_JSON, pa.string()),
        "branches": pa.list_(pa.struct(_SEQUENCE)),  # sequences beside the trunk; null: none
        # Model calls and tools called, as CallTimes and ToolTimes order their fields
        **_CALLS,
        **_TOOLS,
    }  # pyright: ignore[reportArgumentType]
)
ENDED = pa.schema(
    {
        "group": pa.int64(),
        "ending": pa.string(),  # of its members that had not left earlier
        "reason": pa.string(),
        "step": pa.int32(),  # that trained or skipped it; null: none
        "time_s": pa.float64(),  # clock
    }  # pyright: ignore[reportArgumentType]
)
TRAINED = pa.schema(
    {
        "step": pa.int32(),  # trainer version before it
        "group": pa.int64(),
        "member": pa.int32(),
        "sequence": pa.int32(),  # 0: the trunk; then branches
        "weight": pa.float64(),  # share of its loss that counts: below 1 for the copies of a padded member
        "logprobs": _FLOATS,  # of each response token under the weights it was trained with; NaN: not computed
        "clipped": _MASK,
        "trained": _MASK,  # it has loss: neither masked for staleness or importance nor left out
        "advantages": _FLOATS,
        "values": _FLOATS,  # the critic's at the start of the step, in units of reward; NaN: no loss; null: no critic
    }  # pyright: ignore[reportArgumentType]
)
_KINDS = {**_SEQUENCE, **_CALLS, **_TOOLS}
_STRUCT_FORMATS = {pa.int32().id: "i", pa.int64().id: "q", pa.float64().id: "d"}  # of `struct`
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(Rollout) if field.name in _SCALARS}


def recorded_share(settings: LedgerConfig) -> float:
    """The share of the groups that is recorded."""
    return {"all": 1.0, "none": 0.0}[setting] if isinstance(setting := settings.rollouts, str) else setting


def is_recorded(groups: NDArray[np.int64] | int, share: float) -> Any:
    """Whether each of ``groups`` is in the recorded share, which includes the first group and is spaced evenly."""
    return np.floor(groups * share) > np.floor((groups - 1) * share)


def finished_batch(
    rollouts: Sequence[Rollout], task_ids: Sequence[str], reached: Mapping[int, int] = {}
) -> pa.RecordBatch:
    """Rollouts as a batch of `FINISHED`, with the id of each rollout's task. ``reached``: response tokens of unfinished
    rollouts, by position."""
    values_by_field = _values(rollouts)
    columns: dict[str, Any] = {
        **{name: _scalar_array(name, values_by_field[name]) for name in _SCALARS},
        **_sequence_arrays(values_by_field),
        **{name: _json_array(values_by_field[name]) for name in _JSON},
        "turn_rewards": _short_lists(values_by_field["turn_rewards"], _TIMES),
        "branches": _branch_array(values_by_field["branches"]),
        **_nested_arrays(CallTimes, _CALLS, values_by_field["call_times"]),
        **_nested_arrays(ToolTimes, _TOOLS, values_by_field["tool_times"]),
        "task_id": pa.array(task_ids, pa.string()),
    }
    token_counts = np.diff(columns["response_ids"].offsets.to_numpy()).astype(np.int64)
    if any(values_by_field["branches"]):
        token_counts[:] = [rollout.response_tokens for rollout in rollouts]
    verified_flags = np.ones(len(rollouts), np.bool_)
    token_counts[list(reached)], verified_flags[list(reached)] = list(reached.values()), False
    columns |= {"tokens": pa.array(token_counts), "verified": pa.array(verified_flags)}
    return pa.RecordBatch.from_arrays([columns[name] for name in FINISHED.names], schema=FINISHED)


def ended_batch(rows: Sequence[tuple[int, str, str, int | None, float]]) -> pa.RecordBatch:
    """Rows, with fields in the order of `ENDED`, as a batch of `ENDED`."""
    columns = zip(*rows, strict=True)
    return pa.RecordBatch.from_arrays(list(map(_array, columns, ENDED.types)), schema=ENDED)


def trained_batch(*, values: pa.ListArray | None = None, **columns: ArrayLike | pa.Array) -> pa.RecordBatch:
    """Columns of `TRAINED` as a batch of `TRAINED`. ``values``: a critic's; None: there is none."""
    columns["values"] = [None] * len(columns["group"]) if values is None else values  # pyright: ignore[reportArgumentType]
    arrays = [pa.array(columns[field.name], field.type) for field in TRAINED]  # pyright: ignore[reportArgumentType]
    return pa.RecordBatch.from_arrays(arrays, schema=TRAINED)


def list_array(values: NDArray[Any], lengths: Sequence[int] | NDArray[Any]) -> pa.ListArray:
    """Split ``values`` into lists of these ``lengths``."""
    return pa.ListArray.from_arrays(_offsets(lengths), pa.array(values))


def _offsets(lengths: Sequence[int] | NDArray[Any]) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, dtype=np.int32, out=offsets[1:])
    return pa.array(offsets)


def _lengths(parts: Sequence[Any]) -> NDArray[Any]:
    return np.fromiter(map(len, parts), np.int32, len(parts))


def _values(records: Sequence[Rollout] | Sequence[Branch]) -> dict[str, tuple[Any, ...]]:
    """The values of each field, read in one pass because older records are in no CPU cache."""
    columns = zip(*map(msgspec.structs.astuple, records), strict=True)
    return dict(zip(records[0].__struct_fields__, columns, strict=True))


def _sequence_arrays(values: Mapping[str, tuple[Any, ...]]) -> dict[str, pa.Array]:
    prompt_arrays, response_arrays = _arrays(TokenIds, values["prompt_ids"]), _arrays(TokenIds, values["response_ids"])
    response_ids, logprobs = _joined(response_arrays), _joined(_arrays(TokenLogprobs, values["response_logprobs"]))
    mask = _joined(_arrays(TokenMask, values["response_mask"]))
    if not len(response_ids) == len(logprobs) == len(mask):
        raise ValueError(f"{len(response_ids)} ids, {len(logprobs)} log-probabilities and {len(mask)} mask values")
    offsets, bits = _offsets(_lengths(response_arrays)), pa.py_buffer(np.packbits(mask, bitorder="little"))
    return {
        "prompt_ids": list_array(_joined(prompt_arrays), _lengths(prompt_arrays)),
        "response_ids": pa.ListArray.from_arrays(offsets, pa.array(response_ids)),
        "response_logprobs": pa.ListArray.from_arrays(offsets, pa.array(logprobs)),
        "response_mask": pa.ListArray.from_arrays(offsets, pa.Array.from_buffers(pa.bool_(), len(mask), [None, bits])),
        **_nested_arrays(VersionSpan, _SPANS, values["versions"]),
        "turn_ends": _short_lists(values["turn_ends"], _INTS),
        "finish_reason": pa.array(values["finish_reason"], pa.string()),
    }


def _arrays(kind: type[TokenArray[Any]], parts: Sequence[Sequence[Any]]) -> list[NDArray[Any]]:
    if set(map(type, parts)) == {kind}:  # isinstance would ask abc
        return list(map(attrgetter("array"), parts))
    return [kind(part).array for part in parts]


def _joined(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    untyped_arrays: Any = arrays  # bytes.join takes arrays, which its type omits; half the time of np.concatenate
    return np.frombuffer(b"".join(untyped_arrays), arrays[0].dtype)


def _nested_arrays(
    kind: type[msgspec.Struct], names: Iterable[str], parts: Sequence[Sequence[msgspec.Struct]]
) -> dict[str, pa.Array]:
    """Lists of records as the columns ``names``, which correspond to the records' fields."""
    if not any(parts):
        return {name: _constant((), _KINDS[name], len(parts)) for name in names}
    offsets, records = _offsets(_lengths(parts)), list(chain.from_iterable(parts))
    return {
        name: pa.ListArray.from_arrays(offsets, _array(list(map(attrgetter(field), records)), _KINDS[name].value_type))
        for name, field in zip(names, kind.__struct_fields__, strict=True)
    }


def _short_lists(values: Sequence[Sequence[Any]], kind: pa.DataType) -> pa.Array:
    if not any(values):
        return _constant((), kind, len(values))
    flat_array = pa.array(list(chain.from_iterable(values)), kind.value_type)
    return pa.ListArray.from_arrays(_offsets(_lengths(values)), flat_array)


def _scalar_array(name: str, values: tuple[Any, ...]) -> pa.Array:
    arrow_type, default = _SCALARS[name], _DEFAULTS.get(name)
    if values[0] == default and values.count(default) == len(values):  # true of most columns in most batches
        return _constant(default, arrow_type, len(values))
    return _array(values, arrow_type)


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if (struct_format := _STRUCT_FORMATS.get(kind.id)) is not None:
        with contextlib.suppress(struct.error):  # a value is null, or can't be written
            packed_bytes = struct.pack(f"{len(values)}{struct_format}", *values)  # in half the time
            return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(packed_bytes)])
    return pa.array(values, kind)


def _constant(value: Any, kind: pa.DataType, count: int) -> pa.Array:
    """An array of ``count`` times ``value``, as a slice of a cached array."""
    return _constants(value, kind, 1 << count.bit_length())[:count]


@cache
def _constants(value: Any, kind: pa.DataType, count: int) -> pa.Array:
    return pa.nulls(count, kind) if value is None else pa.repeat(pa.scalar(value, kind), count)


def _branch_array(branches: Sequence[tuple[Branch, ...]]) -> pa.Array:
    if not any(branches):
        return pa.nulls(len(branches), FINISHED.field("branches").type)
    array_by_field = _sequence_arrays(_values([branch for siblings in branches for branch in siblings]))
    struct_array = pa.StructArray.from_arrays(list(array_by_field.values()), names=list(array_by_field))
    start_offsets = np.cumsum([0, *map(len, branches)]).tolist()
    offsets = [start if siblings else None for start, siblings in zip(start_offsets, branches, strict=False)]
    return pa.ListArray.from_arrays(pa.array([*offsets, start_offsets[-1]], pa.int32()), struct_array)


def _json_array(values: Sequence[Any]) -> pa.Array:
    if not any(values):
        return pa.nulls(len(values), pa.string())
    return pa.array([msgspec.json.encode(v, enc_hook=plain) if v else None for v in values], pa.string())
