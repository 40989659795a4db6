"""Task folders of Harbor: instruction.md, task.toml, environment/, tests/, solution/.

Their images aren't built here. What a Dockerfile does beyond a base, a working directory, variables and copies
of files is refused; the base has to be what ``sandbox.image`` is.
"""

from __future__ import annotations

import json
import math
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from headway.records.errors import ConfigurationError

COLUMN = "harbor"  # of a row, and so in a task's metadata: {"folder": where its files are}
_FILE_BYTES = 64 << 20  # of all files of one task
_WITHOUT_EFFECT = ("CMD", "LABEL", "EXPOSE", "MAINTAINER", "STOPSIGNAL", "SHELL")  # Harbor gives a command of its own
_AT_START = ("ENTRYPOINT", "HEALTHCHECK")  # what Harbor would run, or wait for, before the agent begins


@dataclass(frozen=True, kw_only=True)
class HarborTask:
    """A task folder, as far as it is used here."""

    name: str
    instruction: str
    image: str  # what its files are laid over
    workdir: str
    environment: Mapping[str, str]  # of every command
    files: tuple[tuple[Path, str], ...]  # (here, in the sandbox) before the agent begins
    tests: tuple[tuple[Path, str], ...]  # and when it has ended
    test_environment: Mapping[str, str] = field(default_factory=dict[str, str])
    verifier_s: float = 600.0


def tasks(folder: str, images: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Rows for a task source (``source = "function"``): one for each task folder in ``folder``, or it is one itself.
    ``images``: what the tasks' own are called that ``sandbox.image`` stands for; (): whatever they are. Raises
    ConfigurationError that names the task and what it needs that isn't here."""
    top = Path(folder).resolve()
    places = [top] if (top / "task.toml").is_file() else sorted(one.parent for one in top.glob("*/task.toml"))
    if not places:
        raise ConfigurationError(f"{folder}: no folder in it has a task.toml")
    for place in places:
        task = read_task(place)
        if images and task.image not in images:
            raise ConfigurationError(f"{place}: its image is {task.image!r}, and sandbox.image is: {', '.join(images)}")
        yield {"prompt": task.instruction, COLUMN: {"folder": str(place)}}


def read_task(folder: Path) -> HarborTask:
    """Read a task folder. Raises ConfigurationError."""
    try:
        config: dict[str, Any] = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        instruction = (folder / "instruction.md").read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{folder}: {type(error).__name__}: {error}") from None
    room, verifier = (config.get(name) or {} for name in ("environment", "verifier"))
    _require_plain(folder, config, room, verifier)
    image, workdir, variables, files = _built(folder, room)
    return HarborTask(
        name=(config.get("task") or {}).get("name") or folder.name,
        instruction=instruction,
        image=image,
        workdir=room.get("workdir") or workdir,
        environment={**variables, **_texts(folder, room.get("env"))},
        files=tuple(files),
        tests=tuple(_below(folder / "tests", PurePosixPath("/tests"))),
        test_environment=_texts(folder, verifier.get("env")),
        verifier_s=float(verifier.get("timeout_sec", 600.0)),
    )


def reward_of(json_file: bytes | None, text_file: bytes | None) -> dict[str, Any]:
    """The verdict in the reward files, as a verifier may return it. Where both have a reward it is the lower one: code
    that the tests run may write there too. Raises ValueError where none has."""
    found: list[dict[str, Any]] = []
    wrong: list[Exception] = []
    for read, content in ((_json_reward, json_file), (_text_reward, text_file)):
        if content is None:
            continue
        try:
            found.append(read(content))
        except (ValueError, OverflowError, RecursionError) as error:
            wrong.append(error)
    if found:
        return min(found, key=lambda one: one["reward"])
    raise ValueError(wrong[0] if wrong else "the tests wrote neither /logs/verifier/reward.json nor reward.txt")


def _json_reward(content: bytes) -> dict[str, Any]:
    """The verdict in reward.json: a number, or numbers by name, whose mean is the reward if none is called "reward"."""
    given: Any = json.loads(content)
    numbers = {
        name: _finite(name, value) for name, value in (given if isinstance(given, dict) else {"reward": given}).items()
    }
    if not numbers:
        raise ValueError("reward.json is empty")
    reward = numbers.pop("reward", None)
    mean = sum(value / len(numbers) for value in numbers.values())
    return {"reward": mean if reward is None else reward, "rewards": numbers}


def _text_reward(content: bytes) -> dict[str, Any]:
    return {"reward": _finite("reward", float(content.decode())), "rewards": {}}


def _finite(name: str, value: Any) -> float:
    name.encode()  # or the verdict couldn't be stored
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"the reward {name!r} is {str(value)[:80]}, not a finite number")
    return float(value)


def _require_plain(
    folder: Path, config: Mapping[str, Any], room: Mapping[str, Any], verifier: Mapping[str, Any]
) -> None:
    """Raise ConfigurationError for what this adapter doesn't do."""
    for what, there in (
        ("several steps ([[steps]])", config.get("steps")),
        ("docker-compose", any((folder / "environment").glob("docker-compose.y*ml"))),
        ("GPUs or TPUs", room.get("gpus") or room.get("tpu")),
        ("an operating system other than Linux", room.get("os", "linux") != "linux"),
        ("servers of tools (environment.mcp_servers)", room.get("mcp_servers")),
        ("a health check", room.get("healthcheck")),
        ("a separate environment of the verifier", verifier.get("environment_mode") == "separate"),
    ):
        if there:
            raise ConfigurationError(
                f"{folder}: this task needs {what}, which environment.name = 'harbor' doesn't have"
            )
    if not (folder / "tests" / "test.sh").is_file():
        raise ConfigurationError(f"{folder}: there is no tests/test.sh")


def _texts(folder: Path, table: Any) -> dict[str, str]:
    """Environment variables. Raises ConfigurationError for what would be filled in from this machine's."""
    found = {str(name): str(value) for name, value in (table or {}).items()}
    for name, value in found.items():
        if "${" in value:
            raise ConfigurationError(
                f"{folder}: env.{name} = {value!r}: nothing of this machine's variables goes there"
            )
    return found


def _built(folder: Path, room: Mapping[str, Any]) -> tuple[str, str, dict[str, str], list[tuple[Path, str]]]:
    """(base image, working directory, variables, files) of its Dockerfile, or of the image that task.toml names."""
    context = folder / "environment"
    dockerfile = context / "Dockerfile"
    instructions = list(_instructions(dockerfile)) if dockerfile.is_file() else []
    at_start = {name: (number, rest) for number, name, rest in instructions if name in _AT_START}  # the last ones count
    for name, (number, rest) in at_start.items():
        if rest.replace(" ", "").upper() not in ("[]", '[""]', "NONE"):
            what = f"{name} {rest[:60]}: its image does something at its start, which isn't done here"
            raise ConfigurationError(f"{dockerfile}:{number}: {what}")
    if room.get("docker_image") or not dockerfile.is_file():
        return str(room.get("docker_image") or ""), "/app", {}, []
    image, workdir = "", PurePosixPath("/")
    variables: dict[str, str] = {}
    files: list[tuple[Path, str]] = []
    for number, name, rest in instructions:
        if name == "FROM" and not image and " " not in rest.strip():
            image = rest.strip()
        elif name == "WORKDIR":
            workdir = workdir / rest.strip()
        elif name == "ENV" and (pairs := _pairs(rest)) is not None:
            variables.update(pairs)
        elif name in ("COPY", "ADD") and (copied := _copied(context, workdir, rest)) is not None:
            files += copied
        elif name not in (*_WITHOUT_EFFECT, *_AT_START):
            raise ConfigurationError(
                f"{dockerfile}:{number}: {name} {rest[:60]}: images aren't built here, only FROM, WORKDIR, ENV and "
                "COPY of files; build it elsewhere, name it in task.toml (environment.docker_image), and give its root "
                "file system as sandbox.image"
            )
    return image, str(workdir), variables, files


def _instructions(dockerfile: Path) -> Iterator[tuple[int, str, str]]:
    """(line number, name, rest) of each instruction, continued lines joined."""
    whole, first = "", 0
    for number, line in enumerate(dockerfile.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        first = first if whole else number
        whole += line.rstrip().removesuffix("\\") + " "
        if not line.rstrip().endswith("\\"):
            name, _, rest = whole.strip().partition(" ")
            yield first, name.upper(), rest.strip()
            whole = ""


def _pairs(rest: str) -> dict[str, str] | None:
    try:
        words = shlex.split(rest)
    except ValueError:
        return None
    if "$" in rest:
        return None
    if all("=" in word for word in words):
        return dict(word.split("=", 1) for word in words)
    return {words[0]: " ".join(words[1:])} if len(words) > 1 else None


def _copied(context: Path, workdir: PurePosixPath, rest: str) -> list[tuple[Path, str]] | None:
    """The files of a COPY; None for one that isn't plain."""
    words = rest.split()
    if len(words) < 2 or any(word.startswith(("--", "[", "http")) or "*" in word or "$" in word for word in words):
        return None
    *sources, target = words
    place = workdir / target
    files: list[tuple[Path, str]] = []
    for source in sources:
        here = (context / source).resolve()
        if not here.is_relative_to(context.resolve()) or not here.exists():
            return None
        if here.is_dir():
            files += _below(here, place)
        else:
            inside = target.endswith("/") or target in (".", "./") or len(sources) > 1
            files.append((here, str(place / here.name if inside else place)))
    return files


def _below(folder: Path, target: PurePosixPath) -> Iterator[tuple[Path, str]]:
    """Every file in it, and where it goes. Raises ConfigurationError for too much, and for links."""
    total = 0
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if path.is_symlink():
            raise ConfigurationError(f"{path}: links aren't copied")
        if path.is_file():
            total += path.stat().st_size
            if total > _FILE_BYTES:
                raise ConfigurationError(f"{folder}: more than {_FILE_BYTES >> 20} MiB of files")
            yield path, str(target / path.relative_to(folder).as_posix())
