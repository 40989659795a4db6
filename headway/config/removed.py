"""Removed configuration keys and renamed public names, for the errors that name their replacements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_NAMED_VERIFIER = "set verifier to a NAME of [verifiers.NAME], whose name, parameters and timeout_s it has"

# section -> its removed key -> the replacement; the part * matches any single name. The name of a table matches all
# keys inside it.
REMOVED: Mapping[str, Mapping[str, str]] = {
    "run": {"worker_start_timeout_s": "it is 600 s, and 1 s more for each 50 MB of the model"},
    "model": {"adapter.kind": "an adapter is low-rank (LoRA)"},
    "tasks": {
        "*.columns.metadata": "a verifier is given all other columns, or what 'convert' returns",
        "*.size": "set parameters.size of the same source",
        "*.seed": "set parameters.seed of the same source",
    },
    "environment": {
        "starts_per_s": "lower environment.concurrency; a provider of sandboxes has its rate in sandbox.settings",
        "max_calls": "16 tool calls of an answer are carried out, or what your class sets as most_calls",
        "mcp.start_timeout_s": "a server has 30 s to start",
        "mcp.starts_per_minute": "a worker starts a server 5 times a minute at most",
        "mcp.result_bytes": "a message has 10 MB at most",
        "models.*.temperature": "set body.temperature of the same model",
        "models.*.max_tokens": "set body.max_tokens of the same model",
        "models.*.retries": "a request is repeated twice",
        "models.*.retry_s": "the first retry waits for 1 s",
        "command": "set environment.agent to the list: a program and its arguments",
        "verifiers": "set environment.parameters to the table",
        "log_bytes": "the first 1 MB and the last 64 KB of an agent's output are kept",
        "stop_grace_s": "an agent's processes have 2 s to end",
    },
    "sandbox": {
        "limits.inodes": "it follows from sandbox.limits.disk_bytes: a file for each 6,700 bytes",
        "limits.open_files": "a process may have 1,024 open",
        "ttl_s": "a sandbox ends by itself after an hour without use; a provider's time is in sandbox.settings",
        "retries": "a start is repeated twice",
        "hedge_share": "a twentieth of the starts may be made twice",
        "reap_every_s": "sandboxes of dead owners are removed every 60 s",
        "inject_faults": "set the environment variable HEADWAY_INJECT_SANDBOX_FAULTS, for a drill",
        "snapshot_bytes": "snapshots may take half of what is free in the run's folder, at most 10 GiB",
    },
    "endpoint": {
        "max_messages": "a request may have 4,096",
        "max_tools": "a request may have 256",
        "choices": "n may be 16",
        "open_calls": "a rollout may have 64",
        "sampled_tokens": "a rollout may have a million sampled",
        "kept_tokens": "sessions keep 10 million tokens together",
        "call_timeout_s": "a call may take rollout.timeout_s, or in headway serve 600 s",
        "body_timeout_s": "a request must be complete within 60 s",
        "keep_alive_s": "idle connections are closed after 75 s",
        "stream_ping_s": "an idle stream gets a comment every 15 s",
        "connections": "4,096 may be open, or as many as the process may open files (ulimit -n)",
    },
    "router": {
        "prefix_block_tokens": "prompts are compared in blocks of 64",
        "remembered_prefixes": "65,536 blocks are kept",
        "health_interval_s": "a replica is polled every 5 s",
        "health_timeout_s": "a replica has 30 s to answer",
        "failures_to_open": "5 failures in a row open a breaker",
        "failure_window_s": "failures within 60 s count",
        "cool_down_s": "the first cool-down is 1 s",
        "cool_down_growth": "a cool-down is twice the one before",
        "longest_cool_down_s": "a cool-down is 30 s at most",
        "successes_to_close": "2 successes in a row close a breaker",
        "burst_s": "the rates allow bursts of 2 s",
        "overcommit": "foreign callers' open requests may have twice the KV",
    },
    "queue": {
        "max_resumes": "a rollout that was parked twice runs uninterrupted",
        "budget_s": "set rollout.timeout_s or queue.group_timeout_s",
        "old_tokens": "tokens beyond queue.max_token_staleness carry no loss",
        "stale_environment": "beyond queue.max_environment_staleness a rollout starts again",
        "give_up_after_batches": "a run ends when groups of 100 batches in a row end untrained",
    },
    "curriculum": {
        "cursor_share": "a tenth of the draws come from the plain walk",
        "replay_share": "a twentieth of the draws are unsolved tasks",
        "replay_after_groups": "an unsolved task is due after 256 groups",
        "repeat_after_groups": "a task of the band rests for the groups of 16 steps",
        "min_signal_range": "min_signal is adjusted within 0.25 and 0.8",
        "zero_variance_range": "the band's share of flat groups is kept within 0.1 and 0.4",
        "member_gain": "a member more must raise the signal's probability by 0.02",
    },
    "algorithm": {
        "fixed_denominator_tokens": "it is samples x rollout.max_response_tokens",
        "kl_horizon": "it is 10,000 samples",
        "overlong_buffer_tokens": "the penalty rises over the last fifth of rollout.max_response_tokens",
        "overlong_penalty": "it is 1 at the limit",
        "kept_set_tokens": "set algorithm.truncation_support_tokens",
        "advantage_k": "set k in [algorithm.parameters]",
        "dual_clip": "set dual_clip in [algorithm.parameters]",
        "sapo_temperature_positive": "set temperature_positive in [algorithm.parameters]",
        "sapo_temperature_negative": "set temperature_negative in [algorithm.parameters]",
        "dro_beta": "set beta in [algorithm.parameters]",
        "divergence": "set divergence in [algorithm.parameters]",
        "divergence_limit": "set divergence_limit in [algorithm.parameters]",
    },
    "evaluation": {
        "before": 'set evaluation.test = "both", "before", "after" or "never"',
        "after": 'set evaluation.test = "both", "before", "after" or "never"',
    },
    "ledger": {
        "group": "set ledger.tags",
        "samples_per_step": "2 rollouts of a step are kept for trackers",
    },
    "alerts": {"min_interval_s": "a rule sends at most one alert in 900 s"},
    "control": {
        "interval_steps": "it decides every 2 steps at most",
        "max_steps_per_publish": "it is queue.budget + 1",
        "max_verifier_workers": "it is 8, or as many as cores and memory allow",
        "length_bias_limit": "it is 0.1",
        "staleness_tolerance": "it is 0.01",
    },
    "sft": {
        "device": "set sft.devices to a list of devices, a rank for each",
        "weight_decay": "set trainer.weight_decay",
        "max_grad_norm": "set trainer.max_grad_norm",
        "micro_batch_tokens": "set trainer.micro_batch_tokens",
        "time_limit_s": "set run.time_limit_s",
    },
    "pruning": {
        "every_tokens": "a rollout is checked every 16 tokens",
        **{
            kind: f'set pruning.pruners = [{{ kind = "{kind}", ... }}]: docs/pruning.md'
            for kind in ("length", "relative_length", "budget", "repetition", "value", "verifier", "group")
        },
        "pruners.least_finished": "a cap needs 2 finished members, a decision on a group 3",
        "pruners.least_tokens": "no response of fewer than 64 tokens is pruned",
        "pruners.slack_steps": "a group is due a step after the last one that may train it",
        "pruners.longest_period": "loops of up to 64 tokens are detected",
        "pruners.loop_tokens": "a loop has 64 tokens at least",
        "pruners.ngram": "runs of 4 tokens are compared",
        "pruners.window_tokens": "the last 256 tokens are compared",
        "pruners.every_tokens": "a verifier is called every 64 tokens",
        "pruners.prior": "it is 0.5",
        "pruners.name": _NAMED_VERIFIER,
        "pruners.parameters": _NAMED_VERIFIER,
        "pruners.timeout_s": _NAMED_VERIFIER,
    },
    "generator": {
        "native_kernels": "they are on where they can be built; HEADWAY_NATIVE_KERNELS=0 in the environment: off",
        "exchange_directory": "set weights.exchange",
        "queue_ahead_groups": "set generator.prefetch_groups",
    },
    "trainer": {
        "native_kernels": "they are on where they can be built; HEADWAY_NATIVE_KERNELS=0 in the environment: off",
        "beta1": "set trainer.betas = [beta1, beta2]",
        "beta2": "set trainer.betas = [beta1, beta2]",
        "epsilon": "it is 1e-8",
    },
    "weights": {"transport": "weights go through shared memory"},
    "cluster": {
        "orphan_s": "set cluster.disconnect_timeout_s",
        "books_directory": "set cluster.accounting_directory",
    },
}


def replacement_of(location: Sequence[object]) -> str:
    """Return the end of a sentence that names the replacement of the removed key at ``location``; "" for a key that
    never existed."""
    key_parts = [str(part) for part in location if not isinstance(part, int)]
    for key, sentence in REMOVED.get(key_parts[0], {}).items() if key_parts else ():
        pattern = key.split(".")
        tail = key_parts[1 : 1 + len(pattern)]
        if len(tail) == len(pattern) and all(glob in ("*", name) for glob, name in zip(pattern, tail, strict=True)):
            return sentence
    return ""


RENAMED = {
    "headway.api": {"Serving": "ServeSettings"},
    "Episode": {
        "say": "add_message",
        "turn_to": "set_active_agent",
        "hold": "pin_to_process",
        "tell": "add_tool_result",
        "hear": "receive",
        "kept": "saved_state",
    },
}  # module or class -> old name -> new name


def renamed(owner: str, name: str) -> str:
    """Return a sentence with the present name of ``owner``'s former ``name``; empty for a name that never existed."""
    new_name = RENAMED[owner].get(name)
    return f"{owner}.{name} is called {new_name} now (docs/renames.md)" if new_name else ""
