"""Serves kernel evaluations over HTTP: an ASGI application with TritonForge's routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from headway.config.endpoint import EndpointConfig
from headway.generator.endpoint.api_keys import ApiKeys
from headway.generator.endpoint.errors import HttpError
from headway.generator.endpoint.exchange import HttpExchange
from headway.generator.endpoint.http_app import HttpApp, decoded, require_method, unknown_url
from headway.generator.endpoint.openapi import described, operation
from headway.kernels.backends import BACKENDS, device_kinds
from headway.kernels.client import KernelServiceFailed
from headway.kernels.devices import DeviceTable
from headway.kernels.wire import answer_of
from headway.records.errors import ConfigurationError
from headway.services.kernel_dispatch import KernelDispatch
from headway.services.kernel_metrics import KernelMetrics
from headway.services.kernel_requests import EvalRequest, KernelRequests

_WITHOUT_KEY = ("/", "/health", "/openapi.json")  # without a key
_RESET = "/reset_gpu/"
_FAILED_RETRY_S = 5  # Retry-After of a failure of the infrastructure
_OUTCOMES = {
    "compiled": {"type": "boolean"},
    "correctness": {"type": "boolean"},
    "metadata": {"type": "object"},
    "runtime": {"type": "number"},  # ms; -1: not timed
    "runtime_stats": {"type": "object"},
    "compile_ok": {"type": "boolean"},
    "pass_rate": {"type": "number", "minimum": 0, "maximum": 1},
    "perf_stats": {"type": "object"},
    "raw_reward": {"type": "number", "minimum": 0, "maximum": 2.3},
    "fault_type": {"type": ["string", "null"]},
    "evaluation": {"type": "object"},
}


class KernelApi(HttpApp):
    """ASGI application that evaluates kernels for other machines.

    A candidate that doesn't compile, crashes or is wrong gets an answer (200). An invalid request gets 4xx with
    the name of the field, a full queue 429 with Retry-After, and a failure of the service 503: never a reward.
    """

    def __init__(
        self,
        dispatch: KernelDispatch,
        devices: DeviceTable,
        requests: KernelRequests,
        settings: EndpointConfig,
        keys: ApiKeys,
    ) -> None:
        """``settings``: limits of size and time."""
        super().__init__(settings)
        self._dispatch = dispatch
        self._devices = devices
        self._requests = requests
        self._keys = keys
        self._routes: dict[str, tuple[str, Callable[[HttpExchange], Awaitable[Any]]]] = {
            "/": ("GET", self._health),
            "/health": ("GET", self._health),
            "/gpu_status": ("GET", self._gpu_status),
            "/backend_info": ("GET", self._backend_info),
            "/fault_statistics": ("GET", self._fault_statistics),
            "/openapi.json": ("GET", self._document),
            "/metrics": ("GET", self._metrics),
            "/eval": ("POST", self._eval),
            "/cleanup": ("POST", self._cleanup),
            "/reset_devices": ("POST", self._reset_devices),
            _RESET: ("POST", self._reset_gpu),
        }

    async def answer(self, exchange: HttpExchange) -> None:
        route = self.route(exchange.path)
        if route not in _WITHOUT_KEY:
            self._keys.require(exchange.key)
        if route not in self._routes:
            raise unknown_url(exchange)
        method, handler = self._routes[route]
        require_method(exchange, method)
        await exchange.reply_with(await handler(exchange))

    def route(self, path: str) -> str:
        if path.startswith(_RESET):
            return _RESET
        return path if path in self._routes else "other"

    def error_body(self, exchange: HttpExchange, error: HttpError) -> bytes:
        error_fields = msgspec.json.decode(error.openai())
        return msgspec.json.encode({**error_fields, "retryable": error.status in (408, 429) or error.status >= 500})

    async def _eval(self, exchange: HttpExchange) -> dict[str, Any]:
        """Evaluate a candidate; the evaluation is cancelled when its client disconnects."""
        submission = self._requests.submission(decoded(await exchange.body()))
        try:
            evaluation = await exchange.while_connected(self._dispatch.evaluate(submission))
        except ConfigurationError as error:
            raise HttpError(400, str(error), code="submission_refused") from None
        except KernelServiceFailed as error:
            headers = ((b"retry-after", str(_FAILED_RETRY_S).encode()),)
            raise HttpError(503, str(error), code="infrastructure", headers=headers) from None
        device_name = next((row["name"] for row in self._devices.describe() if row["device"] == evaluation.device), "")
        return answer_of(evaluation, device_name)

    # --- state ------------------------------------------------------------------------------------------------------

    async def _health(self, exchange: HttpExchange) -> dict[str, Any]:
        devices = self._devices.describe()
        return {
            "status": "healthy",
            "supported_backends": self._requests.available,
            "total_gpu_devices": len(devices),
            "available_gpu_devices": sum(device["available"] for device in devices),
            "busy_gpu_devices": sum(device["state"] == "leased" for device in devices),
            "running": self._dispatch.running,
            "waiting": self._dispatch.waiting,
            "isolation": "sandbox",
        }

    async def _gpu_status(self, exchange: HttpExchange) -> dict[str, Any]:
        await self._devices.refresh()
        devices = self._devices.describe()
        return {"total_devices": len(devices), "devices": devices}

    async def _backend_info(self, exchange: HttpExchange) -> dict[str, Any]:
        backend_facts = {
            name: {
                "available": not self._requests.missing(name),
                "missing": self._requests.missing(name),
                "devices": self._devices.names(device_kinds(name)),
            }
            for name in BACKENDS
        }
        available_names = self._requests.available
        default_name = next(iter(available_names), None)
        return {"supported_backends": available_names, "default_backend": default_name, "backends": backend_facts}

    async def _fault_statistics(self, exchange: HttpExchange) -> dict[str, Any]:
        counts = self._dispatch.counts
        return {
            "evaluations": counts.evaluations,
            "correct": counts.correct,
            "cheats": counts.cheats,
            "repeated": counts.repeated,
            "faults": dict(counts.faults),
            "infrastructure": {"retries": counts.retries, "failures": counts.failures},
            "devices": {device["device"]: device["faults"] for device in self._devices.describe()},
        }

    async def _metrics(self, exchange: HttpExchange) -> bytes:
        return KernelMetrics(self.responses, self._dispatch, self._devices).text()

    async def _document(self, exchange: HttpExchange) -> dict[str, Any]:
        any_object, text_content = {"type": "object"}, {"text/plain": {"schema": {"type": "string"}}}
        answer_schema = {"type": "object", "properties": _OUTCOMES, "required": list(_OUTCOMES)}
        request_schema = msgspec.json.schema(EvalRequest)["$defs"]["EvalRequest"]
        operations = {path: operation(path, any_object) for path in self._routes}
        operations["/eval"] = operation("/eval", answer_schema, request_schema)
        operations["/metrics"] = operation("/metrics", None, stream=text_content)
        operations[_RESET] = operation(_RESET, any_object, None, "device")
        paths = {path: {self._routes[path][0].lower(): specification} for path, specification in operations.items()}
        paths[f"{_RESET}{{device}}"] = paths.pop(_RESET)
        return described("headway kernels", paths)

    # --- actions ----------------------------------------------------------------------------------------------------

    async def _cleanup(self, exchange: HttpExchange) -> dict[str, Any]:
        """Refresh the devices only, since an evaluation leaves nothing to clean up."""
        await self._devices.refresh()
        return {"status": "done", "message": "each evaluation runs in a sandbox of its own, which has cleaned up"}

    async def _reset_devices(self, exchange: HttpExchange) -> dict[str, Any]:
        await self._devices.refresh()
        return {"status": "done", "available_devices": self._dispatch.reset(self._devices.names())}

    async def _reset_gpu(self, exchange: HttpExchange) -> dict[str, Any]:
        device = self._requests.device_named("device", exchange.path.removeprefix(_RESET), status=404)
        return {"status": "done", "device": device, "available_devices": self._dispatch.reset((device,))}
