"""The torch engine meets the conditions every engine must meet."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from headway.generator.engines.torch.block_pool import BLOCK_TOKENS
from headway.generator.engines.torch.engine import TorchEngine
from tests.conformance import engine as conformance

torch.set_num_threads(1)


def make_engine(*, slots: int = 4, max_context_tokens: int = 96, **options: Any) -> TorchEngine:
    model = copy.deepcopy(conformance.model_of(0))
    return TorchEngine(model, slots=slots, max_context_tokens=max_context_tokens, **options)


def make_deterministic(**options: Any) -> TorchEngine:
    return make_engine(deterministic=True, **options)


BLOCKS = conformance.Capabilities(kv_block_tokens=BLOCK_TOKENS)
MAKERS = pytest.mark.parametrize("make", [make_engine, make_deterministic])


@MAKERS
@pytest.mark.parametrize("seed", range(6))
def test_logprobs_equal_teacher_forcing_at_every_composition(make, seed):
    conformance.check_logprobs_at_every_composition(make, seed)


@MAKERS
@pytest.mark.parametrize("seed", range(2))
def test_tokens_do_not_depend_on_neighbours(make, seed):
    conformance.check_tokens_do_not_depend_on_neighbours(make, seed)


@MAKERS
@pytest.mark.parametrize("mode", ["keep", "recompute"])
@pytest.mark.parametrize("seed", range(2))
def test_updates_in_flight(make, mode, seed):
    conformance.check_updates_in_flight(make, mode, seed)


@pytest.mark.parametrize("mode", ["keep", "recompute", "abort"])
def test_update_changes_what_is_sampled(mode):
    conformance.check_update_changes_what_is_sampled(make_engine, mode)


def test_prefix_is_not_shared_across_versions():
    conformance.check_prefix_is_not_shared_across_versions(make_engine)


def test_prefix_is_not_shared_across_updates_of_one_version():
    conformance.check_prefix_is_not_shared_across_updates_of_one_version(make_engine)


def test_abort_update_parks_and_resumes():
    conformance.check_abort_update_parks_and_resumes(make_engine)


@pytest.mark.parametrize("seed", range(4))
def test_resume_equals_uninterrupted(seed):
    conformance.check_resume_equals_uninterrupted(make_engine, seed)


def test_abort():
    conformance.check_abort(make_engine)


def test_priorities():
    conformance.check_priorities(make_engine)


@MAKERS
def test_one_bad_request_is_its_own_error(make):
    conformance.check_one_bad_request_is_its_own_error(make)


def test_context_limit():
    conformance.check_context_limit(make_engine)


@pytest.mark.parametrize("seed", range(3))
def test_preemption(seed):
    conformance.check_preemption(make_engine, seed, BLOCKS)


def test_statistics():
    conformance.check_statistics(make_engine, BLOCKS)
