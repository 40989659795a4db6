"""Finds problems of the generator's engine before the start. Imports no engine."""

from __future__ import annotations

from collections.abc import Iterator

from headway.config.engines import engine_missing, head_size_refused
from headway.config.schema import Experiment
from headway.models.configuration import DecoderConfig
from headway.records.errors import ConfigurationError
from headway.runtime.devices import parse_device


def engine_problems(experiment: Experiment, model: DecoderConfig | None) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it); ``model``: None where it couldn't be read."""
    generator = experiment.generator
    if missing := engine_missing(generator.engine):
        yield "generator.engine", missing
    if model is not None and (refused := head_size_refused(generator.engine, generator.devices, model.head_dim)):
        yield "generator.engine", refused
    ranks = generator.engine_arguments.get("tensor_parallel_size", 1)
    if generator.engine == "vllm" and ranks > 1:
        problem = _ranks_meet(experiment, ranks)
        if problem:
            yield "generator.devices", problem


def _ranks_meet(experiment: Experiment, ranks: int) -> str:
    """The error where a replica of several ranks lacks a GPU: it takes the named one and those after it. "": none."""
    taken: dict[int, str] = {}
    for name in experiment.trainer.devices:
        if (device := parse_device(name)).kind == "cuda":
            taken[device.first] = f"{name} of trainer.devices"
    for name in experiment.generator.devices:
        what = f"{name} with tensor_parallel_size = {ranks}"
        first = parse_device(name).first
        for index in range(first, first + ranks):
            try:
                parse_device(f"cuda:{index}").check()
            except ConfigurationError as error:
                return f"{what}: {error}"
            if index in taken:
                return f"{what} needs cuda:{index} as well, which is taken: {taken[index]}"
            taken[index] = name
    return ""
