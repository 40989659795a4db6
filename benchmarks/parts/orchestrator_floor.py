"""The floor of the orchestrator's cost: its bytes are received, encoded, committed and sent, and nothing else is done.

For each engine step of a replica that hands out tokens, one frame is received; each finished rollout's token block is
encoded once; each group is one transaction of a database opened as the buffer's is; each batch is one frame, its blocks
out of band. No task, no future, no statistics, no rule.
"""

from __future__ import annotations

import os
import socket
import sqlite3
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from headway.buffer.database import open_database
from headway.runtime.framing import FrameReader, Kind, encode, tune
from parts.orchestrator_replay import DELTA_TOKENS, DELTAS, PROMPT_TOKENS, RESPONSE_TOKENS

_ENCODER = msgspec.msgpack.Encoder()


def floor_s(samples: int, *, group: int, groups_per_step: int, slots: int, frame_s: float) -> float:
    """CPU seconds of this process for each of ``samples``, whole batches of them.

    A frame comes every ``frame_s``, as in the run: a process that wakes up seldom finds its caches cold, here as there.
    """
    batch = group * groups_per_step
    samples = max(batch, samples - samples % batch)
    frames = samples * DELTAS // slots
    with tempfile.TemporaryDirectory() as folder:
        connection = open_database(Path(folder) / "floor.db")
        connection.execute("CREATE TABLE blocks (id INTEGER PRIMARY KEY, body BLOB NOT NULL)")
        incoming, peer = socket.socketpair()
        outgoing, sink = socket.socketpair()
        for one in (incoming, peer, outgoing, sink):
            tune(one)
        replicas = _forked(lambda: _stream(peer, slots, frames, frame_s), incoming, outgoing, sink)
        trainer = _forked(lambda: _drain(sink), incoming, outgoing, peer)
        peer.close()
        sink.close()
        try:
            started = time.process_time()
            _work(connection, incoming, outgoing, frames, samples, group, batch)
            spent_s = time.process_time() - started
        finally:
            incoming.close()
            outgoing.close()
            connection.close()
            os.waitpid(replicas, 0)
            os.waitpid(trainer, 0)
    return spent_s / samples


def _work(
    connection: sqlite3.Connection,
    incoming: socket.socket,
    outgoing: socket.socket,
    frames: int,
    samples: int,
    group: int,
    batch: int,
) -> None:
    reader, received, done = FrameReader(), 0, 0
    blocks: list[list[np.ndarray]] = []
    while done < samples:
        due = samples if received == frames else samples * received // frames
        while done + group <= due:
            blocks += _commit(connection, done, group)
            done += group
            if not done % batch:
                _send(outgoing, blocks)
                blocks = []
        if received < frames:
            for frame in reader.received(incoming.recv_into(reader.target())):
                _take(frame.load())
                received += 1


def _take(message: tuple[list[int], bytes, bytes]) -> None:
    """The arrays of one frame: requests, ids, log-probabilities."""
    _, ids, logprobs = message
    np.frombuffer(ids, np.int32)
    np.frombuffer(logprobs, np.float32)


def _commit(connection: sqlite3.Connection, first: int, group: int) -> list[list[np.ndarray]]:
    """One transaction: the token blocks of a group, each encoded once."""
    blocks = [_block() for _ in range(group)]
    rows = [
        (first + member, _ENCODER.encode((first, member, *(array.tobytes() for array in block))))
        for member, block in enumerate(blocks)
    ]
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany("INSERT INTO blocks VALUES (?, ?)", rows)
    connection.execute("COMMIT")
    return blocks


def _block() -> list[np.ndarray]:
    """Prompt, ids, log-probabilities and mask of one rollout."""
    return [_PROMPT, _IDS, _LOGPROBS, _MASK]


def _send(outgoing: socket.socket, blocks: Sequence[Sequence[np.ndarray]]) -> None:
    """One frame with the blocks of a batch, column by column."""
    for chunk in encode(Kind.CALL, 1, [np.concatenate(column) for column in zip(*blocks, strict=True)]):
        outgoing.sendall(chunk)


def _forked(work: Callable[[], None], *others: socket.socket) -> int:
    """Process id of a child that does ``work`` and ends without a word; ``others``: sockets that aren't its own."""
    child = os.fork()
    if child == 0:
        for one in others:
            one.close()
        try:
            work()
        finally:
            os._exit(0)
    return child


def _stream(peer: socket.socket, slots: int, frames: int, frame_s: float) -> None:
    """Frames as replicas send them: what every running request has gained."""
    tokens = slots * DELTA_TOKENS
    message = (list(range(slots)), np.zeros(tokens, np.int32).tobytes(), np.zeros(tokens, np.float32).tobytes())
    frame = b"".join(encode(Kind.EVENT, 0, message))
    start_s = time.monotonic()
    for number in range(frames):
        time.sleep(max(0.0, start_s + number * frame_s - time.monotonic()))
        peer.sendall(frame)


def _drain(sink: socket.socket) -> None:
    """The trainer's side."""
    scratch = bytearray(1 << 20)
    while sink.recv_into(scratch):
        pass


_PROMPT = np.zeros(PROMPT_TOKENS, np.int32)
_IDS = np.zeros(RESPONSE_TOKENS, np.int32)
_LOGPROBS = np.zeros(RESPONSE_TOKENS, np.float32)
_MASK = np.ones(RESPONSE_TOKENS, np.bool_)
