"""``docs/configuration.md``, written from the schema itself: fields, defaults, limits and trailing comments.

python -m headway.config.reference > docs/configuration.md
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import tokenize
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headway.config import schema
from headway.config.schema import RESUMABLE_KEYS, Experiment

_INTRODUCTION = """\
# Configuration

<!-- Written by `python -m headway.config.reference > docs/configuration.md`; edit headway/config/schema.py instead. -->

One TOML file holds a whole experiment; any key can be overridden on the command line as `--section.key=value`.
Unknown keys are errors that name the nearest valid one. Relative paths are relative to the working directory.
A key without a default is **required**; *unset* means that TOML leaves it out. Keys marked ↻ (and all of `[sft]`)
may differ when a run is resumed; every other key must be what the run began with. `headway check` tests the
combinations.
"""
_LIMITS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_NAMES = {int: "integer", float: "number", str: "text", bool: "true or false"}


def reference() -> str:
    """The whole page, Markdown. Pure: it reads the schema and its source and nothing else."""
    comments = _comments(inspect.getsource(schema))
    parts = [_INTRODUCTION]
    for name, section in Experiment.model_fields.items():
        model = _model_of(section.annotation)
        if model is not None:
            parts += _section(name, model, section.is_required(), comments)
    return "\n".join(parts)


def _section(path: str, model: type[BaseModel], required: bool, comments: dict[tuple[str, str], str]) -> Iterator[str]:
    nested = {name: _model_of(field.annotation) for name, field in model.model_fields.items()}
    if any(nested.values()):  # a section of sub-sections, all of one kind: [tasks.train], [tasks.validation], ...
        titles = [f"`[{path}.{name}]`" + (" (required)" if model.model_fields[name].is_required() else "")
                  for name in nested]  # fmt: skip
        yield f"## {', '.join(titles)}\n"
        for name in nested:
            if comment := comments.get((model.__name__, name)):
                yield f"- `{name}`: {comment}"
        yield ""
        model = next(found for found in nested.values() if found is not None)
    else:
        yield f"## `[{path}]`" + (" (required)" if required else "") + "\n"
        if model.__doc__:
            yield inspect.cleandoc(model.__doc__) + "\n"
    yield "| key | valid | default | meaning |"
    yield "| --- | --- | --- | --- |"
    for name, field in model.model_fields.items():
        mark = " ↻" if f"{path}.{name}" in RESUMABLE_KEYS else ""
        cells = (
            f"`{name}`{mark}",
            _valid(field.annotation, field.metadata),
            _default(field),
            comments.get((model.__name__, name), ""),
        )
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def _comments(source: str) -> dict[tuple[str, str], str]:
    """(class, field) -> the comment at the end of the field's line."""
    by_line = {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    return {
        (node.name, field.target.id): by_line[field.end_lineno]
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.end_lineno in by_line
    }


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The section a field holds, if it holds one (an optional one too)."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _valid(annotation: Any, metadata: list[Any]) -> str:
    """What values a field takes, in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        extra = arguments[1].metadata if isinstance(arguments[1], FieldInfo) else list(arguments[1:])
        return _valid(arguments[0], [*extra, *metadata])
    if origin is Literal:
        return " | ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return _valid(next(a for a in arguments if a is not type(None)), metadata)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return f"[{', '.join(_valid(argument, []) for argument in arguments)}]"
    if origin is tuple:
        return f"list of {_valid(arguments[0], [])}"
    if origin is dict:
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
