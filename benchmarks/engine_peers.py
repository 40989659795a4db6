"""A peer of the generation engine, in its own interpreter: one line in, one round, one line out.

    PEER_PYTHON benchmarks/engine_peers.py vllm|hf MODEL_FOLDER DTYPE CORE MAX_REQUESTS CONTEXT_TOKENS

Reads rounds from stdin, a JSON object a line: ``prompts`` (lists of ids), ``new_tokens``. Answers each with
``tokens``, ``seconds`` and ``mean_logprob`` of what was sampled; the first line out says ``ready`` and what runs.
`benchmarks/engine.py` starts it; it imports nothing of Headway.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

Round = tuple[int, float, float]  # tokens, seconds, mean log-probability


def vllm(model: str, dtype: str, core: int, requests: int, context: int) -> tuple[str, Callable[..., Round]]:
    """vLLM on the CPU, eager: the worker bound to ``core``; its two other processes go where they like."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(core)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams, __version__

    engine = LLM(
        model=model,
        dtype=dtype,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=context,
        max_num_seqs=requests,
        enable_prefix_caching=False,
        seed=0,
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> Round:
        how = SamplingParams(
            temperature=1.0, max_tokens=new_tokens, ignore_eos=True, logprobs=0, detokenize=False, seed=None
        )
        started = time.perf_counter()
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], how, use_tqdm=False)
        seconds = time.perf_counter() - started
        rows = [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]
        values = [at[token].logprob for ids, logprobs in rows for token, at in zip(ids, logprobs, strict=True)]
        return len(values), seconds, sum(values) / len(values)

    return f"vLLM {__version__}, eager", generate


def hf(model: str, dtype: str, core: int, requests: int, context: int) -> tuple[str, Callable[..., Round]]:
    """transformers' continuous batching on ``core`` alone, its manager kept between rounds."""
    os.sched_setaffinity(0, {core})
    import torch

    torch.set_num_threads(1)
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, __version__

    network = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    network.eval()
    how = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0)
    settings = ContinuousBatchingConfig(
        page_size=32,
        num_blocks=requests * -(-context // 32) + 8,
        max_batch_tokens=max(2 * requests, 512),
        max_requests_per_batch=requests,
        return_logprobs=True,
        allow_block_sharing=False,
        seed=0,
    )
    manager = network.init_continuous_batching(generation_config=how, continuous_batching_config=settings)
    manager.start()

    def generate(prompts: list[list[int]], new_tokens: int) -> Round:
        started = time.perf_counter()
        manager.add_requests(inputs=prompts, max_new_tokens=new_tokens)
        done: list[Any] = []
        while len(done) < len(prompts):
            result = manager.get_result(timeout=5)
            if result is not None and result.error:
                raise RuntimeError(result.error)
            if result is not None and result.is_finished():
                done.append(result)
            elif result is None and not manager.is_running():
                raise RuntimeError("the manager's thread has ended")
        seconds = time.perf_counter() - started
        logprobs = [value for result in done for value in result.logprobs]
        return sum(len(result.generated_tokens) for result in done), seconds, sum(logprobs) / len(logprobs)

    return f"transformers {__version__}, continuous batching", generate


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries and their processes print goes to stderr
    name, model, dtype, core, requests, context = sys.argv[1:]
    title, generate = {"vllm": vllm, "hf": hf}[name](model, dtype, int(core), int(requests), int(context))
    print(json.dumps({"ready": title}), file=answers)
    for line in sys.stdin:
        try:
            tokens, seconds, mean = generate(**json.loads(line))
        except (
            Exception
        ):  # the boundary to somebody else's engine: whatever it raises ends this process, with its cause
            traceback.print_exc()
            os._exit(1)  # a library's thread would keep the process, and the benchmark waiting
        print(json.dumps({"tokens": tokens, "seconds": seconds, "mean_logprob": mean}), file=answers)


if __name__ == "__main__":
    main()
