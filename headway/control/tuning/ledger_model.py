"""Estimates the parameters of ``queue_model`` from a ledger, that is, from the steps of a run.

Pure arithmetic over ``StepRecord``s; the records must be of one regime (``controller`` cuts its window at changes).
Sums are divided by sums, so that a long step counts for more; costs of a single event (a publish) are medians; the two
straight lines, time of a decode step by requests and time of a training step by tokens, are least squares with a prior,
because in steady state their arguments hardly vary. Parameters that the data don't determine are in ``unidentified``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

import msgspec

from headway.config.schema import Experiment
from headway.control.lengths import LengthDistribution, intraclass_correlation, length_distribution
from headway.control.summaries import bucket_middle, pooled
from headway.control.tuning.forecast import EVEN_REQUESTS, RunShape, kv_slots
from headway.control.tuning.queue_model import QueueModel, queue_shape
from headway.control.tuning.run_figures import RunFigures, figures, relative_noise, usable
from headway.records.ledger import QueueFlow, StepRecord

LEAST_STEPS = 2
_LEAST_ACCEPTANCE = 0.05
_EVEN_ON_GPU = 128.0  # by the roofline, unmeasured: bfloat16 FLOP/s over twice the bytes/s, less as the KV is read too
_EVEN_FACTOR = 2.5  # one standard deviation of these figures, as a factor
_LEAST_OTHER = 0.1  # of the time requests occupy their slots: less is within the estimate's error


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A line y = fixed + slope x through the centre of the data."""

    fixed: float
    slope: float
    share: float  # slope x mean / y mean: share of the mean y that depends on x, 0 to 1
    share_error: float  # its standard deviation, with the prior
    identified: bool  # by the data alone

    x_mean: float = 0.0

    def tilted(self, deviations: float) -> Line:
        """Return the line through the same centre with its share moved by ``deviations`` standard deviations."""
        y_mean = self.fixed + self.slope * self.x_mean
        share = min(1.0, max(0.0, self.share + deviations * self.share_error))
        slope = y_mean * share / self.x_mean if self.x_mean else 0.0
        return msgspec.structs.replace(self, fixed=y_mean * (1 - share), slope=slope, share=share)


class LedgerModel(RunFigures, frozen=True, kw_only=True):
    """Model of a run (or of one regime of it), estimated from its ledger, beside the measured figures."""

    model: QueueModel
    lengths: LengthDistribution
    noise: float  # standard error of samples_per_s, relative
    useful_share: float  # of the trained samples: advantage not 0
    decode: Line  # seconds of a decode step over the requests of one replica
    train: Line  # seconds of a training step over its tokens
    running: float  # mean requests that decoded together, one replica
    in_generation: float  # mean rollouts between admission and last token, all replicas
    straggler_wait: float  # share of the time that the trainer waited while a whole batch had finished
    preemptions_per_response: float
    unidentified: dict[str, str]  # parameter -> reason, and the assumed value

    @property
    def useful_per_s(self) -> float:
        return self.samples_per_s * self.useful_share

    def variants(self) -> list[QueueModel]:
        """Return variants of the model, each with one uncertain parameter moved by a standard deviation.

        Predictions are repeated with them to measure their uncertainty."""
        replace, models = msgspec.structs.replace, list[QueueModel]()
        for deviation in (-1.0, 1.0):
            decode, train = self.decode.tilted(deviation), self.train.tilted(deviation)
            models.append(replace(self.model, decode_fixed_s=decode.fixed, decode_request_s=decode.slope))
            models.append(replace(self.model, train_fixed_s=train.fixed, train_token_s=train.slope))
        return models


def shape_of(experiment: Experiment, yielded_replicas: int = 0, free_devices: int = 0) -> RunShape:
    """Make the model's shape from an experiment, without evaluations (they depend on the task sets)."""
    generator, queue, rollout = experiment.generator, experiment.queue, experiment.rollout
    longest = experiment.max_sequence_tokens
    return RunShape(
        groups_per_step=queue.groups_per_step,
        group_size=rollout.group_size,
        budget=queue.budget,
        overdue=queue.overdue,
        steps_per_publish=experiment.weights.steps_per_publish,
        slots=generator.slots,
        replicas=len(generator.devices),
        ranks=len(experiment.trainer.devices),
        concurrent_rollouts=experiment.concurrent_rollouts,
        kv_tokens=generator.kv_capacity_tokens or generator.slots * longest,
        max_sequence_tokens=longest,
        max_response_tokens=rollout.max_response_tokens,
        verifiers=experiment.verifier.workers,
        teachers=max(1, sum(teacher.at_once for teacher in experiment.used_teachers.values())),
        yielded_replicas=yielded_replicas,
        steps=experiment.run.steps,
        time_limit_s=experiment.run.time_limit_s,
        evaluated_samples=0,
        open_groups=experiment.open_groups,
        surplus_groups=experiment.surplus_groups,
        free_devices=free_devices,
        even_requests=even_requests(generator.devices),
    )


def even_requests(devices: Sequence[str]) -> float:
    """Return the requests at which half of a replica's decode step is assumed to be proportional to them.

    It is the prior where a ledger can't determine it."""
    return _EVEN_ON_GPU if "cuda:" in devices[0] else EVEN_REQUESTS


def as_recorded(shape: RunShape, steps: Sequence[StepRecord]) -> RunShape:
    """Return ``shape`` with the mean size of the finished groups, which an adaptive curriculum chooses for each."""
    count = sum(record.flow.finished_groups for record in steps)
    rollout_count = sum(record.production_per_s * record.step_s for record in steps)
    return msgspec.structs.replace(shape, group_size=round(rollout_count / count)) if count and rollout_count else shape


def estimate(records: Sequence[StepRecord], shape: RunShape) -> LedgerModel | None:
    """Estimate the model from ``records``; its knobs are those of the last record.

    None when fewer than two of them are usable or no response has finished in them."""
    steps = usable(records)
    response_count = sum(record.flow.responses for record in steps)
    token_count = sum(record.flow.generated_tokens for record in steps)
    measured_figures = figures(steps)
    if measured_figures is None or len(steps) < LEAST_STEPS or not response_count or not token_count:
        return None
    shape = as_recorded(shape, steps)
    seconds = sum(record.step_s for record in steps)
    lengths = ledger_lengths(steps, shape.max_response_tokens)
    decode, running = decode_line(steps, shape.even_requests)
    training_fit = training_line(steps)
    finished_groups = sum(record.flow.finished_groups for record in steps)
    acceptance = max(_LEAST_ACCEPTANCE, measured_figures.acceptance)
    prompt_tokens = sum(record.flow.prompt_tokens for record in steps) / response_count
    slots = min(shape.slots, kv_slots(shape, prompt_tokens + lengths.mean_tokens))
    in_generation = sum(record.flow.generating_s for record in steps) / seconds
    last_flow = steps[-1].flow
    awake = max(1, shape.replicas - last_flow.idle_replicas)
    environment_s = sum(record.flow.environment_s for record in steps)
    occupied_ratio, other_s = _split_occupancy(steps, slots * awake, in_generation - environment_s / seconds, running)
    decode = msgspec.structs.replace(decode, slope=decode.slope / occupied_ratio, x_mean=decode.x_mean * occupied_ratio)
    knob_values = {
        "steps_per_publish": last_flow.steps_per_publish or shape.steps_per_publish,
        "concurrent_rollouts": last_flow.concurrent_rollouts or shape.concurrent_rollouts,
        "open_groups": last_flow.open_groups or None,
        "verifiers": last_flow.verifier_workers or shape.verifiers,
    }
    model = QueueModel(
        **queue_shape(shape, slots=slots, replicas=awake, **knob_values),
        length_at=lengths.quantile,
        group_correlation=length_correlation(steps, shape.group_size),
        prompt_tokens=prompt_tokens,
        delay_s=other_s / response_count,
        environment_s=environment_s / response_count,
        decode_fixed_s=decode.fixed,
        decode_request_s=decode.slope,
        yielded_share=max(0, shape.yielded_replicas - last_flow.idle_replicas) / awake,
        train_fixed_s=training_fit.fixed,
        train_token_s=training_fit.slope,
        publish_s=_median_positive(record.publish_s for record in steps),
        apply_s=_median_positive(record.apply_s for record in steps),
        pause_s=_median_positive(record.apply_pause_s for record in steps),
        verify_response_s=sum(record.verify_s for record in steps) / response_count,
        # too long where teachers that could score several rollouts at once had fewer
        teach_response_s=shape.teachers * sum(r.teaching.busy_s for r in steps if r.teaching) / response_count,
        acceptance=acceptance,
    )
    return LedgerModel(
        **msgspec.structs.asdict(measured_figures),
        model=model,
        lengths=lengths,
        noise=relative_noise(steps, measured_figures.samples_per_s),
        useful_share=sum(record.flow.useful_samples for record in steps) / sum(record.samples for record in steps),
        decode=decode,
        train=training_fit,
        running=running,
        in_generation=in_generation,
        straggler_wait=sum(record.flow.straggler_wait_s for record in steps) / seconds,
        preemptions_per_response=sum(record.flow.preemptions for record in steps) / response_count,
        unidentified=_unidentified(decode, training_fit, running, lengths, acceptance, finished_groups),
    )


def training_s(record: StepRecord) -> float:
    """Return the seconds of a step without waits, publishing and checkpoints: compute and call overhead."""
    other_s = record.trainer_wait_s + record.publish_s + record.checkpoint_s + record.flow.update_wait_s
    return max(record.trainer_compute_s, record.step_s - other_s)


def training_line(steps: Sequence[StepRecord]) -> Line:
    """Fit the seconds of a training step over the tokens of its batch."""
    points = [(float(record.flow.trained_tokens), training_s(record)) for record in steps]
    return fit_line(points, prior_share=0.85, prior_error=0.15)


# --- straight lines --------------------------------------------------------------------------------------


def fit_line(points: Sequence[tuple[float, float]], *, prior_share: float, prior_error: float) -> Line:
    """Fit a line by least squares through the means, with a prior on its share (slope x mean / y mean).

    The share is combined with the prior of the given standard deviation by their precisions, and clamped to 0 to 1.
    Points whose residual is beyond four times the median absolute one are left out, once."""
    positive_points = [(x, y) for x, y in points if x > 0 and y > 0]
    if not positive_points:
        return Line(fixed=0.0, slope=0.0, share=0.0, share_error=0.0, identified=False)
    slope_share, share_error, x_mean, y_mean = _least_squares(positive_points)
    if share_error < math.inf:
        slope = slope_share * y_mean / x_mean
        residuals = [abs(y - y_mean - slope * (x - x_mean)) for x, y in positive_points]
        bound = 4.0 * median(residuals)
        near_points = [point for point, residual in zip(positive_points, residuals, strict=True) if residual <= bound]
        if len(near_points) >= max(3, len(positive_points) // 2):
            slope_share, share_error, x_mean, y_mean = _least_squares(near_points)
    identified = share_error < prior_error / 2
    data_weight = 0.0 if share_error == math.inf else prior_error**2 / (prior_error**2 + share_error**2)
    combined_share = min(1.0, max(0.0, data_weight * slope_share + (1 - data_weight) * prior_share))
    return Line(
        fixed=y_mean * (1 - combined_share),
        slope=y_mean * combined_share / x_mean,
        share=combined_share,
        share_error=prior_error * math.sqrt(1 - data_weight),
        identified=identified,
        x_mean=x_mean,
    )


def _least_squares(points: Sequence[tuple[float, float]]) -> tuple[float, float, float, float]:
    """Return (share, its standard error, mean x, mean y); the error is infinite where x doesn't vary."""
    point_count = len(points)
    x_mean, y_mean = sum(x for x, _ in points) / point_count, sum(y for _, y in points) / point_count
    x_squares = sum((x - x_mean) ** 2 for x, _ in points)
    if point_count < 4 or x_squares <= (1e-3 * x_mean) ** 2 * point_count:
        return 0.0, math.inf, x_mean, y_mean
    slope = sum((x - x_mean) * (y - y_mean) for x, y in points) / x_squares
    residual_squares = sum((y - y_mean - slope * (x - x_mean)) ** 2 for x, y in points)
    slope_error = math.sqrt(residual_squares / (point_count - 2) / x_squares)
    return slope * x_mean / y_mean, slope_error * x_mean / y_mean, x_mean, y_mean


def decode_line(steps: Sequence[StepRecord], even: float = EVEN_REQUESTS) -> tuple[Line, float]:
    """Return (line of a decode step's seconds over the requests of one replica, mean requests).

    The data are the engines' counters where they count decode steps: prefills are then part of a step. Else they are
    the rollouts' times between two tokens, less the time in which nothing was generated. A step reads the weights once
    and computes for each request: with n of them a share n / (n + ``even``) is proportional to them, which is the prior
    (Williams, Waterman and Patterson 2009: the roofline's two limits, added up).
    """
    points = [point for r in steps if (point := decode_point(r)) is not None]
    if not points:
        return Line(fixed=0.0, slope=0.0, share=0.0, share_error=0.0, identified=False), 0.0
    busy_s = sum(r.flow.generator_busy_s for r in steps)
    mean_requests = sum(p[0] * r.flow.generator_busy_s for r in steps if (p := decode_point(r)) is not None) / busy_s
    prior_share = mean_requests / (mean_requests + even)
    prior_error = max(0.05, math.log(_EVEN_FACTOR) * prior_share * (1 - prior_share))
    return fit_line(points, prior_share=prior_share, prior_error=prior_error), mean_requests


def decode_point(record: StepRecord) -> tuple[float, float] | None:
    """Return (requests of one replica, seconds of its decode step), means over one training step; None: unmeasured."""
    flow = record.flow
    if not flow.generated_tokens or flow.generator_busy_s <= 0:
        return None
    if flow.decode_steps:
        return flow.generated_tokens / flow.decode_steps, flow.generator_busy_s / flow.decode_steps
    if not flow.decode_tokens:
        return None
    with_work_s = flow.generator_s * (1.0 - record.generator_wait_ratio)
    active_share = min(1.0, flow.generator_busy_s / with_work_s) if with_work_s > 0 else 1.0
    token_s = _decode_s(flow) / flow.decode_tokens * active_share
    return flow.generated_tokens * token_s / flow.generator_busy_s, token_s


def _decode_s(flow: QueueFlow) -> float:
    """Return the seconds between tokens, summed over rollouts, without the tools between turns."""
    return max(0.0, flow.decode_s - flow.environment_s)


def _split_occupancy(steps: Sequence[StepRecord], slots: int, in_engines: float, running: float) -> tuple[float, float]:
    """Split the occupied slots into decoding and other use, in request-seconds while the generator computed.

    Returns (occupied over decoding, other use). Other use is prefills outside of decode steps, and anything else before
    the first token. All slots are occupied when as many rollouts are in the engines. Decoding follows from the engines
    (requests x time) and from the rollouts (tokens x time between two); the larger figure is taken, so that other use
    is rather under- than overestimated.
    """
    busy_s = sum(r.flow.generator_busy_s for r in steps)
    with_work_s = sum(r.flow.generator_s * (1.0 - r.generator_wait_ratio) for r in steps)
    active_share = min(1.0, busy_s / with_work_s) if with_work_s > 0 else 1.0
    tokens, timed_tokens = sum(r.flow.generated_tokens for r in steps), sum(r.flow.decode_tokens for r in steps)
    token_s = sum(_decode_s(r.flow) for r in steps) / timed_tokens if timed_tokens else 0.0
    decoding_s = max(running * busy_s, tokens * token_s * active_share)
    held_s = min(in_engines, slots) * sum(r.step_s for r in steps) * active_share
    other_s = held_s - decoding_s if held_s - decoding_s > _LEAST_OTHER * held_s else 0.0
    return (decoding_s + other_s) / decoding_s if decoding_s else 1.0, other_s


# --- the rest --------------------------------------------------------------------------------------------


def ledger_lengths(steps: Sequence[StepRecord], limit_tokens: int) -> LengthDistribution:
    """Estimate the lengths of finished responses from the middle of each histogram bucket, scaled to the exact mean."""
    step_lengths = [record.lengths for record in steps if record.lengths]
    counts = {bucket_middle(end): count for end, count in pooled(summary.histogram for summary in step_lengths).items()}
    tokens = sum(summary.mean * summary.responses for summary in step_lengths)
    rough_tokens = sum(middle * count for middle, count in counts.items())
    length_factor = tokens / rough_tokens if rough_tokens else 1.0
    ended = ((max(1, round(middle * length_factor)), True) for middle, count in counts.items() for _ in range(count))
    return length_distribution(ended, limit_tokens)


def length_correlation(steps: Sequence[StepRecord], group_size: float) -> float:
    """Return the intraclass correlation of log lengths inside a group, 0 to 1."""
    group_count = sum(r.flow.finished_groups for r in steps if r.flow.length_variance_within > 0)
    if group_size < 2 or not group_count:
        return 0.0
    between_variance = sum(r.flow.length_variance_between * r.flow.finished_groups for r in steps) / group_count
    within_variance = sum(r.flow.length_variance_within * r.flow.finished_groups for r in steps) / group_count
    return min(0.99, intraclass_correlation(between_variance, within_variance, group_size))


def _median_positive(values: Iterable[float]) -> float:
    """Return the median of the positive values, that is, of the events that happened; 0.0 without any."""
    positive_values = [seconds for seconds in values if seconds > 0]
    return median(positive_values) if positive_values else 0.0


def _unidentified(
    decode: Line, train: Line, running: float, lengths: LengthDistribution, acceptance: float, finished: int
) -> dict[str, str]:
    reasons: dict[str, str] = {}
    if not decode.identified:
        reasons["decode step"] = (
            f"the generator always decoded about {running:.0f} requests: how its step time depends on their "
            f"number is unknown; {decode.share:.0%} ± {decode.share_error:.0%} of it is assumed to grow with them"
        )
    if not train.identified:
        reasons["training step"] = (
            f"batches were all about as long: {train.share:.0%} ± {train.share_error:.0%} of a training step "
            "is assumed to grow with its tokens"
        )
    if finished and acceptance <= _LEAST_ACCEPTANCE:
        reasons["acceptance"] = f"(almost) no group was accepted: {_LEAST_ACCEPTANCE:.0%} is taken"
    if lengths.finished < 100:
        reasons["lengths"] = f"only {lengths.finished} responses finished: their tail is not known"
    reasons["interference"] = "the rates include what the two sides cost each other"
    return reasons
