"""Reading an experiment: TOML file, then ``--section.key=value`` overrides, then validation."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError

from headway.config.auto import AUTO, AUTO_KEYS
from headway.config.consistency import require_consistent
from headway.config.external_models import SELF
from headway.config.model import hf_name
from headway.config.objective.critic import ADAPTER, TRUNK
from headway.config.removed import replacement_of
from headway.config.schema import Experiment
from headway.config.simulation import AnyExperiment, SimulatorExperiment
from headway.records.errors import ConfigurationError

Schema = TypeVar("Schema", bound=BaseModel)


def load_experiment(path: str | Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read and validate the experiment at ``path``, as `load_file` does, with "auto" as on a machine without GPUs
    (`orchestrator.preflight.experiment_file` reads one for this machine)."""
    return load_file(path, overrides, Experiment)


def load_file(path: str | Path, overrides: Sequence[str], schema: type[Schema]) -> Schema:
    """Read and validate the file at ``path`` against ``schema``.

    Relative paths inside the file stay relative to the working directory. ``overrides`` are
    ``section.key=value`` (leading dashes allowed); the value is read as TOML, else as a string.
    Raises ConfigurationError naming key, value and valid values.
    """
    return validate(apply_overrides(read_toml(path), overrides, schema), str(path), schema)


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read the tables of a TOML file. Raises ConfigurationError."""
    file = Path(path)
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(f"no such configuration file: {file}{_search_hint(file)}") from None
    except IsADirectoryError:
        raise ConfigurationError(f"{file} is a folder; a TOML file is needed") from None
    except OSError as error:
        raise ConfigurationError(f"{file} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} is not valid TOML: {error}") from None


def _search_hint(file: Path) -> str:
    """Describe where a relative path was searched for, and a folder below that has such a file."""
    if file.is_absolute():
        return ""
    present_folder = Path.cwd()
    near = sorted(folder.name for folder in present_folder.iterdir() if (folder / file).is_file())
    return f", searched in {present_folder}; cd {near[0] if near else 'to the folder that has it'} first"


def apply_overrides(raw: dict[str, Any], overrides: Sequence[str], schema: type[BaseModel]) -> dict[str, Any]:
    """Apply ``overrides`` to ``raw`` in place, for ``validate`` to check, and return it. Raises ConfigurationError for
    one that isn't ``section.key=value``."""
    for override in overrides:
        _apply_override(raw, override, schema)
    return raw


def changed_experiment(experiment: Experiment, settings: Mapping[str, str]) -> Experiment:
    """Return a copy of ``experiment`` with ``settings`` (``section.key`` -> value, as in an override). Raises
    ConfigurationError where it is invalid."""
    raw = experiment.model_dump(mode="json")
    for key, value in settings.items():
        _apply_override(raw, f"{key}={value}", Experiment)
    return validate_experiment(raw, "the changed experiment")


def placed_experiment(experiment: Experiment, settings: Mapping[str, str]) -> Experiment:
    """`changed_experiment` for other ``trainer.devices``, of which as many divide a copy of the model as their number
    allows (`TrainerConfig.layout_of`)."""
    trainer = experiment.trainer
    ranks, context, experts = trainer.layout_of(len(json.loads(settings["trainer.devices"])))
    layout = {"context_parallel": context, "expert_parallel": experts}
    layout |= {} if trainer.shards == "all" else {"shards": ranks // context}
    return changed_experiment(experiment, {**settings, **{f"trainer.{key}": str(n) for key, n in layout.items()}})


def validate_experiment(raw: dict[str, Any], origin: str) -> Experiment:
    """Validate a raw mapping; ``origin`` names it in errors. Raises ConfigurationError, also for a policy's."""
    if "simulator" in raw:
        raise ConfigurationError(f"{origin}: [simulator] trains no language model; valid here: one that does")
    return validate(raw, origin, Experiment)


def validate(raw: dict[str, Any], origin: str, schema: type[Schema]) -> Schema:
    """Validate a raw mapping against ``schema``, each key by itself and then all together; ``origin`` names it in
    errors. Raises ConfigurationError."""
    try:
        configuration = schema.model_validate(raw)
        if isinstance(configuration, Experiment):
            require_consistent(configuration)
        return configuration
    except ValidationError as error:
        lines = [_explain({**item, "loc": _in_file(raw, item["loc"])}, item["loc"], schema) for item in error.errors()]
        raise ConfigurationError(f"{origin}: " + "; ".join(lines)) from None
    except ValueError as error:
        raise ConfigurationError(f"{origin}: {error}") from None


def _in_file(raw: object, location: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Convert ``location`` to the file's form: without the index into a list that the file writes as a single table,
    and without pydantic's names for the alternatives of a value."""
    parts: list[str | int] = []
    node = raw
    for position, part in enumerate(location):
        table = cast("dict[object, object]", node) if isinstance(node, dict) else None
        list_items = cast("list[object]", node) if isinstance(node, list) else None
        if list_items is None and (table is None or isinstance(part, int)):
            continue
        is_last = position == len(location) - 1
        is_kind = bool(parts) and isinstance(parts[-1], int) and table is not None and table.get("kind") == part
        if table is not None and not is_last and (part not in table or is_kind):
            continue
        parts.append(part)
        if table is not None:
            node = table.get(part)
        elif list_items is not None and isinstance(part, int):
            node = list_items[part] if part < len(list_items) else None
    return tuple(parts)


def _apply_override(raw: dict[str, Any], override: str, schema: type[BaseModel]) -> None:
    key, equals_sign, value_text = override.lstrip("-").partition("=")
    key_parts = key.split(".")
    if not equals_sign or len(key_parts) < 2 or not all(key_parts):
        raise ConfigurationError(f"override {override!r}: expected --section.key=value")
    node: Any = raw
    annotation: Any = schema
    for part in key_parts[:-1]:
        name = _key_spelling(part, node, annotation)
        if not isinstance(node, list):  # an item is of the type its list is declared with
            annotation = _inside(annotation, name)
        node = _child(node, name, override)
    if isinstance(node, list):
        node[_index(cast("list[Any]", node), key_parts[-1], override)] = _parse_value(value_text)
    else:
        node[_key_spelling(key_parts[-1], node, annotation)] = _parse_value(value_text)


def _key_spelling(part: str, node: Any, annotation: Any) -> str:
    """Return ``part`` of an override as the table ``node`` spells it. Options are often typed with dashes, but the
    schema's names have none; a name chosen by the user (of a verifier, a parameter) stays as it is."""
    is_user_name = get_origin(annotation) is dict or section_of(annotation) is None
    return part if is_user_name or part in node else part.replace("-", "_")


def _inside(annotation: Any, name: str) -> Any:
    """Return the schema's type of ``name`` in a value of type ``annotation``; None where it declares none."""
    if get_origin(annotation) is dict:
        return get_args(annotation)[1]
    section = section_of(annotation)
    field = None if section is None else section.model_fields.get(name)
    return None if field is None else field.annotation


def _child(node: Any, part: str, override: str) -> Any:
    """Return the table or list of tables ``part`` of ``node``; a missing table is created."""
    if isinstance(node, list):
        items = cast("list[Any]", node)
        child = items[_index(items, part, override)]
    else:
        child = node.setdefault(part, {})
    if not isinstance(child, (dict, list)):
        raise ConfigurationError(f"override {override!r}: {part!r} is not a section, it is {child!r}")
    return cast("Any", child)


def _index(items: list[Any], part: str, override: str) -> int:
    if not part.isdecimal() or int(part) >= len(items):
        raise ConfigurationError(
            f"override {override!r}: {part!r} isn't an index of the list; valid: 0 to {len(items) - 1}"
        )
    return int(part)


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(item: dict[str, Any], validated: tuple[Any, ...], schema: type[BaseModel]) -> str:
    """Write the message of a validation error. Its ``loc`` is the location in the file, and ``validated`` is pydantic's
    location."""
    location = tuple(item["loc"])
    key = ".".join(str(part) for part in location) or "experiment"
    if item["type"] == "extra_forbidden" and (sentence := replacement_of(location)):
        return f"the key {key!r} was removed: {sentence}"
    if item["type"] == "extra_forbidden":
        valid_names = _valid_names(validated[:-1], schema)
        nearest = difflib.get_close_matches(str(location[-1]), valid_names, n=1, cutoff=0.5)
        hint = f"did you mean {nearest[0]!r}?" if nearest else "valid: " + ", ".join(valid_names)
        return f"unknown key {key!r}; {hint}"
    if item["type"] == "missing":
        return f"missing key {key!r}"
    reason = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "value_error" and len(location) < 2:
        return reason
    if item["type"] == "value_error" and (isinstance(item["input"], dict) or "{" in str(item["input"])):
        return f"{key}: {reason}"  # for tables, whose keys the message names
    auto_values = AUTO_KEYS.get(cast("tuple[str, str]", location))
    value_text = re.sub(r"//[^/]*@", "//...@", repr(item["input"]))  # without the password of a URL
    return f"{key} = {value_text}: {reason}" + (f"; valid: {auto_values} or {AUTO}" if auto_values else "")


def _valid_names(location: tuple[Any, ...], schema: type[BaseModel]) -> list[str]:
    model: type[BaseModel] = schema
    kind_sections: list[type[BaseModel]] = []  # possible sections of the current table, where there are several
    for part in location:
        if matching := [kind for kind in kind_sections if kind.model_fields["kind"].default == part]:
            model, kind_sections = matching[0], []
            continue
        field = model.model_fields.get(str(part))
        if field is None:
            continue  # an item of a list, its kind, or a name chosen by the user
        sections = sections_of(field.annotation)
        if not sections:
            return []
        model, kind_sections = sections[0], sections if len(sections) > 1 else []
    return sorted(model.model_fields)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section class that a field holds, once or several times; None for a field of values."""
    return next(iter(sections_of(annotation)), None)


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    """Return the section classes that a field holds: several where its tables may be of several kinds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections_of(part)]


def model_folders(experiment: Experiment) -> dict[str, str]:
    """The folders of models that processes read, by the keys that name them."""
    folder_by_key = {"model.path": experiment.model.path, "model.reference": experiment.model.reference}
    folder_by_key |= {f"teachers.{name}.path": t.path for name, t in experiment.teachers.items() if not t.address}
    folder_by_key["critic.path"] = experiment.critic.path
    return {key: folder for key, folder in folder_by_key.items() if folder not in ("", SELF, TRUNK, ADAPTER)}


def flatten(experiment: AnyExperiment) -> dict[str, Any]:
    """Return a mapping of ``section.key`` to JSON values, with nested tables flattened."""
    return dict(_walk("", json.loads(experiment.model_dump_json())))


def _walk(prefix: str, node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for name, child in cast("dict[str, Any]", node).items():
            yield from _walk(f"{prefix}.{name}" if prefix else name, child)
    elif isinstance(node, list) and node and all(isinstance(item, dict) for item in cast("list[Any]", node)):
        items = cast("list[Any]", node)
        for number, item in enumerate(items):  # a list of one is written as a table
            yield from _walk(f"{prefix}.{number}" if len(items) > 1 else prefix, item)
    else:
        yield prefix, node


# Keys that may differ from the run's stored configuration when it is resumed; all others must be equal. The part *
# matches any single name.
RESUMABLE_KEYS = {
    "run": "steps time_limit_s directory stop_grace_s on_stall offload",
    "generator": "devices engine_arguments engine_arguments.* probe_every_updates slots kv_capacity_tokens "
    "prefetch_groups update_mode",
    "algorithm": "routing_replay truncation_support_tokens",
    "router": "*",
    "queue": "group_timeout_s min_timeout_group_ratio max_concurrent_rollouts",
    "buffer": "*.*",
    "hooks": "group_meta logging",
    "weights": "exchange steps_per_publish whole_every",
    "pruning": "* *.* *.*.*",
    "teachers": "*.devices *.address *.address.*",
    "trainer": "devices shards context_parallel expert_parallel host_memory micro_batch_tokens micro_batch_samples "
    "shared_prefix gradient_checkpointing",
    "verifier": "timeout_s workers nodes",
    "verifiers": "*.timeout_s",
    "rollout": "timeout_s retries",
    "environment": "workers nodes concurrency timeout_s models.*.address models.*.api_key_env models.*.concurrency "
    "models.*.timeout_s",
    "sandbox": "exec_timeout_s live starts start_timeout_s allow_unbounded store store_bytes",
    "endpoint": "address max_body_bytes",
    "evaluation": "every_steps every_s test samples_per_task stop_at_solve_rate episodes video",
    "control": "*",
    "checkpoint": "*",
    "ledger": "*",
    "alerts": "*",
    "cluster": "* nodes.* environment.*",
    "simulator": "step_timeout_s devices",
}
_RESUMABLE_PARTS = tuple((section, *key.split(".")) for section, keys in RESUMABLE_KEYS.items() for key in keys.split())


def is_resumable(key: str) -> bool:
    """Whether ``section.key`` may differ when a run is resumed."""
    parts = key.split(".")
    return any(
        len(pattern) == len(parts) and all(glob in ("*", part) for glob, part in zip(pattern, parts, strict=True))
        for pattern in _RESUMABLE_PARTS
    )


def _effective(experiment: AnyExperiment) -> dict[str, Any]:
    """Flatten the experiment, with the effective length of the decay in ``trainer.schedule_steps``, so that a resume
    that trains for longer can't silently change the learning rates of replayed steps."""
    flat = flatten(experiment)
    if isinstance(experiment, SimulatorExperiment):
        return flat | {"the decay's end": None if experiment.trainer.schedule == "constant" else experiment.run.steps}
    del flat["model.dtype"]  # generator.dtype and trainer.dtype have its effect
    folder_keys = ["model.path", "model.reference", "critic.path"]
    folder_keys += [f"teachers.{name}.path" for name in experiment.teachers]
    flat |= {key: hf_name(flat[key]) for key in folder_keys}  # in the cache of any machine
    for name, teacher in experiment.teachers.items():  # the scores of one outside are stored with the rollouts
        flat[f"the place of teachers.{name}"] = "outside of the trainer" if teacher.scores else "in the trainer"
    if experiment.trainer.schedule == "constant":
        flat["trainer.schedule_steps"] = None
    elif experiment.trainer.schedule_steps is None:
        flat["trainer.schedule_steps"] = experiment.run.steps
    return flat


def require_resumable(stored: AnyExperiment, requested: AnyExperiment) -> None:
    """Raise ConfigurationError naming every key that differs but may not change on resume."""
    old_values, new_values = _effective(stored), _effective(requested)
    changed_keys = sorted(
        key
        for key in old_values.keys() | new_values.keys()
        if old_values.get(key) != new_values.get(key) and not is_resumable(key) and not key.startswith("sft.")
    )
    if changed_keys:
        hint = ""
        if "trainer.schedule_steps" in changed_keys:
            length = old_values["trainer.schedule_steps"]
            hint = f" (the learning rate's decay follows run.steps: keep it with trainer.schedule_steps = {length})"
        details = ", ".join(f"{key}: {old_values.get(key)!r} -> {new_values.get(key)!r}" for key in changed_keys)
        raise ConfigurationError(f"these keys may not change when a run is resumed: {details}{hint}")
