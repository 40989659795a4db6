"""`headway cost tco`, `run`, `service`, `live`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from headway.cli.printing import print_result, print_rows

if TYPE_CHECKING:
    from headway.planner.catalogue.read import Catalogue

CATALOGUE = typer.Option(
    [], "--catalogue", metavar="FILE", help="TOML on top of the package's catalogue; repeatable.", show_default=False
)
_PRICED = "Price of a device-hour: dollars, owned.NAME or rented.NAME."
PRICE = typer.Option("", "--price", metavar="PRICE", help=f"{_PRICED} Default: the run's.")
JSON = typer.Option(False, "--json", help="Print everything as one JSON object.")


def add_commands(app: typer.Typer) -> None:
    cost_app = typer.Typer(
        help="Costs: of a device's hour, of a run, live or published, against a service.", no_args_is_help=True
    )
    cost_app.command("tco", epilog="Example: headway cost tco H200 --catalogue mine.toml")(tco)
    cost_app.command("run", epilog="Example: headway cost run slime --price rented.H200")(run)
    cost_app.command("service", epilog="Example: headway cost service tinker-235b --run slime --tenants 8")(service)
    cost_app.command("live", epilog="Example: headway cost live runs/arithmetic/rl --price rented.H200")(live)
    app.add_typer(cost_app, name="cost")


def tco(
    server: str = typer.Argument("H200", metavar="SERVER", help="Entry of owned in the catalogue."),
    catalogue: list[str] = CATALOGUE,
    as_json: bool = JSON,
) -> None:
    """Compute the total cost of an hour of an owned device: capital as an annuity, power, colocation, hands,
    internet."""
    from headway.planner.cost_tables import owned_rows
    from headway.planner.costs import owned_cost

    cost = owned_cost(read_catalogue(catalogue), server)
    print_result(cost, as_json, lambda: print_rows(owned_rows(cost)))


def run(
    name: str = typer.Argument("prime_rl", metavar="RUN", help="Entry of runs in the catalogue."),
    price: str = PRICE,
    service: str = typer.Option("", "--service", metavar="NAME", help="An entry of services. Default: the run's."),
    catalogue: list[str] = CATALOGUE,
    as_json: bool = JSON,
) -> None:
    """Compute the dollars of a run's steps and of a million tokens. All devices are paid for whole steps, waits
    included."""
    from headway.planner.cost_tables import print_steps, run_rows
    from headway.planner.costs import priced_run

    run_cost = priced_run(read_catalogue(catalogue), name, price, service)
    print_result(run_cost, as_json, lambda: (print_steps(run_cost), print_rows(run_rows(run_cost))))


def service(
    name: str = typer.Argument("tinker-235b", metavar="SERVICE", help="An entry of services."),
    of_run: str = typer.Option("prime_rl", "--run", metavar="RUN", help="Its devices, rate and mix of tokens."),
    price: str = PRICE,
    failures_per_day: float = typer.Option(0.0, "--failures-per-day", min=0.0, help="Failures and preemptions."),
    lost_minutes: float = typer.Option(30.0, "--lost-minutes", min=0.0, help="What each costs all devices."),
    tenants: int = typer.Option(1, "--tenants", min=1, max=64, help="Simulate up to this many on one pool."),
    spread: float = typer.Option(2.2, "--spread", min=1.0, help="Tenants: p99 / median of a rollout's time."),
    train: float = typer.Option(0.0, "--train", min=0.0, help="Tenants: a step's training, in mean rollout times."),
    catalogue: list[str] = CATALOGUE,
    as_json: bool = JSON,
) -> None:
    """Compare one's own devices with a service's price list: the rate at which both cost the same."""
    from headway.control.shared_pool import TenantLoad
    from headway.planner.cost_tables import service_rows
    from headway.planner.costs import service_comparison

    tenant_load = TenantLoad(slots=64, rollouts=64, mean_s=1.0, spread=spread, train_s=train, steps=30)
    comparison = service_comparison(
        read_catalogue(catalogue),
        name,
        of_run,
        price=price,
        failures_per_hour=failures_per_day / 24,
        lost_hours=lost_minutes / 60,
        tenant=tenant_load if tenants > 1 else None,
        most_tenants=tenants,
    )
    print_result(comparison, as_json, lambda: print_rows(service_rows(comparison)))


def live(
    run: str = typer.Argument(..., metavar="RUN", help="The run's folder.", show_default=False),
    price: str = typer.Option(..., "--price", metavar="PRICE", help=_PRICED, show_default=False),
    catalogue: list[str] = CATALOGUE,
    as_json: bool = JSON,
) -> None:
    """Compute the dollars of a run so far, and of its waits, while it runs or afterwards."""
    from headway.planner.costs import price_of
    from headway.report.run_cost import cost_of_run, cost_rows
    from headway.report.run_view import view_run

    run_cost = cost_of_run(view_run(run), price_of(read_catalogue(catalogue), price))
    print_result(run_cost, as_json, lambda: print_rows(cost_rows(run_cost)))


def read_catalogue(paths: list[str]) -> Catalogue:
    """Read the catalogue; prints a warning on stderr for each price that is older than a year."""
    from datetime import date

    from headway.planner.catalogue.read import Catalogue

    catalogue = Catalogue.read(paths)
    for price_warning in catalogue.old_prices(date.today()):
        typer.echo(f"warning: {price_warning}", err=True)
    return catalogue
