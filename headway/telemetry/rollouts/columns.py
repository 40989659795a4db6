"""Columns of the record: rollouts, endings and trained tokens as Arrow batches."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from headway.config.schema import LedgerConfig
from headway.records.rollout import Branch, Rollout
from headway.records.tokens import TokenArray, TokenIds, TokenLogprobs, TokenMask, plain

_INTS, _FLOATS, _MASK = pa.list_(pa.int32()), pa.list_(pa.float32()), pa.list_(pa.bool_())
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
    "left": pa.string(),  # how it left its group before training; null: it didn't
    "left_reason": pa.string(),
    **dict.fromkeys(_INT32.split(), pa.int32()),
    **dict.fromkeys(_INT64.split(), pa.int64()),
    **dict.fromkeys(_FLOAT64.split(), pa.float64()),
}
_JSON = ("verdict", "failure", "pruned")  # null: there is none

FINISHED = pa.schema(
    {
        **_SCALARS,
        "task_id": pa.string(),  # its id
        "verified": pa.bool_(),  # False: its group ended before it had finished; it has no tokens here
        "tokens": pa.int64(),  # of all responses; of an unfinished one those it had reached
        **_SEQUENCE,
        "turn_rewards": pa.list_(pa.float64()),
        **dict.fromkeys(_JSON, pa.string()),
        "branches": pa.list_(pa.struct(_SEQUENCE)),  # sequences beside the trunk; null: none
    }  # pyright: ignore[reportArgumentType]
)
ENDED = pa.schema(
    {
        "group": pa.int64(),
        "ending": pa.string(),  # of its members that had not left before
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
        "trained": _MASK,  # loss was taken of it: neither masked for staleness or importance nor left out
        "advantages": _FLOATS,
    }  # pyright: ignore[reportArgumentType]
)
_scalars_of = attrgetter(*_SCALARS)


class Arrival(NamedTuple):
    """A rollout to be recorded."""

    rollout: Rollout
    task_id: str
    reached: int = -1  # response tokens where it hasn't finished; -1: it has


def share_of(settings: LedgerConfig) -> float:
    """The share of the groups that is recorded."""
    return {"all": 1.0, "none": 0.0}[rollouts] if isinstance(rollouts := settings.rollouts, str) else rollouts


def takes(groups: NDArray[np.int64] | int, share: float) -> Any:
    """Whether each of ``groups`` is among the share that is recorded: the first, and evenly from there."""
    return np.floor(groups * share) > np.floor((groups - 1) * share)


def finished_batch(arrivals: Sequence[Arrival]) -> pa.RecordBatch:
    """The rollouts as a batch of `FINISHED`."""
    rollouts = [arrival.rollout for arrival in arrivals]
    scalars = zip(*map(_scalars_of, rollouts), strict=True)
    sequences = _sequence_arrays(rollouts)
    columns: dict[str, Any] = {
        **{name: pa.array(values, kind) for values, (name, kind) in zip(scalars, _SCALARS.items(), strict=True)},
        **sequences,
        "task_id": pa.array([arrival.task_id for arrival in arrivals], pa.string()),
        "verified": pa.array([arrival.reached < 0 for arrival in arrivals], pa.bool_()),
        "tokens": _token_counts(arrivals, sequences["response_ids"]),
        "turn_rewards": pa.array([rollout.turn_rewards for rollout in rollouts], pa.list_(pa.float64())),
        **{name: _json_array([getattr(rollout, name) for rollout in rollouts]) for name in _JSON},
        "branches": _branch_array([rollout.branches for rollout in rollouts]),
    }
    return pa.RecordBatch.from_arrays([columns[name] for name in FINISHED.names], schema=FINISHED)


def ended_batch(rows: Sequence[tuple[int, str, str, int | None, float]]) -> pa.RecordBatch:
    """Rows of `ENDED`, as it orders their fields, as a batch."""
    columns = zip(*rows, strict=True)
    return pa.RecordBatch.from_arrays(
        [pa.array(values, field.type) for values, field in zip(columns, ENDED, strict=True)], schema=ENDED
    )


def trained_batch(**columns: ArrayLike | pa.Array) -> pa.RecordBatch:
    """Columns of `TRAINED` as a batch."""
    return pa.RecordBatch.from_arrays(
        [pa.array(columns[field.name], field.type) for field in TRAINED],  # pyright: ignore[reportArgumentType]
        schema=TRAINED,
    )


def listed(values: NDArray[Any], lengths: Sequence[int] | NDArray[Any]) -> pa.ListArray:
    """``values`` cut into lists of these ``lengths``."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(np.asarray(lengths, np.int32), out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def _sequence_arrays(sequences: Sequence[Rollout | Branch]) -> dict[str, pa.Array]:
    spans = [s.versions for s in sequences]
    ends = [s.turn_ends for s in sequences]
    counts = list(map(len, spans))
    return {
        "prompt_ids": _lists(TokenIds, [s.prompt_ids for s in sequences]),
        "response_ids": _lists(TokenIds, [s.response_ids for s in sequences]),
        "response_logprobs": _lists(TokenLogprobs, [s.response_logprobs for s in sequences]),
        "response_mask": _lists(TokenMask, [s.response_mask for s in sequences]),
        "span_versions": listed(np.array([span.version for own in spans for span in own], np.int32), counts),
        "span_tokens": listed(np.array([span.tokens for own in spans for span in own], np.int32), counts),
        "turn_ends": pa.array(ends, _INTS),
        "finish_reason": pa.array([s.finish_reason for s in sequences], pa.string()),
    }


def _lists(kind: type[TokenArray[Any]], parts: Sequence[Sequence[Any]]) -> pa.ListArray:
    arrays = [part.array if type(part) is kind else kind(part).array for part in parts]  # isinstance would ask abc
    return listed(np.concatenate(arrays), list(map(len, arrays)))


def _token_counts(arrivals: Sequence[Arrival], responses: pa.ListArray) -> pa.Array:
    counts = np.diff(responses.offsets.to_numpy()).astype(np.int64)
    for index, (rollout, _, reached) in enumerate(arrivals):
        if reached >= 0 or rollout.branches:
            counts[index] = rollout.response_tokens if reached < 0 else reached
    return pa.array(counts)


def _branch_array(branches: Sequence[tuple[Branch, ...]]) -> pa.Array:
    if not any(branches):
        return pa.nulls(len(branches), FINISHED.field("branches").type)
    arrays = _sequence_arrays([branch for own in branches for branch in own])
    structs = pa.StructArray.from_arrays(list(arrays.values()), names=list(arrays))
    offsets = [None if not own else 0 for own in branches]
    position = 0
    for index, own in enumerate(branches):
        offsets[index] = position if own else None
        position += len(own)
    return pa.ListArray.from_arrays(pa.array([*offsets, position], pa.int32()), structs)


def _json_array(values: Sequence[Any]) -> pa.Array:
    if not any(values):
        return pa.nulls(len(values), pa.string())
    return pa.array([msgspec.json.encode(v, enc_hook=plain) if v else None for v in values], pa.string())
