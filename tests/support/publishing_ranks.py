"""Functions that a rank of `RankProcesses` runs to publish what it has of a model."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from rank_processes import service, share
from tiny_trainer import make_batch

from headway.records.generation import PublishedWeights
from headway.trainer.publishing import PublishingRanks
from headway.weights.checksums import root_of
from headway.weights.layout import Layout
from headway.weights.shared_memory import Subscriber
from headway.weights.slot_file import HEADER, table_start

Mesh = tuple[int, int, str]


def published_after_steps(mesh: Mesh, experiment: dict[str, Any]) -> list[PublishedWeights | None]:
    """Publish the initial weights; then those of a step, beside the next one. The first is read once more."""
    trainer = service(mesh, experiment)
    first = trainer.publish(0)
    trainer.train_step(share(trainer, make_batch(0, groups=4)))
    trainer.begin_publish(1)
    trainer.train_step(share(trainer, make_batch(1, groups=4, step=1)))
    future: Any = trainer.complete_publish(1)
    second = future.result(30.0)
    if mesh[0] == 0:
        require_readable(first)
        require_readable(second)
    if mesh[1] > 1:
        torch.distributed.barrier()  # the files go with the process that made them
    trainer.close()
    return [first, second]


def published_offloaded(mesh: Mesh, experiment: dict[str, Any]) -> tuple[list[str | None], int]:
    """The root before weights and optimiser were moved off the device, and after they were moved back."""
    trainer = service(mesh, experiment)
    trainer.train_step(share(trainer, make_batch(0, groups=4)))
    first = trainer.publish(1)
    moved_bytes = trainer.offload().moved_bytes
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in trainer.learner.resident())
    trainer.onload()
    second = trainer.publish(1)
    trainer.close()
    return [record and record.checksum for record in (first, second)], moved_bytes


def killed_in(mesh: Mesh, experiment: dict[str, Any], rank: int, moment: str) -> None:
    """Publish version 1; then version 2, in which a rank is killed at a call of its group, or halfway of its rows."""
    trainer = service(mesh, experiment)
    trainer.publish(1)
    if mesh[0] == rank and moment == "rows":
        write = Layout.write

        def half(layout: Layout, memory: Any, starts: Any, rows: Any) -> None:
            kept = dict(list(rows.items())[: len(rows) // 2])
            part = Layout(layout.manifest, layout.algorithm, layout.entries[: len(kept)], 0, ())
            write(part, memory, list(starts)[: len(kept)], kept)
            os.kill(os.getpid(), signal.SIGKILL)

        Layout.write = half  # type: ignore[method-assign]
    elif mesh[0] == rank:
        calls, gather, exchange = iter(range(4)), PublishingRanks.all_gather, PublishingRanks.exchange

        def count() -> None:
            if next(calls) == int(moment):
                os.kill(os.getpid(), signal.SIGKILL)

        PublishingRanks.all_gather = lambda ranks, value: count() or gather(ranks, value)  # type: ignore[method-assign]
        PublishingRanks.exchange = lambda ranks, parts: count() or exchange(ranks, parts)  # type: ignore[method-assign]
    trainer.publish(2)


def require_readable(published: PublishedWeights | None) -> None:
    """A reader of either kind gets the version."""
    assert published is not None
    fetched, reader = Subscriber().fetch(published), Subscriber()
    attached = reader.attach(published)
    assert all(torch.equal(fetched[name], tensor) for name, tensor in attached.items())


def announced(path: str, content: bytes) -> PublishedWeights:
    """The record of whatever version a slot's header claims, with the root of the slot's own table."""
    _, version, _, manifest_bytes, table_bytes, payload_bytes = HEADER.unpack_from(content)
    manifest = content[HEADER.size : HEADER.size + manifest_bytes]
    start = table_start(manifest_bytes)
    table = torch.frombuffer(bytearray(content[start : start + table_bytes]), dtype=torch.int64).numpy().view("u8")
    checksum = root_of(version, manifest, table)
    return PublishedWeights(version=version, path=path, checksum=checksum, size_bytes=payload_bytes)
