"""``docs/api.md``, written from the docstrings of the names that users' files import. Reads source, imports no torch.

python -m docs.write_api > docs/api.md
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from docs.write_configuration import comments_from, linked
from headway import api

ROOT = Path(__file__).parents[1]
SECTIONS = {  # title -> what a section begins with, and its names: of headway.api, or module:name
    "Tasks, rollouts, verdicts": (
        "What verifiers and hooks are given: [inputs.md](inputs.md), [hooks.md](hooks.md).",
        "Task Rollout Group Verdict",
    ),
    "Environments": (
        "[environments.md](environments.md) shows how one is written.",
        "Environment Episode Answer Call ToolError headway.rollout.tools:Tool",
    ),
    "Rollouts of your own": (
        "For `hooks.rollout`: [hooks.md](hooks.md).",
        "headway.rollout.makers.user_function:Attempt RolloutOver",
    ),
    "Objectives": (
        "For `algorithm.loss`: [objectives.md](objectives.md). An advantage takes and returns an array of rewards.",
        "TokenTerms LossSettings TokenLoss headway.trainer.losses:ratio headway.trainer.losses:clipped_surrogate",
    ),
    "Training and serving from Python": (
        "What the commands call. They raise `HeadwayError`; the commands make an exit code of it.",
        "load_experiment Experiment train run_sft evaluate_model serve ServeSettings Recipe RunSummary read_ledger "
        "headway.telemetry.rollouts.reader:RolloutRecord HeadwayError ConfigurationError InfrastructureError",
    ),
    "Workflows": (
        "[flow.md](flow.md): generate, score, judge, distil, train, executed wherever a plan says.",
        "run Flow Worker WorkerGroup Channel ExecutionPlan StagePlacement ClusterConfig",
    ),
}
_TAG = re.compile(r"(^[^`]*(?:`[^`]*`[^`]*)*?)<")  # outside of code
_INTRODUCTION = """\
# Python reference

<!-- Written by `python -m docs.write_api > docs/api.md`; edit the docstrings instead. -->

The names that environments, hooks, verifiers and scripts of your own import. `from headway.api import NAME` works for
all but those whose module is given; everything else in the package may move between releases.
"""


def reference() -> str:
    """The whole page in Markdown."""
    parts = [_INTRODUCTION]
    for title, (text, names) in SECTIONS.items():
        parts += [f"## {title}\n", text + "\n"]
        for name in names.split():
            parts += _entry(*reversed(name.split(":")) if ":" in name else (name, api._MODULES[name]))
    return "\n".join(parts)


@functools.cache
def _source(module: str) -> str:
    return (ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8")


def _entry(name: str, module: str) -> Iterator[str]:
    [node] = [
        node
        for node in ast.parse(_source(module)).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    ]
    yield f"### `{name}`\n"
    if name not in dir(api):
        yield f"`from {module} import {name}`\n"
    if not isinstance(node, ast.ClassDef):
        yield f"```text\n{_signature(node)}\n```\n"
    yield _prose(node) + "\n"
    if isinstance(node, ast.ClassDef):
        yield from _fields(node, module)
        yield from _methods(node)


def _fields(node: ast.ClassDef, module: str) -> Iterator[str]:
    """A table of the public fields that a class declares, with the comments on their lines."""
    comments = comments_from(_source(module))
    fields = [
        (f"`{field.target.id}`", f"`{ast.unparse(field.annotation)}`", comments.get((node.name, field.target.id), ""))
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if not field.target.id.startswith("_")
    ]
    if fields:
        rows = ["| " + " | ".join(linked(cell).replace("|", "\\|") for cell in cells) + " |" for cells in fields]
        yield "\n".join(("| field | type | |", "| --- | --- | --- |", *rows)) + "\n"


def _methods(node: ast.ClassDef) -> Iterator[str]:
    rows = [
        f"- `{_signature(method)}`: {_prose(method, joined=True)}"
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and not method.name.startswith("_")
        if ast.get_docstring(method)
    ]
    if rows:
        yield "\n".join(rows) + "\n"


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The call: a property has no brackets; arguments without ``self``."""
    decorators = {ast.unparse(one) for one in node.decorator_list}
    result = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    if "property" in decorators:
        return node.name + result
    arguments = ast.unparse(node.args).removeprefix("self").removeprefix("cls").removeprefix(", ")
    return f"{'await ' if isinstance(node, ast.AsyncFunctionDef) else ''}{node.name}({arguments}){result}"


def _prose(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, *, joined: bool = False) -> str:
    """The docstring as Markdown: single backticks, links, and no ``<eos>`` that would be taken for HTML."""
    lines = linked(inspect.cleandoc(ast.get_docstring(node) or "").replace("``", "`")).splitlines()
    parts = [line if line.startswith("    ") else _TAG.sub(r"\1&lt;", line) for line in lines]
    return " ".join(" ".join(parts).split()) if joined else "\n".join(parts)


if __name__ == "__main__":
    print(reference(), end="")
