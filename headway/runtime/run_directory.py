"""A run's folder: its layout, its lock, its stored experiment."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Generator
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import msgspec

from headway.config.load import placed_experiment, require_resumable, validate, validate_experiment
from headway.config.schema import Experiment
from headway.config.simulation import AnyExperiment, SimulatorExperiment
from headway.records.errors import BufferCorrupt, ConfigurationError, HeadwayError, RunLocked
from headway.records.plan import PlacementFile, RunPlacement
from headway.runtime.file_lock import FileLock
from headway.runtime.file_systems import require_local

# Of ledger, rollouts, buffer and checkpoints; raised when they change so that other readers misunderstand them
SCHEMA = 7
KEY = "schema"  # of RUN/config.json, beside the sections of the experiment


class RunDirectory:
    """The folder of a run.

    Lifecycle: *closed* -> ``begin`` (locked, layout made, experiment stored) [-> ``withdraw``] -> ``release``
    (closed). Reading paths and the stored experiment needs no lock, so that `report` and `show` work during a run.

    Invariant: between ``begin`` and ``release`` this process is the only one that writes to the folder. The lock
    on ``RUN/lock`` ends with the process, however it ends, so a killed run leaves nothing to clean up.

    Example::

        with RunDirectory(experiment.run.directory) as run:
            run.begin(experiment, resume=False)
            ledger = Ledger(run.path, clock)
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.ledger = self.path / "ledger.jsonl"
        self.demonstrations = self.path / "demonstrations.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"
        self.best = self.path / "best"
        self.summary = self.path / "summary.json"
        self.left_out = self.path / "left_out.json"  # tasks that their own answers don't solve: id -> why
        self.teachers = self.path / "teachers.json"  # name -> which model it was when the run began
        self.sandboxes = self.path / "sandboxes"
        self.logs = self.path / "logs"
        self.waits = self.path / "waits.json"
        self.placement = self.path / "placement.json"
        self.start = self.path / "started"
        self.lock = self.path / "lock"
        self._lock = FileLock(self.lock, "run.directory", self.path)
        self._accounting_lock: FileLock | None = None  # of the accounting's folder, where it is another one

    @property
    def accounting(self) -> Path:
        """The folder of buffer.db: as ``cluster.accounting_directory`` of the stored experiment says, or this one."""
        try:
            cluster_settings = json.loads(self.config.read_bytes()).get("cluster", {})
        except (OSError, ValueError, AttributeError):  # no run, or a damaged file, which `read_experiment` reports
            return self.path
        return Path(cluster_settings.get("accounting_directory") or self.path)

    @property
    def buffer(self) -> Path:
        return self.accounting / "buffer.db"

    def has_run(self) -> bool:
        """Whether a run was started here."""
        return self.config.is_file()

    def read_experiment(self) -> Experiment:
        """Read the stored experiment. Raises ConfigurationError when there is none, it can't be read, its run is of
        another schema, or it trains a policy in simulators."""
        return validate_experiment(self._read_settings(), str(self.config))

    def read_any_experiment(self) -> AnyExperiment:
        """`read_experiment`, also of a policy in simulators."""
        raw_settings = self._read_settings()
        schema = SimulatorExperiment if "simulator" in raw_settings else Experiment
        return validate(raw_settings, str(self.config), schema)

    def _read_settings(self) -> dict[str, Any]:
        try:
            raw_settings = json.loads(self.config.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigurationError(f"{self.path} holds no run: there is no {self.config}") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{self.config} is damaged: {error}") from None
        if not isinstance(raw_settings, dict):
            raise ConfigurationError(f"{self.config} is damaged: a JSON object is needed")
        return without_schema(cast("dict[str, Any]", raw_settings), self.path)

    def store(self, experiment: AnyExperiment) -> None:
        """Write the experiment, and the schema of the run's files, to RUN/config.json. Raises as `write_json`."""
        self.write_json(self.config, {KEY: SCHEMA, **json.loads(experiment.model_dump_json())})

    def begin(self, experiment: AnyExperiment, *, resume: bool) -> AnyExperiment | None:
        """Lock the folder, make its layout and store ``experiment``; returns the experiment stored before, if any.

        Raises RunLocked when another process holds it, ConfigurationError when a new run would overwrite an old
        one, when there is nothing to resume, when a key changed that may not change on resume, or when buffer.db would
        lie on a network file system; BufferCorrupt when the buffer of a run that has trained is missing. After an error
        the folder is unlocked and unchanged.
        """
        self.acquire()
        try:
            accounting_folder = Path(experiment.cluster.accounting_directory or self.path)
            require_local(accounting_folder)
            stored_experiment = self._admit(experiment, resume, accounting_folder / "buffer.db")
            for folder in (self.checkpoints, self.logs):
                folder.mkdir(exist_ok=True)
            if accounting_folder != self.path:
                self._lock_accounting(accounting_folder)
            if stored_experiment is None:
                write_atomically(self.start, f"{self.started().isoformat()}\n".encode())
            self.store(experiment)
        except BaseException:
            self.release()
            raise
        return stored_experiment

    @contextlib.contextmanager
    def held(self, experiment: AnyExperiment, *, resume: bool) -> Generator[None]:
        """`begin` a run that lasts as long as the block. At RunLocked by a process elsewhere the folder is left as it
        was."""
        former_experiment = self.begin(experiment, resume=resume)
        try:
            yield
        except RunLocked:
            if former_experiment is not None:
                self.store(former_experiment)
            raise
        finally:
            self.release()

    def require_startable(self, *, resume: bool) -> None:
        """Raise ConfigurationError where a new run would overwrite an old one, or there is nothing to resume."""
        if resume and not self.has_run():
            raise ConfigurationError(f"{self.path} holds no run to resume: start it without --resume")
        if not resume and self.has_run():
            raise ConfigurationError(
                f"{self.path} already holds a run: continue it with --resume, or choose another run.directory"
            )

    def _lock_accounting(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"cluster.accounting_directory = {str(folder)!r}: {error.strerror}") from None
        self._accounting_lock = FileLock(folder / "lock", "cluster.accounting_directory", folder)
        self._accounting_lock.acquire()

    def _admit(self, experiment: AnyExperiment, resume: bool, buffer: Path) -> AnyExperiment | None:
        self.require_startable(resume=resume)
        if not resume:
            if experiment.cluster.accounting_directory is not None and buffer.exists():
                raise ConfigurationError(
                    f"cluster.accounting_directory: {buffer.parent} holds the accounting of another run; choose "
                    "another folder"
                )
            return None
        stored_experiment = self.read_any_experiment()
        require_resumable(stored_experiment, experiment)
        if isinstance(experiment, Experiment) and not buffer.is_file() and self._has_trained():
            raise BufferCorrupt(
                f"{buffer} is missing, and the run can't be resumed without it: its batches and open groups are "
                f"there. Put it back, or start in another run.directory, from a checkpoint's weights if you like: "
                f"--model.path={self.path}/checkpoints/step_N/model"
            )
        return stored_experiment

    def _has_trained(self) -> bool:
        """Whether the run has completed a step, by its checkpoints and its ledger."""
        if any(self.checkpoints.glob("step_*")):
            return True
        return self.ledger.is_file() and b'"kind":"step"' in self.ledger.read_bytes()

    def withdraw(self) -> None:
        """Undo ``begin`` of a new run that failed before it did anything: the folder then has no run."""
        self.config.unlink(missing_ok=True)
        self.start.unlink(missing_ok=True)

    def started(self) -> datetime:
        """The time at which the run here was started, by that machine's clock; the present time before its start."""
        try:
            return datetime.fromisoformat(self.start.read_text(encoding="utf-8").strip())
        except (FileNotFoundError, NotADirectoryError):
            return datetime.now()
        except ValueError:
            raise ConfigurationError(f"{self.start} is damaged: the time of the run's start is needed") from None

    def acquire(self) -> None:
        """Take the lock, making the folder if needed. Raises RunLocked naming the process that holds it."""
        self._lock.acquire()

    def release(self) -> None:
        """Release the lock; no-op when it isn't held."""
        self._lock.release()
        if self._accounting_lock is not None:
            self._accounting_lock.release()

    def holder(self) -> int | None:
        """Id of the process that holds the lock now; None when none does (or it hasn't written its id)."""
        return self._lock.holder()

    def write_json(self, path: Path, value: Any) -> None:
        """Write ``value`` (JSON types or a record) to ``path`` atomically: a reader sees the old or the new file whole,
        also after a kill. Raises HeadwayError on a full disk."""
        write_atomically(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file atomically: a reader sees the old or the new one whole, also after a kill. Raises HeadwayError, with
    the old one left, when it can't be written."""
    temporary_path = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary_path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary_path, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary_path.unlink()
        raise HeadwayError(f"{path} can't be written: {error.strerror}") from error


def placement_of(experiment: Experiment) -> RunPlacement:
    """The placement that an experiment configures."""
    return RunPlacement(generator=tuple(experiment.generator.devices), trainer=tuple(experiment.trainer.devices))


def with_saved_placement(experiment: Experiment, directory: RunDirectory) -> Experiment:
    """Return ``experiment`` in the placement to which a former process of this run had moved. The configured placement
    stays where it has been changed since then, and without ``control.devices = "move"``."""
    if experiment.control.devices != "move" or not directory.placement.is_file():
        return experiment
    try:
        saved_placement = msgspec.json.decode(directory.placement.read_bytes(), type=PlacementFile)
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{directory.placement} is damaged: {error}; without it --resume uses the "
                                 "configuration's devices") from None  # fmt: skip
    if saved_placement.configured != placement_of(experiment):
        return experiment
    return placed_experiment(experiment, saved_placement.present.settings)


def require_schema(run_dir: str | Path) -> None:
    """Raise ConfigurationError for a run whose files have another schema. A folder without a configuration that can be
    read says nothing of it, and is accepted: its readers report what is missing."""
    try:
        raw_settings = msgspec.json.decode((Path(run_dir) / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, ValueError, RecursionError):
        return
    without_schema(raw_settings, run_dir)


def without_schema(raw: dict[str, Any], run_dir: str | Path) -> dict[str, Any]:
    """Return a stored configuration without its schema's number. Raises ConfigurationError for another schema."""
    if raw.get(KEY) != SCHEMA:
        schema = f"schema {raw[KEY]!r}" if KEY in raw else "no schema's number"
        raise ConfigurationError(
            f"{run_dir} was written by another Headway: its files have {schema}, and this one reads schema {SCHEMA}. "
            "Read and resume the run with the Headway that wrote it, or start in another run.directory, from its "
            f"weights if you like: --model.path={run_dir}/checkpoints/step_N/model"
        )
    return {name: section for name, section in raw.items() if name != KEY}
