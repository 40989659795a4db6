"""``docs/configuration.md``, written from the schema itself: fields, defaults, limits and trailing comments.

python -m docs.write_configuration > docs/configuration.md
"""

from __future__ import annotations

import ast
import functools
import inspect
import io
import json
import re
import sys
import tokenize
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headway.config.auto import AUTO, AUTO_KEYS
from headway.config.load import is_resumable, section_of, sections_of
from headway.config.schema import Experiment
from headway.config.simulation import SimulatorExperiment

_INTRODUCTION = """\
# Configuration

<!-- Written by `python -m docs.write_configuration > docs/configuration.md`; edit headway/config/ instead. -->

One TOML file holds a whole experiment; any key can be overridden on the command line as `--section.key=value`.
Unknown keys are errors that name the nearest valid one. Relative paths are relative to the working directory.
A key without a default is **required**; *unset* means that TOML leaves it out. Keys marked ↻ (and all of `[sft]`)
may differ when a run is resumed; every other key must be what the run began with. `headway check` tests the
combinations. *In italics*: when to change a key. Most runs need no others than those.
"""
_SIMULATORS = """\
# Experiments with `[simulator]`

A policy that acts in vectorised simulators ([embodied.md](embodied.md)) has these sections, and of those above {};
keys of these that have no effect on it are refused.
"""
_MATTER = """\
run.directory run.steps model.path model.template model.dtype tasks.train.path verifier.name environment.name
rollout.group_size rollout.max_response_tokens queue.groups_per_step queue.budget generator.engine generator.devices
generator.slots trainer.devices trainer.learning_rate trainer.micro_batch_tokens algorithm.loss evaluation.every_steps
"""  # in the order in which a run is thought of
_LIMITS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_UNITS = {"_per_s": "per second", "_s": "seconds"} | {
    f"_{unit}": unit
    for unit in ("bytes", "tokens", "steps", "groups", "samples", "characters", "requests", "updates", "batches")
}  # a key's ending -> its unit
_PAGE = re.compile(r"docs/([\w-]+\.md)")
_NAMES = {int: "integer", float: "number", str: "text", bool: "true or false"}


def reference() -> str:
    """The whole page in Markdown. Pure: reads the schema and its source and nothing else."""
    parts = [_INTRODUCTION, *_matter()]
    for name, section in Experiment.model_fields.items():
        model = section_of(section.annotation)
        if model is not None:
            path = f"{name}.NAME" if get_origin(section.annotation) is dict else name
            parts += _section(path, model, section.is_required())
    return "\n".join([*parts, *_simulator_sections()])


def _simulator_sections() -> Iterator[str]:
    """The sections of an experiment with ``[simulator]`` that a language model's doesn't have, or has otherwise."""
    language, fields = Experiment.model_fields, SimulatorExperiment.model_fields
    shared = fields.keys() & language.keys()
    same = {name for name in shared if section_of(fields[name].annotation) is section_of(language[name].annotation)}
    listed = ", ".join(f"[`[{name}]`](#{name}{'-required' if language[name].is_required() else ''})" for name in
                       SimulatorExperiment.model_fields if name in same)  # fmt: skip
    yield _SIMULATORS.format(listed)
    for name, field in SimulatorExperiment.model_fields.items():
        if name not in same:
            model = section_of(field.annotation)
            assert model is not None
            heading, *rows = _section(name, model, field.is_required())
            yield heading if name not in Experiment.model_fields else heading.replace("`\n", "` in simulators\n")
            yield from rows


def _matter() -> Iterator[str]:
    """The keys that nearly every run has to choose, each with what it means."""
    yield "## The twenty keys that matter\n"
    for key in _MATTER.split():
        model: type[BaseModel] = Experiment
        *sections, name = key.split(".")
        for section in sections:
            inner = section_of(model.model_fields[section].annotation)
            assert inner is not None
            model = inner
        heading = f"{sections[0]}-required" if Experiment.model_fields[sections[0]].is_required() else sections[0]
        anchor = "taskstrain-required-tasksvalidation-taskstest" if sections[0] == "tasks" else heading
        yield f"- [`{key}`](#{anchor}): {_comment(model, name).partition('<br>')[0]}"
    yield ""


def _section(path: str, model: type[BaseModel], required: bool) -> Iterator[str]:
    nested = {name: section_of(field.annotation) for name, field in model.model_fields.items()}
    if all(nested.values()):  # a section of sub-sections, all of one kind: [tasks.train], [tasks.validation], ...
        titles = [f"`[{path}.{name}]`" + (" (required)" if model.model_fields[name].is_required() else "")
                  for name in nested]  # fmt: skip
        yield f"## {', '.join(titles)}\n"
        for name in nested:
            if comment := _comment(model, name):
                yield f"- `{name}`: {comment}"
        yield ""
        model = next(found for found in nested.values() if found is not None)
    else:
        yield f"## `[{path}]`" + (" (required)" if required else "") + "\n"
        if model.__doc__:
            yield linked(inspect.cleandoc(model.__doc__)) + "\n"
    yield "| key | valid | default | meaning |"
    yield "| --- | --- | --- | --- |"
    yield from _rows(path, "", model)
    yield ""


def _rows(path: str, prefix: str, model: type[BaseModel]) -> Iterator[str]:
    """A table row for each key; keys of a table inside the section follow it as ``table.key``, unless that table is a
    section documented elsewhere."""
    for name, field in model.model_fields.items():
        key = prefix + name
        named = f"{path}.{prefix}*.{name}"  # of a table whose entries have names
        mark = " ↻" if is_resumable(f"{path}.{key}") or is_resumable(named) else ""
        if name == "kind":  # stands in the keys of its rows
            continue
        inner = section_of(field.annotation)
        comment = _comment(model, name)
        if inner is None or comment:
            default = "*unset*" if isinstance(field.get_default(), BaseModel) else _default(field)
            valid = valid_values(field.annotation, field.metadata) + _unit(name, field.annotation)
            if (path, key) in AUTO_KEYS:  # resolved before the schema sees it
                valid, default = f"{valid} | `{AUTO}`", f'`"{AUTO}"`'
            cells = (f"`{key}`{mark}", valid, default, comment)
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        kinds = sections_of(field.annotation)
        if len(kinds) > 1:
            for kind in kinds:
                yield from _rows(path, f"{key}.{kind.model_fields['kind'].default}.", kind)
        elif inner is not None:
            yield from _rows(path, f"{key}.", inner)


def _comment(model: type[BaseModel], name: str) -> str:
    """Meaning of a field, and when to change it in italics, from its line or that of the section it extends."""
    for owner in model.__mro__:
        source = inspect.getsource(sys.modules[owner.__module__]) if owner.__module__.startswith("headway.") else ""
        if meaning := comments_from(source).get((owner.__name__, name)):
            tuned = comments_from(source, "Tune: ").get((owner.__name__, name))
            return linked(f"{meaning}<br><em>{tuned}</em>" if tuned else meaning)
    return ""


def linked(text: str) -> str:
    """``text`` with links to the pages that it names."""
    return _PAGE.sub(r"[\1](\1)", text)


@functools.cache
def comments_from(source: str, above: str = "") -> dict[tuple[str, str], str]:
    """(class, field) -> the comment at the end of the field's line; with ``above``: the one that begins so, on the line
    above the field."""
    by_line = {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    fields = [
        (node.name, field.target.id, field.lineno - 1 if above else field.end_lineno)
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    ]
    return {
        (owner, name): by_line[line].removeprefix(above)
        for owner, name, line in fields
        if line in by_line and by_line[line].startswith(above)
    }


def _unit(name: str, annotation: Any) -> str:
    """The unit in brackets, as the key's ending says; "" for one that is no number."""
    kinds = {annotation, *get_args(annotation)} | {get_args(one)[0] for one in get_args(annotation) if get_args(one)}
    if not kinds & {int, float}:
        return ""
    return next((f" ({unit})" for ending, unit in _UNITS.items() if name.endswith(ending)), "")


def valid_values(annotation: Any, metadata: list[Any]) -> str:
    """Description of the values that a field takes."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        extra = arguments[1].metadata if isinstance(arguments[1], FieldInfo) else list(arguments[1:])
        return valid_values(arguments[0], [*extra, *metadata])
    if origin is Literal:
        return " | ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(valid_values(a, metadata) for a in arguments if a is not type(None)))
    if origin is tuple and arguments[-1] is not Ellipsis:
        return f"[{', '.join(valid_values(argument, []) for argument in arguments)}]"
    if origin is tuple:
        return f"list of {valid_values(arguments[0], [])}"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "table"
    bounds = [f"{sign} {getattr(item, name):g}" for item in metadata for name, sign in _LIMITS.items()
              if hasattr(item, name)]  # fmt: skip
    return " ".join([_NAMES[cast("type", annotation)], ", ".join(bounds)]).strip()


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default()
    return "*unset*" if value is None else f"`{json.dumps(value)}`"


if __name__ == "__main__":
    print(reference(), end="")
