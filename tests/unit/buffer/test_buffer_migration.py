"""A run directory of the Headway before tokens were arrays: its buffer reads as it was, and is marked as taken over."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headway.algorithms.samples import build_arrays
from headway.buffer.database import SCHEMA_VERSION
from headway.buffer.history import read_history
from headway.buffer.store import GroupBuffer
from headway.records.errors import BufferCorrupt
from headway.records.generation import VersionSpan
from headway.records.rollout import Sample
from headway.records.tokens import TokenIds
from headway.records.training import TrainBatch

OLD = Path(__file__).with_name("buffer_version_2.sql")  # dumped by that Headway: one group buffered, one parked


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with sqlite3.connect(tmp_path / "buffer.db") as connection:
        connection.executescript(OLD.read_text())
    return tmp_path / "buffer.db"


def test_old_records_mean_what_they_meant(path: Path) -> None:
    assert [drawn.index for drawn in read_history(path)] == [0, 1]
    with sqlite3.connect(path) as connection:
        plain = [msgspec.msgpack.decode(body) for (body,) in connection.execute("SELECT body FROM payloads")]
    buffered, parked = GroupBuffer(path, 8).open_groups()
    assert buffered.group.prompt_ids == (20, 5, 21)
    trained, failed = buffered.rollouts
    assert isinstance(trained.response_ids, TokenIds)
    assert trained.response_ids == (7, 151642, 9, 1)
    assert list(trained.response_logprobs) == plain[0]["response_logprobs"]
    assert trained.response_mask == (True, True, False, True)
    assert trained.versions == (VersionSpan(version=3, tokens=3), VersionSpan(version=4, tokens=1))
    assert (trained.reward, trained.solved, trained.verdict, trained.turn_ends) == (1.0, True, {"found": "3"}, (3, 4))
    assert list(trained.branches[0].response_logprobs) == plain[0]["branches"][0]["response_logprobs"]
    assert (failed.failure is not None, failed.response_ids) == (True, ())
    assert parked.parked[0].response.ids == (7, 8)
    assert parked.parked[0].first_version == 3


def test_it_goes_on_with_arrays_and_older_versions_refuse_it_then(path: Path) -> None:
    buffer = GroupBuffer(path, 8)
    member = buffer.open_groups()[1].parked[0]
    buffer.park(member)
    buffer.close()
    again = GroupBuffer(path, 8)
    assert again.open_groups()[1].parked == (member,)
    assert again.audit() == []
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)


def test_a_version_that_nobody_reads_says_what_to_do(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version=1")
    for reader in (read_history, lambda file: GroupBuffer(file, 8)):
        with pytest.raises(BufferCorrupt, match=r"version 1; .* versions 2 to 4: resume the run"):
            reader(path)


def test_the_batch_of_old_records_is_bit_for_bit_what_it_was(path: Path) -> None:
    """Flat arrays built as they were before, number by number, from the lists that were stored."""
    with sqlite3.connect(path) as connection:
        (body,) = connection.execute("SELECT body FROM payloads ORDER BY id").fetchone()
    old = msgspec.msgpack.decode(body)
    ids, mask, logprobs, versions, advantages = [], [], [], [], []
    for part in (old, *old["branches"]):
        nothing = len(part["prompt_ids"])
        ids += part["prompt_ids"] + part["response_ids"]
        mask += [False] * nothing + part["response_mask"]
        logprobs += [0.0] * nothing + part["response_logprobs"]
        versions += [-1] * nothing + [s["version"] for s in part["versions"] for _ in range(s["tokens"])]
        advantages += [0.0] * nothing + [0.3] * len(part["response_ids"])
    rollout = GroupBuffer(path, 8).open_groups()[0].rollouts[0]
    arrays = build_arrays(TrainBatch(step=4, samples=(Sample(rollout=rollout, advantage=0.3),)))
    for found, before in (
        (arrays.token_ids_n, np.array(ids, np.int64)),
        (arrays.loss_mask_n, np.array(mask, np.bool_)),
        (arrays.behaviour_logprobs_n, np.array(logprobs, np.float32)),
        (arrays.versions_n, np.array(versions, np.int64)),
        (arrays.advantages_n, np.array(advantages, np.float32)),
    ):
        assert (found.dtype, found.tobytes()) == (before.dtype, before.tobytes())
