"""What tests of saving and loading do on the ranks of `rank_processes`."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any
from unittest import mock

from rank_processes import Weights, service, share, state_of
from tiny_trainer import make_batch

from headway.records.errors import CheckpointCorrupt, RanksDiffer, StorageFailed
from headway.trainer import saving
from headway.trainer.service import TrainerService

Mesh = tuple[int, int, str]


def completed(trainer: TrainerService) -> None:
    """Commit the checkpoint that is begun, as the client does: the ranks communicate outside of their processes."""
    checksums: dict[str, str] = {}
    for phase in (trainer.checkpoint_written, trainer.checkpoint_checksums):
        for rank_checksums in trainer.ranks.all_gather(phase().result()):
            checksums |= rank_checksums
    if trainer.ranks.rank == 0:
        assert trainer.commit_checkpoint(checksums).result() == 1
    trainer.ranks.all_gather(None)


def saved_beside_a_step(mesh: Mesh, experiment: dict[str, Any], path: str) -> Weights:
    """Begin a checkpoint of version 1, train another step, and commit it; the state of version 1."""
    trainer = service(mesh, experiment)
    trainer.train_step(share(trainer, make_batch(0)))
    state = state_of(trainer)
    stepped, write = threading.Event(), saving.FolderSaver._write

    def later(*arguments: Any) -> dict[str, str]:
        assert stepped.wait(60)
        return write(*arguments)

    with mock.patch.object(saving.FolderSaver, "_write", later):
        trainer.begin_checkpoint(path, {0: [0]})
    trainer.train_step(share(trainer, make_batch(1, step=1)))
    assert trainer.version == 2
    stepped.set()
    completed(trainer)
    trainer.close()
    return state


def saved_at_the_start(mesh: Mesh, experiment: dict[str, Any], path: str) -> None:
    """Save the loaded weights as a model folder."""
    trainer = service(mesh, experiment)
    trainer.save_weights(path)
    trainer.close()


def loaded_weights(mesh: Mesh, experiment: dict[str, Any], path: str) -> tuple[Weights, Weights]:
    """Train a step, load a model folder; the state of before and of after that."""
    trainer = service(mesh, experiment)
    trainer.train_step(share(trainer, make_batch(0)))
    stepped = state_of(trainer)
    trainer.load_weights(path)
    state = state_of(trainer)
    trainer.close()
    return stepped, state


def refused_checkpoint(mesh: Mesh, experiment: dict[str, Any], path: str) -> tuple[str, bool]:
    """The error of loading a damaged checkpoint, and whether it has changed nothing."""
    trainer = service(mesh, experiment)
    trainer.train_step(share(trainer, make_batch(0)))
    stepped, message = state_of(trainer), ""
    try:
        trainer.load_checkpoint(path)
    except CheckpointCorrupt as error:
        message = str(error)
    state = state_of(trainer)
    trainer.close()
    return message, all((state[name] == values).all() for name, values in stepped.items())


def full_disk(mesh: Mesh, experiment: dict[str, Any], path: str, rank: int) -> str:
    """Save while the disk of one rank is full, and again while it isn't; the error of the first."""
    trainer, message = service(mesh, experiment), ""
    trainer.train_step(share(trainer, make_batch(0)))

    def full(*_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch.object(saving, "write_state", full if mesh[0] == rank else saving.write_state):
        try:
            trainer.save_checkpoint(path, {})
        except StorageFailed as error:
            message = str(error)
    assert not Path(path).exists()
    assert not any(Path(path).parent.glob("*.tmp")) or mesh[0] > 0
    trainer.save_checkpoint(path, {})
    trainer.close()
    return message


def differing_folder(mesh: Mesh, experiment: dict[str, Any], paths: list[str]) -> str:
    """The error of ranks whose models are in folders of the same name on different machines."""
    experiment = experiment | {"model": experiment["model"] | {"path": paths[mesh[0]]}}
    try:
        service(mesh, experiment)
    except RanksDiffer as error:
        return str(error)
    return ""
