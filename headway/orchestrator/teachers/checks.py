"""Checks of teachers, and of a critic's folder, before a run: tokenizers, templates, contexts and sizes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from headway.config.engines import VLLM_CPU_HEAD_SIZES, cpu_refusal
from headway.config.external_models import SELF, TeacherConfig
from headway.config.load import model_folders
from headway.config.model import ModelConfig
from headway.config.schema import Experiment
from headway.models.configuration import DecoderConfig
from headway.models.hf.configuration import HfConfig, read_config
from headway.orchestrator.teachers.replicas import teacher_experiment
from headway.orchestrator.teachers.stage import context_ids
from headway.records.errors import ConfigurationError
from headway.records.task import Task
from headway.tokens.tokenizer import Tokenizer

_PROBE = ("What is 2 + 3?", "5", "And 4 + 4?")  # messages of a conversation


def require_teachers(experiment: Experiment, tokenizer: Tokenizer, tasks: Iterable[Task]) -> None:
    """Raise ConfigurationError, naming the key, for a teacher or a critic that reads tokens otherwise than the policy,
    or a teacher whose context some training task can't fill."""
    tasks, rules = list(tasks), experiment.rules
    if (folder := model_folders(experiment).get("critic.path", experiment.model.path)) != experiment.model.path:
        _require_length("critic", folder, experiment, experiment.max_sequence_tokens)
        _require_same_tokens("critic", folder, experiment, tokenizer)
    for name, teacher in experiment.used_teachers.items():
        key = f"teachers.{name}"
        if teacher.path != SELF:
            _require_computable(key, teacher, experiment)
        if teacher.path not in (SELF, experiment.model.path):
            _require_same_tokens(key, teacher.path, experiment, tokenizer)
        folder = experiment.model.path if teacher.path == SELF else teacher.path
        vocabulary = read_config(ModelConfig(path=folder)).vocabulary_size
        if (teacher.top_k or 0) > vocabulary:
            raise ConfigurationError(f"{key}.top_k = {teacher.top_k}; valid: 1 to {vocabulary}, all ids of {folder!r}")
        for task in (task for task in tasks if rules.of(task.source).teacher == name):
            try:
                context_ids(teacher, task, tokenizer, experiment)
            except ConfigurationError as error:
                raise ConfigurationError(f"{key}.context: {error}") from None
            if task.pictures:
                raise ConfigurationError(f"{key}: task {task.task_id} has pictures, which teachers don't read")


def _require_computable(key: str, teacher: TeacherConfig, experiment: Experiment) -> None:
    reader = teacher_experiment(experiment, teacher) if teacher.devices else experiment
    model, settings = _require_length(key, teacher.path, experiment, reader.max_sequence_tokens), reader.generator
    head_dim = model.head_dim if isinstance(model, DecoderConfig) else VLLM_CPU_HEAD_SIZES[0]
    if teacher.devices and (refusal := cpu_refusal(settings.engine, settings.devices, head_dim, adapted_mixture=False)):
        raise ConfigurationError(f"{key}.devices = {list(teacher.devices)} with generator.engine = {refusal}")


def _require_length(key: str, path: str, experiment: Experiment, needed_tokens: int) -> DecoderConfig | HfConfig:
    """Return the configuration of the model in ``path``, which reads ``needed_tokens``. Raises ConfigurationError."""
    if not Path(path).is_dir():
        further = "" if key == "critic" else ", or 'self'"
        raise ConfigurationError(f"{key}.path = {path!r}: valid: the folder of a model{further}")
    model = read_config(ModelConfig(path=path))
    if model.max_positions < needed_tokens:
        suffix = "" if needed_tokens == experiment.max_sequence_tokens else ", and one more for vLLM"
        raise ConfigurationError(
            f"{key}.path = {path!r} reads {model.max_positions} tokens, and rollouts have up to "
            f"{experiment.max_sequence_tokens} (rollout.max_prompt_tokens and max_response_tokens){suffix}"
        )
    return model


def _require_same_tokens(key: str, path: str, experiment: Experiment, tokenizer: Tokenizer) -> None:
    theirs = Tokenizer.load(path, chat=experiment.uses_chat, arguments=experiment.model.chat_template_kwargs)
    for token_id in range(tokenizer.vocabulary_size):
        text, other_text = tokenizer.token(token_id), theirs.token(token_id)
        if text != other_text:
            raise ConfigurationError(
                f"{key}.path = {path!r} has another tokenizer: id {token_id} is {other_text!r} there, and "
                f"{text!r} in the model's"
            )
    template = "chat" if experiment.uses_chat else "raw"
    if template == "chat" and theirs.chat_template is None:
        raise ConfigurationError(f"{key}.path = {path!r} has no chat template, which the model's prompts have")
    messages = [
        {"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), _PROBE, strict=True)
    ]
    probes = (_PROBE[0], messages) if template == "chat" else (_PROBE[0],)
    for probe in probes:
        if (ours := tokenizer.render(probe, template)) != (others := theirs.render(probe, template)):
            raise ConfigurationError(
                f"{key}.path = {path!r} has another template: {tokenizer.decode(ours, keep_special=True)!r} of "
                f"the model is {theirs.decode(others, keep_special=True)!r} there"
            )
