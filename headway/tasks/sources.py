"""Reading tasks: JSONL files and reasoning-gym generators, and keeping named sets apart."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from headway.config.schema import TaskSource
from headway.records.errors import ConfigurationError
from headway.records.task import Task
from headway.tasks.cursor import permutation
from headway.tasks.entries import pack_entry


class TaskSet(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks of one source."""

    name: str  # what errors call it: a file's path, or "reasoning-gym:<generator>"
    tasks: tuple[Task, ...]  # at least one; no two with equal task_id
    duplicates: int = 0  # tasks dropped because an earlier one had the same content
    limited: int = 0  # tasks left out by the source's ``limit``


def load_tasks(source: TaskSource, seed: int = 0) -> list[Task]:
    """The tasks of ``source``: ``read_tasks`` without the counts."""
    return list(read_tasks(source, seed).tasks)


def read_tasks(source: TaskSource, seed: int = 0) -> TaskSet:
    """Read or generate the tasks of ``source``, in a fixed order.

    ``seed`` (the run's) decides only which tasks a ``limit`` keeps. Raises ConfigurationError: a missing,
    empty or malformed file (with file and line), an unknown generator (with the nearest names), bad parameters.
    """
    if source.source == "jsonl":
        name, read = source.path, _read_jsonl(Path(source.path))
    else:
        name, read = f"reasoning-gym:{source.name}", _generate(source)
    unique: dict[str, Task] = {}
    count = 0
    for task in read:
        count += 1
        unique.setdefault(task.task_id, task)
    if not unique:
        raise ConfigurationError(f"{name} holds no tasks")
    tasks = tuple(unique.values())
    kept = tasks
    if source.limit is not None and source.limit < len(tasks):
        kept = tuple(tasks[i] for i in permutation(len(tasks), seed, 0)[: source.limit])
    return TaskSet(name=name, tasks=kept, duplicates=count - len(tasks), limited=len(tasks) - len(kept))


def task_id(prompt: str, answer: str, metadata: Mapping[str, Any] | None = None) -> str:
    """Content hash of prompt, answer and whatever else the verifier is given, 16 hex digits."""
    # the lengths keep ("ab", "c") and ("a", "bc") apart
    text = f"{len(prompt)}:{prompt}{answer}"
    if metadata:
        text = f"{len(text)}:{text}{json.dumps(metadata, sort_keys=True)}"
    return _digest(text).hex()


def prompt_hash(prompt: str) -> bytes:
    """Content hash of a prompt alone, 8 bytes: what train and held-out sets are compared by."""
    return _digest(prompt)


def _digest(text: str) -> bytes:
    # a lone surrogate (legal in JSON) has no UTF-8 form of its own
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


# --- JSONL -----------------------------------------------------------------------------------------------


def _read_jsonl(path: Path) -> Iterator[Task]:
    for where, raw in read_objects(path):
        yield _task_of(raw, where, str(path))


def read_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSONL file, each with ``file:line`` for errors; blank lines are skipped.

    Raises ConfigurationError: no such file, a folder, a line that is not one JSON object.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if text.strip():
                    yield f"{path}:{number}", _parse_object(text, f"{path}:{number}")
    except FileNotFoundError:
        raise ConfigurationError(f"no such task file: {path}") from None
    except OSError as error:
        raise ConfigurationError(f"task file {path} can't be read: {error.strerror}") from None


def _parse_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        raw = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigurationError(f"{where}: expected a JSON object, got {type(raw).__name__}")
    return raw


def _task_of(raw: dict[str, Any], where: str, source: str) -> Task:
    prompt = require_text(raw, "prompt", where)
    answer = raw.get("answer", "")
    if not isinstance(answer, str):
        raise ConfigurationError(f'{where}: "answer" = {answer!r}: must be a string, so write it in quotes')
    metadata = raw.get("metadata", {})
    if not isinstance(metadata, dict):
        raise ConfigurationError(f'{where}: "metadata" must be an object, got {type(metadata).__name__}')
    rest = {key: value for key, value in raw.items() if key not in ("prompt", "answer", "metadata")}
    everything = {**rest, **metadata}
    name = task_id(prompt, answer, everything)
    return Task(task_id=name, prompt=prompt, answer=answer, metadata=everything, source=source)


def require_text(raw: Mapping[str, Any], key: str, where: str) -> str:
    """The non-empty string ``raw[key]``; ConfigurationError naming ``where`` otherwise."""
    if key not in raw:
        near = difflib.get_close_matches(key, list(raw), n=1, cutoff=0.6)
        hint = f"; did you mean {near[0]!r}?" if near else f"; it has: {', '.join(sorted(raw)) or 'nothing'}"
        raise ConfigurationError(f'{where}: missing "{key}"{hint}')
    value = raw[key]
    if not isinstance(value, str):
        raise ConfigurationError(f'{where}: "{key}" = {value!r}: must be a string')
    if not value:
        raise ConfigurationError(f'{where}: "{key}" is empty')
    return value


# --- reasoning-gym ---------------------------------------------------------------------------------------


def _generate(source: TaskSource) -> Iterator[Task]:
    dataset = build_generator(source.name, {**source.parameters, "seed": source.seed, "size": source.size})
    name = f"reasoning-gym:{source.name}"
    for i in range(source.size):
        try:
            entry = dataset[i]
            packed = pack_entry({key: entry[key] for key in ("question", "answer", "metadata")})
        except Exception as error:  # the boundary to somebody else's generator: all of it is bad input here
            raise ConfigurationError(f"{name} failed at entry {i}: {type(error).__name__}: {error}") from error
        prompt = str(entry["question"])
        answer = "" if entry["answer"] is None else str(entry["answer"])
        yield Task(
            task_id=task_id(prompt, answer),  # an entry's metadata may count the entries, so that none is a repeat
            prompt=prompt,
            answer=answer,
            metadata={"generator": source.name, "parameters": source.parameters, "entry": packed},
            source=name,
        )


def build_generator(name: str, parameters: Mapping[str, Any]) -> Any:
    """The reasoning-gym data set ``name``. Raises ConfigurationError for an unknown name or bad parameters."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset  # a second of imports: only when used
    except ImportError as error:
        raise ConfigurationError(f"reasoning-gym can't be imported: {error}") from None
    if name not in DATASETS:
        near = difflib.get_close_matches(name, list(DATASETS), n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "valid: " + ", ".join(sorted(DATASETS))
        raise ConfigurationError(f"unknown reasoning-gym generator {name!r}; {hint}")
    valid = sorted(field.name for field in dataclasses.fields(DATASETS[name][1]))
    for key in parameters:
        if key not in valid:
            _refuse_parameter(name, key, [v for v in valid if v not in ("seed", "size")])
    try:
        return create_dataset(name, **parameters)
    except Exception as error:  # its validation raises whatever its author chose (mostly AssertionError)
        detail = str(error) or type(error).__name__
        raise ConfigurationError(f"reasoning-gym {name} refuses parameters {dict(parameters)}: {detail}") from error


def _refuse_parameter(name: str, key: str, valid: Sequence[str]) -> NoReturn:
    near = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else "valid: " + ", ".join(valid)
    raise ConfigurationError(f"reasoning-gym {name} has no parameter {key!r}; {hint}")


# --- keeping sets apart ----------------------------------------------------------------------------------


class Overlap(msgspec.Struct, frozen=True, kw_only=True):
    """Two named sets that share prompts."""

    first: str
    second: str
    prompts: int  # how many distinct prompts are in both
    example: str  # one of them


def overlap(named_sets: Mapping[str, Iterable[Task]]) -> list[Overlap]:
    """Every pair of sets that share a prompt, in the order of the mapping."""
    hashed = [(name, {prompt_hash(t.prompt): t.prompt for t in tasks}) for name, tasks in named_sets.items()]
    found: list[Overlap] = []
    for i, (first, prompts) in enumerate(hashed):
        for second, others in hashed[i + 1 :]:
            shared = [key for key in others if key in prompts]
            if shared:
                found.append(Overlap(first=first, second=second, prompts=len(shared), example=prompts[shared[0]]))
    return found


def require_disjoint(named_sets: Mapping[str, Iterable[Task]]) -> None:
    """Raise ConfigurationError naming two sets that share prompts, how many, and one of them."""
    for pair in overlap(named_sets):
        example = pair.example if len(pair.example) <= 80 else pair.example[:77] + "..."
        raise ConfigurationError(
            f"{pair.first} and {pair.second} share {pair.prompts} prompt{'s' if pair.prompts > 1 else ''}, "
            f"for example {example!r}: a score on tasks that were trained on means nothing; "
            "use other seeds or files, or remove them"
        )


def without_prompts_of(tasks: Iterable[Task], held_out: Iterable[Task]) -> list[Task]:
    """``tasks`` less those whose prompt is in ``held_out``: makes generated sets disjoint."""
    taken = {prompt_hash(task.prompt) for task in held_out}
    return [task for task in tasks if prompt_hash(task.prompt) not in taken]
