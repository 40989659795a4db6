"""The tables of keys in docs/simulation.md, written from the scenario's schema.

python -m docs.write_scenario_keys --write
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from docs.write_configuration import comments_from, valid_values
from headway.config.load import section_of
from headway.planner import quantities, scenario
from headway.planner.quantities import Quantity
from headway.planner.scenario import (
    Drift,
    GeneratorHardware,
    Hardware,
    ScenarioEnvironment,
    TeacherHardware,
    TrainerHardware,
    Workload,
)

PAGE = Path(__file__).with_name("simulation.md")
SECTIONS: dict[str, type[BaseModel]] = {
    "[hardware]": Hardware,
    "[hardware.generator]": GeneratorHardware,
    "[hardware.trainer]": TrainerHardware,
    "[hardware.teachers]": TeacherHardware,
    "[workload]": Workload,
    "[environment]": ScenarioEnvironment,
    "[[drift]]": Drift,
    "a quantity": Quantity,
}
_MARKED = re.compile(r"(<!-- keys -->\n).*?(<!-- end of keys -->)", re.DOTALL)


def tables() -> str:
    """A table of keys for each section, Markdown."""
    comments = {**comments_from(inspect.getsource(scenario)), **comments_from(inspect.getsource(quantities))}
    return "\n".join(line for title, model in SECTIONS.items() for line in _table(title, model, comments))


def _table(title: str, model: type[BaseModel], comments: dict[tuple[str, str], str]) -> Iterator[str]:
    yield f"`{title}`\n" if title.startswith("[") else f"{title}\n"
    yield "| key | valid | default | meaning |"
    yield "| --- | --- | --- | --- |"
    for name, field in model.model_fields.items():
        if name not in inspect.get_annotations(model):
            continue  # also a field of the experiment
        inner = section_of(field.annotation)
        if inner is not None and inner is not Quantity:
            continue  # a section has a table of its own
        valid = "quantity" if inner is Quantity else valid_values(field.annotation, field.metadata)
        cells = (f"`{name}`", valid, _default(field), comments.get((model.__name__, name), ""))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default()
    if isinstance(value, Quantity):
        value = value.value
    if value is None or value == ():
        return "*unset*"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def with_tables(page: str) -> str:
    """``page`` with its tables regenerated from the schema."""
    return _MARKED.sub(lambda match: f"{match[1]}{tables()}{match[2]}", page)


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(tables(), end="")
