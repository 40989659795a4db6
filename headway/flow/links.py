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
        go back are no edge, unless the messages go back several times a step: then they close a loop."""
        position = {stage: index for index, stage in enumerate(order)}
        edges: list[WorkflowEdge] = []
        loops: list[WorkflowLoop] = []
        has_rate = self.bytes_per_s is not None

        def add(edge: Edge, item_bytes: float, loop: str | None = None) -> None:
            bytes_per_item = item_bytes if has_rate else 0.0
            edges.append(WorkflowEdge(source=edge[0], to=edge[1], bytes_per_item=bytes_per_item, loop=loop))

        known = [{edge for edge in links if set(edge) <= position.keys()} for links in (self._channels, self._messages)]
        forward = [[edge for edge in links if position[edge[0]] < position[edge[1]]] for links in known]
        for edge in sorted(forward[0]):
            add(edge, self._channels[edge].size_bytes / self._channels[edge].count)
        for edge in sorted(forward[1]):
            add(edge, self._message_bytes(edge))
        ordered_edges = sorted({*forward[0], *forward[1]}, key=lambda edge: position[edge[0]])
        for source, to in sorted(known[1]):
            downstream = {to}
            for edge in ordered_edges:
                downstream |= {edge[1]} if edge[0] in downstream else set()
            if position[to] < position[source] and source in downstream and (rounds := self._rounds((source, to))) > 1:
                name = f"{source} to {to}"
                add((source, to), self._message_bytes((source, to)), name)
                loops.append(WorkflowLoop(name=name, rounds=rounds))
        return tuple(edges), tuple(loops)

    def _rounds(self, edge: Edge) -> int:
        """Messages of a step from each worker, or to each where those are more."""
        workers = max(self._workers.get(stage, 1) for stage in edge)
        return max(1, round(self._messages[edge].count / self._steps / workers))

    def _message_bytes(self, edge: Edge) -> float:
        return self._messages[edge].size_bytes / (self._steps * self._items * self._rounds(edge))
