"""Reading tasks from files, data sets and reasoning-gym generators; checking that named sets share no prompt."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec

from headway.config.sources import TaskColumns, TaskSource
from headway.records.errors import ConfigurationError
from headway.records.task import Task
from headway.runtime.imports import import_extra
from headway.tasks.cursor import permutation
from headway.tasks.entry_encoding import pack_entry
from headway.tasks.source_rows import Rows, number_text, require_column, require_messages, require_text, short
from headway.tokens.pictures import content_text, picture_part, template_messages


class TaskSet(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks of one source, or of several."""

    name: str  # the sources' labels, for errors
    tasks: tuple[Task, ...]  # at least one; no two with equal task_id
    duplicates: int = 0  # tasks dropped because an earlier one had the same content
    left_out: int = 0  # rows for which ``convert`` returned None


def load_tasks(sources: TaskSource | Sequence[TaskSource], seed: int = 0) -> list[Task]:
    """Read the tasks of all ``sources``, in order: ``read_tasks`` without the counts."""
    return list(read_tasks(sources, seed).tasks)


def read_tasks(sources: TaskSource | Sequence[TaskSource], seed: int = 0) -> TaskSet:
    """Read or generate the tasks of ``sources``, in a fixed order; of equal tasks the first is kept.

    ``seed`` (the run's) decides only which tasks a ``limit`` keeps. Raises ConfigurationError: a missing, empty or
    malformed file (with file and line) or data set (with its row), a missing column (with the existing ones), an
    unknown generator (with the nearest names), bad parameters, a source without a task of its own.
    """
    task_by_id: dict[str, Task] = {}
    task_sets = [_read(source, seed) for source in ([sources] if isinstance(sources, TaskSource) else sources)]
    for task_set in task_sets:
        previous_count = len(task_by_id)
        for task in task_set.tasks:
            task_by_id.setdefault(task.task_id, task)
        if len(task_by_id) == previous_count:
            raise ConfigurationError(f"{task_set.name} has only tasks that are in earlier sources")
    tasks = tuple(task_by_id.values())
    return TaskSet(
        name=", ".join(task_set.name for task_set in task_sets),
        tasks=tasks,
        duplicates=sum(len(task_set.tasks) + task_set.duplicates for task_set in task_sets) - len(tasks),
        left_out=sum(task_set.left_out for task_set in task_sets),
    )


def _read(source: TaskSource, seed: int) -> TaskSet:
    """Read the distinct tasks of one source."""
    rows = Rows(source)
    candidates = (_task_from(raw, location, source) for location, raw in rows)
    if source.source == "reasoning-gym":
        candidates = _generate(source)
    task_by_id: dict[str, Task] = {}
    count = 0
    for task in candidates:
        count += 1
        task_by_id.setdefault(task.task_id, task)
    if not task_by_id:
        reason = f": {source.convert} left out all {rows.left_out:,} rows" if rows.left_out else ""
        raise ConfigurationError(f"{source.display_name} holds no tasks{reason}")
    tasks = tuple(task_by_id.values())
    kept_tasks = tasks
    if source.limit is not None and source.limit < len(tasks):
        kept_tasks = tuple(tasks[i] for i in permutation(len(tasks), seed, 0)[: source.limit])
    return TaskSet(name=source.display_name, tasks=kept_tasks, duplicates=count - len(tasks), left_out=rows.left_out)


def row_name_of(sources: Sequence[TaskSource], task: Task) -> str:
    """Find the name of the row that ``task`` is read from, by reading its source again; "" where it has none."""
    for source in sources:
        if source.display_name == task.source and source.source != "reasoning-gym":
            with contextlib.suppress(ConfigurationError):  # the source changed meanwhile
                for location, raw in Rows(source):
                    if _task_from(raw, location, source).task_id == task.task_id:
                        return location
    return ""


def task_id(prompt: str, answer: str, metadata: Mapping[str, Any] | None = None) -> str:
    """Hash a task's content (prompt, answer and the verifier's metadata) to 16 hex digits."""
    # the lengths distinguish ("ab", "c") from ("a", "bc")
    text = f"{len(prompt)}:{prompt}{answer}"
    if metadata:
        text = f"{len(text)}:{text}{json.dumps(metadata, sort_keys=True)}"
    # a lone surrogate (legal in JSON) has no UTF-8 form of its own
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


# --- rows ------------------------------------------------------------------------------------------------


def _task_from(raw: dict[str, Any], location: str, source: TaskSource) -> Task:
    columns = source.columns
    prompt, messages = _prompt_from(raw, columns, location, Path(source.path).parent)
    answer = _answer_from(raw, columns.answer, location, exact=source.source == "jsonl")
    verifier = _verifier_key(raw.get("verifier"), location)
    metadata = _metadata_from(raw, columns, location)
    is_text_only = all(isinstance(message["content"], str) for message in messages)
    other_content = {"messages": messages if is_text_only else template_messages(messages), "verifier": verifier}
    return Task(
        task_id=task_id(prompt, answer, metadata | {key: value for key, value in other_content.items() if value}),
        prompt=prompt,
        messages=messages,
        answer=answer,
        metadata=metadata,
        source=source.display_name,
        verifier=verifier or source.verifier,
    )


def _prompt_from(
    raw: dict[str, Any], columns: TaskColumns, location: str, folder: Path
) -> tuple[str, tuple[dict[str, Any], ...]]:
    """Read the prompt's text, and its messages where it is a conversation or has pictures (paths from ``folder``)."""
    column, images_column = columns.prompt, _column_name(columns.images, "images")
    images = (require_column(raw, images_column, location) if columns.images else raw.get(images_column)) or ()
    if not isinstance(raw.get(column), list):
        text = require_text(raw, column, location)
        if not images:
            return text, ()
        urls = [images] if isinstance(images, str) else images
        if not isinstance(urls, list):
            reason = 'must be a list of paths or data: URLs; columns.images = "" takes none'
            raise ConfigurationError(f'{location}: "{images_column}" = {short(images)}: {reason}')
        parts = [picture_part(url, f'{location}: "{images_column}"', folder) for url in urls]
        return text, ({"role": "user", "content": [*parts, {"type": "text", "text": text}]},)
    if images:
        reason = 'write pictures as their parts, image_url; columns.images = "" takes none'
        raise ConfigurationError(f'{location}: "{images_column}" beside messages: {reason}')
    messages = require_messages(raw[column], column, location, folder)
    if messages[-1]["role"] == "assistant":
        raise ConfigurationError(
            f'{location}: "{column}" ends with the assistant\'s message, but the next one is to be sampled'
        )
    texts = [content_text(message["content"]) for message in messages if message["role"] == "user"]
    if not any(texts):
        raise ConfigurationError(f'{location}: "{column}" holds no message of a user')
    return "\n\n".join(texts), messages  # a single message's text isn't copied


def _column_name(column: str | None, default: str) -> str:
    """Return an optional column's name; "" reads none, so that a column of the default's name is one of the rest."""
    return default if column is None else column


def _answer_from(raw: dict[str, Any], column: str | None, location: str, exact: bool) -> str:
    """Read the answer's text. ``exact``: numbers are refused, since the file's author can write "0.50" in quotes."""
    if column == "" or (column is None and "answer" not in raw):
        return ""
    name = column or "answer"
    answer = require_column(raw, name, location)
    if isinstance(answer, str):
        return answer
    is_number = isinstance(answer, (int, float, Decimal)) and not isinstance(answer, bool) and math.isfinite(answer)
    if not exact and is_number:
        return number_text(answer)
    if exact:
        raise ConfigurationError(f'{location}: "{name}" = {short(answer)}: must be a string, so write it in quotes')
    raise ConfigurationError(
        f'{location}: "{name}" = {short(answer)}: must be a text or a number; columns.answer = "" takes none, and '
        "'convert' can make one or leave the row out"
    )


def _metadata_from(raw: dict[str, Any], columns: TaskColumns, location: str) -> dict[str, Any]:
    """Collect the verifier's metadata besides prompt and answer, in JSON types."""
    metadata = raw.get("metadata")
    if metadata is None:  # data sets use null for a missing struct
        metadata = {}
    if not isinstance(metadata, dict):
        raise ConfigurationError(f'{location}: "metadata" must be an object, got {type(metadata).__name__}')
    other_columns = _column_name(columns.answer, "answer"), _column_name(columns.images, "images")
    taken_columns = (columns.prompt, *other_columns, "metadata", "verifier")
    merged = {**{key: value for key, value in raw.items() if key not in taken_columns}, **metadata}
    for name, value in merged.items():
        if not _is_json(value):
            raise ConfigurationError(
                f'{location}: "{name}" holds a {type(value).__name__}, which has no JSON form; leave it '
                "out with a function of your own: convert = 'module:function'"
            )
    return merged


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, (str, int, float))


def _verifier_key(value: Any, location: str) -> str:
    """Check the "verifier" of a row, a name, and return it as ``Task.verifier``."""
    if value is None or isinstance(value, str):
        return sys.intern(value or "")
    raise ConfigurationError(
        f'{location}: "verifier" = {short(value)}: valid: the name of a verifier; one with parameters is a '
        "[verifiers.NAME] of the experiment"
    )


# --- reasoning-gym ---------------------------------------------------------------------------------------


def _generate(source: TaskSource) -> Iterator[Task]:
    dataset = build_generator(source.name, source.generator_parameters)
    name = f"reasoning-gym:{source.name}"
    generator_parameters = {key: value for key, value in source.parameters.items() if key not in ("seed", "size")}
    for i in range(source.generator_parameters["size"]):
        try:
            entry = dataset[i]
            packed_entry = pack_entry({key: entry[key] for key in ("question", "answer", "metadata")})
        except Exception as error:  # boundary to a foreign generator: any exception is bad input here
            raise ConfigurationError(f"{name} failed at entry {i}: {type(error).__name__}: {error}") from error
        prompt = str(entry["question"])
        answer = "" if entry["answer"] is None else str(entry["answer"])
        yield Task(
            task_id=task_id(prompt, answer),  # without metadata: it may number the entries, and hide repeats
            prompt=prompt,
            answer=answer,
            metadata={"generator": source.name, "parameters": generator_parameters, "entry": packed_entry},
            source=source.display_name,
            verifier=source.verifier,
        )


def build_generator(name: str, parameters: Mapping[str, Any]) -> Any:
    """Make the reasoning-gym data set ``name``. Raises ConfigurationError for an unknown name or bad parameters."""
    import_extra("reasoning_gym", "reasoning-gym", "source = 'reasoning-gym'")
    from reasoning_gym.factory import DATASETS, create_dataset  # a second of imports: only when used

    if name not in DATASETS:
        near = difflib.get_close_matches(name, list(DATASETS), n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "valid: " + ", ".join(sorted(DATASETS))
        raise ConfigurationError(f"unknown reasoning-gym generator {name!r}; {hint}")
    parameter_names = sorted(field.name for field in dataclasses.fields(DATASETS[name][1]))
    for key in parameters:
        if key not in parameter_names:
            near = difflib.get_close_matches(key, parameter_names, n=1, cutoff=0.5)
            valid_text = ", ".join(parameter for parameter in parameter_names if parameter not in ("seed", "size"))
            hint = f"did you mean {near[0]!r}?" if near else f"valid: {valid_text}"
            raise ConfigurationError(f"reasoning-gym {name} has no parameter {key!r}; {hint}")
    try:
        return create_dataset(name, **parameters)
    except Exception as error:  # its validation raises any exception (mostly AssertionError)
        detail = str(error) or type(error).__name__
        raise ConfigurationError(f"reasoning-gym {name} refuses parameters {dict(parameters)}: {detail}") from error


# --- disjoint sets ---------------------------------------------------------------------------------------


class TaskOverlap(msgspec.Struct, frozen=True, kw_only=True):
    """Two named task sets that share prompts."""

    first: str
    second: str
    prompts: int  # number of distinct prompts in both
    example: str  # a shared prompt


def overlap(named_sets: Mapping[str, Iterable[Task]], *, white_space: bool = True) -> list[TaskOverlap]:
    """Return every pair of sets that share a prompt, in the order of the mapping. Without ``white_space``: the pairs
    with prompts that differ in white space only."""
    prompts = {name: dict.fromkeys(_prompt_key(task) for task in tasks) for name, tasks in named_sets.items()}
    if not white_space:
        common = {prompt for first, second in combinations(prompts.values(), 2) for prompt in first if prompt in second}
        prompts = {name: {" ".join(p.split()): p for p in texts if p not in common} for name, texts in prompts.items()}
    return [
        TaskOverlap(first=first, second=second, prompts=len(shared_prompts), example=shared_prompts[0])
        for first, second in combinations(prompts, 2)
        if (shared_prompts := [prompt for prompt in prompts[second] if prompt in prompts[first]])
    ]


def contradictions(tasks: Iterable[Task]) -> dict[str, list[str]]:
    """Map each prompt that has several answers to these."""
    answers: dict[str, list[str]] = {}
    for task in tasks:
        answers_so_far = answers.setdefault(_prompt_key(task), [])
        if task.answer.strip() not in answers_so_far:
            answers_so_far.append(task.answer.strip())
    return {prompt: prompt_answers for prompt, prompt_answers in answers.items() if len(prompt_answers) > 1}


def is_conversation_as_text(task: Task) -> bool:
    """Whether a task's prompt is the JSON text of a conversation, which the model would see unrendered."""
    if task.messages or not task.prompt.lstrip().startswith("[") or '"role"' not in task.prompt:
        return False
    with contextlib.suppress(msgspec.DecodeError):
        messages = msgspec.json.decode(task.prompt, type=list[dict[str, Any]])
        return bool(messages) and all({"role", "content"} <= set(message) for message in messages)
    return False


def _prompt_key(task: Task) -> str:
    """Return a task's prompt, with the content hashes of its pictures."""
    return "\n".join((task.prompt, *(content for _, content in task.pictures))) if task.messages else task.prompt


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
    """Return ``tasks`` without those whose prompt is in ``held_out``, which makes generated sets disjoint."""
    held_out_prompts = {_prompt_key(task) for task in held_out}
    return [task for task in tasks if _prompt_key(task) not in held_out_prompts]
