"""Atomic and durable writing of folders: checkpoints and the best model. Torch-free.

A folder is written next to its target as ``NAME.tmp``: first its files, last ``state.json`` with the checksum of every
other file. All files and folders are flushed to disk, then it is renamed. An existing folder of that name is moved to
``NAME.old`` first and removed afterwards. A kill at any instant therefore leaves the previous folder, or ``NAME.old``
without ``NAME`` (restored by `remove_leftovers`), or the new folder. It may also leave folders named ``*.tmp`` or
``*.old``, which the next start removes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import xxhash

from headway.records.errors import CheckpointCorrupt, ConfigurationError
from headway.runtime.scratch import flush, flush_folder

STATE_FILE = "state.json"
CHECKPOINTS = "checkpoints"
DELTAS = f"{CHECKPOINTS}/deltas"  # of published versions
CANDIDATE = "candidate"  # weights that become the best if the running evaluation confirms it
_NAME = re.compile(r"step_(\d{8})")
CARD_FILE = "README.md"  # the model card beside exported weights
CARD_MARK = "<!-- Written by Headway and replaced by the next export; without this line it is kept. -->"
_UNFINISHED = "headway-is-writing-here"  # file that marks a scratch folder until its state.json is written


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """Content of ``state.json``, which describes a checkpoint or model folder and its files."""

    version: int  # completed training steps
    consumed: dict[int, list[int]] = {}  # step -> admission indices of the groups it trained
    random_state: str = ""  # torch's generator, base64
    schedule: dict[str, float | int | str] = {}  # learning-rate schedule; a function of the version
    metrics: dict[str, float] = {}  # e.g. the score by which the best model was chosen
    files: dict[str, str] = {}  # relative path -> xxh3-128 of every other file
    checksum: str = ""  # xxh3-128 of all of the above

    def sealed(self) -> CheckpointState:
        """A copy whose ``checksum`` is that of all other fields."""
        unsealed = msgspec.structs.replace(self, checksum="")
        checksum = xxhash.xxh3_128_hexdigest(msgspec.json.encode(unsealed))
        return msgspec.structs.replace(self, checksum=checksum)


def checkpoint_path(run: str | Path, version: int) -> Path:
    """The path of the checkpoint of ``version``: ``RUN/checkpoints/step_XXXXXXXX``."""
    return Path(run) / CHECKPOINTS / f"step_{version:08d}"


def write_folder(path: str | Path, fill: Callable[[Path], None], state: CheckpointState) -> None:
    """Replace the folder ``path`` atomically by one with the files that ``fill(folder)`` writes, and ``state``.

    Raises any error of ``fill``, and OSError (a full disk); the previous content is then kept.
    """
    scratch_folder = begin_folder(path)
    try:
        fill(scratch_folder)
        commit_folder(path, state)
    finally:
        shutil.rmtree(scratch_folder, ignore_errors=True)


def begin_folder(path: str | Path) -> Path:
    """Make the empty folder beside ``path`` into which its files are written before `commit_folder`, and remove what an
    earlier one left. Raises OSError."""
    target = Path(path)
    recover_folder(target)
    scratch_folder = scratch_of(target)
    scratch_folder.mkdir(parents=True)
    (scratch_folder / _UNFINISHED).touch()
    return scratch_folder


def commit_folder(path: str | Path, state: CheckpointState, checksums: Mapping[str, str] | None = None) -> None:
    """Replace the folder ``path`` atomically by that of `begin_folder`, with ``state``. ``checksums``: of files, by
    relative path, that their writers have computed; those of other files are computed here. Raises OSError, also if one
    of these files isn't there; the previous content is then kept."""
    target, known = Path(path), checksums or {}
    scratch_folder, retired_folder = scratch_of(target), target.with_name(target.name + ".old")
    names = {str(file.relative_to(scratch_folder)) for file in scratch_folder.rglob("*") if file.is_file()}
    if missing_names := sorted(known.keys() - names):
        raise FileNotFoundError(
            f"{scratch_folder / missing_names[0]}: a rank wrote it elsewhere; valid: a folder that all ranks share"
        )
    files = {name: known.get(name) or checksum_of(scratch_folder / name) for name in sorted(names - {_UNFINISHED})}
    (scratch_folder / STATE_FILE).write_bytes(
        msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(state, files=files).sealed()), indent=1)
    )
    (scratch_folder / _UNFINISHED).unlink()  # from here on `state.json` lists the written files
    flush_folder(scratch_folder)
    if target.exists():
        target.rename(retired_folder)
    scratch_folder.rename(target)
    flush(target.parent)
    _remove(retired_folder)


def scratch_of(path: str | Path) -> Path:
    """The folder in which the content of ``path`` is written."""
    return Path(path).with_name(Path(path).name + ".tmp")


def require_replaceable(path: str | Path, key: str) -> None:
    """Raise ConfigurationError, which names ``key``, unless `write_folder` would remove only its own files: ``path``
    doesn't exist, is empty, or has only the files that its ``state.json`` lists. The same holds for ``NAME.tmp`` and
    ``NAME.old`` next to it, which may instead have the mark of a folder that a killed process was writing."""
    target = Path(path)
    if target.name in ("", ".."):
        raise ConfigurationError(f"{key} = {str(path)!r}: a folder's own name is needed, such as 'models/tiny'")
    for sibling in (target.with_name(target.name + ".tmp"), target.with_name(target.name + ".old")):
        if os.path.lexists(sibling) and not (_is_replaceable(sibling) or _is_unfinished(sibling)):
            raise ConfigurationError(f"{key} = {str(path)!r} would remove {sibling}: move it, or choose another {key}")
    if os.path.lexists(target) and not _is_replaceable(target):
        raise ConfigurationError(
            f"{key} = {str(path)!r} exists, and its content would be removed; valid: a new folder, an empty one, or "
            "one that holds what this command wrote and nothing else"
        )


def _is_replaceable(target: Path) -> bool:
    if target.is_symlink() or not target.is_dir():
        return False
    file_names = {str(file.relative_to(target)) for file in target.rglob("*") if file.is_symlink() or not file.is_dir()}
    try:
        return file_names <= {*read_state(target).files, STATE_FILE, *([CARD_FILE] if has_own_card(target) else [])}
    except CheckpointCorrupt:
        return not any(target.iterdir())


def has_own_card(folder: Path) -> bool:
    """Whether Headway wrote the model card in ``folder``."""
    try:
        return CARD_MARK in (folder / CARD_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def _is_unfinished(scratch: Path) -> bool:
    return not scratch.is_symlink() and (scratch / _UNFINISHED).is_file()


def read_state(path: str | Path) -> CheckpointState:
    """Read ``state.json`` of a folder and check its checksum. Raises CheckpointCorrupt, which names the file."""
    file = Path(path) / STATE_FILE
    try:
        state = msgspec.json.decode(file.read_bytes(), type=CheckpointState)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise CheckpointCorrupt(f"{file}: {error}") from None
    if state.checksum != (expected_checksum := state.sealed().checksum):
        raise CheckpointCorrupt(f"{file}: checksum {state.checksum}, expected {expected_checksum}")
    return state


def verify(path: str | Path, rank: int = 0, ranks: int = 1) -> CheckpointState:
    """Check every file of a folder against its checksum, and the version of a checkpoint against its folder's name.
    ``ranks`` ranks that call this check a share of the files each. Raises CheckpointCorrupt, which names the first bad
    file."""
    folder = Path(path)
    state = read_state(folder)
    if _NAME.fullmatch(folder.name) and state.version != version_of(folder):
        raise CheckpointCorrupt(f"{folder / STATE_FILE}: version {state.version}, in the folder of another version")
    for name, expected_checksum in sorted(state.files.items())[rank::ranks]:
        file = folder / name
        try:
            checksum = checksum_of(file)
        except OSError as error:
            raise CheckpointCorrupt(f"{file}: {error.strerror}") from None
        if checksum != expected_checksum:
            raise CheckpointCorrupt(f"{file}: checksum {checksum}, expected {expected_checksum}")
    return state


def find_checkpoints(run: str | Path) -> list[Path]:
    """List the complete checkpoints of a run (valid or not), oldest first."""
    folder = Path(run) / CHECKPOINTS
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and _NAME.fullmatch(path.name))


def latest_valid(run: str | Path, on_corrupt: Callable[[CheckpointCorrupt], None] | None = None) -> Path | None:
    """The newest checkpoint whose checksums match; None: the run has no checkpoint.

    ``on_corrupt`` is called for each newer corrupt checkpoint. Raises CheckpointCorrupt if all are corrupt, because
    starting from scratch would silently discard the run.
    """
    newest_error: CheckpointCorrupt | None = None
    for path in reversed(find_checkpoints(run)):
        try:
            verify(path)
        except CheckpointCorrupt as error:
            newest_error = newest_error or error
            if on_corrupt is not None:
                on_corrupt(error)
        else:
            return path
    if newest_error is not None:
        raise newest_error
    return None


def version_of(path: Path) -> int:
    """The version in the name of a checkpoint's folder, without reading from disk."""
    return int(path.name.removeprefix("step_"))


def rename_corrupt(run: str | Path, newer_than: Path) -> list[Path]:
    """Rename the checkpoints newer than the valid one ``newer_than``, all of which are corrupt, to ``NAME.corrupt``, so
    that they don't count among those to keep; returns their new paths."""
    renamed_paths: list[Path] = []
    for path in find_checkpoints(run):
        if version_of(path) > version_of(newer_than):
            corrupt_path = path.with_name(path.name + ".corrupt")
            shutil.rmtree(corrupt_path, ignore_errors=True)
            renamed_paths.append(path.rename(corrupt_path))
    return renamed_paths


def keep_last(run: str | Path, count: int) -> list[Path]:
    """Delete all but the newest ``count`` checkpoints of a run; returns the deleted ones. Callers make sure that the
    newest one is durable. Raises ValueError for ``count`` < 1."""
    if count < 1:
        raise ValueError(f"count = {count}: at least one checkpoint is kept")
    removed_folders = find_checkpoints(run)[:-count]
    for path in removed_folders:
        # A half-removed checkpoint must not look like one.
        retired_folder = path.with_name(path.name + ".tmp")
        path.rename(retired_folder)
        shutil.rmtree(retired_folder)
    return removed_folders


def remove_leftovers(run: str | Path) -> list[Path]:
    """Restore folders that a kill left as ``NAME.old`` and remove half-written ones; returns the removed folders.

    It is called at the start of a run, while no trainer writes to the run.
    """
    run = Path(run)
    for folder in (run, run / CHECKPOINTS):
        for retired_folder in sorted(folder.glob("*.old")) if folder.is_dir() else []:
            recover_folder(retired_folder.with_suffix(""))
    leftovers = [run / CANDIDATE] if (run / CANDIDATE).is_dir() else []  # never judged
    leftovers += [
        path
        for pattern in ("*.tmp", "*.old")
        for folder in (run, run / CHECKPOINTS)
        for path in sorted(folder.glob(pattern))
        if path.is_dir()
    ]
    for path in leftovers:
        shutil.rmtree(path)
    return leftovers


def recover_folder(path: str | Path) -> None:
    """Undo or complete a replacement of ``path`` that a kill interrupted, and remove its ``.tmp`` and ``.old``."""
    target = Path(path)
    retired_folder = target.with_name(target.name + ".old")
    if retired_folder.exists() and not target.exists():
        retired_folder.rename(target)
    _remove(retired_folder)
    _remove(target.with_name(target.name + ".tmp"))


def _remove(folder: Path) -> None:
    """Delete a folder if it exists. Files that mark it as Headway's are deleted last, in case a kill leaves a part."""
    for child in folder.iterdir() if folder.is_dir() and not folder.is_symlink() else ():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child, ignore_errors=True)
        elif child.name not in (STATE_FILE, _UNFINISHED):
            with contextlib.suppress(OSError):
                child.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def checksum_of(file: Path) -> str:
    """A file's xxh3-128 as `CheckpointState.files` has it. Raises OSError."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
