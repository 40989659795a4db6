"""Lines of a run's ledger (``RUN/ledger.jsonl``): one tagged JSON object a line."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec

from headway.records.curriculum import CurriculumStep
from headway.records.generation import EngineLoad, RouterStatistics
from headway.records.node import NodeConditions
from headway.records.sandbox_statistics import SandboxStatistics


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """A summary of one quantity over the samples of a step."""

    mean: float = 0.0
    max: float = 0.0
    histogram: dict[str, int] = {}  # value -> count


class SourceScore(msgspec.Struct, frozen=True, kw_only=True):
    """How well the tasks of one source are solved."""

    tasks: int  # with at least one valid attempt
    samples: int  # valid attempts
    solve_rate: float
    standard_error: float  # over tasks


class PassAt(msgspec.Struct, frozen=True, kw_only=True):
    """How often the best of k attempts solves a task."""

    groups: int  # with at least k valid attempts: those it is the mean over
    value: float
    standard_error: float  # over groups; 0 for fewer than two


class TokenStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Section of a step: tokens that were sampled and trained."""

    generated_per_s: float = 0.0
    trained_per_s: float = 0.0  # that carry loss
    computed_share: float = 1.0  # tokens the trainer computed / tokens of its samples: prompts shared by a group
    staleness: Distribution = Distribution()  # of those trained
    ended: dict[str, int] = {}  # ending -> response tokens of such rollouts: wasted, but for the trained ones


class WeightsStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Section of a step: the newest version applied since the last one. Trainer and engines stood still for the step's
    ``publish_s`` and ``apply_pause_s``; these parts are work, mostly beside theirs."""

    transport: str = "shared memory"  # the path from the publisher on its machine; or "cuda ipc"
    size_bytes: int = 0  # of the payload
    snapshot_s: float = 0.0  # publishing: the weights couldn't change
    copy_s: float = 0.0  # ... from the snapshot to the host, if it was in a device's memory
    hash_s: float = 0.0  # ... the table of hashes and its root
    encode_s: float = 0.0  # ... what has changed since the version before it
    delta_bytes: int = 0  # ... of that, for other nodes; 0: they get the whole version
    fetch_s: float = 0.0  # applying, slowest replica: copying
    check_s: float = 0.0  # ... verifying


class LengthStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Section of a step: response lengths, tokens, of the groups that finished since the last step."""

    mean: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    max: int = 0
    histogram: dict[str, int] = {}  # last length of a bucket -> responses; four buckets for every doubling
    truncated_share: float = 0.0

    @property
    def responses(self) -> int:
        """Number of responses that these are the lengths of."""
        return sum(self.histogram.values())


class LengthBiasStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Section of a step: length bias over all closed cohorts; KS: the largest difference of two distributions."""

    ks: float = 0.0  # trained against all completed lengths
    scheduling_ks: float = 0.0  # overdue and discarded rollouts: all lengths reached with and without them
    filter_ks: float = 0.0  # filtered rollouts, likewise
    pruning_ks: float = 0.0  # pruned rollouts, dropped or trained as they stood, likewise
    censored_share: float = 0.0  # share of admitted rollouts in cohorts not closed yet
    cut_share: float = 0.0  # share of the closed cohorts' rollouts that ended before their length was known


class RewardStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Section of a step: learning signal of the groups that finished since the last step, filtered ones included."""

    mean: float = 0.0
    std: float = 0.0
    solve_rate: float = 0.0
    solve_rate_histogram: list[int] = []  # groups by share solved, 11 bins: 0, (0, .1], ... (.7, .8], (.8, 1), 1
    pass_at: dict[str, PassAt] = {}  # k -> pass@k, for each k that a group has enough valid attempts for
    zero_variance_share: float = 0.0
    by_source: dict[str, SourceScore] = {}  # label of a task source -> its share of the above; {}: a single source


class JudgeStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Section of a step: use of language models that judged the groups that finished since the last step."""

    tokens: int = 0  # read and written
    cost: float = 0.0  # in the currency of verifier.parameters.price_*


class TeacherStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Section of a step: the teachers that scored rollouts since the last step."""

    rollouts: int = 0  # scored
    failures: int = 0  # rollouts that failed because a teacher did
    tokens: int = 0  # read, for failed rollouts, retries and probes too
    cost: float = 0.0  # of these, in the currency of teachers.NAME.address.price_prompt
    busy_s: float = 0.0  # in which a group was being scored


class AgentStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Section of a step: model calls of agents whose groups finished since the last step."""

    calls: int = 0  # that were answered
    branches: int = 0  # sequences that didn't extend their rollout's trunk
    rewritten: int = 0  # ... because the chat template renders an answer otherwise than it was sampled
    abandoned_tokens: int = 0  # sampled for calls whose client left, or that failed: no loss


class KernelScores(msgspec.Struct, frozen=True, kw_only=True):
    """Section of a step: scores of the kernels that its groups have written, of each answer that was judged."""

    evaluations: int = 0
    repeated: int = 0  # answered from an equal source's evaluation
    rewards: dict[str, int] = {}  # raw, rounded down to tenths -> count
    faults: dict[str, int] = {}  # class, "wrong" (outputs), "cheat" -> count
    compiled_at: dict[str, PassAt] = {}  # k -> pass@k: the rollout's best answer compiles ...
    correct_at: dict[str, PassAt] = {}  # ... or is correct
    log_speedups: dict[str, int] = {}  # natural logarithm of a correct answer's speed-up, in tenths -> count
    wait_s: float = 0.0  # summed: for a device of the evaluators
    busy_s: float = 0.0  # ... compiling, checking, timing


class KernelShare(msgspec.Struct, frozen=True, kw_only=True):
    """Share of an evaluation's rollouts whose best kernel compiles, is correct, or is faster than its reference."""

    value: float  # mean over tasks
    interval: tuple[float, float]  # 95 %, over tasks
    count: int  # rollouts of which it is true ...
    rollouts: int  # ... of so many that didn't fail
    untimed: int = 0  # of "faster": correct, but without a speed-up, so counted as no faster


class EpisodeStatistics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Section of a step, of policies in simulators: returns of the episodes that ended, and what the simulators did.

    Returns, lengths and successes are of the last 100 episodes that ended in trained fragments; intervals: 95 %,
    bootstrapped over episodes. nan, (): no episode has ended, or the simulator doesn't report successes."""

    episodes: int = 0  # that ended in this step's fragments
    cut: int = 0  # episodes that were lost with their lanes since the run began: they count as no return
    return_mean: float = math.nan
    return_interval: tuple[float, ...] = ()  # low and high
    success_rate: float = math.nan
    success_interval: tuple[float, ...] = ()
    length_mean: float = math.nan  # steps of an episode
    transitions: int = 0  # of this step's fragments: environment steps that were trained
    steps_per_s: float = 0.0  # of these, over the whole step
    simulate_s: float = 0.0  # summed over blocks: in which the fragments were collected
    worker_bytes: int = 0  # largest resident memory of a simulators' worker
    learner_bytes: int = 0  # resident memory of the learner
    constructions: int = 0  # simulator objects since the run began
    rebuilt: int = 0  # blocks since the run began, after their worker had died or the run was resumed
    admitted: int = 0  # fragments since the run began, those that begin behind this step included


class QueueFlow(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over one step from which the parameters of its queue are estimated (``control/tuning/ledger_model.py``).
    "Finished" is what finished since the step before, whenever it began."""

    open_groups: int = 0  # knobs in effect at the end of the step (records/control.py); 0: all that admission allows
    concurrent_rollouts: int = 0
    steps_per_publish: int = 0
    idle_replicas: int = 0  # replicas that take no requests
    verifier_workers: int = 0
    configured_concurrent_rollouts: int = 0  # as the experiment sets them
    configured_steps_per_publish: int = 0
    configured_verifier_workers: int = 0
    useful_samples: int = 0  # trained ones with a gradient: by an advantage that isn't 0, or by more than reward
    trained_tokens: int = 0  # of the batch, prompts included
    finished_groups: int = 0  # verified, those that were then filtered or failed included
    accepted_groups: int = 0  # ... that entered the buffer
    responses: int = 0  # of the finished groups, without failure
    prompt_tokens: int = 0  # of those responses, each with its own prompt
    generating_s: float = 0.0  # summed over them: from admission to the last token
    decode_s: float = 0.0  # ... from the first token, as the orchestrator saw it, to the last
    decode_tokens: int = 0  # ... that came after the first
    environment_s: float = 0.0  # ... of that time, what passed between turns: tools and sandboxes
    environment_hop_s: float = 0.0  # ... of that, between processes: no environment worked or was waited for
    length_variance_between: float = 0.0  # mean squares of the logarithm of their lengths: between groups ...
    length_variance_within: float = 0.0  # ... and within them
    straggler_wait_s: float = 0.0  # of trainer_wait_s: a whole batch had finished, but older groups were due
    device_wait_s: float = 0.0  # of trainer_wait_s: until replicas had yielded its devices
    update_wait_s: float = 0.0  # the trainer waited until the version before was applied everywhere
    generated_tokens: int = 0  # by all replicas
    generator_busy_s: float = 0.0  # inside model calls, summed over replicas
    generator_s: float = 0.0  # of all replicas that take requests: between two readings of their counters
    decode_steps: int = 0  # of all replicas; 0: they don't count them
    preemptions: int = 0


class PrunerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of one pruner on the groups that finished since the last step (control/pruning/rules.py)."""

    rollouts: int = 0  # ended early
    dropped: int = 0  # ... of these, left their group; the others were scored as they stood, and train
    saved_tokens: float = 0.0  # response tokens that the rollouts above would still have had, as expected at their end
    audits: int = 0  # hit as well, but run to their own end
    audited_tokens: int = 0  # ... response tokens after the hit
    wrong: int = 0  # ... of these, those whose reward pruning would have changed
    reward_bias: float = 0.0  # ... mean of their reward less what pruning would have put in its place

    @property
    def wrong_rate(self) -> float:
        """Share of the audits that were wrong; 0.0 without any."""
        return self.wrong / self.audits if self.audits else 0.0

    @property
    def saving_tokens(self) -> float:
        """Response tokens saved, estimated from the audits, a random sample of the rollouts that were hit. The
        expectation when the rollouts ended, small while no audit has ended yet, counts as one more audit."""
        if not self.rollouts:
            return 0.0
        return (self.saved_tokens + self.rollouts * self.audited_tokens) / (1 + self.audits)

    @staticmethod
    def total(figures: Iterable[PrunerFigures]) -> PrunerFigures:
        """Figures of several steps or pruners as one; the bias is the mean over all audits."""
        parts = list(figures)
        audit_count = sum(part.audits for part in parts)
        return PrunerFigures(
            rollouts=sum(part.rollouts for part in parts),
            dropped=sum(part.dropped for part in parts),
            saved_tokens=sum(part.saved_tokens for part in parts),
            audits=audit_count,
            audited_tokens=sum(part.audited_tokens for part in parts),
            wrong=sum(part.wrong for part in parts),
            reward_bias=sum(part.audits * part.reward_bias for part in parts) / audit_count if audit_count else 0.0,
        )


def _always_encoded(kind: type[Any]) -> Any:
    """Make the default ``kind()`` of a field that stands in every line. msgspec leaves out a field whose value is the
    same object as its default: a measured float never is, but a count of 0 is the same object as a plain default 0."""
    return msgspec.field(default_factory=kind)


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="step", tag_field="kind"):
    """A training step: times, waits, rates, queue, staleness and endings of any kind of run, then a section for each
    subject, None where the run lacks it, or nothing of it was measured since the last step: absent, not zero.

    To add one: a struct above, a field here, which `orchestrator/step_metrics.py` fills, and the names of its numbers
    in `telemetry/metrics.py:STEP_METRICS` ("section.field")."""

    step: int  # version before the step
    version: int  # version after it
    skipped: bool = _always_encoded(bool)
    time_s: float = 0.0  # since the run (or its resume) started, at the end of the step
    step_s: float = 0.0  # duration: wait + compute + publish + the rest
    samples: int = _always_encoded(int)  # trained in this step
    groups: int = _always_encoded(int)
    demonstrations: int = 0  # trained beside the samples: no rollouts
    # rates, samples per second
    consumption_per_s: float = 0.0  # samples / (step time - wait): what the trainer would take if it never waited
    production_per_s: float = 0.0  # rollouts finished / step time
    effective_production_per_s: float = 0.0  # production x acceptance rate
    # where time went, seconds within the step
    trainer_wait_s: float = 0.0
    trainer_compute_s: float = 0.0
    publish_s: float = 0.0
    apply_s: float = 0.0  # until every replica had applied the version
    apply_pause_s: float = 0.0  # worst replica: time no token could be generated
    checkpoint_s: float = 0.0
    switch_s: float = 0.0  # on- and offloading of both sides, summed
    offload_freed_bytes: int = _always_encoded(int)
    trainer_wait_ratio: float = 0.0
    generator_wait_ratio: float = 0.0  # share of the step the replicas had nothing to do, mean over replicas
    generator_yielded_ratio: float = 0.0  # ... their devices were yielded to the trainer, which isn't waiting
    orchestrator_cpu_s: float = 0.0
    verify_s: float = 0.0  # summed over responses
    # cost
    flops_per_s: float = 0.0  # trainer model FLOP / step time
    mfu_step: float = 0.0
    mfu_compute: float = 0.0
    peak_flops_per_s: float = 0.0  # measured matmul peak of the trainer's device at its dtype
    # queue
    open_groups: int = _always_encoded(int)
    running_groups: int = _always_encoded(int)
    parked_groups: int = _always_encoded(int)
    buffered_groups: int = _always_encoded(int)
    buffer_capacity_groups: int = _always_encoded(int)
    oldest_age_s: float = 0.0  # of the buffered groups
    flow: QueueFlow = QueueFlow()  # all 0: a step whose own record was lost in a kill
    # what entered the queue, rollouts since the last step
    admitted_rollouts: int = _always_encoded(int)
    parkings: int = _always_encoded(int)  # of members, on a full batch or an update
    # staleness of what was trained
    trajectory_staleness: Distribution = Distribution()
    environment_staleness: Distribution = Distribution()  # of the environments that parked rollouts were resumed in
    # ... of trajectories, in optimiser steps: with several on one batch, the later ones use older samples
    optimizer_step_staleness: Distribution = Distribution()
    # endings of rollouts since the last step, and failures by boundary
    endings: dict[str, int] = {}
    failures: dict[str, int] = {}
    filtered: dict[str, int] = {}  # why: zero_variance, low_advantage, overlong, branches, too_few_kept, user:WHY
    metrics: dict[str, float] = {}  # from the trainer: loss, entropy, grad_norm, clip_fraction, ratio_p01/p50/p99, ...
    group_meta: dict[str, float] = {}  # means over finished groups of the numbers that hooks.group_meta returned
    # sections by subject
    engines: EngineLoad | None = None
    weights: WeightsStatistics | None = None
    replica_versions: tuple[int, ...] = ()  # that each replica has applied, in order
    router: RouterStatistics | None = None  # its counters: since the step before
    tokens: TokenStatistics | None = None
    lengths: LengthStatistics | None = None
    length_bias: LengthBiasStatistics | None = None
    rewards: RewardStatistics | None = None
    judges: JudgeStatistics | None = None
    teaching: TeacherStatistics | None = None
    agents: AgentStatistics | None = None
    sandboxes: SandboxStatistics | None = None  # counters and histograms: since the step before
    kernels: KernelScores | None = None
    curriculum: CurriculumStep | None = None
    episodes: EpisodeStatistics | None = None
    pruning: dict[str, PrunerFigures] = {}  # pruner -> its effect on the groups that finished since the last step
    nodes: tuple[NodeConditions, ...] = ()  # the run's machines as they were at the step's end, where it has several


class EvaluationRecord(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation", tag_field="kind"):
    """An evaluation, outside N (it takes no credit)."""

    split: str  # validation | test
    phase: str  # before | during | after | held (`headway eval`)
    step: int  # trainer version when it started
    first_version: int  # versions its tokens were sampled under
    last_version: int
    held: bool  # weights were held: first_version == last_version
    tasks: int
    samples: int
    solve_rate: float
    standard_error: float
    pass_at: dict[str, PassAt] = {}  # k -> pass@k over its tasks
    reward_mean: float
    length_mean: float
    failed: int = 0  # attempts beside the ``samples``; they count in no rate
    failure_cause: str = ""  # of one of the most frequent kind
    judge_tokens: int = 0  # of language models that judged it
    judge_cost: float = 0.0
    duration_s: float = 0.0
    time_s: float = 0.0
    by_source: dict[str, SourceScore] = {}  # label of a task source -> its share of the above; {}: a single source
    kernels: dict[str, KernelShare] = {}  # compiles, correct, faster; {}: no kernels were judged
    return_interval: tuple[float, ...] = ()  # 95 %, of the mean return of episodes, ``reward_mean``; (): no episodes

    @property
    def mostly_failed(self) -> bool:
        """Whether half of the attempts failed, or more: the solve rate, of the others alone, decides nothing then."""
        return self.failed >= self.samples

    @property
    def failures_text(self) -> str:
        """The failed attempts in words, say "91 of 96 attempts failed: CAUSE"; "" without any."""
        if not self.failed:
            return ""
        warning = "MOST FAILED, and count in no rate: " if self.mostly_failed else ""
        cause_suffix = f": {self.failure_cause}" if self.failure_cause else ""
        return f"{warning}{self.failed:,} of {self.failed + self.samples:,} attempts failed{cause_suffix}"


class EventRecord(msgspec.Struct, frozen=True, kw_only=True, tag="event", tag_field="kind"):
    """A single event: start, resume, a worker's death, a skipped step, a checkpoint, the end."""

    event: str
    detail: str = ""
    step: int = 0
    time_s: float = 0.0
    data: dict[str, float | int | str] = {}
    # of a death, a stall, a restart or a replay; a node that joins or gets files has ``worker`` alone
    worker: str = ""  # the worker concerned; "": none
    cause: str = ""  # exit code or signal, with the last output
    found_by: str = ""  # exit: its process ended; health: it missed its health checks; call: a call to it failed
    lost_s: float = 0.0  # seconds during which the worker did no work
    lost_samples: int = 0  # rollouts to be moved, generated or scored again; samples trained again


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """``RUN/summary.json``: written when a run ends in order, and by `report` from the ledger otherwise."""

    finished: bool = False
    ended: str = ""  # why: all steps, the target solve rate, the time limit
    steps: int = 0
    untimed_steps: int = 0  # of these, whose own records were lost: no time or rate below has them
    samples_trained: int = 0
    duration_s: float = 0.0
    solve_rate_before: float | None = None
    solve_rate_after: float | None = None
    version_after: int | None = None  # of the weights that this is the solve rate of: the best ones by validation
    failed_before: str = ""  # attempts that failed in these evaluations, in words: they count in no rate; "": none
    failed_after: str = ""
    best_version: int | None = None
    trainer_wait_ratio: float = 0.0
    generator_wait_ratio: float = 0.0
    generator_yielded_ratio: float = 0.0
    max_trajectory_staleness: int = 0
    accounting_balanced: bool = False
    length_bias_ks: float = 0.0
    consumption_per_s: float = 0.0
    production_per_s: float = 0.0
    effective_production_per_s: float = 0.0
    trained_per_s: float = 0.0
    endings: dict[str, int] = {}
    simulated: bool = False  # by `headway simulate`: no model was trained
    episodes: EpisodeStatistics | None = None  # of the last step of a policy in simulators; None: a language model
    environment_steps: int = 0  # of such a policy, trained


LedgerLine = StepRecord | EvaluationRecord | EventRecord
