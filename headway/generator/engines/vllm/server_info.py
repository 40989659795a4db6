"""Configuration of a `vllm serve`, fetched once, and the checks that headway can work with it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from headway.config.auto import VLLM_RELEASE
from headway.generator.engines.vllm.server_client import KEY_VARIABLE, ServerError, VllmServer
from headway.records.errors import ConfigurationError, HeadwayError

T = TypeVar("T")

RETURNS_S = 300.0  # a replica's longest wait for a server that it lost: the server may be loading its model
_HEALTH_S = 10.0  # timeout of one health check
_ASK_AGAIN_S = 1.0
COMMAND = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs "
    "--scheduling-policy priority"
)
UPDATING = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"


class Counters(NamedTuple):
    """Values of the server's /metrics; counters since the server's start."""

    running: int  # requests
    kv_usage: float  # share of the KV in use
    prefilled: int  # prompt tokens
    preemptions: int
    steps: int


class ServerInfo(NamedTuple):
    """The parts of a server's configuration that headway needs."""

    context_tokens: int
    kv_capacity_tokens: int
    dtype: str
    quantised: bool

    def counters(self, server: VllmServer) -> Counters:
        """Fetch the counters; all 0 with --disable-log-stats. Raises OSError when the server is gone."""
        total_by_name: dict[str, float] = {}
        for line in server.get("/metrics").decode().splitlines():
            match = re.match(r"vllm:(\w+)\{[^}]*\} (\S+)$", line)
            if match:
                total_by_name[match[1]] = total_by_name.get(match[1], 0.0) + float(match[2])
        return Counters(
            running=int(total_by_name.get("num_requests_running", 0)),
            kv_usage=total_by_name.get("kv_cache_usage_perc", 0.0),
            prefilled=int(total_by_name.get("prompt_tokens_total", 0)),
            preemptions=int(total_by_name.get("num_preemptions_total", 0)),
            steps=int(total_by_name.get("iteration_tokens_total_count", 0)),
        )


def wait_for(
    server: VllmServer, *, sleep: Callable[[float], object] = time.sleep, now: Callable[[], float] = time.monotonic
) -> None:
    """Wait until an unavailable server answers again. Raises HeadwayError after ``RETURNS_S``."""
    deadline_s = now() + RETURNS_S
    while True:
        try:
            server.get("/health", timeout_s=_HEALTH_S)
            return
        except (OSError, ServerError) as error:  # a proxy may answer for it
            if isinstance(error, ServerError) and error.status < 500:
                return  # it answers: `connect` checks what it is
            if now() >= deadline_s:
                reason = f"{server.address} did not come back within {RETURNS_S:g} s ({error})"
                raise HeadwayError(f"{reason}; start it again with {COMMAND}") from error
        sleep(_ASK_AGAIN_S)


def connect(
    server: VllmServer, *, slots: int, context_tokens: int, adapters: Mapping[str, Any] = {}, again: bool = False
) -> ServerInfo:
    """Fetch a server's configuration and check it. Raises ConfigurationError, which says how to start the server, if
    it doesn't answer or can't be used. ``adapters``: `VllmAdapters.arguments`, of which it needs at least as much.
    ``again``: it was connected before, so wait for it, and raise OSError instead when it doesn't answer. Raises
    HeadwayError, with the last lines of its output, for a managed one that has ended."""
    if again:
        wait_for(server)
    try:
        _require_version(server)
        config = _configuration(server)
    except OSError as error:
        if output := server.last_output():  # a managed one has some
            raise HeadwayError(f"`vllm serve` answers no more ({error}){output}") from error
        if again:
            raise
        raise _refusal(server, f"no server answers ({error}); start it with {COMMAND}") from error
    model_config, scheduler, cache_config = config["model_config"], config["scheduler_config"], config["cache_config"]
    device_config, engine_count = config["device_config"], config["parallel_config"]["data_parallel_size"]
    on_cpu = str(device_config["device"]).startswith("cpu") or device_config["device_type"] == "cpu"
    holds_by_problem = {
        f"its --scheduling-policy is {scheduler['policy']!r}: start it with --scheduling-policy priority": (
            scheduler["policy"] != "priority"
        ),
        f"its --max-num-seqs {scheduler['max_num_seqs']} leaves no slot for a probe beside generator.slots = {slots}; "
        f"valid: {slots + 1} or more": scheduler["max_num_seqs"] <= slots,
        "it computes on a CPU, where vLLM's sampler fails at a request with a seed whose prompt takes several steps: "
        "start it with --no-enable-chunked-prefill": on_cpu and scheduler["enable_chunked_prefill"],
        f"it runs {engine_count} engines, of which a probe would see one: start a server for each, without "
        "--data-parallel-size, and name them all in generator.devices": engine_count > 1,
        f"its --max-model-len {model_config['max_model_len']} is less than {context_tokens}, the tokens of "
        "rollout.max_prompt_tokens and rollout.max_response_tokens": model_config["max_model_len"] < context_tokens,
    }
    for problem, holds in holds_by_problem.items():
        if holds:
            raise _refusal(server, problem)
    if adapters:
        _require_lora(server, config["lora_config"] or {}, adapters)
    return ServerInfo(
        context_tokens=model_config["max_model_len"],
        kv_capacity_tokens=(cache_config["num_gpu_blocks"] - 1) * cache_config["block_size"],
        dtype=str(model_config["dtype"]).removeprefix("torch."),
        quantised=model_config["quantization"] is not None,
    )


def _require_lora(server: VllmServer, served: Mapping[str, Any], required: Mapping[str, Any]) -> None:
    """Check that the server can hold the adapters. Its head must not be wrapped: log-probabilities of a prompt
    then end vLLM's engine (``lora/layers/logits_processor.py`` takes all rows for sampled ones)."""
    counts = {name: required[name] for name in ("max_loras", "max_cpu_loras", "max_lora_rank")}
    modules, wrapped = set(required["lora_target_modules"]), set(served.get("target_modules") or ["lm_head"])
    if "lm_head" in wrapped or not modules <= wrapped or any((served.get(name) or 0) < counts[name] for name in counts):
        option_text = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in counts.items())
        reason = f"it can't load the run's adapters: start it with --enable-lora {option_text} --lora-target-modules "
        raise _refusal(server, f"{reason}{' '.join(sorted(modules))}, and {UPDATING}")


def _settled(call: Callable[..., T], *arguments: object) -> T:
    """Return the call's result. Raises ConnectionError for a status of 500 or more: an error of the server or a proxy
    says nothing about the server's configuration."""
    try:
        return call(*arguments)
    except ServerError as error:
        if error.status >= 500:
            raise ConnectionError(str(error)) from error
        raise


def _require_version(server: VllmServer) -> None:
    try:
        version = msgspec.json.decode(_settled(server.get, "/version"))["version"]
    except (ServerError, msgspec.DecodeError, KeyError, TypeError) as error:
        raise _refusal(server, f"it isn't vLLM: /version reports {error}") from error
    if not str(version).startswith(VLLM_RELEASE):
        raise _refusal(server, f"it is vLLM {version}; headway supports {VLLM_RELEASE}x")
    try:
        _settled(server.post, "/inference/v1/abort_requests", {"request_ids": ["headway-asks"]})
    except ServerError as error:
        if error.status == 401:
            raise _refusal(server, f"it needs a key: set {KEY_VARIABLE} to its --api-key") from error
        raise _refusal(server, f"it accepts no token ids ({error}): start it with --enable-scale-out") from error


def _configuration(server: VllmServer) -> Any:
    try:
        return msgspec.json.decode(_settled(server.get, "/server_info?config_format=json"))["vllm_config"]
    except ServerError as error:
        raise _refusal(
            server, f"its weights can't be updated ({error}): start it with VLLM_SERVER_DEV_MODE=1 in its environment"
        ) from error


def _refusal(server: VllmServer, reason: str) -> ConfigurationError:
    return ConfigurationError(f"generator.devices has {server.address}: {reason}")
