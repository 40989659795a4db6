"""Settings of all tests: import paths of the processes that tests start, tiers, and which files come first."""

from __future__ import annotations

import ast
import contextlib
import gc
import os
import re
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
PATHS = [str(HERE / "support"), str(HERE / "e2e"), str(HERE / "slow"), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in PATHS if path)

_parse = ast.parse


def _parse_again(*arguments: Any, **options: Any) -> Any:
    """Parse a failed test's source, again after a SystemError, which CPython 3.11.7 has where threads parse at once."""
    for _ in range(9):
        with contextlib.suppress(SystemError):
            return _parse(*arguments, **options)
    return _parse(*arguments, **options)


ast.parse = _parse_again

# Until all tests are collected: what they import stays, and looking through it for garbage takes a tenth of the time.
gc.disable()

# Seconds of the longest files, on two cores: they are begun first, so that no worker is left alone with one at the end.
LONGEST_S = {
    "slow/test_chaos.py": 240,
    "e2e/test_nodes_run.py": 130,
    "slow/test_nodes_ranks.py": 120,
    "e2e/test_run_faults.py": 120,
    "e2e/test_environment_code.py": 75,
    "e2e/test_hub_run.py": 70,
    "e2e/test_pictures_run.py": 70,
    "e2e/test_environment_repair.py": 70,
    "e2e/test_sandbox_kills.py": 60,
    "e2e/test_verifier_pool.py": 60,
    "e2e/test_watch_page.py": 60,
    "e2e/test_environment_mcp.py": 60,
    "e2e/test_check_nodes.py": 50,
    "e2e/test_flow_peers.py": 50,
    "e2e/test_generator_pool.py": 45,
    "e2e/test_sandbox_hostile.py": 45,
    "e2e/test_verifiers_training.py": 40,
    "e2e/test_moves_run.py": 30,
    "e2e/test_model_division.py": 40,
    "e2e/test_adapter_training.py": 40,
    "e2e/test_alerts.py": 40,
    "e2e/test_serve.py": 40,
    "e2e/test_stalls.py": 40,
    "e2e/test_buffer_service.py": 35,
    "e2e/test_watch_server.py": 35,
    "unit/planner/test_run_plan.py": 35,
    "unit/kernels/test_kernel_triton.py": 35,
    "unit/generator/test_engine_hub.py": 35,
    "unit/generator/test_engine_hub_adapters.py": 30,
    "unit/trainer/test_trainer_objectives.py": 30,
    "unit/generator/test_engine_adapters.py": 20,
    "unit/models/test_models_native.py": 30,
}


# CI has little time: SLOW_FORMS of a test's slow forms stay so, and of ranks' tests FAST_FORMS of the others, evenly
# chosen. The rest is long.
FAST_FORMS = 2
SLOW_FORMS = 2
OF_RANKS = {
    "unit/trainer/test_context_experts.py",
    "unit/trainer/test_critic_ranks.py",
    "unit/trainer/test_layout_check.py",
    "unit/trainer/test_publishing_ranks.py",
    "unit/trainer/test_saving.py",
    "unit/trainer/test_sharding.py",
    "e2e/test_model_division.py",
}

# Tests that are repeated on other sandbox backends than the default one, or for a second provider: slow tier.
SECOND_FORMS = re.compile(r"[\[-](bubblewrap|docker|local.without.groups|prime)\b")


def pytest_collection_finish() -> None:
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests of real processes have the process that they are forked from import its modules from their first on."""
    if item.path.relative_to(HERE).parts[0] in ("e2e", "slow"):
        import warm_programs  # what it imports, other tests needn't

        warm_programs.begin()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow tier, give tests of real processes their time, and put the longest files first."""

    def seconds(item: pytest.Item) -> float:
        place = str(item.path.relative_to(HERE))
        return LONGEST_S.get(place, {"e2e": 10, "slow": 30}.get(item.path.parent.name, 1))

    for item in items:
        place = item.path.relative_to(HERE).parts[0]
        if place == "slow" or (place == "e2e" and SECOND_FORMS.search(item.name)):
            item.add_marker(pytest.mark.slow)
        if place in ("e2e", "slow") and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))
    forms: dict[tuple[str, bool], list[pytest.Item]] = {}
    for item in items:
        marks, file = {mark.name for mark in item.iter_markers()}, str(item.path.relative_to(HERE))
        if "long" not in marks and ("slow" in marks or file in OF_RANKS):
            forms.setdefault((item.nodeid.partition("[")[0], "slow" in marks), []).append(item)
    for (_, slow), repeated in forms.items():
        kept = SLOW_FORMS if slow else FAST_FORMS
        chosen = {number * len(repeated) // kept for number in range(kept)}
        for number, item in enumerate(repeated):
            if number not in chosen:
                item.add_marker(pytest.mark.long)
    items.sort(key=lambda item: -seconds(item))  # stable: a file's tests stay together, in their order
