"""Which of a test's many forms `make test` runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def first(count: int, forms: Iterable[Any], mark: Any = pytest.mark.slow) -> list[Any]:
    """All ``forms`` of a parametrised test; those after the first ``count`` in the slow tier, or that of ``mark``."""
    return [form if n < count else pytest.param(form, marks=mark) for n, form in enumerate(forms)]


def pairs(
    *axes: Sequence[Any],
    valid: Callable[..., bool] = lambda *values: True,
    marks: tuple[Any, Any] = ((), pytest.mark.slow),
) -> list[Any]:
    """All ``valid`` combinations of the axes' values as forms of a parametrised test. ``marks``: of those that are
    needed to have every pair of two axes' values once, and of the others."""
    forms = list(itertools.product(*(range(len(axis)) for axis in axes)))
    forms = [form for form in forms if valid(*(axis[index] for axis, index in zip(axes, form, strict=True)))]
    chosen, left = set[tuple[int, ...]](), {pair for form in forms for pair in _pairs_of(form)}
    while left:
        best = max(forms, key=lambda form: len(left & _pairs_of(form)))
        left -= _pairs_of(best)
        chosen.add(best)
    named = ((form, [axis[index] for axis, index in zip(axes, form, strict=True)]) for form in forms)
    return [pytest.param(*values, marks=marks[form not in chosen]) for form, values in named]


def _pairs_of(form: tuple[int, ...]) -> set[Any]:
    return set(itertools.combinations(enumerate(form), 2))
