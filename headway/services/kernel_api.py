"""The kernel service as an ASGI application: TritonForge's routes over an evaluator."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from headway.config.endpoint import EndpointConfig
from headway.generator.endpoint.api_keys import ApiKeys
from headway.generator.endpoint.exchange import ClientGone, HttpExchange
from headway.generator.endpoint.http_app import HttpApp, decoded, require_method, unknown_url
from headway.generator.endpoint.openapi import described, operation
from headway.generator.endpoint.refusals import HttpError
from headway.kernels.backends import BACKENDS, device_kinds
from headway.kernels.devices import DeviceTable
from headway.kernels.wire import answer_of
from headway.records.errors import ConfigurationError
from headway.runtime.supervision import to_its_end
from headway.services.kernel_dispatch import EvaluationFailed, KernelDispatch
from headway.services.kernel_metrics import KernelMetrics
from headway.services.kernel_requests import EvalRequest, KernelRequests

_OPEN = ("/", "/health", "/openapi.json")  # without a key
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
    """ASGI application: judges kernels for other machines.

    A candidate that doesn't compile, crashes or is wrong is an answer (200). What the request has wrong is 4xx and
    names the field, a full queue 429 with Retry-After, and the service's own failure 503: never a reward.
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
        self._views: dict[str, Callable[[], Awaitable[Any]]] = {
            "/": self._health,
            "/health": self._health,
            "/gpu_status": self._gpu_status,
            "/backend_info": self._backend_info,
            "/fault_statistics": self._fault_statistics,
            "/openapi.json": self._document,
        }
        self._actions = {"/cleanup": self._cleanup, "/reset_devices": self._reset_devices}

    async def answer(self, exchange: HttpExchange) -> None:
        path = exchange.path
        if path not in _OPEN:
            self._keys.require(exchange.key)
        if path == "/eval":
            require_method(exchange, "POST")
            await self._eval(exchange)
        elif path == "/metrics":
            require_method(exchange, "GET")
            text = KernelMetrics(self.responses, self._dispatch, self._devices).text()
            await exchange.reply(200, text, kind=b"text/plain; version=0.0.4; charset=utf-8")
        elif path in self._views:
            require_method(exchange, "GET")
            await exchange.reply(200, msgspec.json.encode(await self._views[path]()))
        elif path in self._actions:
            require_method(exchange, "POST")
            await exchange.reply(200, msgspec.json.encode(await self._actions[path]()))
        elif path.startswith(_RESET):
            require_method(exchange, "POST")
            await exchange.reply(200, msgspec.json.encode(self._reset_gpu(path[len(_RESET) :])))
        else:
            raise unknown_url(exchange)

    def route(self, path: str) -> str:
        if path.startswith(_RESET):
            return _RESET
        return path if path in ("/eval", "/metrics", *self._views, *self._actions) else "other"

    def error_body(self, exchange: HttpExchange, error: HttpError) -> bytes:
        body = msgspec.json.decode(error.openai())
        return msgspec.json.encode({**body, "retryable": error.status in (408, 429) or error.status >= 500})

    async def _eval(self, exchange: HttpExchange) -> None:
        """Judge a candidate; a client that leaves ends its evaluation."""
        submission, preferred = self._requests.submission(decoded(await exchange.body()))
        judging = asyncio.create_task(self._dispatch.evaluate(submission, preferred), name="evaluation")
        try:
            await asyncio.wait({judging, exchange.gone()}, return_when=asyncio.FIRST_COMPLETED)
            if not judging.done():
                raise ClientGone
            evaluation = judging.result()
        except ConfigurationError as error:
            raise HttpError(400, str(error), code="submission_refused") from None
        except EvaluationFailed as error:
            headers = ((b"retry-after", str(_FAILED_RETRY_S).encode()),)
            raise HttpError(503, str(error), code="infrastructure", headers=headers) from None
        finally:
            if not judging.done():
                judging.cancel()
                await to_its_end(_ended(judging))
        hardware = next((one["name"] for one in self._devices.describe() if one["device"] == evaluation.device), "")
        await exchange.reply(200, msgspec.json.encode(answer_of(evaluation, hardware)))

    # --- what is shown ----------------------------------------------------------------------------------------------

    async def _health(self) -> dict[str, Any]:
        devices = self._devices.describe()
        return {
            "status": "healthy",
            "supported_backends": self._requests.available,
            "total_gpu_devices": len(devices),
            "available_gpu_devices": sum(one["available"] for one in devices),
            "busy_gpu_devices": sum(one["state"] == "leased" for one in devices),
            "running": self._dispatch.running,
            "waiting": self._dispatch.waiting,
            "isolation": "sandbox",
        }

    async def _gpu_status(self) -> dict[str, Any]:
        await self._devices.refresh()
        devices = self._devices.describe()
        return {"total_devices": len(devices), "devices": devices}

    async def _backend_info(self) -> dict[str, Any]:
        backends = {
            name: {
                "available": not self._requests.missing(name),
                "missing": self._requests.missing(name),
                "devices": self._devices.names(device_kinds(name)),
            }
            for name in BACKENDS
        }
        available = self._requests.available
        default = next(iter(available), None)
        return {"supported_backends": available, "default_backend": default, "backends": backends}

    async def _fault_statistics(self) -> dict[str, Any]:
        counts = self._dispatch.counts
        return {
            "evaluations": counts.evaluations,
            "correct": counts.correct,
            "cheats": counts.cheats,
            "repeated": counts.repeated,
            "faults": dict(counts.faults),
            "infrastructure": {"retries": counts.retries, "failures": counts.failures},
            "devices": {one["device"]: one["faults"] for one in self._devices.describe()},
        }

    async def _document(self) -> dict[str, Any]:
        any_object = {"type": "object"}
        answer = {"type": "object", "properties": _OUTCOMES, "required": list(_OUTCOMES)}
        asked = msgspec.json.schema(EvalRequest)["$defs"]["EvalRequest"]
        paths: dict[str, Any] = {"/eval": {"post": operation("/eval", answer, asked)}}
        for path in self._views:
            paths[path] = {"get": operation(path, any_object)}
        for path in self._actions:
            paths[path] = {"post": operation(path, any_object)}
        paths[f"{_RESET}{{device}}"] = {"post": operation(_RESET, any_object, None, "device")}
        plain = {"text/plain": {"schema": {"type": "string"}}}
        paths["/metrics"] = {"get": operation("/metrics", None, stream=plain)}
        return described("headway kernels", paths)

    # --- what is done -----------------------------------------------------------------------------------------------

    async def _cleanup(self) -> dict[str, Any]:
        """An evaluation leaves nothing behind, so this looks at the devices anew, and no more."""
        await self._devices.refresh()
        return {"status": "done", "message": "each evaluation runs in a sandbox of its own, which has cleaned up"}

    async def _reset_devices(self) -> dict[str, Any]:
        await self._devices.refresh()
        return {"status": "done", "available_devices": self._dispatch.reset(self._devices.names())}

    def _reset_gpu(self, given: str) -> dict[str, Any]:
        name = "device"
        device = self._requests.device_named(given, name, lambda why: HttpError(404, why, code="no_device", param=name))
        return {"status": "done", "device": device, "available_devices": self._dispatch.reset((device,))}


async def _ended(task: asyncio.Task[Any]) -> None:
    await asyncio.wait({task})
