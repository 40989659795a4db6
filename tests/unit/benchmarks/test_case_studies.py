"""The part of docs/case_studies.md that costs nothing to check, and the fits behind its scenarios."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from benchmarks.case_studies import a as case_a
from benchmarks.case_studies import b as case_b
from benchmarks.case_studies import c as case_c
from benchmarks.case_studies import d as case_d
from benchmarks.case_studies.hardware import GB300, H200, QWEN3_235B, ReplicaHardware, trainer_overrides
from benchmarks.case_studies.runs import SCENARIOS, Figure, figures_table
from docs.write_scenario_keys import PAGE as SIMULATION
from docs.write_scenario_keys import with_tables

PAGE = (Path(__file__).parents[3] / "docs" / "case_studies.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("case", [case_a, case_d])
def test_identities_hold_and_stand_in_the_page(case):
    figures = case.identities()
    assert all(abs(figure.error) < 0.05 for figure in figures)
    assert figures_table(figures) in PAGE


def test_every_predicted_figure_of_the_page_is_within_its_bound():
    rows = re.findall(r"^\| (.+?) \| .*\*predicted\*.*\| ([+-][\d.]+)%", PAGE, re.M)
    assert len(rows) >= 15
    assert [row for row in rows if abs(float(row[1])) > 15] == []
    assert f"**{len(rows)} of {len(rows)} predicted figures are within 15%**" in PAGE


def test_a_figure_knows_whether_it_is_near_enough():
    near = Figure(name="x", published=100, computed=114, label="predicted")
    far = Figure(name="x", published=100, computed=116, label="predicted")
    assert (near.within, far.within) == (True, False)
    assert "(outside)" in figures_table([far])
    assert "(outside)" not in figures_table([near])


FITTED = {"a": case_a.REPLICA, "b": case_b.REPLICA, "d": case_d.REPLICA}


@pytest.mark.parametrize("name", sorted(FITTED))
def test_the_scenarios_hold_what_was_fitted(name):
    """The fraction that the page says gives the numbers that the scenario file has."""
    part = PAGE[PAGE.index(f"\n## {name.upper()}:") :]
    found = re.search(r"generator\s+achieves\s+([\d.]+)", part)
    assert found is not None
    raw = tomllib.loads((SCENARIOS / f"{name}.toml").read_text(encoding="utf-8"))
    hardware = raw["hardware"]["generator"]
    for override in FITTED[name].overrides(float(found[1])):
        key, value = override.split("=")
        if key.startswith("hardware.generator.") and not key.endswith("devices_per_replica"):
            assert hardware[key.rsplit(".", 1)[1]] == pytest.approx(float(value), rel=0.04), key


def test_rooflines():
    """235 GB of weights over 8 x 4.8 TB/s; 192,512 B of KV a token, each on two devices; 44 GFLOP a prefilled token."""
    replica = ReplicaHardware(model=QWEN3_235B, device=H200, devices=8, weight_bytes_per_parameter=1.0, kv_copies=2)
    keys = dict(override.split("=") for override in replica.overrides(0.5))
    assert float(keys["hardware.generator.decode_fixed_s"]) == pytest.approx(235e9 / 38.4e12 / 0.5)
    assert float(keys["hardware.generator.decode_kv_token_s"]) == pytest.approx(2 * 192_512 / 38.4e12 / 0.5)
    assert float(keys["hardware.generator.prefill_tokens_per_s"]) == pytest.approx(8 * 989e12 * 0.5 / 44e9)
    assert replica.kv_capacity_tokens() == int((8 * 141e9 * 0.9 - 235e9) / (2 * 192_512))
    trainer = dict(override.split("=") for override in trainer_overrides(QWEN3_235B, GB300, 48, 0.02))
    assert float(trainer["hardware.trainer.token_s"]) == pytest.approx(132e9 / (48 * 2500e12 * 0.02))


def test_run_a_s_consumption_follows_from_its_mfu():
    """Without a simulation: FLOP/s x MFU / (6 x active parameters x mean sequence)."""
    rate = 64 * 989e12 * case_a.MFU / (6 * 22e9 * 18_294)
    assert rate == pytest.approx(case_a.CONSUMPTION, rel=0.02)


def test_a_straggler_of_128k_tokens_takes_hours():
    assert case_c.straggler_s(0.4, 96) < case_c.STRAGGLER_S < 2 * case_c.straggler_s(1.0, 360)


def test_the_tables_of_keys_are_up_to_date():
    page = SIMULATION.read_text(encoding="utf-8")
    assert page == with_tables(page), "run: python -m docs.write_scenario_keys --write"
