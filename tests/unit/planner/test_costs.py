"""`headway cost`: each digit that the source printed, and what of them contradicts the others."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest

from headway.cli.main import main
from headway.planner.catalogue.read import Catalogue, DeviceFigures, MachineFigures, RunTable
from headway.planner.costs import agrees, load_of, owned_cost, price_of, priced_run, service_comparison
from headway.records.errors import ConfigurationError

CATALOGUE = Catalogue.read()
RUNS = ("prime_rl", "slime")


# --- an hour of a device ---------------------------------------------------------------------------------


def test_the_published_hour_of_a_device() -> None:
    """Every printed figure but the one that the printed lines contradict."""
    found = owned_cost(CATALOGUE, "H200")
    assert found.cost.capital_usd == 361_255
    assert round(found.cost.capital_usd_per_device) == 45_157
    assert f"{found.cost.usd_per_device_hour:.2f}" == "1.59"
    assert f"{found.cost.capital_percent:.1f}" == "72.5"
    printed = {key for key, value in found.lines.published.items() if agrees(getattr(found.cost, key), value)}
    assert printed == found.lines.published.keys() - {"power_and_colocation_usd_per_month", "operating_usd_per_month"}
    assert len(printed) == 6


def test_its_contradiction_is_named_with_arithmetic() -> None:
    """218.59 x 10.93 is 2,389.19, not 2,388.27; the rest follows from the latter: one contradiction, not two."""
    (text,) = owned_cost(CATALOGUE, "H200").contradictions
    assert "218.59 x 10.93 kW = 2,389.19, but 2,388.27 is printed, which is 10.926 kW" in text
    assert "printed rounded" in text
    assert "2,388.27 + 170 = 2,558.27" in text


def test_another_wrong_figure_is_named_too(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('[owned.H200]\nsource = "mine"\ndate = 2026-06-16\nserver_usd = 300000\n')
    texts = owned_cost(Catalogue.read([own]), "H200").contradictions
    assert any(text.startswith("usd_per_device_hour: 1.7") and "1.59 is printed" in text for text in texts)


def test_digits_agree_when_they_round_to_what_is_printed() -> None:
    assert agrees(1.5949, 1.59)
    assert not agrees(1.5951, 1.59)
    assert agrees(2388.6, 2389.0) is False  # printed with a decimal
    assert agrees(2389.04, 2389.0)


# --- runs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "steps", "hourly"), [("prime_rl", 10, "407.04"), ("slime", 20, "152.64")])
def test_every_published_row(name: str, steps: int, hourly: str) -> None:
    """A service's dollars to the printed cent; own dollars as near as the printed seconds allow (half of their last
    digit), and their ratio to the printed tokens to the printed cent."""
    found = priced_run(CATALOGUE, name)
    assert len(found.owned.usd) == len(found.run.steps) == steps
    assert f"{found.devices * found.usd_per_device_hour:.2f}" == hourly
    assert found.service is not None
    rate = float(hourly) / 3600
    for index, step in enumerate(found.run.steps):
        part, usd = found.service_parts[index], found.owned.usd[index]
        for computed, column in (
            (part.prefill_usd, "prefill_usd"),
            (part.sample_usd, "sample_usd"),
            (part.train_usd, "train_usd"),
            (part.usd, "service_usd"),
            (found.service.usd_per_mtok[index], "service_usd_per_mtok"),
        ):
            assert agrees(computed, step.printed[column]), (index, column, computed)
        if name == "prime_rl":
            assert usd == pytest.approx(step.printed["usd"], abs=0.5 * rate + 0.005)
            assert load_of(found.run, step).tokens == pytest.approx(step.printed["tokens"], abs=0.5 * found.run.batch)
            assert agrees(1e6 * step.printed["usd"] / step.printed["tokens"], step.printed["usd_per_mtok"])


def test_the_published_means() -> None:
    """$16.23 and $6.90 are means of ratios, $16.17 and $6.95 what all dollars come to over all tokens; 2.01 x."""
    prime, slime = (priced_run(CATALOGUE, name) for name in RUNS)
    assert f"{prime.owned.mean_of_ratios:.2f} {prime.owned.ratio_of_means:.2f}" == "6.90 6.95"
    assert f"{slime.owned.mean_of_ratios:.2f} {slime.owned.ratio_of_means:.2f}" == "16.23 16.17"
    assert prime.owned_over_service is not None
    assert [f"{ratio:.2f}" for ratio in prime.owned_over_service] == ["2.01", "2.03"]
    for run in (prime, slime):
        mean, theirs = run.run.mean, run.service
        assert mean is not None
        assert theirs is not None
        assert agrees(theirs.total_usd / len(theirs.usd), mean.printed["service_usd"])
        assert agrees(theirs.mean_of_ratios, mean.printed["service_usd_per_mtok"])
    assert prime.run.mean is not None
    assert prime.owned.total_usd / 10 == pytest.approx(prime.run.mean.printed["usd"], abs=0.05)
    (text,) = prime.contradictions
    assert "6.9 $/M tokens is a mean of ratios; all dollars over all tokens are 6.95" in text
    assert "65.07 / 9.367 M = 6.95" in text


def test_all_devices_are_paid_for_the_whole_step() -> None:
    """Twice the price, or twice the devices: twice the dollars; the service's don't change."""
    run = priced_run(CATALOGUE, "slime", "3.18")
    assert run.owned.total_usd == pytest.approx(2 * priced_run(CATALOGUE, "slime").owned.total_usd)
    assert run.service == priced_run(CATALOGUE, "slime").service
    assert run.contradictions == []  # at another price nothing printed is contradicted


# --- services --------------------------------------------------------------------------------------------


def test_break_even_is_where_the_sign_flips() -> None:
    found = service_comparison(CATALOGUE, "tinker-235b", "prime_rl")

    def own(tokens_per_s: float) -> float:
        return 1e6 * found.devices * found.usd_per_device_hour / 3600 / tokens_per_s

    even = found.break_even_tokens_per_s
    assert own(even) == pytest.approx(found.service_usd_per_mtok, rel=1e-12)
    assert own(even * 1.0001) < found.service_usd_per_mtok < own(even * 0.9999)
    assert own(found.tokens_per_s) == pytest.approx(found.own_usd_per_mtok, rel=1e-12)
    assert found.utilization == pytest.approx(even / found.tokens_per_s)
    cheap = service_comparison(CATALOGUE, "tinker-235b", "prime_rl", price="0.5")
    assert cheap.utilization == pytest.approx(0.5 / 1.59 * found.utilization)
    assert cheap.own_usd_per_mtok < cheap.service_usd_per_mtok


def test_work_done_again_is_paid_again() -> None:
    """Four failures a day of half an hour each: a twelfth of the time, 12 / 11 of the price; none: nothing."""
    plain = service_comparison(CATALOGUE, "tinker-235b", "slime")
    failing = service_comparison(CATALOGUE, "tinker-235b", "slime", failures_per_hour=4 / 24, lost_hours=0.5)
    assert plain.replay_factor == 1
    assert failing.replay_factor == pytest.approx(12 / 11)
    assert failing.own_usd_per_mtok == pytest.approx(plain.own_usd_per_mtok * 12 / 11)
    with pytest.raises(ConfigurationError, match="leave no time"):
        service_comparison(CATALOGUE, "tinker-235b", "slime", failures_per_hour=2, lost_hours=0.5)


def test_prices_that_are_not_known_or_do_not_hold_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"services\.tinker-397b\.train_usd_per_mtok is not known"):
        priced_run(CATALOGUE, "slime", service="tinker-397b")
    with pytest.raises(ConfigurationError, match=r"services\.nobody: unknown; known: tinker-235b"):
        priced_run(CATALOGUE, "slime", service="nobody")


def test_a_price_list_does_not_hold_for_longer_sequences(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text('[services.tinker-235b]\nsource = "mine"\ndate = 2026-06-16\ncontext_tokens = 20000\n')
    with pytest.raises(ConfigurationError, match=r"up to 20,000 tokens; runs.slime has a step with 21,939"):
        priced_run(Catalogue.read([file]), "slime")


# --- the catalogue ---------------------------------------------------------------------------------------


def test_every_entry_has_a_source_and_is_whole() -> None:
    for section in ("devices", "machines", "owned", "rented", "services", "runs"):
        assert CATALOGUE.names(section)
        for name in CATALOGUE.names(section):
            source = CATALOGUE.source(section, name)
            assert len(source.source) > 20
            assert source.date <= date(2026, 11, 29)
    for name in CATALOGUE.names("machines"):
        assert CATALOGUE.entry("machines", name, MachineFigures).device in CATALOGUE.names("devices")
    for name in RUNS:
        run = CATALOGUE.entry("runs", name, RunTable)
        assert price_of(CATALOGUE, run.price) == 1.59
        assert run.service in CATALOGUE.names("services")


def test_published_figures_of_devices() -> None:
    assert CATALOGUE.known("devices", "H200", "memory_bytes_per_s") == 4.8e12
    assert CATALOGUE.known("devices", "GB300", "flops_per_s", "bfloat16") == 2.5e15
    with pytest.raises(ConfigurationError, match=r"devices\.MI300X\.link_bytes_per_s is not known \(https"):
        CATALOGUE.known("devices", "MI300X", "link_bytes_per_s")
    with pytest.raises(ConfigurationError, match=r"devices\.cpu\.flops_per_s\.float8 is not known"):
        CATALOGUE.known("devices", "cpu", "flops_per_s", "float8")


def _read(tmp_path: Path, text: str) -> Catalogue:
    file = tmp_path / "own.toml"
    file.write_text(text)
    return Catalogue.read([file])


def test_a_user_s_file_lies_over_the_package_s(tmp_path: Path) -> None:
    own = _read(
        tmp_path,
        '[rented.H200]\nsource = "an offer"\ndate = 2026-11-01\nusd_per_device_hour = 2.1\n'
        '[devices.MI300X]\nsource = "measured"\ndate = 2026-11-01\nlink_bytes_per_s = 4e11\n',
    )
    assert price_of(own, "rented.H200") == 2.1
    assert own.source("rented", "H200").source == "an offer"
    changed = own.entry("devices", "MI300X", DeviceFigures)
    assert (changed.link_bytes_per_s, changed.memory_bytes) == (4e11, 192e9)


_HEAD = 'source = "mine"\ndate = 2026-01-01\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[rented.X]\nusd_per_device_hour = 1.0\n", r"rented\.X needs a source and a date"),
        (
            f"[rented.X]\n{_HEAD}usd_per_device_hour = -1.0\n",
            r"rented\.X\.usd_per_device_hour = -1\.0: expected .* >= 0",
        ),
        (f"[rented.X]\n{_HEAD}", r"rented\.X: object missing required field `usd_per_device_hour`"),
        (f"[rented.X]\n{_HEAD}usd = 1.0\n", r"rented\.X: object contains unknown field `usd`"),
        (f"[owned.X]\n{_HEAD}devices = 8\n", r"owned\.X: object missing required field `server_usd`"),
        (f"[owned.H200]\n{_HEAD}server_usd = -5\n", r"owned\.H200\.server_usd = -5: expected .* >= 0"),
        (f"[services.X]\n{_HEAD}prefill_usd_per_mtok = 1\n", r"missing required field `sample_usd_per_mtok`"),
        (f"[price.X]\n{_HEAD}", r"unknown section 'price'; valid: devices, machines, owned"),
        ("[rented", "is not valid TOML"),
        (
            '[rented.X]\nsource = ""\ndate = 2026-01-01\nusd_per_device_hour = 1.0\n',
            r"rented\.X\.source = '': expected",
        ),
    ],
)
def test_a_catalogue_that_can_not_be_used_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        _read(tmp_path, text)


def test_prices_of_an_hour() -> None:
    assert price_of(CATALOGUE, "2.5") == 2.5
    for wrong in ("-1", "nan", "inf", "H200", "owned", "rented."):
        with pytest.raises(ConfigurationError, match=r"valid: dollars of at least 0, or owned\.H200, rented\.H100"):
            price_of(CATALOGUE, wrong)
    with pytest.raises(ConfigurationError, match=r"rented\.X: unknown; known: H100, H200"):
        price_of(CATALOGUE, "rented.X")


def test_a_price_older_than_a_year_is_named() -> None:
    assert CATALOGUE.old_prices(date(2027, 5, 20)) == []
    (text,) = CATALOGUE.old_prices(date(2027, 5, 21))
    assert text == "rented.H100: a price of 2026-05-20, 366 days old"


# --- the commands ----------------------------------------------------------------------------------------


def test_commands_print_tables_and_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for command, texts in (
        (["tco"], ["$45,157", "$1.59", "72.5 %", "10.926"]),
        (["run", "slime"], ["$16.23", "$16.17", "593.4"]),
        (["service", "--tenants", "4"], ["2.03 x as high", "4 tenants"]),
    ):
        assert main(["cost", *command]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert [text for text in texts if text not in printed] == []
        assert main(["cost", *command, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["source"]["date"] == "2026-06-16"
    old = tmp_path / "old.toml"
    old.write_text('[rented.OLD]\nsource = "an old list"\ndate = 2020-01-01\nusd_per_device_hour = 9.0\n')
    assert main(["cost", "run", "--price", "rented.OLD", "--catalogue", str(old)]) == 0
    assert "warning: rented.OLD: a price of 2020-01-01" in capsys.readouterr().err
    for wrong in (["tco", "X"], ["run", "--price", "-1"], ["service", "X"], ["run", "--catalogue", "/nowhere.toml"]):
        assert main(["cost", *wrong]) == 2
        assert capsys.readouterr().err.startswith("error: ")
