"""The release workflow: its steps are the commands there are, and a tag that isn't the version ends it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.cli.projects import PROJECTS

ROOT = Path(__file__).parents[3]
STEPS: list[dict[str, Any]] = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))[
    "jobs"
]["build"]["steps"]


def step(name: str) -> str:
    return next(step["run"] for step in STEPS if step.get("name") == name)


@pytest.mark.parametrize(
    ("tag", "section", "code"), [("v1.2.0", "1.2.0", 0), ("v1.3.0", "1.2.0", 1), ("v1.2.0", "", 1)]
)
def test_tag_is_the_version_and_the_changelog_has_it(tag: str, section: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"## Unreleased\n\n## {section} (2026-01-01)\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    environment = {**os.environ, "GITHUB_REF_NAME": tag, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    ended = subprocess.run(["bash", "-e", "-c", step("The tag is the version")], cwd=tmp_path, env=environment)
    assert ended.returncode == code


def test_wheel_is_tried_with_every_template() -> None:
    tried = step("The wheel works without the repository")
    assert f"for template in {' '.join(PROJECTS)}; do" in tried
    assert "headway quickstart" in tried
    assert [s["run"] for s in STEPS if "run" in s and "name" not in s] == [
        "python -m pip install -c constraints.txt build twine",
        "python -m build",
        "python -m twine check --strict dist/*",
    ]
