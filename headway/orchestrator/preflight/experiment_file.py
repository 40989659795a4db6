"""Loads an experiment for the machine that it runs on: models by name become folders, "auto" becomes values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.config.auto import AUTO, Machine, resolve
from headway.config.load import apply_overrides, read_toml, validate_experiment
from headway.config.schema import Experiment
from headway.models.hf.configuration import implementation_of
from headway.models.hf.downloads import model_folder
from headway.orchestrator.preflight.capacity import fewest_shards
from headway.records.errors import ConfigurationError
from headway.runtime.nodes.gpus import read_machine
from headway.runtime.run_directory import RunDirectory


def load_experiment(
    path: str | Path, overrides: Sequence[str] = (), *, resume: bool = False, machine: Machine | None = None
) -> Experiment:
    """Read and validate the experiment at ``path``, with ``overrides`` (``section.key=value``), for this machine or a
    described ``machine``; ``resume``: the run in its directory goes on, which keeps engine, dtypes and the commits of
    models. Downloads models that it names. Raises ConfigurationError naming key, value and valid values."""
    return prepared(apply_overrides(read_toml(path), overrides, Experiment), str(path), resume=resume, machine=machine)


def prepared(raw: dict[str, Any], origin: str, *, resume: bool = False, machine: Machine | None = None) -> Experiment:
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
    resolved = resolve(raw, machine, in_transformers=_in_transformers(model), kept=stored_experiment)
    experiment, trainer = validate_experiment(resolved, origin), raw.get("trainer")
    is_auto = not isinstance(trainer, dict) or trainer.get("shards", AUTO) == AUTO
    if not is_auto or len(experiment.trainer.devices) == 1:
        return experiment
    update = {"shards": fewest_shards(experiment, machine)}
    return experiment.model_copy(update={"trainer": experiment.trainer.model_copy(update=update)})


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
