"""Harbor's tasks whose images do something at their start, which no sandbox here does: refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.records.errors import ConfigurationError
from headway.rollout.environments.harbor_tasks import read_task, tasks


def folder(place: Path, *lines: str, config: str = "") -> Path:
    for name, text in {
        "task.toml": "[verifier]\ntimeout_sec = 20.0\n" + config,
        "instruction.md": "Write add.py.\n",
        "environment/Dockerfile": "\n".join(("FROM base", "WORKDIR /app", *lines, "")),
        "tests/test.sh": "",
    }.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    return place


STARTS = {
    "a program": ('ENTRYPOINT ["/start.sh"]', "ENTRYPOINT"),
    "a shell's": ("ENTRYPOINT service postgresql start && exec bash", "ENTRYPOINT"),
    "in small letters": ('entrypoint ["/start.sh"]', "ENTRYPOINT"),
    "over two lines": ('ENTRYPOINT ["/start.sh", \\\n  "--now"]', "ENTRYPOINT"),
    "with its arguments": ('ENTRYPOINT ["/start.sh"]\nCMD ["bash"]', "ENTRYPOINT"),
    "health": ("HEALTHCHECK CMD curl -f http://localhost/", "HEALTHCHECK"),
    "health with options": ("HEALTHCHECK --interval=5s --timeout=3s CMD pg_isready", "HEALTHCHECK"),
    "health over two lines": ("HEALTHCHECK --interval=5s \\\n  CMD true", "HEALTHCHECK"),
    "health in small letters": ("healthcheck CMD true", "HEALTHCHECK"),
}


@pytest.mark.parametrize(("lines", "named"), STARTS.values(), ids=STARTS)
def test_an_image_that_does_something_at_its_start_is_refused(lines: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"(?i)Dockerfile.*{named}"):
        read_task(folder(tmp_path, lines))


@pytest.mark.parametrize("lines", ['ENTRYPOINT ["/start.sh"]', "HEALTHCHECK CMD true"])
def test_a_source_of_such_tasks_names_the_task(lines: str, tmp_path: Path) -> None:
    folder(tmp_path / "plain")
    folder(tmp_path / "starting", lines)
    with pytest.raises(ConfigurationError, match="starting"):
        list(tasks(str(tmp_path)))


@pytest.mark.parametrize(
    "lines", ["CMD bash", 'CMD ["bash"]', "LABEL a=b", "EXPOSE 80", "STOPSIGNAL SIGTERM", "# ENTRYPOINT x"]
)
def test_what_has_no_effect_is_accepted(lines: str, tmp_path: Path) -> None:
    assert read_task(folder(tmp_path, lines)).image == "base"
