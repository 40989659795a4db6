"""Divergences from a teacher's distribution: float64 golden values, gradients, bins of likeliest tokens, memory."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.trainer.streams import divergence
from headway.trainer.streams.divergence import DivergenceKind, TeacherHidden, TopLogprobs, token_divergences

KINDS: tuple[DivergenceKind, ...] = ("forward", "reverse", "jensen_shannon")
VOCABULARY, WIDTH = 13, 6


def head_of(weight_vd: Tensor) -> Any:
    return SimpleNamespace(config=SimpleNamespace(vocabulary_size=len(weight_vd)), head=lambda x_nd: x_nd @ weight_vd.T)


def drawn(seed: int, tokens: int = 7, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states and head of a student, then of a teacher, in float64."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, WIDTH), (VOCABULARY, WIDTH)) * 2
    hidden_md, head_vd, teacher_md, teacher_vd = (
        scale * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes
    )
    return hidden_md.requires_grad_(), head_vd.requires_grad_(), teacher_md, teacher_vd


def by_definition(kind: str, p_mb: Tensor, q_mb: Tensor) -> Tensor:
    def kl(a_mb: Tensor, b_mb: Tensor) -> Tensor:
        return (a_mb * (a_mb / b_mb).log()).sum(1)

    m_mb = (p_mb + q_mb) / 2
    kinds: dict[str, Callable[[], Tensor]] = {
        "forward": lambda: kl(q_mb, p_mb),
        "reverse": lambda: kl(p_mb, q_mb),
        "jensen_shannon": lambda: (kl(p_mb, m_mb) + kl(q_mb, m_mb)) / 2,
    }
    return kinds[kind]()


def binned(p_mv: Tensor, ids_mk: Tensor) -> Tensor:
    """The mass of each named id, and of all others together."""
    named_mk = p_mv.gather(1, ids_mk)
    return torch.cat([named_mk, p_mv.scatter(1, ids_mk, 0.0).sum(1, keepdim=True)], dim=1)


@pytest.mark.parametrize("top_k", [None, 1, 4, VOCABULARY - 1])
@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradient_are_the_definitions(
    monkeypatch: pytest.MonkeyPatch, kind: DivergenceKind, top_k: int | None
) -> None:
    monkeypatch.setattr(divergence, "CHUNK_LOGITS", 2 * VOCABULARY)  # four chunks of seven tokens
    hidden_md, head_vd, teacher_md, teacher_vd = drawn(3)
    weights_m = torch.linspace(-1, 2, len(hidden_md), dtype=torch.float64)
    teacher = TeacherHidden(model=head_of(teacher_vd), hidden_md=teacher_md, top_k=top_k)
    values_m = token_divergences(head_of(head_vd), hidden_md, teacher, kind, 0.7).values_m
    gradients = torch.autograd.grad((values_m * weights_m).sum(), (hidden_md, head_vd))
    p_mv, q_mv = (torch.softmax(x @ w.T / 0.7, 1) for x, w in ((hidden_md, head_vd), (teacher_md, teacher_vd)))
    if top_k is not None:
        ids_mk = q_mv.topk(top_k, 1).indices
        p_mv, q_mv = binned(p_mv, ids_mk), binned(q_mv, ids_mk)
    expected_m = by_definition(kind, p_mv, q_mv)
    expected_gradients = torch.autograd.grad((expected_m * weights_m).sum(), (hidden_md, head_vd))
    torch.testing.assert_close(values_m, expected_m, rtol=1e-10, atol=1e-12)
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


def test_values_by_hand() -> None:
    """p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2)."""
    p_v, q_v = (torch.tensor([logits], dtype=torch.float64).log() for logits in ([2.0, 1.0, 1.0], [1.0, 1.0, 2.0]))
    student = SimpleNamespace(config=SimpleNamespace(vocabulary_size=3), head=lambda x: x)
    teacher = TeacherHidden(model=student, hidden_md=q_v)  # pyright: ignore[reportArgumentType]
    values = {kind: token_divergences(student, p_v, teacher, kind, 1.0).values_m.item() for kind in KINDS}  # pyright: ignore[reportArgumentType]
    jensen_shannon = 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3)
    assert values == pytest.approx(
        {"forward": 0.25 * math.log(2), "reverse": 0.25 * math.log(2), "jensen_shannon": jensen_shannon}, rel=1e-12
    )


@pytest.mark.parametrize("kind", KINDS)
def test_all_tokens_named_equal_the_complete_distribution(kind: DivergenceKind) -> None:
    hidden_md, head_vd, teacher_md, teacher_vd = (x.detach().float().requires_grad_() for x in drawn(5))
    teacher_mv = torch.log_softmax(teacher_md @ teacher_vd.T, 1).detach()
    stored = TopLogprobs(*teacher_mv.topk(VOCABULARY, 1)[::-1])
    computed = [TeacherHidden(model=head_of(teacher_vd), hidden_md=teacher_md, top_k=k) for k in (None, VOCABULARY)]
    outcomes = []
    for teacher in (*computed, stored):
        values_m = token_divergences(head_of(head_vd), hidden_md, teacher, kind, 1.0).values_m
        outcomes.append((values_m, *torch.autograd.grad(values_m.sum(), (hidden_md, head_vd))))
    for outcome in outcomes[1:]:
        for tensor, expected in zip(outcome, outcomes[0], strict=True):
            torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_stored_and_computed_likeliest_tokens_are_equal(kind: DivergenceKind) -> None:
    hidden_md, head_vd, teacher_md, teacher_vd = drawn(8)
    logprobs_mk, ids_mk = torch.log_softmax(teacher_md @ teacher_vd.T, 1).topk(4, 1)
    stored = TopLogprobs(ids_mk, logprobs_mk)
    computed = TeacherHidden(model=head_of(teacher_vd), hidden_md=teacher_md, top_k=4)
    values = [
        token_divergences(head_of(head_vd), hidden_md, teacher, kind, 1.0).values_m for teacher in (stored, computed)
    ]
    torch.testing.assert_close(*values, rtol=1e-9, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.1, 3.0, 40.0]),
    top_k=st.sampled_from([None, 1, 5]),
    kind=st.sampled_from(KINDS),
)
def test_values_and_gradients_stay_finite_and_values_are_not_negative(
    seed: int, scale: float, top_k: int | None, kind: DivergenceKind
) -> None:
    hidden_md, head_vd, teacher_md, teacher_vd = (x.detach().float() for x in drawn(seed, scale=scale))
    hidden_md.requires_grad_()
    teacher = TeacherHidden(model=head_of(teacher_vd), hidden_md=teacher_md, top_k=top_k)
    values_m = token_divergences(head_of(head_vd), hidden_md, teacher, kind, 1.0).values_m
    values_m.sum().backward()
    assert hidden_md.grad is not None
    assert torch.isfinite(values_m).all()
    assert torch.isfinite(hidden_md.grad).all()
    logits = hidden_md.detach() @ head_vd.T, teacher_md @ teacher_vd.T
    rounding = 1e-5 + torch.finfo(torch.float32).eps * max(float(of_one.abs().max()) for of_one in logits)
    assert values_m.min() >= -rounding
    if kind == "jensen_shannon":
        assert values_m.max() <= math.log(2) + rounding


@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_equal_to_the_student_gives_nothing(kind: DivergenceKind, top_k: int | None) -> None:
    hidden_md, head_vd, _, _ = (x.detach().float() for x in drawn(2))
    hidden_md.requires_grad_()
    teacher = TeacherHidden(model=head_of(head_vd), hidden_md=hidden_md.detach(), top_k=top_k)
    values_m = token_divergences(head_of(head_vd), hidden_md, teacher, kind, 1.0).values_m
    values_m.sum().backward()
    assert hidden_md.grad is not None
    assert values_m.abs().max() <= 1e-6
    assert hidden_md.grad.abs().max() <= 1e-6


@pytest.mark.parametrize("top_k", [None, 2, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_kept_sets_renormalise_both(kind: DivergenceKind, top_k: int | None) -> None:
    hidden_md, head_vd, teacher_md, teacher_vd = drawn(9)
    kept_ids = torch.tensor([1, 4, 5, 9])
    outside_v = torch.ones(VOCABULARY, dtype=torch.bool)
    outside_v[kept_ids] = False
    kept: Any = SimpleNamespace(outside=lambda first, stop: outside_v.expand(stop - first, -1))
    teacher = TeacherHidden(model=head_of(teacher_vd), hidden_md=teacher_md, top_k=top_k)
    values_m = token_divergences(head_of(head_vd), hidden_md, teacher, kind, 1.0, kept).values_m
    (gradient,) = torch.autograd.grad(values_m.sum(), hidden_md)
    p_mv, q_mv = (torch.softmax((x @ w.T)[:, kept_ids], 1) for x, w in ((hidden_md, head_vd), (teacher_md, teacher_vd)))
    if top_k == 2:
        ids_mk = q_mv.topk(2, 1).indices
        p_mv, q_mv = binned(p_mv, ids_mk), binned(q_mv, ids_mk)
    expected_m = by_definition(kind, p_mv, q_mv)
    (expected_gradient,) = torch.autograd.grad(expected_m.sum(), hidden_md)
    torch.testing.assert_close(values_m, expected_m, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-10)


def test_no_token_has_no_divergence() -> None:
    hidden_md, head_vd, teacher_md, teacher_vd = drawn(1, tokens=0)
    teacher = TeacherHidden(model=head_of(teacher_vd), hidden_md=teacher_md)
    values_m = token_divergences(head_of(head_vd), hidden_md, teacher, "reverse", 1.0).values_m
    values_m.sum().backward()
    assert values_m.shape == (0,)
    assert head_vd.grad is not None
    assert not head_vd.grad.any()


MEASURED = """
import resource, sys, threading, time
import torch
from types import SimpleNamespace
from headway.trainer.streams.divergence import TeacherHidden, token_divergences
from headway.trainer.learner import token_logprobs

kind, top_k = sys.argv[1], int(sys.argv[2]) or None
tokens, vocabulary, width = 1536, 151_936, 64
torch.manual_seed(0)
heads = [torch.randn(vocabulary, width) * 0.05 for _ in range(2)]
student, teacher_model = (
    SimpleNamespace(config=SimpleNamespace(vocabulary_size=vocabulary), head=lambda x, w=w: x @ w.T) for w in heads
)
hidden, teacher_hidden = torch.randn(tokens, width, requires_grad=True), torch.randn(tokens, width)
targets = torch.randint(vocabulary, (tokens,))

def peak_of(loss):
    def peak(stop, peaks):
        while not stop.is_set():
            with open("/proc/self/statm") as file:
                peaks.append(int(file.read().split()[1]) * 4096)
            time.sleep(0.002)
    stop, peaks = threading.Event(), []
    watch = threading.Thread(target=peak, args=(stop, peaks))
    watch.start()
    loss().backward()
    stop.set()
    watch.join()
    return max(peaks)

plain = lambda: token_logprobs(student, hidden, targets, 1.0)[0].sum()
peak_of(plain)
without = peak_of(plain)
teacher = TeacherHidden(model=teacher_model, hidden_md=teacher_hidden, top_k=top_k)
with_teacher = peak_of(lambda: plain() + token_divergences(student, hidden, teacher, kind, 1.0).values_m.sum())
print((with_teacher - without) / (4 * 2**25))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)  # minutes of a core
@pytest.mark.parametrize(("kind", "top_k"), [("jensen_shannon", 0), ("reverse", 20)])
@pytest.mark.long
def test_memory_is_that_of_three_chunks(kind: str, top_k: int) -> None:
    """1,536 tokens at a vocabulary of 151,936, whose logits would be 7 chunks of 2^25 values."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, kind, str(top_k)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) <= 3.0
