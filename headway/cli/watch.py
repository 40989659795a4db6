"""`headway watch`: serves a web page that shows runs."""

from __future__ import annotations

import asyncio

import typer

from headway.cli.printing import USD_PER_DEVICE_HOUR, price_from


def add_commands(app: typer.Typer) -> None:
    app.command("watch", epilog="Example: headway watch runs --usd-per-device-hour 2.5")(watch)


def watch(
    folders: list[str] = typer.Argument(
        None, metavar="[RUN|FOLDER]...", help="Runs, or folders that hold some. Default: runs.", show_default=False
    ),
    port: int = typer.Option(8060, min=0, max=65535, help="Port; 0: any."),
    host: str = typer.Option("127.0.0.1", help="Where to listen."),
    key_file: str = typer.Option(
        "", metavar="FILE", help="Keys, one a line; required where other machines reach the address."
    ),
    open_page: bool = typer.Option(False, "--open/--no-open", help="Open the page in a browser."),
    usd_per_device_hour: str = USD_PER_DEVICE_HOUR,
) -> None:
    """Watch runs in a browser, live or ended ones, read only from the files that they write. Ctrl-C stops."""
    from headway.services.watch.app import PageSettings
    from headway.services.watch.app import watch as serve

    settings = PageSettings(
        roots=tuple(folders or ["runs"]),
        host=host,
        port=port,
        key_file=key_file,
        usd_per_device_hour=price_from(usd_per_device_hour),
    )

    def ready(address: str) -> None:
        typer.echo(f"watching {', '.join(settings.roots)}: {address}/")
        if open_page:
            import webbrowser

            webbrowser.open(f"{address}/")

    asyncio.run(serve(settings, ready))
    typer.echo("stopped")
