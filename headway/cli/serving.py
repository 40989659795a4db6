"""`headway serve`, `headway serve-tinker` and `headway serve-kernels`."""

from __future__ import annotations

import asyncio

import typer

from headway.cli import experiment_options as experiments


def add_commands(app: typer.Typer) -> None:
    experiments.add_command(app, serve, "headway serve runs/arithmetic/rl/best --generator.devices='[\"cpu:0\"]'")
    experiments.add_command(app, serve_tinker, "headway serve-tinker tinker.toml --endpoint.address=127.0.0.1:8000")
    app.command("serve-kernels", rich_help_panel="Kernels")(serve_kernels)


def serve(
    context: typer.Context,
    model: str = typer.Argument(..., metavar="MODEL", help="Model folder with its tokenizer.", show_default=False),
    address: str = typer.Option(
        "127.0.0.1:8000", "--address", metavar="HOST:PORT", help="Address to listen at; port 0: any free port."
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
    from headway.services.serve import serve_settings_from

    settings = serve_settings_from(model, address, context_tokens, keys, record, overrides, adapters)
    endpoint, max_tokens = settings.experiment.endpoint, settings.experiment.max_sequence_tokens

    def ready(url: str) -> None:
        names_text = ", ".join(map(repr, (endpoint.model, *settings.adapters)))
        typer.echo(f"{model} as {names_text}, {max_tokens} tokens of context, on {', '.join(devices)}")
        typer.echo(f"OPENAI_BASE_URL={url}/v1")

    devices = settings.experiment.generator.devices
    asyncio.run(run(settings, ready, lambda name, detail: typer.echo(f"{name}: {detail}", err=True)))
    typer.echo("stopped")


def serve_tinker(context: typer.Context, config: str = experiments.CONFIG) -> None:
    """Serve the tinker SDK: many tenants' adapters of one base are trained and sampled. Ctrl-C stops.

    Any key of the file can be given as --section.key=value.
    """
    overrides = experiments.given_overrides(context)
    from headway.services.tinker.serve import serve_tinker as run
    from headway.services.tinker.serve import tinker_settings_from

    settings = tinker_settings_from(config, overrides)
    base, experiment, tinker = settings.base, settings.experiment, settings.tinker

    def ready(url: str) -> None:
        devices = f"training on {experiment.trainer.devices[0]}, sampling on {', '.join(experiment.generator.devices)}"
        typer.echo(f"{base.name}, {base.max_context_tokens} tokens of context, {devices}; store {tinker.store}")
        typer.echo(f"export TINKER_BASE_URL={url}")
        typer.echo(f"export TINKER_API_KEY={'KEY' if tinker.keys else 'tml-any'}")

    asyncio.run(run(settings, ready, lambda name, detail: typer.echo(f"{name}: {detail}", err=True)))
    typer.echo("stopped")


def check_tinker(config: str, overrides: list[str]) -> None:
    """Check a file of `headway serve-tinker`, and print the memory of its workers. Raises ConfigurationError."""
    from rich.console import Console

    from headway.orchestrator.preflight.capacity import memory_findings, memory_places
    from headway.report.preview import memory_table
    from headway.services.tinker.serve import memory_of, tinker_settings_from
    from headway.services.tinker.tenants import TenantKeys

    settings = tinker_settings_from(config, overrides)
    TenantKeys(settings.tinker.keys)
    uses = memory_of(settings)
    places = memory_places(uses)
    Console(highlight=False).print(memory_table(uses, places))
    findings = memory_findings(uses, places)
    for finding in findings:
        typer.echo(f"{finding.level}: {finding.key}: {finding.message}", err=True)
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(2)


def serve_kernels(
    context: typer.Context,
    host: str = typer.Option("127.0.0.1", help="Where to listen."),
    port: int = typer.Option(8010, min=0, max=65535, help="Port; 0: any."),
    key_file: str = typer.Option(
        "", metavar="FILE", help="API keys, one a line; required where other machines reach the address."
    ),
    cores: str = typer.Option(
        "",
        metavar="SETS",
        help="Cores for timing, each set leased as a whole: 2-3,4-5. Default: the upper half, one core a set.",
    ),
    concurrency: int | None = typer.Option(
        None, min=1, metavar="N", help="Untimed evaluations at once. Default: one for each core that isn't for timing."
    ),
    queue: int = typer.Option(256, min=0, metavar="N", help="Most waiting submissions; further ones get HTTP 429."),
    queue_s: float = typer.Option(300.0, min=0.1, metavar="S", help="Longest wait of a submission; then HTTP 429."),
    timeout_s: float = typer.Option(600.0, min=1.0, metavar="S", help="Longest time of an evaluation."),
    timing_s: float = typer.Option(
        0.7, min=0.1, metavar="S", help="Longest time in which a speed-up is measured; less is coarser."
    ),
    max_source_bytes: int = typer.Option(1 << 20, min=1, metavar="N", help="Longest source; longer ones get HTTP 413."),
    evaluator: str = typer.Option(
        "", metavar="MODULE:FUNCTION", help="Factory of an evaluator that replaces Headway's: docs/kernels-service.md."
    ),
) -> None:
    """Judge kernels for other machines over HTTP: compile, check, time. Ctrl-C stops."""
    from headway.services.serve_kernels import KernelSettings
    from headway.services.serve_kernels import serve_kernels as run

    settings = KernelSettings(**context.params)  # the options are named as the settings are

    def ready(url: str, described: str) -> None:
        typer.echo(f"kernels on {described}")
        typer.echo(f"HEADWAY_KERNELS={url}")

    asyncio.run(run(settings, ready, lambda name, detail: typer.echo(f"{name}: {detail}", err=True)))
    typer.echo("stopped")
