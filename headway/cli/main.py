"""The ``headway`` command: registers the sub-commands, and turns errors into messages and exit codes."""

from __future__ import annotations

import os
import re
import sys
from importlib.metadata import version as distribution_version

import typer

from headway.cli import cost, kernels, models, nodes, planning, projects, reading, sandboxes, serving, training, watch
from headway.records.errors import HeadwayError, Interrupted

EXIT_INTERRUPTED = 130
SECTIONS = {  # of the experiment file -> anchors of docs/configuration.md
    **{"run": "run-required", "model": "model-required", "verifiers": "verifiersname", "buffer": "bufferservice"},
    **{"tasks": "taskstrain-required-tasksvalidation-taskstest", "teachers": "teachersname"},
    **{name: name for name in ("verifier", "rollout", "environment", "sandbox", "endpoint", "generator", "router")},
    **{
        name: name
        for name in ("queue", "hooks", "curriculum", "pruning", "algorithm", "critic", "demonstrations", "trainer")
    },
    **{name: name for name in ("weights", "checkpoint", "evaluation", "ledger", "alerts", "control", "cluster", "sft")},
}
_FILES = r"(?!(?:jsonl?|toml|db|py|md|html|log|safetensors)\b)"
_KEY = re.compile(rf"(?<![\w./-])({'|'.join(SECTIONS)})\.{_FILES}[a-z_]+")

app = typer.Typer(
    name="headway",
    help="Reinforcement-learning post-training for language models, built on queue health.",
    epilog=(
        "Exit codes: 0 done · 1 failed · 2 bad input or configuration · 3 a worker failed · 4 the accounting or the "
        "staleness budget don't hold · 130 interrupted (resumable)"
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
projects.add_commands(app)
models.add_commands(app)
training.add_commands(app)
reading.add_commands(app)
watch.add_commands(app)
planning.add_commands(app)
cost.add_commands(app)
serving.add_commands(app)
kernels.add_commands(app)
sandboxes.add_commands(app)
nodes.add_commands(app)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"headway {distribution_version('headway')}")
        raise typer.Exit


@app.callback()
def _headway(
    show_version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    pass


def page_about(error: HeadwayError) -> str:
    """Return the page of documentation for ``error``: its own, or the section of the first configuration key that it
    names; "" when there is none, or when its message already names a page."""
    if error.page or "docs/" in str(error):
        return error.page if "docs/" not in str(error) else ""
    key_match = _KEY.search(str(error))
    return f"docs/configuration.md#{SECTIONS[key_match[1]]}" if key_match else ""


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code.

    A HeadwayError is printed as one ``error: ...`` line (``interrupted: ...`` for Interrupted) and gives its
    ``exit_code``; with HEADWAY_TRACEBACK=1 it is raised instead. Wrong usage gives 2, Ctrl-C 130. Any other exception
    is a defect and is raised.
    """
    try:
        app(args=arguments, prog_name="headway")
    except SystemExit as system_exit:  # Typer ends every command so, --help included
        return system_exit.code if isinstance(system_exit.code, int) else 1
    except HeadwayError as error:
        if os.environ.get("HEADWAY_TRACEBACK") == "1":
            raise
        prefix, page = "interrupted" if isinstance(error, Interrupted) else "error", page_about(error)
        print(f"{prefix}: {error}" + (f" ({page})" if page else ""), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
