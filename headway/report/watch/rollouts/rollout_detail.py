"""Describes a whole rollout: its tokens with the engine's and the trainer's values, its life, its turns."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headway.report.watch.rollouts.text_index import TokenTable
from headway.telemetry.rollouts.reader import TrainedSequence

MAX_TOKENS = 20_000  # in a window
_MAX_PARTS = 5_000
_CONTEXT_TOKENS = 4  # before a window, since a character of the window may begin there
_TRAINER = ("trainer_logprobs", "ratios", "clipped", "trained", "advantages", "values")
_SCALARS = ("trained_reward", "verified", "finish_reason", "resumes", "reprefills", "attempts", "verify_s",
          "environment_s", "judge_tokens")  # fmt: skip
Array = NDArray[Any]


def scalars(batch: pa.RecordBatch) -> dict[str, Any]:
    """Return the single values of the rollout that ``batch`` consists of, with verdict, failure and pruning decoded."""
    field_values = {name: batch[name][0].as_py() for name in _SCALARS}
    for name in ("verdict", "failure", "pruned"):
        text = batch[name][0].as_py()
        field_values[name] = None if text is None else _decode_object(text)
    return field_values


def cause_of(failure: str) -> str:
    """Return the boundary and the cause of a recorded failure."""
    failure_fields = _decode_object(failure)
    return ": ".join(str(failure_fields[name]) for name in ("boundary", "cause") if name in failure_fields) or failure


def _decode_object(text: str) -> dict[str, Any]:
    with contextlib.suppress(msgspec.MsgspecError):
        return msgspec.json.decode(text, type=dict[str, Any])
    return {"cause": text}


def life(batch: pa.RecordBatch, began_s: float | None, ended_s: float | None) -> list[dict[str, Any]]:
    """Return the periods of a rollout from admission to gradient. ``began_s``: clock when its training step could
    begin; None: there is no step; ``ended_s``: clock at its group's end; None: the group is open."""
    opened_s, token_s, generated_s, finished_s = (
        batch[name][0].as_py() for name in ("opened_s", "first_token_s", "generated_s", "finished_s")
    )
    periods = [
        ("waiting", opened_s, token_s), ("generating", token_s, generated_s), ("verifying", generated_s, finished_s),
        ("buffered", finished_s, began_s or ended_s), ("training", began_s, ended_s),
    ]  # fmt: skip
    return [
        {"name": name, "start_s": start, "end_s": end} for name, start, end in periods if start and end and end >= start
    ]


def sequences(
    batch: pa.RecordBatch,
    tokens: TokenTable | None,
    trained: Sequence[TrainedSequence | None],
    window: tuple[int | None, int, int],
) -> list[dict[str, Any]]:
    """Return the sequences of the rollout that ``batch`` consists of: the trunk, then its branches. ``trained``: the
    trainer's values of each; ``window``: (sequence, None for all; first token; number of tokens)."""
    column_sets = [{field.name: batch[field.name] for field in batch.schema}]
    if (branches := batch["branches"][0].values) is not None:
        for number in range(len(branches)):
            column_sets.append({field.name: branches.field(field.name).slice(number, 1) for field in branches.type})
    only_number, offset, limit = window
    token_range = max(0, offset), min(max(limit, 0), MAX_TOKENS)
    return [
        {"name": f"branch {number}" if number else "trunk"}
        | _sequence(columns, tokens, trained_sequence, token_range if only_number in (None, number) else (0, 0))
        for number, (columns, trained_sequence) in enumerate(zip_longest(column_sets, trained))
    ]


def _sequence(
    columns: dict[str, pa.Array], tokens: TokenTable | None, trained: TrainedSequence | None, window: tuple[int, int]
) -> dict[str, Any]:
    prompt, response = (_array(columns[f"{name}_ids"]) for name in ("prompt", "response"))
    ids, mask = np.concatenate([prompt, response]), _array(columns["response_mask"]).astype(bool)
    versions = np.repeat(_array(columns["span_versions"]), _array(columns["span_tokens"]))
    offset, end = min(window[0], len(ids)), min(window[0] + window[1], len(ids))
    low, high = max(0, offset - len(prompt)), max(0, end - len(prompt))
    in_prompt = (end - offset) - (high - low)  # tokens of the prompt in the window
    sampled = mask[low:high]
    logprobs = _array(columns["response_logprobs"])[low:high]
    token_texts: list[Any] = [None] * (end - offset)
    if tokens is not None:
        token_texts = tokens.strings(ids[offset:end], ids[max(0, offset - _CONTEXT_TOKENS) : offset])
    values: dict[str, Any] = {
        "logprobs": _rounded(np.where(sampled, logprobs, np.nan)),
        "versions": [v if s else None for v, s in zip(versions[low:high].tolist(), sampled.tolist(), strict=False)],
        **dict.fromkeys(_TRAINER),
    }
    if trained is not None and len(trained.logprobs) == len(response):
        new_logprobs, clipped, in_loss, advantages = (column[low:high] for column in trained[:4])
        ratios = np.exp(np.where(sampled, new_logprobs - logprobs, np.nan))
        rounded = (_rounded(new_logprobs), _rounded(ratios), clipped.tolist(), in_loss.tolist(), _rounded(advantages))
        estimates = None if trained.values is None else _rounded(trained.values[low:high])
        values |= dict(zip(_TRAINER, (*rounded, estimates), strict=True))
    values = {name: None if column is None else [*[None] * in_prompt, *column] for name, column in values.items()}
    return {
        "parts": _parts(len(prompt), mask, _array(columns["turn_ends"])), "tokens": token_texts,
        "ids": ids[offset:end].tolist(), "mask": [*[False] * in_prompt, *sampled.tolist()], **values, "offset": offset,
        "total_tokens": len(ids), "prompt_tokens": len(prompt),
        "span_versions": _array(columns["span_versions"]).tolist(),
    }  # fmt: skip


def turns(parts: list[dict[str, Any]], batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the turns of the trunk, which has these ``parts``, of the rollout that ``batch`` consists of: tokens, and
    where they are recorded the reward and the times of the model call."""
    sampled_parts = [part for part in parts if part["kind"] == "sampled"]
    column_by_name = {"reward": "turn_rewards", "start_s": "call_starts_s", "end_s": "call_ends_s"}
    columns = {name: batch[column][0].as_py() for name, column in column_by_name.items()}
    full_columns = {name: values for name, values in columns.items() if len(values) == len(sampled_parts)}
    return [
        {"index": index, "tokens": part["to"] - part["from"]}
        | {name: full_columns[name][index] if name in full_columns else None for name in column_by_name}
        for index, part in enumerate(sampled_parts)
    ]


def _parts(prompt: int, mask: Array, turn_ends: Array) -> list[dict[str, Any]]:
    """Split a sequence into prompt, sampled tokens and observations; sampled tokens are also split at ends of turns."""
    cut_positions = np.flatnonzero(mask[1:] != mask[:-1]) + 1
    turn_cuts = turn_ends[(turn_ends > 0) & (turn_ends < len(mask))]
    cut_positions = np.unique(np.concatenate([[0], cut_positions, turn_cuts, [len(mask)]]).astype(int))
    if len(cut_positions) > _MAX_PARTS:
        cut_positions = np.append(cut_positions[:_MAX_PARTS], len(mask))
    parts = [{"kind": "prompt", "from": 0, "to": prompt}] if prompt else []
    for start, end in zip(cut_positions.tolist(), cut_positions[1:].tolist(), strict=False):
        kind = "sampled" if mask[start] else "observation"
        if parts and parts[-1]["kind"] == kind == "observation":
            parts[-1]["to"] = prompt + end
        else:
            parts.append({"kind": kind, "from": prompt + start, "to": prompt + end})
    return parts


def _array(lists: pa.Array) -> Array:
    """Return the only row of a list column."""
    values = lists[0].values
    return np.empty(0, np.float32) if values is None else values.to_numpy(zero_copy_only=False)


def _rounded(values: Array) -> list[float | None]:
    is_finite = np.isfinite(values)
    return [float(f"{v:.5g}") if ok else None for v, ok in zip(values.tolist(), is_finite.tolist(), strict=True)]
