"""Loads an experiment for the machine that it runs on: models by name become folders, "auto" becomes values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from headway.config.auto import AUTO, Machine, resolve
from headway.config.load import apply_overrides, read_toml, validate_experiment
from headway.config.objective.critic import ADAPTER, TRUNK
from headway.config.schema import Experiment
from headway.models.hf.configuration import implementation_of
from headway.models.hf.downloads import model_folder
from headway.orchestrator.preflight.capacity import fewest_shards
from headway.records.errors import ConfigurationError
from headway.runtime.nodes.gpus import read_machine
from headway.runtime.run_directory import RunDirectory

RanksOf = Literal["trainer", "sft"]


def load_experiment(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    machine: Machine | None = None,
    ranks_of: RanksOf = "trainer",
) -> Experiment:
    """Read and validate the experiment at ``path``, with ``overrides`` (``section.key=value``), for this machine or a
    described ``machine``; ``resume``: the run in its directory goes on, which keeps engine, dtypes and the commits of
    models. ``ranks_of``: the section whose devices the keys of ``trainer`` divide a model among; "sft" where it is for
    `run_sft`. Downloads models that it names. Raises ConfigurationError naming key, value and valid values."""
    raw = apply_overrides(read_toml(path), overrides, Experiment)
    return prepared(raw, str(path), resume=resume, machine=machine, ranks_of=ranks_of)


def prepared(
    raw: dict[str, Any],
    origin: str,
    *,
    resume: bool = False,
    machine: Machine | None = None,
    ranks_of: RanksOf = "trainer",
) -> Experiment:
    """Validate a raw mapping as `load_experiment` does; ``origin`` names it in errors."""
    machine = machine or read_machine()
    stored_experiment = _stored(raw.get("run")) if resume else None
    model = raw.get("model")
    if isinstance(model, dict):
        sft_section = raw.get("sft")
        sft_output = sft_section.get("output") if isinstance(sft_section, dict) else None  # not there yet, perhaps
        for key in ("path", "reference"):
            name = model.get(key)
            if isinstance(name, str) and name and name != sft_output:
                stored_folder = str(stored_experiment["model"][key]) if stored_experiment else ""
                folder = model_folder(name, stored=stored_folder, weights=not machine.described, key=f"model.{key}")
                model = model | {key: folder}
        raw = raw | {"model": model}
    for name, teacher in _teachers(raw).items():
        stored_folder = str(_teachers(stored_experiment or {}).get(name, {}).get("path", ""))
        weights = not machine.described and "address" not in teacher
        folder = model_folder(teacher["path"], stored=stored_folder, weights=weights, key=f"teachers.{name}.path")
        raw = raw | {"teachers": raw["teachers"] | {name: teacher | {"path": folder}}}
    critic = raw.get("critic")
    path = critic.get("path", TRUNK) if isinstance(critic, dict) else TRUNK
    if isinstance(critic, dict) and isinstance(path, str) and path not in (TRUNK, ADAPTER):
        stored_folder = str(stored_experiment["critic"]["path"]) if stored_experiment else ""
        folder = model_folder(path, stored=stored_folder, weights=not machine.described, key="critic.path")
        raw = raw | {"critic": critic | {"path": folder}}
    resolved = resolve(raw, machine, in_transformers=_in_transformers(model), kept=stored_experiment)
    if ranks_of == "sft":
        resolved = _with_ranks_of_sft(resolved)
    try:
        experiment, trainer = validate_experiment(resolved, origin), raw.get("trainer")
    except ConfigurationError as error:
        raise ConfigurationError(str(error).replace("of trainer.devices", f"of {ranks_of}.devices")) from None
    is_auto = not isinstance(trainer, dict) or trainer.get("shards", AUTO) == AUTO
    if not is_auto or len(experiment.trainer.devices) == 1:
        return experiment
    update = {"shards": fewest_shards(experiment, machine)}
    return experiment.model_copy(update={"trainer": experiment.trainer.model_copy(update=update)})


def _with_ranks_of_sft(resolved: dict[str, Any]) -> dict[str, Any]:
    """The mapping with the ranks of SFT as the trainer's, if there are several; one divides nothing."""
    sft, trainer = resolved.get("sft"), resolved.get("trainer", {})
    devices = sft.get("devices") if isinstance(sft, dict) else None
    if not isinstance(devices, list) or len(devices) == 1 or not isinstance(trainer, dict):
        return resolved
    return resolved | {"trainer": trainer | {"devices": devices}}


def _teachers(raw: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The tables of teachers that name a folder or a model; invalid ones are left to validation."""
    teachers: Any = raw.get("teachers")
    tables = teachers.items() if isinstance(teachers, dict) else ()
    return {name: table for name, table in tables if isinstance(table, dict) and isinstance(table.get("path"), str)}


def _stored(run: object) -> Mapping[str, Any] | None:
    """The configuration of the run in the directory that the section ``run`` names; None where there is none."""
    directory = RunDirectory(str(run.get("directory"))) if isinstance(run, dict) else None
    return directory.read_experiment().model_dump(mode="json") if directory and directory.has_run() else None


def _in_transformers(model: object) -> bool:
    if not isinstance(model, dict):
        return False
    try:
        return implementation_of(str(model.get("path")), model.get("implementation")) == "transformers"
    except ConfigurationError:  # check reports the model
        return False
