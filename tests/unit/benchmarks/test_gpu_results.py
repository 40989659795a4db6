"""Results of GPUs: collected by card, and compared with the code as it is now."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parts import gpu_results
from benchmarks.parts.gpu_results import AREAS, area_digests, area_files, collect, unstated_changes, with_stale_line

ROOT = Path(__file__).resolve().parents[3]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("gpu-*.txt"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_results_file_says_which_code_of_gpus_has_changed_since(path: Path) -> None:
    text, digests = path.read_text(encoding="utf-8"), area_digests(ROOT)
    changed = unstated_changes(text, digests)
    lines = [line for line in with_stale_line(text, digests).splitlines() if line.startswith(("not measured", "never"))]
    assert not changed, f"{path} must end with {lines}; changed: {[(area, AREAS[area].files) for area in changed]}"


def test_every_area_has_files_and_known_steps() -> None:
    from benchmarks.gpu_measure import STEPS

    patterns = [pattern for area in AREAS.values() for pattern in area.files]
    assert [pattern for pattern in patterns if not any((ROOT / "headway").glob(pattern))] == []
    assert {step for area in AREAS.values() for step in area.steps} == STEPS.keys() - {"facts"}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Files of every area, without git."""
    for area in AREAS:
        for path in area_files(ROOT, area):
            target = tmp_path / "checkout" / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    return tmp_path / "checkout"


def measured(folder: Path, root: Path, *lines: dict[str, Any], **fields: Any) -> Path:
    common = {"card": "NVIDIA H100 80GB HBM3", "commit": "0123abcd", "date": "2027-01-05", "quick": False}
    common |= {"code": area_digests(root)} | fields
    folder.mkdir(exist_ok=True)
    (folder / "results.jsonl").write_text("".join(json.dumps(common | line) + "\n" for line in lines))
    return folder


def ran(*steps: str, **numbers: Any) -> list[dict[str, Any]]:
    return [{"step": step, "status": "ran", "seconds": 3.0, "measured": numbers} for step in steps]


def test_results_are_appended_to_their_cards_file(tmp_path: Path, checkout: Path) -> None:
    failed = {"step": "engine", "status": "failed", "why": "killed"}
    again = ran("engine", **{"0.6B": {"1": {"share": 0.5}, "top": ["gemm: 3 calls"]}})
    lines = [
        *ran("facts", "step", "kernels"),
        failed,
        *again,
        failed,
        {"step": "vllm", "status": "not run", "why": "absent"},
    ]
    path = Path(collect(measured(tmp_path / "out", checkout, *lines), tmp_path, checkout))
    text = path.read_text()
    assert path.name == "gpu-h100-80gb-hbm3.txt"
    assert text.startswith("NVIDIA H100 80GB HBM3\n\n2027-01-05, commit 0123abcd")
    assert "engine: ran in 3.0 s\n    0.6B\n        1: share 0.5\n        top: gemm: 3 calls\n" in text
    assert "vllm: not run: absent" in text
    assert gpu_results.measured_areas(text).keys() == {"models", "engine"}
    assert gpu_results.stale_areas(text) == {"vllm", "trainer", "weights", "runs"}
    collect(measured(tmp_path / "out", checkout, *ran("trainer"), commit="4567abcd"), tmp_path, checkout)
    text = path.read_text()
    assert gpu_results.measured_areas(text)["trainer"].commit == "4567abcd"
    assert gpu_results.stale_areas(text) == {"vllm", "weights", "runs"}
    assert not unstated_changes(text, area_digests(checkout))


def test_a_changed_file_is_named_until_the_line_names_its_area(tmp_path: Path, checkout: Path) -> None:
    path = Path(collect(measured(tmp_path / "out", checkout, *ran("step", "engine", "trainer")), tmp_path, checkout))
    (checkout / "headway" / "generator" / "engines" / "torch" / "engine.py").write_text("faster = True\n")
    digests = area_digests(checkout)
    assert unstated_changes(path.read_text(), digests) == ["engine"]
    text = with_stale_line(path.read_text(), digests)
    assert "not measured since 0123abcd: engine\n" in text
    assert not unstated_changes(text, digests)


def test_results_that_do_not_belong_together_are_refused(tmp_path: Path, checkout: Path) -> None:
    def refused(*lines: dict[str, Any], **fields: Any) -> str:
        with pytest.raises(ValueError, match=r"results\.jsonl|gpu-") as raised:
            collect(measured(tmp_path / "out", checkout, *lines, **fields), tmp_path, checkout)
        assert not list(tmp_path.glob("gpu-*.txt")) or "first line" in str(raised.value)
        return str(raised.value)

    first, second = ran("facts", "engine")
    assert "NVIDIA A100, NVIDIA H100" in refused(first, second | {"card": "NVIDIA A100"})
    assert "2 states of the code" in refused(first, second | {"code": {}})
    assert "no measurement of a GPU" in refused(first, quick=True)
    assert "no measurement of a GPU" in refused(first, card="CPU")
    assert "without git" in refused(first, commit="", code={"engine": "00000000"})
    (tmp_path / "gpu-h100-80gb-hbm3.txt").write_text("NVIDIA L4\n")
    assert "first line isn't of NVIDIA H100" in refused(first)
