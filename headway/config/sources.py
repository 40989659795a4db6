"""The keys for the sources of tasks and demonstrations, and for the verifiers that score responses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from headway.config.section import NonNegative, Positive, Seconds, Section

_OTHER_FORMATS = (".parquet", ".arrow", ".csv")  # files that only source = "datasets" reads
# key -> the sources in which it has an effect; the other keys have one in all sources
_SOURCES_OF_KEY: Mapping[str, tuple[str, ...]] = {
    "path": ("jsonl", "datasets"),
    "name": ("datasets", "reasoning-gym", "function"),
    "subset": ("datasets",),
    "split": ("datasets",),
    "revision": ("datasets",),
    "columns": ("jsonl", "datasets", "function"),
    "convert": ("jsonl", "datasets", "function"),
    "parameters": ("reasoning-gym", "function"),
}


class VerifierSettings(Section):
    """A verifier, chosen by name (``verifier = "NAME"``) in a source or a row."""

    name: str = "exact"  # exact | numeric | math | regex | reasoning-gym | weighted | judge | module:function
    parameters: dict[str, Any] = {}  # keyword arguments of the verifier
    timeout_s: Seconds = 10.0  # hard limit per response; the job is killed


def _require_name(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("valid: a verifier's name; one with parameters is a [verifiers.NAME]")
    return value


class TaskColumns(Section):
    prompt: str = "prompt"  # a text, or a conversation: a list of {role, content} (needs model.template = "chat")
    answer: str | None = None  # default: "answer" where there is one; "" reads none
    images: str | None = None  # pictures before a prompt's text; default: "images" where there is one; "" reads none


class SftColumns(Section):
    prompt: str = "prompt"  # a text; with solution
    solution: str = "solution"  # a text
    messages: str = "messages"  # a list of {role, content}; rows that have it are conversations
    tools: str = "tools"  # conversations: tools for the chat template; optional


class TaskSource(Section):
    source: Literal["jsonl", "datasets", "reasoning-gym", "function"] = "jsonl"  # kind of the source: docs/inputs.md
    path: str = ""  # jsonl: the file; datasets: a file or folder on this machine
    name: str = ""  # datasets: name on the Hugging Face hub; reasoning-gym: the generator; function: module:function
    subset: str = ""  # datasets: the configuration, where there are several
    split: str = ""  # datasets: train, test, ...; default: the only one, or else train
    revision: str = ""  # datasets from the hub: a commit or tag, so that the data can't change during the run
    columns: TaskColumns = TaskColumns()  # names of the columns
    convert: str = ""  # module:function from a row to {"prompt", "answer", ...}, or to None to leave it out
    parameters: dict[str, Any] = {}  # reasoning-gym: the generator's, size and seed; function: its arguments
    limit: Positive | None = None  # number of tasks used: the first ones after shuffling by run.seed
    weight: Annotated[float, Field(gt=0)] = 1.0  # share of the training tasks, relative to other sources' weights
    label: str = ""  # name under which its solve rate is reported; default: its path or name
    verifier: Annotated[str, BeforeValidator(_require_name)] = ""  # one of [verifiers.NAME]; default: [verifier]
    algorithm: dict[str, Any] = {}  # tasks.train: keys of [algorithm] that its samples have otherwise

    @model_validator(mode="after")
    def _complete(self) -> TaskSource:
        require_complete(self, self.source)
        return self

    @property
    def display_name(self) -> str:
        """The source's name in errors: its label, or else its path or name."""
        return self.label or self.path or (f"{self.source}:{self.name}" if self.source != "datasets" else self.name)

    @property
    def generator_parameters(self) -> dict[str, Any]:
        """The parameters of a reasoning-gym generator, with the number of its tasks and its seed."""
        return {"size": 1000, "seed": 0, **self.parameters}


class SftSource(Section):
    source: Literal["jsonl", "datasets"] = "jsonl"  # kind of the source: docs/inputs.md
    path: str = ""  # jsonl: the file; datasets: a file or folder on this machine
    name: str = ""  # datasets: name on the Hugging Face hub
    subset: str = ""  # datasets: the configuration, where there are several
    split: str = ""  # datasets: train, test, ...; default: the only one, or else train
    revision: str = ""  # datasets from the hub: a commit or tag
    columns: SftColumns = SftColumns()  # names of the columns
    convert: str = ""  # module:function from a row to one with the keys above, or to None

    @model_validator(mode="after")
    def _complete(self) -> SftSource:
        require_complete(self, self.source)
        return self

    @property
    def display_name(self) -> str:
        """The source's name in errors."""
        return self.path or self.name


def require_complete(section: TaskSource | SftSource, source: str) -> None:
    """Raise ValueError for a key that ``source`` needs but lacks, or that has no effect with it."""
    for key, sources in _SOURCES_OF_KEY.items():
        field = type(section).model_fields.get(key)
        if field is not None and source not in sources and getattr(section, key) != field.default:
            valid_sources = " or ".join(f"'{name}'" for name in sources)
            raise ValueError(f"{key!r} has no effect with source = '{source}': it belongs to source = {valid_sources}")
    if source == "jsonl":
        if not section.path:
            raise ValueError("source 'jsonl' needs 'path'")
        if PurePath(section.path).suffix in _OTHER_FORMATS:
            raise ValueError(f"{section.path!r} isn't a JSONL file; set source = 'datasets'")
    if source == "function" and ":" not in section.name:
        raise ValueError(f"source 'function' needs 'name', module:function, not {section.name!r}")
    if source == "reasoning-gym" and not section.name:
        raise ValueError("source 'reasoning-gym' needs 'name'")
    if isinstance(section, TaskSource) and source == "reasoning-gym":
        size, seed = section.generator_parameters["size"], section.generator_parameters["seed"]
        if type(size) is not int or size < 1:
            raise ValueError(f"parameters.size = {size!r}: valid: 1 or more, the number of tasks")
        if type(seed) is not int:
            raise ValueError(f"parameters.seed = {seed!r}: valid: an integer")
    if source == "datasets" and bool(section.path) == bool(section.name):
        raise ValueError("source 'datasets' needs either 'path', on this machine, or 'name', on the Hugging Face hub")
    if section.path and section.revision:
        raise ValueError("'revision' has no effect with 'path': it chooses a version on the Hugging Face hub")
    if section.convert and section.columns != type(section.columns)():
        raise ValueError("'columns' has no effect with 'convert', whose rows have the columns' default names")
    if section.convert and ":" not in section.convert:
        raise ValueError(f"convert = {section.convert!r}: expected module:function")


def _path_or_table(value: Any) -> Any:
    """Convert the path of a JSONL file to the table that it is short for."""
    return {"path": value} if isinstance(value, str) else value


def _listed(value: Any) -> Any:
    """Convert one source, or a list of several, to a list of tables."""
    raw_sources = cast("list[Any]", value) if isinstance(value, (list, tuple)) else [value]
    return [_path_or_table(source) for source in raw_sources]


def _require_distinct_names(sources: tuple[TaskSource, ...]) -> tuple[TaskSource, ...]:
    seen_names: set[str] = set()
    for source in sources:
        if source.display_name in seen_names:
            raise ValueError(f"two sources are called {source.display_name!r}: give them a 'label' each")
        seen_names.add(source.display_name)
    return sources


# One source, as a table (or the path of a JSONL file), or a list of several.
TaskSources = Annotated[
    tuple[TaskSource, ...], BeforeValidator(_listed), Field(min_length=1), AfterValidator(_require_distinct_names)
]


# The path of a JSONL file, or a table.
SftData = Annotated[SftSource | None, BeforeValidator(lambda value: _path_or_table(value or None))]


class SftConfig(Section):
    """Supervised cold start (`headway sft`)."""

    data: SftData = None  # a JSONL file, or a table: rows with "prompt" and "solution", or with "messages"
    train_on: Literal["assistant", "last_assistant", "all"] = "assistant"  # messages that carry loss: docs/inputs.md
    output: str = ""  # folder of the trained model: new, empty, or of an earlier `headway sft`
    devices: Annotated[tuple[str, ...], Field(min_length=1)] = ("cpu:0-1",)  # a rank for each: cuda:N, cpu:N, cpu:N-M
    epochs: Annotated[float, Field(gt=0)] | None = 3  # passes over the data; fewer if the held-out loss rises
    steps: Positive | None = None  # optimiser steps at which SFT ends, instead of sft.epochs; then no data is held out
    batch_sequences: Positive = 32  # sequences of one step
    # Tune: the default suits models of a million weights; 1e-5 to 5e-5 suits those of billions
    learning_rate: Annotated[float, Field(ge=0)] = 2e-3  # peak
    warmup_steps: NonNegative = 20  # steps over which the learning rate rises linearly
    schedule: Literal["constant", "linear", "cosine"] = "cosine"  # after the warm-up, to the last step
    max_tokens: Positive = 512  # longer sequences (prompt and solution, or conversation) are dropped and counted
    evaluate_every_steps: NonNegative = 0  # sampled solve rate, or shares of kernels, on tasks.validation; 0: never
    # Tune: set it so that RL begins from a model that isn't certain yet: 0.3 to 0.6
    stop_at_solve_rate: Annotated[float, Field(gt=0, le=1)] | None = None  # ends SFT: RL has to improve on it

    @model_validator(mode="before")
    @classmethod
    def _require_one_end(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        table = cast("dict[str, Any]", raw)
        epochs, steps = table.get("epochs"), table.get("steps")
        if steps is None:
            return table
        if epochs is not None:
            raise ValueError(f"sft.epochs = {epochs} and sft.steps = {steps} both set its end; valid: one of them")
        return table | {"epochs": None}

    def total_steps(self, sequences: int) -> int:
        """Return the optimiser steps of the whole training on this number of sequences."""
        return self.steps or math.ceil((self.epochs or 3) * sequences / self.batch_sequences)


class DemonstrationsConfig(Section):
    """Demonstrations that are trained beside rollouts: `docs/objectives.md`."""

    data: SftData = None  # a JSONL file, or a table, as sft.data; sft.train_on says which messages carry loss
    per_step: Positive = 8  # rows in a step's batch, drawn without repetition until all were drawn
    # Tune: 0.1 to 1: lower it when the reward falls, raise it when the model forgets what they show
    coefficient: Annotated[float, Field(gt=0)] = 1.0  # of the mean cross-entropy over their loss tokens

    @model_validator(mode="after")
    def _require_data(self) -> DemonstrationsConfig:
        if self.data is None and (self.per_step, self.coefficient) != (8, 1.0):
            raise ValueError(
                f"per_step = {self.per_step}, coefficient = {self.coefficient:g} without data: there are no "
                "demonstrations; valid: with demonstrations.data"
            )
        return self
