"""Results of ``gpu_measure.py`` in ``benchmarks/results/gpu-CARD.txt``, and which code of GPUs has changed since.

A section's line ``code at COMMIT: AREA DIGEST, ...`` has the areas of `AREAS` whose steps all ran, each with a digest
of its files. An area that has changed since must be named by the file's line ``not measured since COMMIT: AREA, ...``,
one that has no digest by ``never measured: AREA, ...``: tests/unit/benchmarks/test_gpu_results.py compares them.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Area(NamedTuple):
    """Files whose behaviour on a GPU the results depend on, and the steps that measure it."""

    steps: tuple[str, ...]
    files: tuple[str, ...]  # patterns below headway/


AREAS = {
    "models": Area(("kernels",), ("models/*.py", "models/gpu/*.py")),
    "engine": Area(
        ("step", "engine"), ("generator/engines/*.py", "generator/engines/torch/*.py", "generator/service.py")
    ),
    "vllm": Area(("vllm",), ("generator/engines/vllm/*.py",)),
    "trainer": Area(("trainer",), ("trainer/*.py",)),
    "weights": Area(("publish",), ("weights/*.py", "runtime/transport/*.py")),
    "runs": Area(
        ("loop", "tests", "nccl"),
        (
            "config/auto.py",
            "flow/device_locks.py",
            "flow/process.py",
            "kernels/device_queries.py",
            "orchestrator/preflight/memory.py",
            "runtime/devices.py",
            "runtime/nodes/gpus.py",
            "trainer/ranks.py",
        ),
    ),
}
_STALE, _NEVER = "not measured since ", "never measured"
_CODE = re.compile(r"^code at (\w+)\+?: (.+)$", re.MULTILINE)
_LEAST_DIGITS = 8


def area_files(root: Path, area: str) -> list[Path]:
    """The area's files, sorted."""
    return sorted({path for pattern in AREAS[area].files for path in (root / "headway").glob(pattern)})


def area_digests(root: Path) -> dict[str, str]:
    """A digest of names and contents of each area's files."""
    digests = dict[str, str]()
    for area in AREAS:
        hashed = hashlib.blake2b(digest_size=_LEAST_DIGITS // 2)
        for path in area_files(root, area):
            hashed.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
        digests[area] = hashed.hexdigest()
    return digests


def commit_of(root: Path) -> str:
    """The commit of a checkout, with "+" if files differ from it; "" where git doesn't say."""
    try:
        commit, status = (
            subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
            for command in (["rev-parse", "--short=8", "HEAD"], ["status", "--porcelain", "headway", "benchmarks"])
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit + ("+" if status else "")


class Measured(NamedTuple):
    """An area's last measurement."""

    commit: str
    digest: str


def measured_areas(text: str) -> dict[str, Measured]:
    """Each area's last measurement in a results file."""
    return {
        area: Measured(line[1], digest)
        for line in _CODE.finditer(text)
        for area, digest in (part.split() for part in line[2].split(", "))
    }


def stale_areas(text: str) -> set[str]:
    """The areas that the file says aren't measured since their commit."""
    lines = [line.partition(": ")[2] for line in text.splitlines() if line.startswith((_STALE, _NEVER))]
    return {area.strip() for line in lines for area in line.split(",")}


def unstated_changes(text: str, digests: Mapping[str, str]) -> list[str]:
    """The areas that were measured and have changed since, or never were measured, though the file doesn't say so."""
    measured, stated = measured_areas(text), stale_areas(text)
    changed = [area for area in AREAS if area not in measured or measured[area].digest != digests[area]]
    return [area for area in changed if area not in stated]


def with_stale_line(text: str, digests: Mapping[str, str]) -> str:
    """The file's text with the lines that say, of each commit, which areas aren't measured since."""
    kept = "\n".join(line for line in text.splitlines() if not line.startswith((_STALE, _NEVER))).rstrip() + "\n"
    measured = measured_areas(kept)
    by_commit = dict[str, list[str]]()
    for area in unstated_changes(kept, digests):
        since = f"{_STALE}{measured[area].commit}" if area in measured else _NEVER
        by_commit.setdefault(since, []).append(area)
    lines = [f"{since}: {', '.join(areas)}\n" for since, areas in by_commit.items()]
    return kept + ("\n" if lines else "") + "".join(lines)


def collect(folder: Path, results: Path, root: Path) -> str:
    """Append a section with the lines of ``folder/results.jsonl`` to their card's file in ``results``; returns its
    name. Raises ValueError, with nothing written, for lines that aren't measurements of one card and of one state of
    the code."""
    source = folder / "results.jsonl"
    if not source.is_file():
        raise ValueError(f"{source}: no such file; valid: the folder that --out named")
    lines = [
        line for line in map(json.loads, source.read_text(encoding="utf-8").splitlines()) if line["step"] != "summary"
    ]
    if any(line["quick"] or line["card"] == "CPU" for line in lines) or not lines:
        raise ValueError(f"{source}: no measurement of a GPU: run without --quick and --device cpu")
    cards, states = {line["card"] for line in lines}, {json.dumps(line["code"]) for line in lines}
    if len(cards) > 1:
        raise ValueError(f"{source}: numbers of {', '.join(sorted(cards))}; valid: those of one card")
    if len(states) > 1:
        raise ValueError(
            f"{source}: lines of {len(states)} states of the code; valid: one; measure into an empty folder"
        )
    (card,), code = cards, lines[0]["code"]
    name = re.sub(r"[^a-z0-9]+", "-", card.lower().removeprefix("nvidia")).strip("-")
    target = results / f"gpu-{name}.txt"
    text = target.read_text(encoding="utf-8") if target.exists() else f"{card}\n"
    if not text.startswith(card):
        raise ValueError(f"{target}: its first line isn't of {card}")
    commit = lines[0]["commit"] or (commit_of(root) if code == area_digests(root) else "")
    if not commit:
        raise ValueError(
            f"{source}: measured on a copy without git whose files differ from this checkout's: use that one"
        )
    text += "\n" + "\n".join(_section(lines, commit)) + "\n"
    target.write_text(with_stale_line(text, area_digests(root)), encoding="utf-8")
    return str(target)


def _section(lines: Sequence[dict[str, Any]], commit: str) -> Iterator[str]:
    newest = dict[str, dict[str, Any]]()
    for line in lines:  # of a step measured again: the last time it ran
        if line["status"] == "ran" or newest.get(line["step"], line)["status"] != "ran":
            newest[line["step"]] = line
    ran = {step for step, line in newest.items() if line["status"] == "ran"}
    complete = [area for area, (steps, _) in AREAS.items() if ran.issuperset(steps)]
    yield f"{lines[-1]['date']}, commit {commit}, benchmarks/gpu_measure.py"
    if complete:
        yield f"code at {commit}: " + ", ".join(f"{area} {lines[0]['code'][area]}" for area in complete)
    for step, line in newest.items():
        seconds = f" in {line['seconds']} s" if "seconds" in line else ""
        yield f"{step}: {line['status']}{seconds}{': ' + line['why'] if 'why' in line else ''}"
        yield from _table(line.get("measured", {}))
        for part, why in line.get("lacking", {}).items():
            yield f"    {part}: not run: {why}"


def _table(numbers: Mapping[str, Any], indent: str = "    ") -> Iterator[str]:
    """Nested numbers as lines: those of one level in one, then each further level below its name."""
    plain = {key: value for key, value in numbers.items() if not isinstance(value, dict | list)}
    if plain:
        yield indent + ", ".join(f"{key} {value}" for key, value in plain.items())
    for key, value in numbers.items():
        if isinstance(value, list):
            yield from (f"{indent}{key}: {line}" for line in value)
        elif isinstance(value, dict):
            rows = list(_table(value, indent + "    "))
            yield from ([f"{indent}{key}: {rows[0].strip()}"] if len(rows) == 1 else [f"{indent}{key}", *rows])
