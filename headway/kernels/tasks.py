"""Kernel tasks: the built-in problems, a local KernelBench checkout, and JSONL; sources with other sizes."""

from __future__ import annotations

import ast
import math
import operator
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from headway.records.errors import ConfigurationError
from headway.records.kernels import KernelBackend, KernelTask
from headway.records.task import Task
from headway.tasks.source_rows import read_objects

KERNEL = "kernel"  # key of a task's metadata
LEVELS = (1, 2, 3, 4)
SMALLEST_DIMENSION = 16  # the dimension limit isn't halved below this one
_FUNCTIONS = ("get_inputs", "get_init_inputs")
_TENSOR_MAKERS = frozenset(("rand", "randn", "randint", "ones", "zeros", "empty", "full", "normal", "sample"))
_FOLDED: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.LShift: operator.lshift,
    ast.Pow: operator.pow,
}


class ScaleLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Caps of a problem's sizes, each at least 1."""

    dimension: int = 1024
    batch: int = 256
    elements: int = 2**20  # of one input whose shape is written with module constants


class ScaledSource(msgspec.Struct, frozen=True, kw_only=True):
    """A problem whose sizes fit the limits, with the source that model and checker see."""

    source: str
    changed: dict[str, tuple[int, int]]  # constant -> size before, size now; NAME[0] within a tuple
    unscaled: tuple[str, ...]  # sizes that don't fit, or may not agree with the changed ones: line and reason


class _Size(msgspec.Struct, frozen=True, kw_only=True):
    """An integer constant at module level. ``span``: the bytes of the source that spell it."""

    name: str
    value: int
    span: tuple[int, int]
    batch: bool


def builtin_tasks(backend: KernelBackend = "cpp", levels: Sequence[int] = LEVELS) -> list[KernelTask]:
    """The package's CPU problems: 1 elementwise, 2 reductions, 3 matmul variants, 4 fused blocks."""
    folder = files("headway.kernels") / "problems"
    return [
        msgspec.convert({"name": name, "level": level, "backend": backend, **fields}, KernelTask)
        for level in levels
        for name, fields in tomllib.loads((folder / f"level{level}.toml").read_text(encoding="utf-8")).items()
    ]


def load_kernelbench(
    folder: Path,
    *,
    levels: Sequence[int] = LEVELS,
    limits: ScaleLimits | None = ScaleLimits(),
    backend: KernelBackend = "cpp",
) -> tuple[list[KernelTask], dict[str, tuple[str, ...]]]:
    """Tasks of a KernelBench checkout, scaled to ``limits`` unless None, and notes by name on sizes that don't scale.

    Tasks are named ``level1/19_ReLU``. A problem that names its batch size gets a second shape with another one.
    Raises ConfigurationError: a folder without ``KernelBench/level1``, a file that isn't a problem.
    """
    root = next((root for root in (folder / "KernelBench", folder) if (root / "level1").is_dir()), None)
    if root is None:
        raise ConfigurationError(
            f"{folder}: not a checkout of KernelBench; valid: a folder with KernelBench/level1/*.py, as `git clone` "
            "of github.com/ScalingIntelligence/KernelBench leaves it"
        )
    tasks, notes_by_name = [], {}
    for level in levels:
        paths = sorted((root / f"level{level}").glob("*.py"), key=lambda file: _numeric_key(file.stem))
        if not paths:
            raise ConfigurationError(f"{root / f'level{level}'}: no problems; valid levels: those with *.py files")
        for file in paths:
            source, name = _read_text(file), f"level{level}/{file.stem}"
            require_problem(source, str(file))
            if limits is not None:
                scaled = scaled_source(source, limits)
                source = scaled.source
                if scaled.unscaled:
                    notes_by_name[name] = scaled.unscaled
            shapes = _other_batch(_sizes(source))
            tasks.append(KernelTask(name=name, source=source, level=level, backend=backend, shapes=shapes))
    return tasks, notes_by_name


def load_jsonl(path: Path) -> list[KernelTask]:
    """Tasks of a file with one JSON object per line, whose keys are KernelTask's fields: at least ``name``, ``source``.

    Raises ConfigurationError with file and line: bad JSON, unknown keys, a second task of one name, no problem.
    """
    task_by_name, field_names = dict[str, KernelTask](), KernelTask.__struct_fields__
    for location, fields in read_objects(path):
        for key in fields.keys() - set(field_names):
            raise ConfigurationError(f"{location}: unknown key {key!r}; valid: {', '.join(field_names)}")
        try:
            task = msgspec.convert(fields, KernelTask)
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"{location}: not a kernel task: {error}") from error
        if task.name in task_by_name:
            raise ConfigurationError(f"{location}: name = {task.name!r} is another task's; valid: names that differ")
        require_problem(task.source, location)
        for shape in task.shapes:
            resized_source(task.source, shape, location)
        task_by_name[task.name] = task
    if not task_by_name:
        raise ConfigurationError(f"{path}: no tasks; valid: one JSON object a line")
    return list(task_by_name.values())


def kernel_task(task: Task, backend: str = "", location: str = "") -> KernelTask:
    """The kernel task in a task's metadata; ``backend``, if given, replaces its back end. ``location``: the task's, for
    errors. Raises ConfigurationError."""
    try:
        kernel = msgspec.convert(task.metadata.get(KERNEL), KernelTask)
    except msgspec.ValidationError as error:
        raise ConfigurationError(
            f"{location or f'task {task.task_id}'}: metadata.{KERNEL} is no kernel task: {error}; write tasks by "
            "`headway kernels tasks`"
        ) from None
    return msgspec.structs.replace(kernel, backend=backend) if backend else kernel


def require_problem(source: str, location: str) -> None:
    """Raise ConfigurationError unless ``source`` is Python with ``Model``, ``get_inputs`` and ``get_init_inputs``."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # as ast.parse says that it may
        raise ConfigurationError(f"{location}: not Python: {error}") from error
    defined_names = {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    missing_names = [name for name in ("Model", *_FUNCTIONS) if name not in defined_names]
    if missing_names:
        raise ConfigurationError(
            f"{location}: {', '.join(missing_names)} not defined; valid: a source with class Model, get_inputs() and "
            "get_init_inputs()"
        )


def resized_source(source: str, sizes: Mapping[str, int], location: str = "source") -> str:
    """The source with other values of its integer constants at module level, and of everything derived from them.

    Raises ConfigurationError for a name that isn't such a constant.
    """
    by_name = {size.name: size for size in _sizes(source)}
    for name in sizes:
        if name not in by_name:
            raise ConfigurationError(f"{location}: no integer constant {name!r}; valid: {', '.join(by_name) or 'none'}")
    return _with_values(source, {by_name[name]: value for name, value in sizes.items()})


def scaled_source(source: str, limits: ScaleLimits) -> ScaledSource:
    """Cap the integer constants at module level, those in tuples and lists too, so that the problem fits a CPU.

    Constants whose name begins with "batch", B, and those that equal one of them are capped at ``limits.batch``, the
    others at ``limits.dimension``. A size above its limit keeps its divisibility. U is the least common multiple of the
    file's smaller constants that divide the size, those named group or head first, as long as U is within the limit.
    The new size is the largest divisor of the old one within the limit that is a multiple of U and more than half the
    limit, else the largest multiple of U within the limit. While an input whose shape is written with constants has
    more than ``limits.elements``, the dimension limit is halved, not below SMALLEST_DIMENSION, then the batch limit.
    """
    sizes = [size for size in _sizes(source) if "seed" not in size.name.lower()]
    batches = {size.value for size in sizes if size.batch}  # equal sizes stay equal: inputs may be broadcast
    dim_limit, batch_limit = limits.dimension, limits.batch
    while True:
        new_sizes = {size: _capped(size, batch_limit if size.value in batches else dim_limit, sizes) for size in sizes}
        scaled_text = _with_values(source, new_sizes)
        too_large_notes = [note for note, element_count in _inputs(scaled_text) if element_count > limits.elements]
        if not too_large_notes or (dim_limit <= SMALLEST_DIMENSION and batch_limit <= 1):
            break
        if dim_limit > SMALLEST_DIMENSION:
            dim_limit = max(SMALLEST_DIMENSION, dim_limit // 2)
        else:
            batch_limit //= 2
    changed = {size.name: (size.value, value) for size, value in new_sizes.items() if value != size.value}
    notes = [*too_large_notes, *_literals(source, changed, limits)]
    return ScaledSource(source=scaled_text, changed=changed, unscaled=tuple(notes))


def _other_batch(sizes: Sequence[_Size]) -> tuple[dict[str, int], ...]:
    """A further shape with another batch size, unless another size equals it, and may have to."""
    batch = next((size for size in sizes if size.batch and size.value >= 4), None)
    if batch is None or [size.value for size in sizes].count(batch.value) > 1:
        return ()
    return ({batch.name: batch.value // 2 + 1},)


def _capped(size: _Size, limit: int, sizes: Sequence[_Size]) -> int:
    if size.value <= limit:
        return size.value
    unit = 1
    ranked_values = {(re.search("group|head", other.name.lower()) is None, other.value) for other in sizes}
    for _, divisor in sorted(ranked for ranked in ranked_values if 1 < ranked[1] <= limit):
        if size.value % divisor == 0 and math.lcm(unit, divisor) <= limit:
            unit = math.lcm(unit, divisor)
    divisors = (factor for factor in range(limit, limit // 2, -1) if size.value % factor == 0 and factor % unit == 0)
    return next(divisors, limit // unit * unit)


def _sizes(source: str) -> list[_Size]:
    """Integer constants at module level, each spelt by digits or by an expression of digits alone."""
    line_starts = [0]
    for line in source.encode().splitlines(keepends=True):
        line_starts.append(line_starts[-1] + len(line))
    sizes: dict[tuple[int, int], _Size] = {}
    for name, node in _constants(ast.parse(source)):
        value = _evaluate(node, {})
        if not isinstance(value, int) or value < 0:
            continue
        end_byte = line_starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        span = (line_starts[node.lineno - 1] + node.col_offset, end_byte)
        lowered = name.lower()
        sizes[span] = _Size(name=name, value=value, span=span, batch=lowered.startswith("batch") or lowered == "b")
    return list(sizes.values())


def _constants(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for statement in tree.body:
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        value_node = getattr(statement, "value", None)
        for target in targets:
            is_sequence = isinstance(value_node, (ast.Tuple, ast.List))
            if isinstance(target, (ast.Tuple, ast.List)) and is_sequence and len(target.elts) == len(value_node.elts):
                pairs = zip(target.elts, value_node.elts, strict=True)
                yield from ((name_node.id, node) for name_node, node in pairs if isinstance(name_node, ast.Name))
            elif isinstance(target, ast.Name) and is_sequence:
                yield from ((f"{target.id}[{index}]", node) for index, node in enumerate(value_node.elts))
            elif isinstance(target, ast.Name) and value_node is not None:
                yield target.id, value_node


def _evaluate(node: ast.expr, known: Mapping[str, Any]) -> int | tuple[int, ...] | None:
    """The value of an expression of integers, known names and tuples; None for any other expression."""
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return value
        case ast.Name(id=name):
            return known.get(name)
        case ast.Tuple(elts=element_nodes) | ast.List(elts=element_nodes):
            values = []
            for element_node in element_nodes:
                value = _evaluate(element_node.value if isinstance(element_node, ast.Starred) else element_node, known)
                if value is None or isinstance(element_node, ast.Starred) != isinstance(value, tuple):
                    return None
                values.extend(value if isinstance(value, tuple) else (value,))
            return tuple(values)
        case ast.BinOp(left=left_node, op=sign, right=right_node):
            lhs, rhs = _evaluate(left_node, known), _evaluate(right_node, known)
            if type(sign) in _FOLDED and isinstance(lhs, int) and isinstance(rhs, int):
                is_small = abs(lhs) <= 2**40 and 0 <= rhs <= (64 if isinstance(sign, (ast.Pow, ast.LShift)) else 2**40)
                if is_small and (rhs or not isinstance(sign, ast.FloorDiv)):
                    return _FOLDED[type(sign)](lhs, rhs)
    return None


def _with_values(source: str, values: Mapping[_Size, int]) -> str:
    source_bytes = source.encode()
    for size, value in sorted(values.items(), key=lambda item: -item[0].span[0]):
        if value != size.value:
            source_bytes = source_bytes[: size.span[0]] + str(value).encode() + source_bytes[size.span[1] :]
    return source_bytes.decode()


def _inputs(source: str) -> Iterator[tuple[str, int]]:
    """A note with the line, and the number of elements, of each tensor of constant shape in ``get_inputs``."""
    tree = ast.parse(source)
    value_by_name: dict[str, Any] = {}
    for name, node in _constants(tree):
        value_by_name[name] = _evaluate(node, value_by_name)
    for name in {name.split("[")[0] for name in value_by_name if "[" in name}:
        element_values = [value for key, value in value_by_name.items() if key.startswith(f"{name}[")]
        value_by_name[name] = tuple(element_values) if all(isinstance(part, int) for part in element_values) else None
    for call in (node for node in _function_nodes(tree, "get_inputs") if isinstance(node, ast.Call)):
        if not isinstance(call.func, ast.Attribute) or call.func.attr not in _TENSOR_MAKERS:
            continue
        shape = _evaluate(ast.Tuple(elts=call.args), value_by_name)
        for argument in call.args:
            argument_shape = None if isinstance(argument, ast.Starred) else _evaluate(argument, value_by_name)
            shape = argument_shape if isinstance(argument_shape, tuple) else shape
        if isinstance(shape, tuple):
            element_count = math.prod(shape)
            yield f"line {call.lineno}: an input of {element_count} elements", element_count


def _literals(source: str, changed: Mapping[str, tuple[int, int]], limits: ScaleLimits) -> list[str]:
    """Notes on sizes written as literals that exceed the limits or equal a constant before its change."""
    tree, notes = ast.parse(source), []
    constant_ids = {id(part) for _, node in _constants(tree) for part in ast.walk(node)}
    function_node_ids = {id(node) for name in _FUNCTIONS for node in _function_nodes(tree, name)}
    old_names = {old: name for name, (old, _) in changed.items()}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or type(node.value) is not int or id(node) in constant_ids:
            continue
        if node.value in old_names:
            notes.append(f"line {node.lineno}: {node.value}, which {old_names[node.value]} was before it was scaled")
        elif id(node) in function_node_ids and node.value > limits.dimension:
            notes.append(f"line {node.lineno}: {node.value} isn't a constant of the module")
    return notes


def _function_nodes(tree: ast.Module, function: str) -> Iterator[ast.AST]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            yield from ast.walk(node)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: can't be read as UTF-8 text: {error}") from error


def _numeric_key(stem: str) -> tuple[int, str]:
    number_match = re.match(r"\d+", stem)
    return (int(number_match[0]) if number_match else 2**31, stem)
