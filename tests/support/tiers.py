"""Which of a test's many forms `make test` runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first(count: int, forms: Iterable[Any]) -> list[Any]:
    """All ``forms`` of a parametrised test; those after the first ``count`` in the slow tier."""
    return [form if n < count else pytest.param(form, marks=pytest.mark.slow) for n, form in enumerate(forms)]
