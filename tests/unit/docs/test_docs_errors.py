"""The pages that errors name exist, and so do the headings on them."""

from __future__ import annotations

import pytest

from headway.cli.main import SECTIONS, page_about
from headway.config.schema import Experiment
from headway.records import errors
from tests.unit.docs.test_docs_names import ROOT, anchors

CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.HeadwayError)]
PAGES = sorted(
    {kind.page for kind in CLASSES if kind.page} | {f"docs/configuration.md#{at}" for at in SECTIONS.values()}
)


@pytest.mark.parametrize("link", sorted(PAGES))
def test_page_of_an_error_exists(link: str) -> None:
    page, _, anchor = link.partition("#")
    assert (ROOT / page).is_file()
    assert not anchor or anchor in anchors(ROOT / page)


def test_every_section_of_the_experiment_has_its_heading() -> None:
    assert set(SECTIONS) == set(Experiment.model_fields)


@pytest.mark.parametrize(
    ("error", "page"),
    [
        (errors.ConfigurationError("a.toml: unknown key 'queue.budgt'"), "docs/configuration.md#queue"),
        (errors.ConfigurationError("run.directory = 'x': no"), "docs/configuration.md#run-required"),
        (errors.ConfigurationError("runs/tasks.jsonl, model.safetensors: no such file"), ""),
        (errors.ConfigurationError("queue.budget: docs/async.md"), ""),
        (errors.RunLocked("run.directory is in use"), "docs/map.md#a-runs-folder"),
        (errors.HeadwayError("x"), ""),
    ],
)
def test_error_names_the_page_that_says_more(error: errors.HeadwayError, page: str) -> None:
    assert page_about(error) == page
