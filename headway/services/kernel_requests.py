"""Requests to the kernel service: their fields and limits, what is refused, and the submission they make."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
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
_Constant = Annotated[str, Meta(pattern=r"^[A-Za-z_]\w{0,99}(\[\d{1,3}\])?$")]  # N; SHAPE[0]: a part of one
_Sizes = dict[_Constant, Annotated[int, Meta(ge=1, le=1 << 31)]]
_Operators = Annotated[tuple[Annotated[str, Meta(pattern=r"^[\w.:]{1,200}$")], ...], Meta(max_length=1000)]
_VALID = {  # where msgspec's words are no help
    "backend": f"one of {', '.join(BACKENDS)}",
    "shapes": "a list of objects: constant -> size",
    "original_model_src_b64": "UTF-8 in base64",
    "custom_model_src_b64": "UTF-8 in base64",
}
_NEEDED = {"original_model_src": ("Model", "get_inputs", "get_init_inputs"), "custom_model_src": ("ModelNew",)}


class EvalRequest(msgspec.Struct, kw_only=True):
    """The body of a request for ``/eval``: TritonForge's fields, the sources in base64 as well, and a task's own.
    Further fields are ignored."""

    original_model_src: str | None = None
    original_model_src_b64: bytes | None = None
    custom_model_src: str | None = None
    custom_model_src_b64: bytes | None = None
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

    def submission(self, body: Mapping[str, Any]) -> KernelSubmission:
        """The submission, with the device that it prefers. Raises RequestRefused (400) and HttpError."""
        asked = _converted(body)
        asked.backend = backend = asked.backend or (self.available or BACKENDS)[0]
        if missing := self.missing(backend):
            raise RequestRefused(f"backend = {backend!r}: not available on this machine: {missing}", param="backend")
        if asked.timeout_s is None:
            asked.timeout_s = self._timeout_s
        if asked.timeout_s > self._timeout_s:
            raise refused("timeout_s", asked.timeout_s, f"at most {self._timeout_s:g}")
        reference, candidate = self._source(asked, "original_model_src"), self._source(asked, "custom_model_src")
        asked.name = asked.name or f"task-{hashlib.blake2b(reference.encode(), digest_size=6).hexdigest()}"
        task = KernelTask(source=reference, **{name: getattr(asked, name) for name in TASK_FIELDS})
        settings = {own: getattr(asked, name) for name, own in SUBMISSION_FIELDS.items()}
        device = self._preferred(asked.preferred_device, backend)
        return KernelSubmission(task=task, source=candidate, device=device, **settings)

    def device_named(self, name: str, given: int | str, *, status: int = 400) -> str:
        """The device with this index or name. ``name``: of the field. Raises HttpError."""
        known = self._devices.names()
        by_index = {str(index): device for index, device in enumerate(known)}
        if (device := by_index.get(str(given), given)) in known:
            return str(device)
        listed = ", ".join(f"{index} ({device})" for index, device in by_index.items())
        text, code = f"{name} = {shown(given)}: there is no such device; valid are {listed}", {404: "no_device"}
        raise HttpError(status, text, code=code.get(status), param=name)

    def _preferred(self, given: int | str | None, backend: KernelBackend) -> str:
        if given is None:
            return ""
        device, fitting = self.device_named("preferred_device", given), self._devices.names(device_kinds(backend))
        if device not in fitting:
            valid = f"for backend = {backend!r}: {', '.join(fitting) or 'no device of this machine'}"
            raise refused("preferred_device", given, valid)
        return device

    def _source(self, asked: EvalRequest, name: str) -> str:
        """A source, given as text or in base64. Raises RequestRefused and HttpError 413."""
        needed, text, coded = _NEEDED[name], getattr(asked, name), getattr(asked, f"{name}_b64")
        if (text is None) == (coded is None):
            what = "neither is given" if text is None else "both are given"
            raise RequestRefused(f"{name}: {what}; valid is {name} or {name}_b64, one of them", param=name)
        name, raw = (f"{name}_b64", coded) if text is None else (name, text.encode(errors="surrogatepass"))
        if len(raw) > self._max_source_bytes:
            what = f"{name}: {len(raw)} bytes; valid are at most {self._max_source_bytes}"
            raise HttpError(413, what, code="request_too_large", param=name)
        try:
            source = raw.decode()
        except UnicodeDecodeError as error:
            what = f"not UTF-8: byte {error.object[error.start]:#04x} at {error.start}; valid is UTF-8"
            raise RequestRefused(f"{name}: {what}", param=name) from None
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
        raise refused(name, body.get(name), _VALID.get(name, what.removeprefix("Expected "))) from None
