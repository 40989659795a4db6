"""The figures of docs/async.md are what the real loops do today."""

from __future__ import annotations

import re

import pytest

from docs.timeline import PAGE, figures, with_figures


@pytest.mark.slow
@pytest.mark.long
def test_figures_are_up_to_date():
    page = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"<!-- figure ([\w-]+) -->\n", page) == [
        "timeline-0", "timeline-1", "timeline-4", "budgets", "publishing", "policies", "surplus", "modes"
    ]  # fmt: skip
    assert page == with_figures(page), "run: python -m docs.timeline --write"


@pytest.mark.slow
def test_a_figure_shows_each_group_once_within_the_budget():
    for name, text in figures().items():
        if name.startswith("timeline"):
            rows = re.findall(r"^group +(\d+) .*staleness (\d+)$", text, re.M)
            assert [int(group) for group, _ in rows] == list(range(14))
            assert max(int(staleness) for _, staleness in rows) <= int(name.removeprefix("timeline-"))
