"""lm-eval: a task of its own over a local file, by chat completions and by completions."""

import json
import os
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
from lm_eval.tasks import TaskManager
from reporting import MODEL, OPENAI_URL, finish, headers, report

scratch = Path(os.environ["HEADWAY_SCRATCH"])
rows = [{"question": "Say hello.", "answer": "Hello there."}, {"question": "And again.", "answer": "Hello again."}]
(scratch / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
begin, end = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"


def task(name: str, prompt: str) -> dict[str, object]:
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(scratch / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": prompt,
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 40},
        "metric_list": [{"metric": "exact_match"}],
    }


def evaluate(name: str, kind: type[LocalCompletionsAPI], route: str, prompt: str, *, chat: bool) -> None:
    model = kind(
        base_url=f"{OPENAI_URL}/{route}",
        model=MODEL,
        tokenizer_backend=None,
        tokenized_requests=False,
        num_concurrent=1,
        header={"Authorization": "Bearer any", **headers(name)},
    )
    found = simple_evaluate(model, tasks=[task(name, prompt)], apply_chat_template=chat, task_manager=TaskManager())
    assert found is not None
    assert found["results"][name]["exact_match,none"] == 1.0
    report(name, *(row["resps"][0][0] for row in found["samples"][name]), calls=2)


evaluate("chat", LocalChatCompletion, "chat/completions", "{{question}}", chat=True)
evaluate("completions", LocalCompletionsAPI, "completions", f"{begin}{{{{question}}}}{end}", chat=False)
finish()
