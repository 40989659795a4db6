"""`[cluster]`: the further machines of a run."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, Field, model_validator

from headway.config.section import Seconds, Section, host_port


def _port_range(value: str) -> str:
    first, _, last = value.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 1 << 16):
        raise ValueError("valid: FIRST-LAST, say 29500-29599")
    return value


class ClusterConfig(Section):
    """The further machines of a run: docs/several_machines.md. Devices there are named NODE/cuda:0."""

    address: Annotated[str, host_port("10.0.0.1:7400", optional=True)] = ""  # this machine's; "": the run has no nodes
    launcher: Literal["local", "ssh", "slurm", "ray"] = "local"  # starts the nodes' agents; local: you start them
    nodes: dict[str, str] = {}  # name -> address for the launcher; "": the name
    command: Annotated[str, Field(min_length=1)] = "headway"  # command that starts Headway on the nodes (ssh, slurm)
    key_file: str | None = None  # holds the run's key, mode 0600; unset: HEADWAY_CLUSTER_KEY; launchers make one
    encryption: Literal["none", "tls"] = "none"  # between machines, except between a trainer's ranks
    environment: dict[str, str] = {}  # variables for workers on nodes, beside their agent's
    port_range: Annotated[str, AfterValidator(_port_range)] = "29500-29599"  # for connections between nodes
    join_timeout_s: Seconds = 300.0  # limit for the nodes that the run needs to join
    # Tune: raise it where nodes are lost because the network fails for minutes
    disconnect_timeout_s: Annotated[float, Field(ge=5)] = 60.0  # shorter outages restart nothing; then a node is lost
    accounting_directory: str | None = None  # folder of buffer.db, on a local disk; unset: run.directory
    replicate_to: str | None = None  # NODE:PATH of a copy of the accounting, from which another machine can resume

    @model_validator(mode="before")
    @classmethod
    def _nodes_table(cls, raw: Any) -> Any:
        """Convert a list of names, which is short for a table of them."""
        table: dict[str, Any] = cast("dict[str, Any]", raw) if isinstance(raw, dict) else {}
        nodes = table.get("nodes")
        if not isinstance(nodes, list):
            return cast("Any", raw)
        return table | {"nodes": {str(name): "" for name in cast("list[object]", nodes)}}

    @model_validator(mode="after")
    def _complete(self) -> ClusterConfig:
        if self.nodes and not self.address:
            raise ValueError("cluster.nodes needs cluster.address: the HOST:PORT of this machine that they connect to")
        for name in self.nodes:
            if not name or "/" in name or ":" in name:
                raise ValueError(f"cluster.nodes has {name!r}: a name has no '/' and no ':'")
        if self.replicate_to is not None and not self.replicate_to.partition(":")[2]:
            raise ValueError(f"cluster.replicate_to = {self.replicate_to!r}; valid: NODE:PATH, or :PATH here")
        if self.launcher != "local" and not self.nodes:
            raise ValueError(f"cluster.launcher = {self.launcher!r} needs cluster.nodes, where it starts agents")
        return self

    @property
    def ports(self) -> range:
        first, _, last = self.port_range.partition("-")
        return range(int(first), int(last) + 1)
