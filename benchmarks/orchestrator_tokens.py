"""What a token costs between the engine and the trainer's batch: nanoseconds of CPU, and bytes.

    python benchmarks/orchestrator_tokens.py

A rollout of 128 and one of 1,024 response tokens take the same way through the code that a run uses; the difference,
divided by 896 tokens, is what a token costs. The way: deltas of 16 tokens are encoded, framed, read and appended to
their open request; the response is checked and becomes a rollout, which is written to the buffer's file and read
again; the batch is framed, read by the trainer and laid out flat. Processes, sockets and the disk's own time are left
out. The last line is one JSON object: ``ns_per_token`` (with its parts) and ``bytes_per_token`` (the largest of frame,
database row and batch message, each given as well). Each part is that of the quietest of its rounds: what is measured
is the code's own cost.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from headway.algorithms.samples import SampleArrays, lay_out
from headway.buffer.row_encoding import payload_id, read_rollouts
from headway.generator.routing.open_request import OpenRequest
from headway.records.counted import all_finite, sampled_mask
from headway.records.generation import (
    GenerationRequest,
    GenerationResult,
    PartialResponse,
    SamplingParameters,
    TokenDelta,
)
from headway.records.rollout import Rollout, Sample
from headway.records.tokens import TokenIds, TokenLogprobs, decoder, encoder, sampled
from headway.records.training import TrainBatch
from headway.runtime.framing import FrameReader, Kind, encode

SHORT, LONG = 128, 1024  # response tokens
DELTA_TOKENS = 16
PROMPT_TOKENS = 32
ROLLOUTS = 64  # take the way side by side: eight groups of eight, as a replica's event and a batch have them
ROUNDS = 30
WARM_UP = 3  # rounds that don't count

_deltas = decoder(list[TokenDelta])
_encoder = encoder()
_reader = FrameReader()  # of one connection


def deltas_of(request_id: str, tokens: int, seed: int) -> list[TokenDelta]:
    """What an engine says of one response, ``DELTA_TOKENS`` at a time."""
    numbers = np.random.default_rng(seed)
    tokens_n = sampled(TokenIds(numbers.integers(0, 32_000, tokens)), TokenLogprobs(-numbers.random(tokens)))
    return [
        TokenDelta(
            request_id=request_id,
            data=tokens_n[at : at + DELTA_TOKENS].tobytes(),
            version=3 + at // 512,
            finish_reason="stop" if at + DELTA_TOKENS >= tokens else None,
        )
        for at in range(0, tokens, DELTA_TOKENS)
    ]


def through_frame(message: object) -> tuple[Any, int]:
    """The message as its receiver has it, and the bytes that went over."""
    chunks = [memoryview(chunk) for chunk in encode(Kind.EVENT, 0, message)]
    for chunk in chunks:
        while chunk:
            target = _reader.target()
            taken = min(len(target), len(chunk))
            target[:taken] = chunk[:taken]
            chunk = chunk[taken:]
            if frames := _reader.received(taken):
                return frames[0].load(), sum(map(len, chunks))
    raise AssertionError("a frame has an end")


def stream(events: Sequence[Sequence[TokenDelta]], calls: dict[str, OpenRequest]) -> int:
    """Engine to open requests: each event a frame of one delta for every request. Returns the bytes sent."""
    total = 0
    for deltas in events:
        event, sent = through_frame(_encoder.encode(deltas))
        assert isinstance(event, bytes)
        total += sent
        for delta in _deltas.decode(event):
            call = calls[delta.request_id]
            call.absorb(delta, 0.0)
            if delta.finish_reason is not None:
                call.finish(delta.finish_reason)
    return total


def rollout_from(member: int, response: PartialResponse) -> Rollout:
    """The checked response as `rollout.makers.single_turn` puts it together."""
    assert all_finite(response.logprobs)
    return Rollout(
        group=0,
        member=member,
        prompt_ids=_PROMPT,
        response_ids=response.ids,
        response_logprobs=response.logprobs,
        response_mask=sampled_mask(response.ids),
        versions=response.versions,
        reward=float(member % 2),
    )


def store(connection: sqlite3.Connection, rollouts: Sequence[Rollout]) -> int:
    """Write the payloads as `buffer.store` does. Returns their bytes."""
    rows = [(payload_id(r.group, r.member), _encoder.encode(r)) for r in rollouts]
    connection.executemany("REPLACE INTO payloads VALUES (?, ?)", rows)
    return sum(len(body) for _, body in rows)


def train(rollouts: Sequence[Rollout]) -> tuple[SampleArrays, int]:
    """Batch to flat arrays, as the trainer's process has them, and the bytes of the message."""
    batch = TrainBatch(step=4, samples=tuple(Sample(rollout=r, advantage=r.reward - 0.5) for r in rollouts))
    received, sent = through_frame(("train_step", (lay_out(batch),), {}))
    assert isinstance(received, tuple)
    return received[1][0].arrays(), sent


_PROMPT = TokenIds(range(PROMPT_TOKENS))


def one_round(tokens: int, connection: sqlite3.Connection) -> tuple[dict[str, float], dict[str, int]]:
    """A group's way with responses of ``tokens``: seconds of CPU by part, bytes by message."""
    events = [list(step) for step in zip(*(deltas_of(f"0-{m}.0.0", tokens, m) for m in range(ROLLOUTS)), strict=True)]
    sampling = SamplingParameters(max_tokens=tokens)
    loop = asyncio.new_event_loop()
    try:
        futures: list[asyncio.Future[GenerationResult]] = [loop.create_future() for _ in range(ROLLOUTS)]
        calls = {
            f"0-{m}.0.0": OpenRequest(
                GenerationRequest(request_id=f"0-{m}.0.0", prompt_ids=_PROMPT, sampling=sampling), futures[m]
            )
            for m in range(ROLLOUTS)
        }
        seconds: dict[str, float] = {}

        def timed(part: str, work: Callable[[], object]) -> object:
            started = time.process_time_ns()
            found = work()
            seconds[part] = (time.process_time_ns() - started) / 1e9
            return found

        sizes: dict[str, int] = {}
        sizes["frame"] = stream_bytes = timed("stream", lambda: stream(events, calls))
        assert stream_bytes
        rollouts = timed("rollout", lambda: [rollout_from(m, f.result().response) for m, f in enumerate(futures)])
        sizes["row"] = timed("store", lambda: store(connection, rollouts))
        read = timed("read", lambda: read_rollouts(connection, 0))
        assert read == tuple(rollouts)
        arrays, sizes["batch"] = timed("batch", lambda: train(read))
        assert arrays.tokens == ROLLOUTS * (PROMPT_TOKENS + tokens)
        return seconds, sizes
    finally:
        loop.close()


def token_costs(rounds: int = ROUNDS) -> dict[str, Any]:
    """``ns_per_token``, ``bytes_per_token`` and their parts, marginal between SHORT and LONG."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.execute("CREATE TABLE payloads (id INTEGER PRIMARY KEY, body BLOB NOT NULL)")
    taken: dict[int, list[dict[str, float]]] = {SHORT: [], LONG: []}
    sizes: dict[int, dict[str, int]] = {}
    for number in range(WARM_UP + rounds):
        for tokens in (SHORT, LONG):
            seconds, sizes[tokens] = one_round(tokens, connection)
            if number >= WARM_UP:
                taken[tokens].append(seconds)
    connection.close()
    more = ROLLOUTS * (LONG - SHORT)
    parts = {
        part: round(1e9 * (_least(taken[LONG], part) - _least(taken[SHORT], part)) / more, 2) for part in taken[LONG][0]
    }
    bytes_of = {name: round((sizes[LONG][name] - sizes[SHORT][name]) / more, 2) for name in sizes[LONG]}
    return {
        "ns_per_token": round(sum(parts.values()), 2),
        "bytes_per_token": max(bytes_of.values()),
        "ns_by_part": parts,
        "bytes_by_message": bytes_of,
    }


def _least(rounds: Sequence[dict[str, float]], part: str) -> float:
    return min(seconds[part] for seconds in rounds)


def main() -> None:
    print(json.dumps(token_costs()))


if __name__ == "__main__":
    main()
