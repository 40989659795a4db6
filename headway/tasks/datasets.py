"""Rows of Hugging Face data sets: files and folders on this machine, or data sets by name from the hub.

Local files are streamed in place: no copy on the disk, one batch of rows in memory. Files from the hub are downloaded
once, into the cache of the package ``datasets``, and mapped into memory from there.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headway.config.sources import SftColumns, SftSource, TaskSource
from headway.records.errors import ConfigurationError
from headway.runtime.imports import import_extra

_BUILDERS = {
    ".parquet": "parquet",
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".arrow": "arrow",
}  # suffix of a file -> its reader
_MARK = "\ue000"  # a private character: before texts of CSV files
_SAVED_DATASET_FILES = ("dataset_dict.json", "state.json")  # files that save_to_disk leaves in its folder


def read_dataset(source: TaskSource | SftSource) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of ``source`` in their own order, each with its name for errors ("gsm8k row 3", counted from 0).

    Raises ConfigurationError: the package is missing; no such file, folder or data set; an unknown subset or split
    (the error lists the valid ones); the hub can't be reached; a file that can't be read.
    """
    package = import_extra("datasets", "datasets", "source = 'datasets'")
    name = source.display_name
    try:
        if source.path:
            rows = _open_path(package, source)
        else:  # all splits are prepared at once; asking for one alone would still download the others' files
            rows = _split_of(_load(package, source, source.name, revision=source.revision or None), source)
        features: Mapping[str, Any] = getattr(rows, "features", None) or {}
        for number, row in enumerate(rows):
            columns = (
                (key, value.removeprefix(_MARK) if isinstance(value, str) else value) for key, value in row.items()
            )
            yield f"{name} row {number}", {key: _marked_structs(value, features.get(key)) for key, value in columns}
    except ConfigurationError:
        raise
    except ConnectionError as error:  # also what the package raises for a name that isn't in its cache
        raise ConfigurationError(
            f"{name}: the Hugging Face hub can't be reached ({_first_line(error)}): download it where there is a "
            f'network (hf download {source.name} --repo-type dataset --local-dir FOLDER) and set path = "FOLDER" '
            "instead of name"
        ) from error
    except Exception as error:  # boundary to a foreign package and its files: any exception is bad input here
        raise ConfigurationError(f"{name} can't be read: {type(error).__name__}: {_first_line(error)}") from error


class ArrowStruct(dict[str, Any]):
    """An object of a column whose objects all have the same fields: a null may stand for one that its row lacks."""


def without_nulls(value: Any) -> Any:
    """Return ``value`` without null fields, in all objects where a null may stand for a missing field."""
    if isinstance(value, dict):
        drops_nulls = isinstance(value, ArrowStruct)
        return {key: without_nulls(child) for key, child in value.items() if child is not None or not drops_nulls}
    return [without_nulls(child) for child in value] if isinstance(value, list) else value


def _marked_structs(value: Any, feature: Any) -> Any:
    """Return a column's value with objects of struct columns as ArrowStruct; JSON columns have plain dictionaries."""
    element_feature = getattr(feature, "feature", feature[0] if isinstance(feature, list) and feature else None)
    if isinstance(value, list) and (element_feature is not None or feature is None):
        return [_marked_structs(child, element_feature) for child in value]
    if isinstance(value, dict) and (isinstance(feature, Mapping) or feature is None):
        feature_by_name: Mapping[str, Any] = feature or {}
        return ArrowStruct({key: _marked_structs(child, feature_by_name.get(key)) for key, child in value.items()})
    return value


def _open_path(package: Any, source: TaskSource | SftSource) -> Iterable[Mapping[str, Any]]:
    path = Path(source.path)
    if not path.exists():
        raise ConfigurationError(f"no such file or folder: {path}")
    if path.is_dir() and any((path / mark).exists() for mark in _SAVED_DATASET_FILES):
        if source.subset:
            raise ConfigurationError(f"{path} was written by save_to_disk, which keeps no subsets: leave 'subset' out")
        return _split_of(package.load_from_disk(str(path)), source)
    if path.is_dir():
        return _split_of(_load(package, source, str(path), streaming=True), source)
    builder = _BUILDERS.get(path.suffix)
    if builder is None:
        suffixes = ", ".join(_BUILDERS)
        raise ConfigurationError(f"{path}: {path.suffix or 'no'} files can't be read; valid: {suffixes}, or a folder")
    if source.split or source.subset:
        raise ConfigurationError(f"{path} is a single file, without splits and subsets: leave 'split' and 'subset' out")
    csv_options = {"converters": _text_columns(source)} if builder == "csv" else {}
    return package.load_dataset(builder, data_files=str(path), split="train", streaming=True, **csv_options)


def _load(package: Any, source: TaskSource | SftSource, path_or_name: str, **options: Any) -> Any:
    try:
        builder = package.load_dataset_builder(path_or_name, source.subset or None, revision=options.get("revision"))
        if hasattr(builder.config, "converters"):  # CSV
            options["converters"] = _text_columns(source)
        return package.load_dataset(path_or_name, source.subset or None, **options)
    except ValueError as error:
        if "BuilderConfig" in str(error) or "Config name is missing" in str(error):
            reason = f"subset = {source.subset!r}" if source.subset else "'subset' is needed"
            raise ConfigurationError(f"{source.display_name}: {reason}: {_first_line(error)}") from None
        raise


def _text_columns(source: TaskSource | SftSource) -> dict[str, Callable[[str], str]]:
    """Return converters for the columns of a CSV file that are read as they are written: 007, 1.50."""
    columns = source.columns
    names = [columns.prompt, columns.solution] if isinstance(columns, SftColumns) else [columns.prompt, columns.answer]
    return dict.fromkeys(("answer" if name is None else name for name in names), _with_mark)


def _with_mark(text: str) -> str:
    """Mark a text, so that the reader doesn't take NA, say, for a missing one."""
    return _MARK + text


def _split_of(loaded: Any, source: TaskSource | SftSource) -> Iterable[Mapping[str, Any]]:
    """Choose the split that ``source`` names, from one data set or a dictionary of splits."""
    if not isinstance(loaded, Mapping):
        if source.split and str(loaded.split) != source.split:
            raise ConfigurationError(f"{source.display_name} is one data set without splits: leave 'split' out")
        return loaded
    names = [str(name) for name in loaded]
    split = source.split or (names[0] if len(names) == 1 else "train")
    if split not in names:
        nearest = difflib.get_close_matches(split, names, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        request_text = f"split = {split!r}" if source.split else "'split' is needed"
        raise ConfigurationError(f"{source.display_name}: {request_text}; {hint}it has: {', '.join(names)}")
    return loaded[split]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
