"""The vLLM engine meets the conditions every engine must meet."""

from __future__ import annotations

import pytest
from vllm_engines import BLOCKS, make_engine, model_of, needs_vllm

from tests.conformance import engine as conformance

pytestmark = needs_vllm


@pytest.fixture(autouse=True)
def _models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "model_of", model_of)


@pytest.mark.parametrize("seed", range(3))
def test_logprobs_equal_teacher_forcing_at_every_composition(seed):
    conformance.check_logprobs_at_every_composition(make_engine, seed)


@pytest.mark.parametrize("seed", range(2))
def test_tokens_do_not_depend_on_neighbours(seed):
    conformance.check_tokens_do_not_depend_on_neighbours(make_engine, seed)


@pytest.mark.parametrize("mode", ["keep", "recompute"])
@pytest.mark.parametrize("seed", range(2))
def test_updates_in_flight(mode, seed):
    conformance.check_updates_in_flight(make_engine, mode, seed)


@pytest.mark.parametrize("mode", ["keep", "recompute", "abort"])
def test_update_changes_what_is_sampled(mode):
    conformance.check_update_changes_what_is_sampled(make_engine, mode)


def test_prefix_is_not_shared_across_versions():
    conformance.check_prefix_is_not_shared_across_versions(make_engine)


def test_prefix_is_not_shared_across_updates_of_one_version():
    conformance.check_prefix_is_not_shared_across_updates_of_one_version(make_engine)


def test_abort_update_parks_and_resumes():
    conformance.check_abort_update_parks_and_resumes(make_engine)


@pytest.mark.parametrize("seed", range(2))
def test_resume_equals_uninterrupted(seed):
    conformance.check_resume_equals_uninterrupted(make_engine, seed)


def test_abort():
    conformance.check_abort(make_engine)


def test_priorities():
    conformance.check_priorities(make_engine)


def test_one_bad_request_is_its_own_error():
    conformance.check_one_bad_request_is_its_own_error(make_engine)


def test_context_limit():
    conformance.check_context_limit(make_engine)


@pytest.mark.parametrize("seed", range(2))
def test_preemption(seed):
    conformance.check_preemption(make_engine, seed, BLOCKS)


def test_statistics():
    conformance.check_statistics(make_engine, BLOCKS)
