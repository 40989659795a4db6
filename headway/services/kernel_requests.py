"""Validates requests to the kernel service, and converts them to submissions."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headway.generator.endpoint.errors import HttpError
from headway.generator.endpoint.fields import formatted, refused
from headway.kernels.backends import BACKENDS, device_kinds, missing_for
from headway.kernels.devices import DeviceTable
from headway.kernels.wire import SUBMISSION_FIELDS, TASK_FIELDS
from headway.records.conversations import RequestRefused
from headway.records.kernels import TOLERANCES, KernelBackend, KernelSubmission, KernelTask

_Tolerance = Annotated[float, Meta(ge=0)]
_Constant = Annotated[str, Meta(pattern=r"^[A-Za-z_]\w{0,99}(\[\d{1,3}\])?$")]  # N, or SHAPE[0] for an element
_Sizes = dict[_Constant, Annotated[int, Meta(ge=1, le=1 << 31)]]
_Operators = Annotated[tuple[Annotated[str, Meta(pattern=r"^[\w.:]{1,200}$")], ...], Meta(max_length=1000)]
_VALID_VALUES = {  # where msgspec's message doesn't help
    "backend": f"one of {', '.join(BACKENDS)}",
    "shapes": "a list of objects: constant -> size",
    "original_model_src_b64": "UTF-8 in base64",
    "custom_model_src_b64": "UTF-8 in base64",
}
_REQUIRED_NAMES = {"original_model_src": ("Model", "get_inputs", "get_init_inputs"), "custom_model_src": ("ModelNew",)}


class EvalRequest(msgspec.Struct, kw_only=True):
    """The body of a request for ``/eval``: TritonForge's fields, the sources also in base64, and fields of a kernel
    task. Other fields are ignored."""

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
    """Converts requests to submissions. A refusal names the field, its value and the valid values."""

    def __init__(self, devices: DeviceTable, timeout_s: float, max_source_bytes: int) -> None:
        """Set the limits. ``timeout_s``: of an evaluation; ``max_source_bytes``: of each source in UTF-8."""
        self._devices = devices
        self._timeout_s = timeout_s
        self._max_source_bytes = max_source_bytes

    def missing(self, backend: KernelBackend) -> str:
        """Describe what this machine lacks for a back end; "": nothing."""
        return missing_for(backend, gpus=bool(self._devices.names(("gpu",))))

    @property
    def available(self) -> list[KernelBackend]:
        """Return the back ends that this machine has; a request without a back end gets the first."""
        return [name for name in BACKENDS if not self.missing(name)]

    def submission(self, body: Mapping[str, Any]) -> KernelSubmission:
        """Convert a request's body to a submission, with its preferred device. Raises RequestRefused (400) and
        HttpError."""
        request = _convert(body)
        request.backend = backend = request.backend or (self.available or BACKENDS)[0]
        if missing := self.missing(backend):
            raise RequestRefused(f"backend = {backend!r}: not available on this machine: {missing}", param="backend")
        if request.timeout_s is None:
            request.timeout_s = self._timeout_s
        if request.timeout_s > self._timeout_s:
            raise refused("timeout_s", request.timeout_s, f"at most {self._timeout_s:g}")
        reference, candidate = self._source(request, "original_model_src"), self._source(request, "custom_model_src")
        request.name = request.name or f"task-{hashlib.blake2b(reference.encode(), digest_size=6).hexdigest()}"
        task = KernelTask(source=reference, **{name: getattr(request, name) for name in TASK_FIELDS})
        settings = {setting: getattr(request, name) for name, setting in SUBMISSION_FIELDS.items()}
        device = self._preferred(request.preferred_device, backend)
        return KernelSubmission(task=task, source=candidate, device=device, **settings)

    def device_named(self, name: str, requested: int | str, *, status: int = 400) -> str:
        """Return the device with the requested index or name. ``name``: of the field. Raises HttpError."""
        device_names = self._devices.names()
        device_by_index = {str(index): device for index, device in enumerate(device_names)}
        if (device := device_by_index.get(str(requested), requested)) in device_names:
            return str(device)
        listed = ", ".join(f"{index} ({device})" for index, device in device_by_index.items())
        text, codes = f"{name} = {formatted(requested)}: there is no such device; valid: {listed}", {404: "no_device"}
        raise HttpError(status, text, code=codes.get(status), param=name)

    def _preferred(self, requested: int | str | None, backend: KernelBackend) -> str:
        if requested is None:
            return ""
        device, fitting = self.device_named("preferred_device", requested), self._devices.names(device_kinds(backend))
        if device not in fitting:
            valid_text = f"for backend = {backend!r}: {', '.join(fitting) or 'no device of this machine'}"
            raise refused("preferred_device", requested, valid_text)
        return device

    def _source(self, request: EvalRequest, name: str) -> str:
        """Return a source that the request has as text or in base64. Raises RequestRefused and HttpError 413."""
        needed_names, text, encoded = _REQUIRED_NAMES[name], getattr(request, name), getattr(request, f"{name}_b64")
        if (text is None) == (encoded is None):
            problem = "neither is given" if text is None else "both are given"
            raise RequestRefused(f"{name}: {problem}; valid: {name} or {name}_b64, one of them", param=name)
        name, source_bytes = (f"{name}_b64", encoded) if text is None else (name, text.encode(errors="surrogatepass"))
        if len(source_bytes) > self._max_source_bytes:
            problem = f"{name}: {len(source_bytes)} bytes; valid: at most {self._max_source_bytes}"
            raise HttpError(413, problem, code="request_too_large", param=name)
        try:
            source = source_bytes.decode()
        except UnicodeDecodeError as error:
            problem = f"not UTF-8: byte {error.object[error.start]:#04x} at {error.start}; valid: UTF-8"
            raise RequestRefused(f"{name}: {problem}", param=name) from None
        for definition in needed_names:  # the evaluator checks whether it is the definition
            if re.search(rf"\b{definition}\b", source) is None:
                problem = f"defines no {definition}; valid: a module with {', '.join(needed_names)}"
                raise RequestRefused(f"{name}: {problem}", param=name)
        return source


def _convert(body: Mapping[str, Any]) -> EvalRequest:
    try:
        return msgspec.convert(body, EvalRequest)
    except msgspec.ValidationError as error:
        message, _, location = str(error).partition(" - at `")
        field = (re.findall(r"\$\.(\w+)", location) or [""])[0]
        raise refused(field, body.get(field), _VALID_VALUES.get(field, message.removeprefix("Expected "))) from None
