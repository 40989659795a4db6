"""Keeps deltas beside the checkpoints that they lead from, within a limit of bytes. Torch-free."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

from headway.records.errors import WeightsCorrupt
from headway.weights.deltas import DeltaContent, delta_in

log = logging.getLogger(__name__)
_NAME = re.compile(r"(\d{8})-([0-9a-f]+)\.delta")  # the version that it leads to, and that one's checksum


class DeltaArchive:
    """A folder of deltas. The oldest are removed beyond the limit, and those that lead from no kept checkpoint."""

    def __init__(self, folder: Path, limit_bytes: int, oldest_checkpoint: Callable[[], int]) -> None:
        """``oldest_checkpoint()``: the version of the oldest one that is kept; -1: there is none."""
        self._folder, self._limit_bytes, self._oldest_checkpoint = folder, limit_bytes, oldest_checkpoint

    def add(self, version: int, checksum: str, pieces: Sequence[bytes]) -> None:
        """Keep the delta to a version; those to later ones are of steps that a restart has undone. A full disk costs
        this one alone, and is logged."""
        target = self._folder / f"{version:08d}-{checksum}.delta"
        scratch = target.with_suffix(".tmp")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with scratch.open("wb") as file:
                file.writelines(pieces)
            os.replace(scratch, target)
        except OSError as error:
            log.warning("the delta of version %d is not kept: %s: %s", version, self._folder, error.strerror)
            scratch.unlink(missing_ok=True)
        first_version, free_bytes = self._oldest_checkpoint(), self._limit_bytes
        for kept_version, path in sorted(_files(self._folder), reverse=True):
            with suppress(FileNotFoundError):  # removed by a trainer that this one has taken over from
                free_bytes -= path.stat().st_size
                is_other = kept_version >= version and path != target
                if is_other or free_bytes < 0 or kept_version <= first_version:
                    path.unlink()


def kept_chain(folder: Path, version: int, checkpoints: Collection[int]) -> tuple[int, list[DeltaContent]]:
    """The newest checkpoint from which kept deltas lead to a version, and these in order. Raises WeightsCorrupt, which
    names what is missing or damaged."""
    paths = dict(sorted(_files(folder)))
    chain, reached, checksum = list[DeltaContent](), version, ""
    while reached not in checkpoints:
        path = paths.pop(reached, None)
        if path is None:
            kept = f"{min(paths)} to {max(paths)}" if paths else "none"
            raise WeightsCorrupt(
                f"version {version} can't be rebuilt: {folder} has no delta to version {reached} (others: {kept}), nor "
                f"is there a checkpoint of it (those kept: {', '.join(map(str, sorted(checkpoints))) or 'none'})"
            )
        content = path.read_bytes()
        delta = delta_in(content, str(path), _checksum_in(path))
        if checksum and delta.checksum != checksum:
            raise WeightsCorrupt(
                f"{path} gives version {reached} as {delta.checksum}, and the next delta begins with {checksum}"
            )
        chain.append(DeltaContent(delta, content))
        reached, checksum = delta.base, delta.base_checksum
    return reached, chain[::-1]


def _files(folder: Path) -> list[tuple[int, Path]]:
    names = ((_NAME.fullmatch(path.name), path) for path in folder.glob("*.delta"))
    return [(int(match[1]), path) for match, path in names if match is not None]


def _checksum_in(path: Path) -> str:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return match[2]
