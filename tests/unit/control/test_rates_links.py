"""Seconds of an update over a link: what was measured on a model under training, and limits."""

from __future__ import annotations

import pytest

from headway.control.rates.links import changed_share, delta_bytes, hiding_budget, update_s


@pytest.mark.parametrize(("rate", "share"), [(1e-6, 0.018), (1e-5, 0.11), (1e-4, 0.43)])
def test_measured_shares_of_changed_values(rate: float, share: float):
    assert changed_share(rate, "bfloat16") == pytest.approx(share)
    assert changed_share(rate, "float32") == 1.0


def test_shares_rise_with_the_learning_rate_and_end_at_all():
    shares = [changed_share(rate, "bfloat16") for rate in (0.0, 1e-8, 1e-7, 3e-6, 3e-5, 1e-3, 1.0)]
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[1] < 0.001
    assert shares[-1] == 1.0


def test_bytes_are_near_the_measured_ones_and_never_more_than_the_whole():
    assert delta_bytes(1.0, changed_share(1e-6, "bfloat16")) == pytest.approx(0.0103, rel=0.15)
    assert delta_bytes(96.0, 1.0) == 96.0
    assert delta_bytes(96.0, 0.9) == 96.0, "too many have changed"
    assert delta_bytes(96.0, 0.0) == 0.0
    assert delta_bytes(96.0, 0.1, 4) < delta_bytes(96.0, 0.1)


def test_an_update_takes_encoding_and_the_link_and_whole_versions_the_link_alone():
    assert update_s(14e9, 1.25e9) == pytest.approx(11.2)
    by_deltas = update_s(14e9, 1.25e9, 0.018, encoders=16)
    assert delta_bytes(14e9, 0.018) / 1.25e9 < by_deltas < 3.0
    assert update_s(14e9, 1.25e9, 0.018, encoders=1) > by_deltas


def test_budget_that_hides_an_update():
    assert [hiding_budget(seconds, 10.0) for seconds in (0.5, 10.0, 10.5, 95.0)] == [2, 2, 3, 11]
