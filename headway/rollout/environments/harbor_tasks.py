"""Reader of Harbor's task folders: instruction.md, task.toml, environment/, tests/, solution/.

Their images aren't built here. Dockerfile instructions other than a base, a working directory, variables and copies of
files are refused; the base has to be the image that ``sandbox.image`` stands for.
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

COLUMN = "harbor"  # of a row, and so in a task's metadata: {"folder": the task folder's path}
_FILE_BYTES = 64 << 20  # of all files of one task
_WITHOUT_EFFECT = ("CMD", "LABEL", "EXPOSE", "MAINTAINER", "STOPSIGNAL", "SHELL")  # Harbor overrides the command
_AT_START = ("ENTRYPOINT", "HEALTHCHECK")  # Harbor would run these, or wait for them, before the agent begins


@dataclass(frozen=True, kw_only=True)
class HarborTask:
    """A task folder, as far as it is used here."""

    name: str
    instruction: str
    image: str  # the base image
    workdir: str
    environment: Mapping[str, str]  # variables of every command
    files: tuple[tuple[Path, str], ...]  # (path here, path in the sandbox), copied before the agent begins
    tests: tuple[tuple[Path, str], ...]  # likewise, copied after its end
    test_environment: Mapping[str, str] = field(default_factory=dict[str, str])
    verifier_s: float = 600.0


def tasks(folder: str, images: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield rows for a task source (``source = "function"``): one for each task folder in ``folder``, or a single one
    where ``folder`` is a task folder. ``images``: names of task images that ``sandbox.image`` stands for; (): any.
    Raises ConfigurationError that names the task and the feature that isn't supported."""
    root = Path(folder).resolve()
    folders = [root] if (root / "task.toml").is_file() else sorted(path.parent for path in root.glob("*/task.toml"))
    if not folders:
        raise ConfigurationError(f"{folder}: no folder in it has a task.toml")
    for path in folders:
        task = read_task(path)
        if images and task.image not in images:
            raise ConfigurationError(f"{path}: its image is {task.image!r}, and sandbox.image is: {', '.join(images)}")
        yield {"prompt": task.instruction, COLUMN: {"folder": str(path)}}


def read_task(folder: Path) -> HarborTask:
    """Read a task folder. Raises ConfigurationError."""
    try:
        config: dict[str, Any] = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        instruction = (folder / "instruction.md").read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{folder}: {type(error).__name__}: {error}") from None
    environment_table, verifier_table = (config.get(name) or {} for name in ("environment", "verifier"))
    _require_plain(folder, config, environment_table, verifier_table)
    image, workdir, variables, files = _image_of(folder, environment_table)
    return HarborTask(
        name=(config.get("task") or {}).get("name") or folder.name,
        instruction=instruction,
        image=image,
        workdir=environment_table.get("workdir") or workdir,
        environment={**variables, **_variables(folder, environment_table.get("env"))},
        files=tuple(files),
        tests=tuple(_files_below(folder / "tests", PurePosixPath("/tests"))),
        test_environment=_variables(folder, verifier_table.get("env")),
        verifier_s=float(verifier_table.get("timeout_sec", 600.0)),
    )


def reward_of(json_file: bytes | None, text_file: bytes | None) -> dict[str, Any]:
    """Return the verdict in the reward files, in a form that a verifier may return. Of two rewards the lower one
    counts: code that the tests run may write there too. Raises ValueError where neither file has one."""
    verdicts: list[dict[str, Any]] = []
    errors: list[Exception] = []
    for parse, content in ((_json_reward, json_file), (_text_reward, text_file)):
        if content is None:
            continue
        try:
            verdicts.append(parse(content))
        except (ValueError, OverflowError, RecursionError) as error:
            errors.append(error)
    if verdicts:
        return min(verdicts, key=lambda verdict: verdict["reward"])
    raise ValueError(errors[0] if errors else "the tests wrote neither /logs/verifier/reward.json nor reward.txt")


def _json_reward(content: bytes) -> dict[str, Any]:
    """Return the verdict in reward.json: a number, or numbers by name; without a "reward" their mean is the reward."""
    parsed: Any = json.loads(content)
    number_by_name = {
        name: _finite(name, value)
        for name, value in (parsed if isinstance(parsed, dict) else {"reward": parsed}).items()
    }
    if not number_by_name:
        raise ValueError("reward.json is empty")
    reward = number_by_name.pop("reward", None)
    mean = sum(value / len(number_by_name) for value in number_by_name.values())
    return {"reward": mean if reward is None else reward, "rewards": number_by_name}


def _text_reward(content: bytes) -> dict[str, Any]:
    return {"reward": _finite("reward", float(content.decode())), "rewards": {}}


def _finite(name: str, value: Any) -> float:
    name.encode()  # fails here, for such a verdict couldn't be stored
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"the reward {name!r} is {str(value)[:80]}, not a finite number")
    return float(value)


def _require_plain(
    folder: Path, config: Mapping[str, Any], container: Mapping[str, Any], verifier: Mapping[str, Any]
) -> None:
    """Raise ConfigurationError for features that this adapter doesn't support."""
    for feature, is_used in (
        ("several steps ([[steps]])", config.get("steps")),
        ("docker-compose", any((folder / "environment").glob("docker-compose.y*ml"))),
        ("GPUs or TPUs", container.get("gpus") or container.get("tpu")),
        ("an operating system other than Linux", container.get("os", "linux") != "linux"),
        ("servers of tools (environment.mcp_servers)", container.get("mcp_servers")),
        ("a health check", container.get("healthcheck")),
        ("a separate environment of the verifier", verifier.get("environment_mode") == "separate"),
    ):
        if is_used:
            raise ConfigurationError(
                f"{folder}: this task needs {feature}, which environment.name = 'harbor' doesn't have"
            )
    if not (folder / "tests" / "test.sh").is_file():
        raise ConfigurationError(f"{folder}: there is no tests/test.sh")


def _variables(folder: Path, table: Any) -> dict[str, str]:
    """Return environment variables as texts. Raises ConfigurationError for references to this machine's variables."""
    variables = {str(name): str(value) for name, value in (table or {}).items()}
    for name, value in variables.items():
        if "${" in value:
            raise ConfigurationError(
                f"{folder}: env.{name} = {value!r}: nothing of this machine's variables goes there"
            )
    return variables


def _image_of(folder: Path, container: Mapping[str, Any]) -> tuple[str, str, dict[str, str], list[tuple[Path, str]]]:
    """Return (base image, working directory, variables, files) of the Dockerfile, or of the image that task.toml
    names."""
    context = folder / "environment"
    dockerfile = context / "Dockerfile"
    instructions = list(_instructions(dockerfile)) if dockerfile.is_file() else []
    startup = {name: (number, rest) for number, name, rest in instructions if name in _AT_START}  # the last ones count
    for name, (number, rest) in startup.items():
        if rest.replace(" ", "").upper() not in ("[]", '[""]', "NONE"):
            reason = f"{name} {rest[:60]}: its image has a start-up command, which isn't run here"
            raise ConfigurationError(f"{dockerfile}:{number}: {reason}")
    if container.get("docker_image") or not dockerfile.is_file():
        return str(container.get("docker_image") or ""), "/app", {}, []
    image, workdir = "", PurePosixPath("/")
    variables: dict[str, str] = {}
    files: list[tuple[Path, str]] = []
    for number, name, rest in instructions:
        if name == "FROM" and not image and " " not in rest.strip():
            image = rest.strip()
        elif name == "WORKDIR":
            workdir = workdir / rest.strip()
        elif name == "ENV" and (new_variables := _pairs(rest)) is not None:
            variables.update(new_variables)
        elif name in ("COPY", "ADD") and (copied_paths := _copied_files(context, workdir, rest)) is not None:
            files += copied_paths
        elif name not in (*_WITHOUT_EFFECT, *_AT_START):
            raise ConfigurationError(
                f"{dockerfile}:{number}: {name} {rest[:60]}: images aren't built here, only FROM, WORKDIR, ENV and "
                "COPY of files; build it elsewhere, name it in task.toml (environment.docker_image), and give its root "
                "file system as sandbox.image"
            )
    return image, str(workdir), variables, files


def _instructions(dockerfile: Path) -> Iterator[tuple[int, str, str]]:
    """Yield (line number, name, rest) of each instruction, with continued lines joined."""
    instruction, first_line = "", 0
    for line_number, line in enumerate(dockerfile.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        first_line = first_line if instruction else line_number
        instruction += line.rstrip().removesuffix("\\") + " "
        if not line.rstrip().endswith("\\"):
            name, _, arguments_text = instruction.strip().partition(" ")
            yield first_line, name.upper(), arguments_text.strip()
            instruction = ""


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


def _copied_files(context: Path, workdir: PurePosixPath, rest: str) -> list[tuple[Path, str]] | None:
    """Return the files of a COPY instruction; None for one with options or patterns."""
    words = rest.split()
    if len(words) < 2 or any(word.startswith(("--", "[", "http")) or "*" in word or "$" in word for word in words):
        return None
    *sources, target = words
    destination = workdir / target
    files: list[tuple[Path, str]] = []
    for source in sources:
        path = (context / source).resolve()
        if not path.is_relative_to(context.resolve()) or not path.exists():
            return None
        if path.is_dir():
            files += _files_below(path, destination)
        else:
            is_inside = target.endswith("/") or target in (".", "./") or len(sources) > 1
            files.append((path, str(destination / path.name if is_inside else destination)))
    return files


def _files_below(folder: Path, target: PurePosixPath) -> Iterator[tuple[Path, str]]:
    """Yield the path of every file below ``folder``, and its path below ``target``. Raises ConfigurationError for links
    and above the size limit."""
    total_bytes = 0
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if path.is_symlink():
            raise ConfigurationError(f"{path}: links aren't copied")
        if path.is_file():
            total_bytes += path.stat().st_size
            if total_bytes > _FILE_BYTES:
                raise ConfigurationError(f"{folder}: more than {_FILE_BYTES >> 20} MiB of files")
            yield path, str(target / path.relative_to(folder).as_posix())
