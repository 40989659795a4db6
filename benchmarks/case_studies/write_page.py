"""The four published runs, simulated: writes docs/case_studies.md.

python -m benchmarks.case_studies.write_page > docs/case_studies.md
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

from benchmarks.case_studies import a as case_a
from benchmarks.case_studies import b as case_b
from benchmarks.case_studies import c as case_c
from benchmarks.case_studies import d as case_d
from benchmarks.case_studies.runs import WITHIN, Figure

_INTRODUCTION = """\
# Case studies

<!-- Written by `python -m benchmarks.case_studies.write_page > docs/case_studies.md` (minutes of one core). -->

Four reinforcement-learning runs on software-engineering tasks that SemiAnalysis reported in "RL Systems Mind the Gap"
(2026-06-16), simulated by `headway simulate`: Headway's own orchestrator over a description of their hardware
and workload. Accelerators and models are described by public figures (bandwidth, FLOP/s, parameters, KV heads)
times at most two *fitted* achieved fractions a run.

Every reported figure has a label:

- *fitted*: a fraction was chosen so that it comes out. Says nothing.
- *identity*: follows arithmetically from other reported figures. Says nothing either.
- *contradictory*: disagrees with other reported figures.
- *predicted*: neither; only these count.
"""


def page() -> str:
    """The whole page, Markdown."""
    with ProcessPoolExecutor() as processes:
        sections = list(processes.map(_section, (case_a.section, case_b.section, case_c.section, case_d.section)))
    figures = [figure for _, found in sections for figure in found]
    return "\n".join([_INTRODUCTION, _verdict(figures), *(text for text, _ in sections)])


def _section(make: Callable[[], tuple[str, list[Figure]]]) -> tuple[str, list[Figure]]:
    return make()


def _verdict(figures: list[Figure]) -> str:
    counts = Counter(figure.label for figure in figures)
    predicted = [figure for figure in figures if figure.label == "predicted"]
    worst = max(predicted, key=lambda figure: abs(figure.error))
    distinct = [figure for figure in predicted if not figure.name.startswith(case_d.SINGLE_STEP)]
    others = ", ".join(f"{counts[label]} {label}" for label in ("fitted", "identity", "contradictory"))
    return (
        f"**{sum(figure.within for figure in predicted)} of {len(predicted)} predicted figures are within "
        f"{WITHIN:.0%}**; the worst is {worst.name} ({worst.error:+.1%}). Ten of them are run D's single steps, all "
        "predicted by one mean, because nothing reported tells them apart; without those it is "
        f"{sum(figure.within for figure in distinct)} of {len(distinct)}. Besides: {others}.\n"
    )


if __name__ == "__main__":
    print(page(), end="")
