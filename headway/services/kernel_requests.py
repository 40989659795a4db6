"""Requests to the kernel service: their fields and limits, what is refused, and the submission they make."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headway.generator.endpoint.fields import refused, shown
from headway.generator.endpoint.refusals import HttpError
from headway.kernels.backends import BACKENDS, device_kinds, missing_for
from headway.kernels.devices import DeviceTable
from headway.kernels.wire import SUBMISSION_FIELDS, TASK_FIELDS
from headway.records.conversations import RequestRefused
from headway.records.kernels import TOLERANCES, KernelBackend, KernelSubmission, KernelTask

_Tolerance = Annotated[float, Meta(ge=0)]
_Constant = Annotated[str, Meta(pattern=r"^[A-Z_][A-Z0-9_]{0,99}$")]
_Sizes = dict[_Constant, Annotated[int, Meta(ge=1, le=1 << 31)]]
_Operators = Annotated[tuple[Annotated[str, Meta(pattern=r"^[\w.:]{1,200}$")], ...], Meta(max_length=1000)]
_SHAPE = {"backend": f"one of {', '.join(BACKENDS)}", "shapes": "a list of objects: upper-case constant -> size"}
_NEEDED = {"original_model_src": ("Model", "get_inputs", "get_init_inputs"), "custom_model_src": ("ModelNew",)}


class EvalRequest(msgspec.Struct, kw_only=True):
    """The body of a request for ``/eval``: TritonForge's fields, the sources in base64 as well, and a task's own.
    Further fields are ignored."""

    original_model_src: str | None = None
    original_model_src_b64: str | None = None
    custom_model_src: str | None = None
    custom_model_src_b64: str | None = None
    seed_num: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 42
    num_correct_trials: Annotated[int, Meta(ge=1, le=1000)] = 5
    num_perf_trials: Annotated[int, Meta(ge=1, le=100_000)] = 100
    measure_performance: bool = True
    compare_compiled: bool = False
    preferred_device: int | str | None = None
    backend: KernelBackend | None = None
    timeout_s: Annotated[float, Meta(gt=0)] | None = None
    name: Annotated[str, Meta(max_length=200)] = ""
    level: Annotated[int, Meta(ge=0, le=1000)] = 1
    tolerances: dict[str, tuple[_Tolerance, _Tolerance]] = msgspec.field(default_factory=TOLERANCES.copy)
    shapes: Annotated[tuple[_Sizes, ...], Meta(max_length=64)] = ()
    allowed_operators: _Operators | None = None
    forbidden_operators: _Operators = ()


class KernelRequests:
    """Reads requests into submissions. A refusal names the field, its value and what is valid."""

    def __init__(self, devices: DeviceTable, timeout_s: float, max_source_bytes: int) -> None:
        """``timeout_s``: the longest that an evaluation may take; ``max_source_bytes``: of each source in UTF-8."""
        self._devices = devices
        self._timeout_s = timeout_s
        self._max_source_bytes = max_source_bytes

    def missing(self, backend: KernelBackend) -> str:
        """Say what this machine lacks for a back end; "": nothing."""
        return missing_for(backend, gpus=bool(self._devices.names(("gpu",))))

    @property
    def available(self) -> list[KernelBackend]:
        """The back ends that this machine has; a request that names none gets the first."""
        return [name for name in BACKENDS if not self.missing(name)]

    def submission(self, body: Mapping[str, Any]) -> tuple[KernelSubmission, str]:
        """The submission, and the device that it prefers or "". Raises RequestRefused (400) and HttpError 413."""
        asked = _converted(body)
        asked.backend = backend = asked.backend or (self.available or BACKENDS)[0]
        if missing := self.missing(backend):
            raise RequestRefused(f"backend = {backend!r}: not available on this machine: {missing}", param="backend")
        if asked.timeout_s is None:
            asked.timeout_s = self._timeout_s
        if asked.timeout_s > self._timeout_s:
            raise refused("timeout_s", asked.timeout_s, f"at most {self._timeout_s:g}")
        reference, candidate = self._source(body, "original_model_src"), self._source(body, "custom_model_src")
        asked.name = asked.name or f"task-{hashlib.blake2b(reference.encode(), digest_size=6).hexdigest()}"
        task = KernelTask(source=reference, **{name: getattr(asked, name) for name in TASK_FIELDS})
        settings = {own: getattr(asked, name) for name, own in SUBMISSION_FIELDS.items()}
        submission = KernelSubmission(task=task, source=candidate, **settings)
        return submission, self._preferred(asked.preferred_device, backend)

    def device_named(self, given: int | str, name: str, refusal: Callable[[str], Exception]) -> str:
        """The device with this index or name. Raises what ``refusal`` makes of the error's text."""
        known = self._devices.names()
        by_index = {str(index): device for index, device in enumerate(known)}
        if (device := by_index.get(str(given), given)) in known:
            return str(device)
        listed = ", ".join(f"{index} ({device})" for index, device in by_index.items())
        raise refusal(f"{name} = {shown(given)}: there is no such device; valid are {listed}")

    def _preferred(self, given: int | str | None, backend: KernelBackend) -> str:
        if given is None:
            return ""
        name = "preferred_device"
        device = self.device_named(given, name, lambda why: RequestRefused(why, param=name))
        fitting = self._devices.names(device_kinds(backend))
        if device not in fitting:
            raise refused(
                name, given, f"for backend = {backend!r}: {', '.join(fitting) or 'no device of this machine'}"
            )
        return device

    def _source(self, body: Mapping[str, Any], name: str) -> str:
        """A source, given as text or in base64. Raises RequestRefused and HttpError 413."""
        needed, given = _NEEDED[name], [one for one in (name, f"{name}_b64") if body.get(one) is not None]
        if len(given) != 1:
            what = "both are given" if given else "neither is given"
            raise RequestRefused(f"{name}: {what}; valid is {name} or {name}_b64, one of them", param=name)
        [name] = given
        try:
            raw = base64.b64decode(body[name], validate=True) if name.endswith("_b64") else body[name].encode()
            if len(raw) > self._max_source_bytes:
                what = f"{name}: {len(raw)} bytes; valid are at most {self._max_source_bytes}"
                raise HttpError(413, what, code="request_too_large", param=name)
            source = raw.decode()
        except UnicodeDecodeError as error:
            what = f"not UTF-8: byte {error.object[error.start]:#04x} at {error.start}; valid is UTF-8"
            raise RequestRefused(f"{name}: {what}", param=name) from None
        except ValueError as error:
            raise RequestRefused(f"{name}: not base64: {error}; valid is UTF-8 in base64", param=name) from None
        for word in needed:  # whether it is the definition, the evaluator sees
            if re.search(rf"\b{word}\b", source) is None:
                what = f"defines no {word}; valid is a module with {', '.join(needed)}"
                raise RequestRefused(f"{name}: {what}", param=name)
        return source


def _converted(body: Mapping[str, Any]) -> EvalRequest:
    try:
        return msgspec.convert(body, EvalRequest)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `")
        name = (re.findall(r"\$\.(\w+)", place) or [""])[0]
        raise refused(name, body.get(name), _SHAPE.get(name, what.removeprefix("Expected "))) from None
