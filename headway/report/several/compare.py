"""`headway report RUN RUN... --compare --json`: several runs, and how their files differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.records.errors import ConfigurationError, HeadwayError
from headway.report.run_view import RunView, as_json, view_run
from headway.report.several.configurations import differences


def compare_json(run_dirs: Sequence[str | Path]) -> dict[str, Any]:
    """Several runs as one JSON object: each as `headway report RUN --json` has it, and how their files differ."""
    views, left_out = read_runs(run_dirs)
    return {
        "runs": [as_json(view) for view in views],
        "configuration": differences([view.configuration for view in views]),
        "left_out": left_out,
    }


def read_runs(run_dirs: Sequence[str | Path]) -> tuple[list[RunView], dict[str, str]]:
    """The runs that can be read, and what is wrong with the others. Raises ConfigurationError when none can."""
    views, left_out = list[RunView](), dict[str, str]()
    for run in run_dirs:
        try:
            views.append(view_run(run))
        except (HeadwayError, OSError) as error:
            left_out[str(run)] = str(error)
    if not views:
        raise ConfigurationError("; ".join(left_out.values()))
    return views, left_out
