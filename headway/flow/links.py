"""The links between a workflow's stages, as measured: items of channels, messages, and the loops that they form."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from headway.flow.worker import StageTimes, Traffic
from headway.records.plan import WorkflowEdge, WorkflowLoop

Edge = tuple[str, str]  # from stage, to stage


class StageLinks:
    """Items and messages between stages, summed over steps of ``items`` items.

    Example: in each of 10 steps "act" sends "simulate" 128 messages and gets 128 back: a loop of 128 rounds."""

    def __init__(self, *, items: int) -> None:
        self._items = items
        self._channels: Mapping[Edge, Traffic] = {}
        self._messages: defaultdict[Edge, Traffic] = defaultdict(Traffic)
        self._workers: dict[str, int] = {}
        self._steps = 0
        self._transfer_s = 0.0

    def add(self, channels: Mapping[Edge, Traffic], times: Mapping[str, Sequence[StageTimes]]) -> None:
        """Add a step. ``channels``: items of all steps so far; ``times``: of the step's workers, by stage."""
        self._channels = channels
        self._steps += 1
        for stage, worker_times in times.items():
            self._workers[stage] = len(worker_times)
            for each in worker_times:
                self._transfer_s += each.transfer_s
                for receiver, traffic in each.sent.items():
                    self._messages[stage, receiver].add(traffic.size_bytes, traffic.count)

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes of items by the seconds that their transfer took; None: there were none."""
        size_bytes = sum(traffic.size_bytes for traffic in self._channels.values())
        return size_bytes / self._transfer_s if size_bytes and self._transfer_s else None

    def has_messages(self, stage: str) -> bool:
        """Whether the stage has sent messages to another or received some."""
        return any(stage in edge and edge[0] != edge[1] for edge in self._messages)

    def graph(self, order: Sequence[str]) -> tuple[tuple[WorkflowEdge, ...], tuple[WorkflowLoop, ...]]:
        """Return edges and loops for the search of a plan. ``order``: stages, upstream first. Items and messages that
        go back are no edge, unless messages go back several times a step: then they close a loop."""
        position = {stage: index for index, stage in enumerate(order)}
        links = [(edge, traffic.size_bytes / traffic.count, 1) for edge, traffic in self._channels.items()]
        for edge, traffic in self._messages.items():
            workers = max(self._workers.get(stage, 1) for stage in edge)
            rounds = max(1, round(traffic.count / self._steps / workers))
            links.append((edge, traffic.size_bytes / (self._steps * self._items * rounds), rounds))
        links = sorted(link for link in links if set(link[0]) <= position.keys())
        downstream = {stage: {stage} for stage in order}
        edges: list[WorkflowEdge] = []
        loops: list[WorkflowLoop] = []
        # Forward links come first, in the order of their sources: `downstream` is complete for those that go back.
        for (source, to), item_bytes, rounds in sorted(
            links, key=lambda link: (position[link[0][0]] >= position[link[0][1]], position[link[0][0]])
        ):
            name = None if position[source] < position[to] else f"{source} to {to}"
            if name is None:
                for stages in downstream.values():
                    stages |= {to} if source in stages else set()
            elif rounds > 1 and source != to and source in downstream[to]:
                loops.append(WorkflowLoop(name=name, rounds=rounds))
            else:
                continue
            bytes_per_item = item_bytes if self.bytes_per_s else 0.0
            edges.append(WorkflowEdge(source=source, to=to, bytes_per_item=bytes_per_item, loop=name))
        return tuple(edges), tuple(loops)
