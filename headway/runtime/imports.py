"""Imports users' functions and classes by name, ``module:function``: the boundary to code that isn't ours."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Collection
from importlib.machinery import PathFinder
from typing import Any, TypeVar, cast

from headway.records.errors import ConfigurationError

T = TypeVar("T")
_FUNCTION = "module:function"


def import_function(name: str, key: str, known: Collection[str], *, asynchronous: bool = False) -> Callable[..., Any]:
    """Import the plain function ``module:function`` (``function`` may be a dotted path into the module).

    The working directory is searched last. ``key`` (of the experiment file) and ``known`` (its names that need no
    import) are only for the error's text. ``asynchronous``: it may be an async function. Raises ConfigurationError: an
    unknown name, a module that can't be imported, with the reason, or one without that function, with the nearest.
    """
    function = _import_target(name, key, known)
    if not callable(function) or (inspect.iscoroutinefunction(function) and not asynchronous):
        required_kind = "function (not a class)" if asynchronous else "plain function (not a class, not async)"
        raise ConfigurationError(f"{key} = {name!r}: must be a {required_kind}")
    return cast("Callable[..., Any]", function)


def import_class(name: str, key: str, base: type[T]) -> type[T]:
    """Import the class ``module:Class``, which extends ``base``. Raises ConfigurationError as `import_function`."""
    imported = _import_target(name, key, (), "module:Class")
    if not (isinstance(imported, type) and issubclass(imported, base)):
        base_name = f"{base.__module__}:{base.__qualname__}"
        raise ConfigurationError(f"{key} = {name!r}: must be a class that extends {base_name}")
    return imported


def require_module(name: str, key: str, known: Collection[str]) -> None:
    """Raise ConfigurationError unless the module of ``module:function`` can be found. Nothing is imported, not even
    the packages above it: a check for functions that need torch, in a process that must not load it."""
    module_name, _ = _split(name, key, known)
    _search_working_directory()
    if not _exists(module_name):
        scope_text = "on the path or in the working directory"
        raise ConfigurationError(f"{key} = {name!r}: there is no module {module_name!r} {scope_text}; {_valid(known)}")


def import_extra(module: str, extra: str, needed_by: str) -> Any:
    """Import the module of a package that comes with ``headway[extra]``. Raises ConfigurationError, with how to install
    it, when it is missing; ``needed_by``: the setting that needs it, as the experiment file has it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.replace("_", "-")
        raise ConfigurationError(
            f"{needed_by} needs the package {package} ({error}): pip install 'headway[{extra}]'"
        ) from None


def _import_target(name: str, key: str, known: Collection[str], form: str = _FUNCTION) -> Any:
    """Import the object that ``module:path`` names. Raises ConfigurationError."""
    module_name, attribute_path = _split(name, key, known, form)
    _search_working_directory()
    try:
        target: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        cause_text, top_package = f"{type(error).__name__}: {error}", module_name.partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and error.name == top_package:
            cause_text += f" (nor in the working directory: run the command in the folder that has {top_package}.py)"
        raise ConfigurationError(
            f"{key} = {name!r}: {module_name} can't be imported: {cause_text}; {_valid(known, form)}"
        ) from error
    for member in attribute_path.split("."):
        if not hasattr(target, member):
            hint = _nearest(member, [known_member for known_member in vars(target) if not known_member.startswith("_")])
            raise ConfigurationError(f"{key} = {name!r}: {module_name} has no {member!r}; {hint}{_valid(known, form)}")
        target = getattr(target, member)
    return target


def _split(name: str, key: str, known: Collection[str], form: str = _FUNCTION) -> tuple[str, str]:
    module_name, colon, attribute_path = name.partition(":")
    if not colon:
        raise ConfigurationError(f"{key} = {name!r} is unknown; {_nearest(name, known)}{_valid(known, form)}")
    if not module_name or not attribute_path:
        raise ConfigurationError(f"{key} = {name!r}: expected {form}; {_valid(known, form)}")
    return module_name, attribute_path


def _search_working_directory() -> None:
    # an installed command doesn't have this folder on its path, and a user's module is usually there
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())


def _exists(module_name: str) -> bool:
    top_package, *submodules = module_name.split(".")
    try:
        spec = importlib.util.find_spec(top_package)
    except (ImportError, ValueError):  # already loaded, without a specification
        return top_package in sys.modules
    for submodule in submodules:
        if spec is None or spec.submodule_search_locations is None:
            return False
        spec = PathFinder.find_spec(f"{spec.name}.{submodule}", spec.submodule_search_locations)
    return spec is not None


def _nearest(name: str, known: Collection[str]) -> str:
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {matches[0]!r}? " if matches else ""


def _valid(known: Collection[str], form: str = _FUNCTION) -> str:
    return f"valid: {', '.join(sorted(known))} or {form}" if known else f"valid: {form}"
