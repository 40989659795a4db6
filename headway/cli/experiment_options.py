"""The experiment file and its ``--section.key=value`` overrides, shared by the commands that take one."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import typer

if TYPE_CHECKING:
    from headway.config.auto import Machine
    from headway.config.schema import Experiment
    from headway.config.simulation import SimulatorExperiment

# Options that a command doesn't know are overrides of the experiment file.
_OVERRIDES: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}

MACHINE = typer.Option(
    "", "--machine", metavar="POOL", help="A machine that a pool file of headway plan describes, instead of this one."
)
CONFIG = typer.Argument(..., metavar="CONFIG", help="The experiment file (TOML).", show_default=False)


def add_command(
    app: typer.Typer, function: Callable[..., None], *examples: str, name: str = "", overridable: bool = True
) -> None:
    """Add a command to ``app``, by default under the function's name. ``examples``: command lines at the end of its
    help; ``overridable``: the command accepts keys of the experiment file as options."""
    heading = "Examples" if len(examples) > 1 else "Example"
    app.command(
        name or function.__name__.replace("_", "-"),
        context_settings=_OVERRIDES if overridable else None,
        epilog=f"{heading}: {'; '.join(examples)}" if examples else None,
    )(function)


def load(
    context: typer.Context,
    path: str,
    *settings: str,
    resume: bool = False,
    machine: Machine | None = None,
    ranks_of: Literal["trainer", "sft"] = "trainer",
) -> Experiment:
    """Read the experiment for this machine, or a described one, with ``settings`` below the command's overrides.
    Raises ConfigurationError, and a usage error for an argument that is neither an option of the command nor an
    override."""
    from headway.orchestrator.preflight.experiment_file import load_experiment

    overrides = [*settings, *given_overrides(context)]
    return load_experiment(path, overrides, resume=resume, machine=machine, ranks_of=ranks_of)


def names_simulator(context: typer.Context, path: str) -> bool:
    """Whether the experiment file has ``[simulator]``. Raises as `load` does."""
    from headway.config.load import read_toml

    given_overrides(context)
    return "simulator" in read_toml(path)


def load_policy(context: typer.Context, path: str, *settings: str) -> SimulatorExperiment:
    """Read an experiment with ``[simulator]``, else as `load` does."""
    from headway.config.load import load_file
    from headway.config.simulation import SimulatorExperiment

    return load_file(path, [*settings, *given_overrides(context)], SimulatorExperiment)


def described_machine(path: str) -> Machine | None:
    """The machine that a pool file describes; None for no file."""
    if not path:
        return None
    from headway.planner.catalogue.read import Catalogue
    from headway.planner.pool_file import machine_of, read_pool

    return machine_of(read_pool(path, Catalogue.read()), path)


def given_overrides(context: typer.Context) -> list[str]:
    """Return the command's overrides; raises a usage error for any other unknown argument, and without a file."""
    if (config := str(context.params.get("config"))).startswith("--"):
        context.fail(f"the experiment file is missing before {config}: {context.command_path} experiment.toml {config}")
    known_options = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
    try:
        return overrides(context.args, known_options)
    except ValueError as error:
        context.fail(str(error))


def overrides(arguments: Sequence[str], known_options: Sequence[str] = ()) -> list[str]:
    """Extract ``--section.key=value`` overrides, also as ``--section.key value``, from arguments unknown to the
    command. Raises ValueError naming an argument that is neither."""
    assignments: list[str] = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        option_name, equals_sign, _ = argument.partition("=")
        if not option_name.startswith("--") or "." not in option_name:
            raise ValueError(_explain(argument, known_options))
        if not equals_sign:
            if not remaining or remaining[0].startswith("--"):
                raise ValueError(f"{option_name} needs a value: {option_name}=VALUE")
            argument = f"{option_name}={remaining.pop(0)}"
        assignments.append(argument)
    return assignments


def _explain(argument: str, known_options: Sequence[str]) -> str:
    close_matches = difflib.get_close_matches(argument.partition("=")[0], known_options, n=1, cutoff=0.6)
    if close_matches:
        return f"no such option: {argument} (did you mean {close_matches[0]}?)"
    if argument.startswith("-"):
        return f"no such option: {argument} (a key of the experiment file is given as --section.key=value)"
    return f"unexpected argument: {argument}"
