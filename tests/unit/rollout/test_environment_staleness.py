"""How old an environment may be that a rollout goes on in after a resume."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from played import GROUP

from headway.control.staleness import OpenGroups
from headway.orchestrator.dispatch_loop import DispatchLoop
from headway.orchestrator.parking import Parking
from headway.orchestrator.state import RunningGroup, RunState
from headway.records.control import Knobs
from headway.records.environment import EnvironmentState, NextTurn, PartialRollout, SavedEpisode
from headway.records.generation import PartialResponse
from headway.records.rollout import Group, Rollout
from headway.runtime.bounded_queue import BoundedQueue
from headway.runtime.clock import VirtualClock, run_virtual
from headway.runtime.stalls.waits import Waits

SAVED = SavedEpisode(exchanges=(), asked=NextTurn(messages=()), environment=EnvironmentState())
RESPONSE = PartialResponse(ids=(1,), logprobs=(-1.0,))


@pytest.mark.parametrize(
    ("version", "episode", "begun"),
    [
        (3, SAVED, (RESPONSE, 0, SAVED)),
        (4, SAVED, "anew"),
        (4, None, (RESPONSE, 0, None)),  # it begins anew anyway, and holds nothing then
    ],
)
def test_its_limit_holds_after_a_resume_too(version: int, episode: Any, begun: Any) -> None:
    """Parked at version 1, and a former process had completed steps since."""
    seen: dict[int, Any] = {}

    class Rollouts:
        async def generate_member(self, group: Group, member: int, parked: PartialRollout | None = None) -> Rollout:
            seen[member] = "anew" if parked is None else (parked.response, parked.resumes, parked.episode)
            return Rollout(group=group.index, member=member, prompt_ids=group.prompt_ids)

    async def main() -> tuple[Rollout, ...]:
        queue = SimpleNamespace(max_environment_staleness=2, surplus="keep", group_timeout_s=None)
        knobs = Knobs(open_groups=None, concurrent_rollouts=2, steps_per_publish=1)
        state = RunState(clock=VirtualClock(), knobs=knobs, selectable=OpenGroups(1, 2, "wait"))
        state.version = version
        run = SimpleNamespace(
            parking=Parking(cast("Any", state), cast("Any", None), cast("Any", queue)),
            rollouts=Rollouts(),
            pruning=None,
            experiment=SimpleNamespace(queue=queue),
            clock=VirtualClock(),
            state=state,
            waits=Waits(lambda: 0.0),
        )
        generated: BoundedQueue[Any] = BoundedQueue(1)
        parked = PartialRollout(
            group=GROUP.index, member=1, response=RESPONSE, resumes=0, environment_version=1, episode=episode
        )
        entry = RunningGroup(group=GROUP, unfinished=2, partials={1: parked})
        state.open_group(entry)
        await DispatchLoop(cast("Any", run), generated)._generate(entry)
        return (await generated.get())[1]

    rollouts = run_virtual(main())
    assert seen == {0: "anew", 1: begun}
    assert [rollout.failure for rollout in rollouts] == [None, None]
