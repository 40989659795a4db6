"""What a `vllm serve` answers, read in whatever pieces it comes, and what is refused of one before it is asked."""

from __future__ import annotations

import socket
import threading
from typing import Any

import msgspec
import pytest

from headway.generator.engines.vllm.server_client import EventStream, ServerError, VllmServer, message_of
from headway.generator.engines.vllm.server_info import Counters, ServerInfo, connect, wait_for
from headway.records.errors import ConfigurationError, HeadwayError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


def read(sent: bytes, piece: int, close: bool = False) -> tuple[list[bytes], EventStream]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    stream, found = EventStream(ours), []
    for start in range(0, len(sent), piece):
        theirs.sendall(sent[start : start + piece])
        found += stream.read()
    if close:
        theirs.close()
        found += stream.read()
    return found, stream


@pytest.mark.parametrize("piece", [1, 2, 7, 1000])
def test_events_come_whole_in_whatever_pieces(piece: int) -> None:
    sent = (
        HEAD + chunked(b'data: {"a": 1}\n\n', b'data: {"b"', b": 2}\n\ndata: 3\n\n", b"data: [DONE]\n\n") + chunked(b"")
    )
    found, stream = read(sent, piece)
    assert found == [b'{"a": 1}', b'{"b": 2}', b"3"]
    assert stream.over


def test_a_stream_that_breaks_off_is_no_end() -> None:
    with pytest.raises(ConnectionError, match="closed a stream before its end"):
        read(HEAD + chunked(b"data: 1\n\n"), 1000, close=True)


def test_an_answer_that_is_no_http_ends_the_stream_as_a_lost_connection() -> None:
    with pytest.raises(ConnectionError, match="the server's answer is no HTTP"):
        read(b"SSH-2.0-OpenSSH_9.6\r\n", 1000)


def test_a_refusal_is_read_to_its_end() -> None:
    body = b'{"error": {"message": "no such token", "code": 400}}'
    head = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n" % len(body)
    with pytest.raises(ServerError, match="HTTP 400: no such token") as raised:
        read(head + body, 5, close=True)
    assert raised.value.status == 400


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": {"message": "bad"}}', "bad"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"error": "Unauthorized"}', "Unauthorized"),
        (b"upstream fell over\n", "upstream fell over"),
        (b"[1, 2]", "[1, 2]"),
    ],
)
def test_what_an_error_says(body: bytes, said: str) -> None:
    assert message_of(body) == said


# --- what it is -----------------------------------------------------------------------------------------------

CONFIG: dict[str, Any] = {
    "model_config": {"max_model_len": 512, "dtype": "torch.bfloat16", "quantization": None},
    "scheduler_config": {"policy": "priority", "max_num_seqs": 65, "enable_chunked_prefill": True},
    "cache_config": {"num_gpu_blocks": 11, "block_size": 16},
    "parallel_config": {"data_parallel_size": 1},
    "device_config": {"device": "cuda", "device_type": "cuda"},
}


class Answers:
    """A server that answers what it is told to; an exception is raised."""

    address = "http://there:8000"

    def __init__(self, config: dict[str, Any] | None = None, **answers: Any) -> None:
        merged = {name: part | (config or {}).get(name, {}) for name, part in CONFIG.items()}
        info = msgspec.json.encode({"vllm_config": merged})
        self._answers = {"/version": b'{"version": "0.32.0"}', "/server_info?config_format=json": info, "abort": None}
        self._answers |= answers

    def last_output(self) -> str:
        return ""

    def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        return self._answer(path)

    def post(self, path: str, body: Any = None) -> Any:
        return self._answer("abort")

    def _answer(self, path: str) -> Any:
        answer = self._answers[path]
        if isinstance(answer, Exception):
            raise answer
        return answer


def ask(server: Any, slots: int = 64, context_tokens: int = 512) -> ServerInfo:
    return connect(server, slots=slots, context_tokens=context_tokens)


def test_what_a_good_server_is() -> None:
    served = ServerInfo(context_tokens=512, kv_capacity_tokens=160, dtype="bfloat16", quantised=False)
    assert ask(Answers()) == served
    assert ask(Answers({"model_config": {"quantization": "fp8"}})).quantised


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (
            Answers(**{"/version": ConnectionRefusedError("refused")}),
            r"no server answers \(refused\); start it with VLLM_S",
        ),
        (Answers(**{"/version": ServerError(404, "Not Found")}), "it isn't vLLM: /version reports HTTP 404"),
        (Answers(**{"/version": b"<html>"}), "it isn't vLLM: /version reports"),
        (Answers(**{"/version": b'{"version": "0.29.1"}'}), r"it is vLLM 0.29.1; headway supports 0.32"),
        (Answers(abort=ServerError(401, "Unauthorized")), "it needs a key: set VLLM_API_KEY to its --api-key"),
        (Answers(abort=ServerError(403, "disabled")), "accepts no token ids .* start it with --enable-scale-out"),
        (
            Answers(**{"/server_info?config_format=json": ServerError(404, "Not Found")}),
            "can't be updated .*: start it with VLLM_SERVER_DEV_MODE=1",
        ),
        (Answers({"scheduler_config": {"policy": "fcfs"}}), "--scheduling-policy is 'fcfs'"),
        (Answers({"scheduler_config": {"max_num_seqs": 64}}), "--max-num-seqs 64 .*slots = 64; valid: 65 or more"),
        (Answers({"model_config": {"max_model_len": 511}}), "--max-model-len 511 is less than 512"),
        (Answers({"parallel_config": {"data_parallel_size": 2}}), "it runs 2 engines"),
        (
            Answers({"device_config": {"device": "cpu", "device_type": "cpu"}}),
            "start it with --no-enable-chunked-prefill",
        ),
    ],
)
def test_a_server_that_can_not_be_worked_with_is_refused(server: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=r"generator.devices has http://there:8000: .*" + said):
        ask(server)


def test_counters_of_several_engines_add_up() -> None:
    text = (
        "# HELP vllm:num_requests_running x\n"
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
        'vllm:num_requests_running{engine="1",model_name="m"} 4.0\n'
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25\n'
        'vllm:prompt_tokens_total{engine="0"} 1200.0\n'
        'vllm:num_preemptions_total{engine="0"} 2.0\n'
        'vllm:iteration_tokens_total_count{engine="0"} 77.0\n'
        'vllm:iteration_tokens_total_bucket{engine="0",le="1.0"} 5.0\n'
        "python_gc_objects_collected_total 9.0\n"
    )
    counters = ask(Answers()).counters(Answers(**{"/metrics": text.encode()}))  # type: ignore[arg-type]
    assert counters == Counters(running=7, kv_usage=0.25, prefilled=1200, preemptions=2, steps=77)
    assert ask(Answers()).counters(Answers(**{"/metrics": b""})) == Counters(0, 0.0, 0, 0, 0)  # type: ignore[arg-type]


# --- one that was there before --------------------------------------------------------------------------------


class Comes:
    """A server that is away for some questions."""

    address = "http://there:8000"

    def __init__(self, *away: Exception) -> None:
        self.away = list(away)
        self.waited: list[float] = []
        self.now_s = 0.0
        self.silent_s = 0.0  # until it doesn't answer

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.waited.append(seconds)
        self.now_s += seconds

    def get(self, path: str, *, timeout_s: float | None = None) -> bytes:
        self.now_s += min(self.silent_s, timeout_s or 600.0)
        if self.away:
            raise self.away.pop(0)
        return b""


def test_a_server_that_went_is_waited_for() -> None:
    server = Comes(ConnectionRefusedError("refused"), TimeoutError("slow"), ServerError(503, "starting"))
    wait_for(server, sleep=server.sleep, now=server.now)  # type: ignore[arg-type]
    assert len(server.waited) == 3
    another = Comes(ServerError(404, "Not Found"))  # it is there, whatever it is
    wait_for(another, sleep=another.sleep, now=another.now)  # type: ignore[arg-type]
    assert another.waited == []


@pytest.mark.parametrize("silent_s", [0.0, 600.0])  # it refuses; nothing comes back at all
def test_one_that_does_not_come_back_says_what_to_do(silent_s: float) -> None:
    server = Comes(*[ConnectionRefusedError("refused")] * 1000)
    server.silent_s = silent_s
    with pytest.raises(
        HeadwayError, match=r"http://there:8000 did not come back within 300 s .*refused.*vllm serve"
    ) as e:
        wait_for(server, sleep=server.sleep, now=server.now)  # type: ignore[arg-type]
    assert not isinstance(e.value, ConfigurationError)  # it may come later: the replica is restarted, others go on
    assert 290 <= server.now_s <= 315


@pytest.mark.parametrize("path", ["/version", "abort", "/server_info?config_format=json"])
def test_trouble_of_a_server_that_comes_back_is_no_wrong_configuration(path: str) -> None:
    server: Any = Answers(**{"/health": b"", path: ServerError(503, "no healthy upstream")})
    with pytest.raises(ConnectionError, match="no healthy upstream"):
        connect(server, slots=64, context_tokens=512, again=True)
    with pytest.raises(ConfigurationError):  # at the start of a run nobody waits
        connect(server, slots=64, context_tokens=512)


def test_one_that_goes_again_is_no_wrong_configuration() -> None:
    with pytest.raises(ConnectionResetError):
        connect(
            Answers(**{"/health": b"", "/version": ConnectionResetError("reset")}),  # type: ignore[arg-type]
            slots=64,
            context_tokens=512,
            again=True,
        )


# --- a server whose engine is dead ----------------------------------------------------------------------------

DEAD = b'{"error": {"message": "EngineCore encountered an issue. See stack trace (above) for the root cause."}}'


def test_a_request_that_meets_a_dead_engine_finds_the_server_gone() -> None:
    head = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: %d\r\n\r\n" % len(DEAD)
    with pytest.raises(ConnectionError, match="its engine is dead"):
        read(head + DEAD, 1000, close=True)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (DEAD, ConnectionError),
        (b'{"error": "Failed to pause generation: EngineCore encountered an issue. See"}', ConnectionError),
        (b'{"error": "Failed to pause generation: busy"}', ServerError),
    ],
)
def test_a_call_that_meets_a_dead_engine_finds_the_server_gone(body: bytes, error: type[Exception]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            one, _ = listening.accept()
            with one:
                one.recv(65536)
                one.sendall(b"HTTP/1.1 500 X\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(error):
            VllmServer(f"http://127.0.0.1:{listening.getsockname()[1]}").post("/pause")
        thread.join()
