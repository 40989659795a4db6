"""Saving of checkpoints and model folders: each rank writes its rows, beside the following steps if wanted."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError

from headway.models.shards.row_map import FileTensor
from headway.models.shards.shard import Shard, by_name
from headway.models.shards.tensor_files import write_model_files
from headway.records.errors import StorageFailed
from headway.trainer.checkpoints import CheckpointState, begin_folder, checksum_of, commit_folder, keep_last, scratch_of
from headway.trainer.learner import Learner
from headway.trainer.state_files import state_file, write_state

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SavedFolder:
    """A checkpoint or a model folder that is to be written."""

    path: str
    state: CheckpointState  # its state.json, but for the files' checksums
    weights_folder: str = ""  # the folder of the model or the adapter in it; "": ``path`` itself
    texts: Mapping[str, str] = field(default_factory=dict)  # further files, by name
    has_optimiser: bool = False  # whether the optimiser's state is a part
    kept_checkpoints: int = 0  # that remain after its commit, itself included; 0: all


class FolderSaver:
    """Writing of folders of a model in training by all ranks.

    Lifecycle: `begin` -> `written` -> `checksums` -> `commit`, repeatedly; `discard` ends it early; `save` is all of
    it. Every rank is called, with ``commit`` rank 0 alone. The futures are done beside the process's other calls.
    Nothing of a save counts before its commit: only then are the payloads released that a checkpoint covers.
    """

    def __init__(self, learner: Learner) -> None:
        self._learner, self._ranks = learner, learner.ranks
        self._thread = ThreadPoolExecutor(1, "save")
        self._saved: SavedFolder | None = None  # begun, and neither committed nor discarded
        self._written: Future[dict[str, str]] = _done({})

    def begin(self, saved: SavedFolder, *, beside: bool) -> None:
        """Begin to write, after the save before. ``beside``: weights and optimiser may change as soon as this returns,
        since what this rank writes is copied first; else when `written` is done. Raises StorageFailed on all ranks."""
        self.discard()
        self._ranks.require_equal("save", {"path": saved.path, "version": saved.state.version})
        self._saved = saved
        self._together(lambda: _done(self._begin_folder(saved)))
        if self._ranks.rank >= self._learner.writers:
            return
        tensors, weights = self._learner.stored_rows()
        state = self._learner.optimiser_shards() if saved.has_optimiser else []
        if beside:
            weights, state = [shard.copied() for shard in weights], [shard.copied() for shard in state]
        self._written = self._thread.submit(self._write, saved, tensors, weights, state)

    def written(self) -> Future[dict[str, str]]:
        """Done when this rank's rows are on disk: the checksum of its own file of state, by name. Raises StorageFailed
        if they can't be written."""
        return self._written

    def checksums(self) -> Future[dict[str, str]]:
        """The checksums of this rank's share of the files of weights, by path in the folder. To be called when all
        ranks have written, since each may have written into each of these files."""
        return self._thread.submit(self._checksums)

    def commit(self, checksums: Mapping[str, str]) -> Future[int]:
        """Put the folder in the place of ``path``, and delete older checkpoints beyond those to keep; returns its
        version. ``checksums``: all that `written` and `checksums` of all ranks have returned. Raises StorageFailed."""
        return self._thread.submit(self._commit, checksums)

    def discard(self) -> None:
        """Remove a folder that was begun and isn't committed, once this rank doesn't write to it any more."""
        wait([self._written])
        self._written = _done({})
        saved, self._saved = self._saved, None
        if saved is not None and self._ranks.rank == 0:
            shutil.rmtree(scratch_of(saved.path), ignore_errors=True)

    def save(self, saved: SavedFolder) -> None:
        """Write a folder and commit it. Raises StorageFailed on all ranks; the folder before is then kept."""
        self.begin(saved, beside=False)
        checksums: dict[str, str] = {}
        for phase in (self.written, self.checksums):
            for rank_checksums in self._together(phase):
                checksums |= rank_checksums
        self._together(lambda: self.commit(checksums) if self._ranks.rank == 0 else _done(0))

    def close(self) -> None:
        """Wait for what is being written."""
        self._thread.shutdown()

    def _together(self, call: Callable[[], Future[T]]) -> list[T]:
        """The results of a ``call`` on all ranks. Raises the first StorageFailed on all, and discards the folder."""
        try:
            outcome: T | StorageFailed = call().result()
        except StorageFailed as error:
            outcome = error
        outcomes = self._ranks.all_gather(outcome)
        for failure in outcomes:
            if isinstance(failure, StorageFailed):
                self.discard()
                raise failure
        return [outcome for outcome in outcomes if not isinstance(outcome, StorageFailed)]

    def _begin_folder(self, saved: SavedFolder) -> None:
        if self._ranks.rank == 0:
            with _reporting(saved.path):
                folder = begin_folder(saved.path)
                for name, text in saved.texts.items():
                    (folder / name).write_text(text)
                self._learner.write_folder(folder / saved.weights_folder)

    def _write(
        self, saved: SavedFolder, tensors: dict[str, FileTensor], weights: list[Shard], state: list[Shard]
    ) -> dict[str, str]:
        folder, rank, ranks = scratch_of(saved.path), self._ranks.rank, self._learner.writers
        with _reporting(saved.path):
            if tensors:
                write_model_files(folder / saved.weights_folder, tensors.values(), by_name(weights), rank, ranks)
            weights.clear()  # frees their copies
            if not saved.has_optimiser:
                return {}
            return {state_file(rank, ranks): write_state(folder, state, rank, ranks, saved.state.version)}

    def _checksums(self) -> dict[str, str]:
        assert self._saved is not None, "begun before"
        with _reporting(self._saved.path):
            folder = scratch_of(self._saved.path)
            files = sorted((folder / self._saved.weights_folder).glob("*.safetensors"))
            share = files[self._ranks.rank :: self._learner.writers] if self._ranks.rank < self._learner.writers else []
            return {str(file.relative_to(folder)): checksum_of(file) for file in share}

    def _commit(self, checksums: Mapping[str, str]) -> int:
        saved = self._saved
        assert saved is not None, "begun before"
        with _reporting(saved.path):
            commit_folder(saved.path, saved.state, checksums)
            self._saved = None
            if saved.kept_checkpoints:
                keep_last(Path(saved.path).parent.parent, saved.kept_checkpoints)
        return saved.state.version


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


@contextmanager
def _reporting(path: str) -> Iterator[None]:
    """Convert errors of the disk in the block to a StorageFailed that names ``path`` and the remedy."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StorageFailed(
            f"{path} can't be written: {error}; free some space and start again (a run with --resume)"
        ) from error
