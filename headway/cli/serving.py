"""`headway serve`."""

from __future__ import annotations

import asyncio

import typer

from headway.cli import experiment_options as experiments


def add_commands(app: typer.Typer) -> None:
    experiments.add_command(app, serve, "headway serve runs/arithmetic/rl/best --generator.devices='[\"cpu:0\"]'")


def serve(
    context: typer.Context,
    model: str = typer.Argument(..., metavar="MODEL", help="Model folder with its tokenizer.", show_default=False),
    address: str = typer.Option(
        "127.0.0.1:8000", "--address", metavar="HOST:PORT", help="Where to listen; port 0: any."
    ),
    context_tokens: int | None = typer.Option(
        None,
        "--context",
        metavar="N",
        help="Most tokens of a prompt and its response. Default: the model's, up to 4096.",
        show_default=False,
    ),
    keys: str = typer.Option(
        "", "--keys", metavar="FILE", help="API keys, one a line; required where other machines reach the address."
    ),
    adapters: list[str] = typer.Option(
        [],
        "--adapter",
        metavar="NAME=FOLDER",
        help="Serve an adapter of the model (PEFT's format) as model NAME as well; repeatable.",
        show_default=False,
    ),
    record: str = typer.Option(
        "", "--record", metavar="FILE", help="Append each finished session's (X-Session-ID) tokens to this JSONL file."
    ),
) -> None:
    """Serve a model over OpenAI's API (chat, completions, responses) and Anthropic's (messages). Ctrl-C stops.

    Any key of the sections generator, router and endpoint can be given as --section.key=value.
    """
    overrides = experiments.given_overrides(context)
    from headway.services.serve import serve as run
    from headway.services.serve import serving_of

    wanted = serving_of(model, address, context_tokens, keys, record, overrides, adapters)
    endpoint, tokens = wanted.experiment.endpoint, wanted.experiment.max_sequence_tokens

    def ready(at: str) -> None:
        names = ", ".join(map(repr, (endpoint.model, *wanted.adapters)))
        typer.echo(f"{model} as {names}, {tokens} tokens of context, on {', '.join(devices)}")
        typer.echo(f"OPENAI_BASE_URL={at}/v1")

    devices = wanted.experiment.generator.devices
    asyncio.run(run(wanted, ready, lambda name, detail: typer.echo(f"{name}: {detail}", err=True)))
    typer.echo("stopped")
