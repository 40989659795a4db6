"""Every hook, default or a user's, passes the contract or fails it with a message that says what to mend."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headway.algorithms.advantages import ADVANTAGES, KEY
from headway.algorithms.groups.hook_conformance import CASES, advantage_violations, hook_violations, synthetic_group
from headway.algorithms.groups.hooks import ARGUMENTS, DEFAULTS, GroupHooks, resolve_hook, resolve_hooks
from headway.config.hooks import HOOKS, HooksConfig
from headway.records.errors import ConfigurationError
from headway.records.task import Task
from headway.runtime.hooks import Hook
from headway.trainer.loss_conformance import loss_violations, main
from headway.trainer.losses import LOSSES, TokenLoss, ppo_clip, ratio, resolve

TASK = Task(task_id="0", prompt="1+1=", answer="2")


def hooks_with(short: str, function: Callable[..., Any]) -> GroupHooks:
    """The defaults, but for one."""
    chosen = {name: resolve_hook(name, HOOKS[name][0]) for name in ARGUMENTS}
    return GroupHooks(
        **chosen | {short: Hook(key=f"hooks.{short}", name=f"mine:{function.__name__}", function=function)}
    )


def test_every_default_keeps_its_contract() -> None:
    assert {short: tuple(named) for short, named in DEFAULTS.items()} == {short: HOOKS[short] for short in ARGUMENTS}
    for short, named in DEFAULTS.items():
        for name in named:
            assert list(hook_violations(resolve_hooks(HooksConfig(**{short: name})), TASK)) == []
    for name, rule in ADVANTAGES.items():
        assert list(advantage_violations(Hook(key=KEY, name=name, function=rule))) == []
    for name in LOSSES:
        assert list(loss_violations(resolve(name))) == []


# --- a user's own that keep it ----------------------------------------------------------------------------


def half_reward(group, rollout, response):
    return np.float32(rollout.reward / 2)


def refuse_equal(group, rollouts):
    return len({r.reward for r in rollouts if r.valid}) > 1, "equal"


def only_positive(group, rollout):
    return bool(rollout.reward >= 0), "negative reward"


def to_unit(group, rollouts, rewards):
    rewards -= rewards.min()  # a copy: nobody else sees it
    return rewards / max(rewards.max(), 1.0)


def best_again(group, rollouts):
    best = max(rollouts, key=lambda r: r.reward)
    return [best.member] * (group.size - len(rollouts))


@pytest.mark.parametrize(
    ("short", "function"),
    [
        ("reward", half_reward),
        ("group_meta", lambda group, rollouts: {"members": np.int64(len(rollouts))}),
        ("is_valid_group", refuse_equal),
        ("filter_item", only_positive),
        ("normalize_group", to_unit),
        ("normalize_group", lambda group, rollouts, rewards: rewards.tolist()),
        ("pad_group", best_again),
        ("pad_group", lambda group, rollouts: ()),
    ],
)
def test_own_functions_keep_it(short: str, function: Callable[..., Any]) -> None:
    assert list(hook_violations(hooks_with(short, function), TASK)) == []


# --- and that break it -------------------------------------------------------------------------------------

state: list[int] = []


def fickle(group, rollout):
    state.append(0)
    return len(state) % 2 == 0


def changes(group, rollouts):
    rollouts[0].verdict["seen"] = True
    return True


def reject_above_one(group, rollout):
    raise ValueError(f"reward {rollout.reward} is above 1")


@pytest.mark.parametrize(
    ("short", "function", "what"),
    [
        ("reward", lambda g, r, text: "good", "returned 'good' for rollout 0-0: a finite number is needed"),
        ("reward", lambda g, r, text: r.reward / 0.0 if r.reward else 0.0, "raised ZeroDivisionError"),
        ("reward", lambda g, r, text: float("nan"), "returned nan for rollout 0-0"),
        ("group_meta", lambda g, rollouts: [1.0], r"returned \[1.0\]: a dictionary of numbers is needed"),
        ("group_meta", lambda g, rollouts: {"best": None}, "returned 'best': None in its dictionary"),
        ("group_meta", lambda g, rollouts: {"best": max(r.reward for r in rollouts if r.valid)}, "no group left"),
        ("is_valid_group", lambda g, rollouts: None, "returned None: valid: True, False or"),
        ("is_valid_group", lambda g, rollouts: (True, "fine", 3), r"returned \(True, 'fine', 3\): valid: True,"),
        ("is_valid_group", changes, "changed its arguments"),
        ("filter_item", lambda g, r: 1, "returned 1: valid: True, False or"),
        ("filter_item", lambda g, r: (False, 7), r"returned \(False, 7\)"),
        (
            "filter_item",
            reject_above_one,
            r"raised ValueError: reward 2.3 is above 1 \(test_hooks_conformance.py, line",
        ),
        ("filter_item", fickle, "then .* of the same arguments: a replay would train on something else"),
        ("normalize_group", lambda g, rs, x: x[:1], r"returned shape \[1\] for 4 rewards: one number for each"),
        ("normalize_group", lambda g, rs, x: (x - x.mean()) / x.std(), "not all finite.*case: rewards all equal"),
        ("normalize_group", lambda g, rs, x: None, "not all finite|numbers are required|one number for each"),
        ("pad_group", lambda g, rs: [0] * g.size, "returned 4 members to fill 0 slots of a group of 4"),
        ("pad_group", lambda g, rs: [99] * (g.size - len(rs)), r"returned member 99: valid: \[0, 2\]"),
        ("pad_group", lambda g, rs: [1.0] * (g.size - len(rs)), r"returned member 1.0: valid:"),
        ("pad_group", lambda g, rs: "0", "returned '0': a list of members is needed"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_what_breaks_it_is_named(short: str, function: Callable[..., Any], what: str) -> None:
    [found] = hook_violations(hooks_with(short, function), TASK)
    assert found.startswith(f"hooks.{short} = 'mine:{function.__name__}' ")
    assert "(case: " in found
    assert re.search(what, found), found


def test_a_padded_member_that_left_is_refused() -> None:
    finished = synthetic_group(TASK, CASES["two failed members"])
    hooks = hooks_with("pad_group", lambda group, rollouts: [1])
    with pytest.raises(Exception, match=r"returned member 1: valid: \[0, 2\]"):
        hooks.copies(finished.group, finished.valid)


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("filter_item", "no_such", "valid: all or module:function"),
        ("pad_group", "repeated", "valid: none, repeat or module:function"),
    ],
)
def test_unknown_names(key: str, value: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        HooksConfig(**{key: value})


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("nowhere:f", "hooks.filter_item = 'nowhere:f': nowhere can't be imported"),
        ("json:lods", "json has no 'lods'; did you mean 'loads'"),
        ("asyncio:sleep", "must be a plain function"),
        ("os.path:splitext", r"is called as splitext\(group, rollout\), and takes \(p\): too many positional"),
    ],
)
def test_a_function_that_cannot_be_called_so_is_refused_at_the_start(name: str, what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        resolve_hook("filter_item", name)


@pytest.mark.parametrize(
    ("rule", "what"),
    [
        (lambda rewards: (rewards - rewards.mean()) / rewards.std(), "not all finite.*case: rewards all equal"),
        (lambda rewards: rewards - rewards[1], "raised IndexError.*case: one member"),
        (lambda rewards: rewards + np.random.default_rng().normal(), "of the same arguments"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_own_advantages(rule: Callable[..., Any], what: str) -> None:
    [found] = advantage_violations(Hook(key=KEY, name="mine:rule", function=rule))
    assert re.search(what, found), found


# --- losses ------------------------------------------------------------------------------------------------


def batch_centred(terms, settings):
    """A baseline over the micro-batch: what a sample gets depends on who is packed beside it."""
    found = ppo_clip(terms, settings)
    return TokenLoss(loss_m=found.loss_m - found.loss_m.mean(), clipped_m=found.clipped_m)


def unbounded(terms, settings):
    ratio_m = torch.exp(terms.logprobs_m - terms.behaviour_m)
    return TokenLoss(loss_m=-ratio_m * terms.advantages_m, clipped_m=torch.zeros_like(ratio_m, dtype=torch.bool))


def detached(terms, settings):
    ratio_m = ratio(terms.logprobs_m, terms.behaviour_m).detach()
    return TokenLoss(loss_m=-ratio_m * terms.advantages_m, clipped_m=torch.zeros_like(ratio_m, dtype=torch.bool))


def mean(terms, settings):
    found = ppo_clip(terms, settings)
    return TokenLoss(loss_m=found.loss_m.mean(), clipped_m=found.clipped_m)


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (batch_centred, "another loss with others beside it"),
        (unbounded, "isn't finite for log-ratios of 500"),
        (detached, "has no gradient"),
        (mean, "one value per token is needed"),
    ],
)
def test_own_losses(function: Callable[..., Any], what: str) -> None:
    found = list(loss_violations(Hook(key="algorithm.loss", name="mine:loss", function=function)))
    assert what in found[0], found
    assert found[0].startswith("algorithm.loss = 'mine:loss' ")


def test_the_command_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    assert main(["gspo", "ppo_clip"]) == 0
    assert capsys.readouterr().out == "gspo, ppo_clip: the contract is kept\n"
    assert main(["test_hooks_conformance:detached"]) == 1
    assert "has no gradient" in capsys.readouterr().out
    assert main(["gpso"]) == 2
    assert "did you mean 'gspo'?" in capsys.readouterr().err
