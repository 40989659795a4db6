"""`headway node`: runs the agent of a machine that serves a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def add_commands(app: typer.Typer) -> None:
    app.command("node", rich_help_panel="Several machines")(node)


def node(
    join: Annotated[str, typer.Option("--join", metavar="HOST:PORT", help="The run's cluster.address.")],
    name: Annotated[str, typer.Option(help="Name of this node in the run's cluster.nodes; default: this host's.")] = "",
    key_file: Annotated[Path | None, typer.Option(help="File that holds the run's key; mode 0600.")] = None,
    key_stdin: Annotated[bool, typer.Option(help="Read the key from the first line of standard input.")] = False,
    offer: Annotated[
        list[str] | None,
        typer.Option(metavar="DEVICE", help="Run a replica of the generator here, like cuda:0; may be repeated."),
    ] = None,
    give_up_s: Annotated[float, typer.Option(help="Exit when no run has answered for this many seconds.")] = 600.0,
) -> None:
    """Serve a run with this machine's devices, until the run is over.

    The key comes from --key-file, --key-stdin or the environment's HEADWAY_CLUSTER_KEY: never from the command line,
    which every user of this machine can read.
    """
    import asyncio
    import platform

    from headway.records.errors import ConfigurationError
    from headway.runtime.devices import parse_device
    from headway.runtime.nodes.agent import require_name, run_agent
    from headway.runtime.nodes.handshake import checked_key, read_key

    host, _, port = join.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigurationError(f"--join {join!r}: valid: HOST:PORT, the run's cluster.address")
    name = require_name(name or platform.node().partition(".")[0])
    offers = tuple(offer or ())
    for device in offers:
        parse_device(device).check()
    key = checked_key(sys.stdin.readline().strip(), "standard input") if key_stdin else read_key(key_file)
    asyncio.run(
        run_agent(join, name, key, offers=offers, give_up_s=give_up_s, report=lambda line: print(line, flush=True))
    )
