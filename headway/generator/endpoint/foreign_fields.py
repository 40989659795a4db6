"""Fields of other servers' APIs (vLLM, SGLang, TGI, llama.cpp, OpenRouter, Ollama, hosted models) that this one lacks.

Each is accepted with a value that asks for nothing. Otherwise those that change the form or the end of an answer, or
which model gives it, are refused by name; those that change how its tokens are sampled are refused where sampling is
the client's, and reported where the experiment's holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.generator.endpoint.fields import Field, Values, formatted, only
from headway.records.conversations import RequestRefused
from headway.tokens.grammar_schemas import is_one_of

_CONSTRAIN = "write response_format, or a tool's schema with tool_choice or strict"
_LIMIT = "write max_tokens"
_TEMPLATE = "write chat_template_kwargs"
_NOTHING: tuple[Any, ...] = (False, 0, [], {}, "")  # beside null
# why a field is refused: its names, or beginnings of names that end in an underscore
_FORMS: Mapping[str, str] = {
    _CONSTRAIN: "guided_ structured_outputs regex ebnf json_schema grammar grammar_lazy grammar_triggers format nvext "
    "extra_body custom_logit_processor custom_params logits_processors vllm_xargs",
    "answers end at the model's own stop tokens and at the texts of stop": "stop_token_ids stop_regex "
    "bad_words bad_words_ids allowed_token_ids ignore_eos min_tokens min_new_tokens min_length "
    "include_stop_str_in_output "
    "no_stop_trim forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens",
    "answers don't have such parts": "return_ echo logprob_start_len top_logprobs_num "
    "logprob_token_ids token_ids_logprob n_probs post_sampling_probs top_n_tokens details decoder_input_details "
    "timings_per_token verbose response_fields audio",
    _LIMIT: "max_new_tokens max_length num_predict max_gen_toks t_max_predict_ms n_indent options parameters",
    _TEMPLATE: "chat_template documents",
    "prompts are read whole": "truncate_prompt_tokens truncation_side truncate transforms prompt_embeds "
    "input_embeds image_data mm_processor_kwargs media_io_kwargs",
    "answers are sampled one by one": "use_beam_search",
    "this server has no search": "web_search_options plugins mcp_servers search_parameters data_sources",
    "the field model selects the model": "models lora_path lora_request lora adapter_id adapter_source",
    "the model's own format separates reasoning from text": "reasoning_format thinking_forced_open "
    "reasoning_in_content chat_format",
}
# every value of these has an effect, since false and 0 turn thinking off
_ASKING = ("enable_thinking", "think", "thinking_budget", "thinking_token_budget", "reasoning_budget")
# a value of these has an effect where it turns thinking off, or hides it
_THINKING = ("thinking", "reasoning", "reasoning_effort")
_OFF: Mapping[str, tuple[Any, ...]] = {
    "type": ("disabled",), "enabled": (False,), "effort": ("none",), "exclude": (True,),
    **dict.fromkeys(("max_tokens", "budget_tokens"), (0,)),
}  # fmt: skip
_DEFAULTS: Mapping[str, tuple[tuple[Any, ...], str]] = {  # neutral values beside null
    "prompt_logprobs": ((False,), "prompts aren't scored"),
    "n_predict": ((-1,), _LIMIT),
    "num_beams": ((1,), "answers are sampled one by one"),
    "best_of": ((1,), "answers are sampled one by one"),
    "skip_special_tokens": ((True,), "special tokens are not text"),
    "spaces_between_special_tokens": ((True,), "special tokens are not text"),
    "clean_up_tokenization_spaces": ((False,), "text is decoded as it was sampled"),
    "include_reasoning": ((True,), "reasoning is a part of the answer"),
    "separate_reasoning": ((True,), "reasoning has a separate field if the model's format marks it"),
    "stream_reasoning": ((True,), "reasoning is streamed as it is sampled"),
    "parse_tool_calls": ((True,), "calls are read where the request has tools; else write tool_choice = 'none'"),
    "add_special_tokens": ((True,), "prompts are encoded as the model's tokenizer does it"),
}
_SAMPLING: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "dry_multiplier", "diversity_penalty"), (0,)),
    **dict.fromkeys(("min_p", "top_a", "mirostat", "dynatemp_range", "xtc_probability", "smoothing_factor"), (0,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "penalty_alpha", "top_n_sigma"), (0, -1)),
    **dict.fromkeys(("repetition_penalty", "repeat_penalty", "length_penalty", "typical_p", "tfs_z"), (1,)),
    **dict.fromkeys(("encoder_repetition_penalty", "smoothing_curve", "temperature_decay"), (1,)),
    **dict.fromkeys(("early_stopping", "watermark", "temperature_last", "dynamic_temperature"), (False,)),
    **dict.fromkeys(("samplers", "sampler_order", "sampler_priority"), ([], "")),
    "do_sample": (True,),
}  # fmt: skip


def foreign_fields() -> dict[str, Field]:
    """Return the fields with complete names; `require_no_foreign` checks those given by their beginnings."""
    form_fields = {name: only(*_NOTHING, why=why) for why, names_text in _FORMS.items() for name in names_text.split()}
    form_fields |= {name: only(why=_TEMPLATE) for name in _ASKING}
    form_fields |= {name: Field(_thinking, {}) for name in _THINKING}
    defaults = {name: only(*neutral, why=f"{why}; valid: {neutral[0]}") for name, (neutral, why) in _DEFAULTS.items()}
    sampling_fields = {name: Field(lambda name, value: value, {}) for name in _SAMPLING}
    return {name: field for name, field in (form_fields | defaults | sampling_fields).items() if not name.endswith("_")}


def _thinking(name: str, value: Any) -> Any:
    """Accept a value that requests thinking; refuse one that turns it off, which only a template can do."""
    thinking_parts = value if isinstance(value, Mapping) else {"type": value, "enabled": value, "effort": value}
    for part_name, off_values in _OFF.items():
        if part_name in thinking_parts and is_one_of(thinking_parts[part_name], off_values):
            reason = "the model's template decides whether it reasons; chat completions take chat_template_kwargs"
            raise RequestRefused(f"{name} = {formatted(value)}: {reason}", param=name)
    return value


def require_no_foreign(body: Mapping[str, Any], known: Mapping[str, Field]) -> None:
    """Raise RequestRefused for a field whose name begins like a foreign one's, unless it is ``known``."""
    for why, names_text in _FORMS.items():
        for name_prefix in (name for name in names_text.split() if name.endswith("_")):
            for name in (name for name in body if name.startswith(name_prefix) and name not in known):
                if body[name] is not None:
                    only(*_NOTHING, why=why).read(name, body[name])


def foreign_sampling(values: Values, *, fixed: bool) -> dict[str, Any]:
    """Return the fields that would change how tokens are sampled, if the experiment's parameters hold (``fixed``).
    Raises RequestRefused for one if they don't hold."""
    requested_values = {name: values[name] for name in _SAMPLING if values[name] is not None}
    effective = {name: value for name, value in requested_values.items() if not is_one_of(value, _SAMPLING[name])}
    for name, value in effective.items():
        if not fixed:
            valid = " or ".join(repr(neutral) for neutral in _SAMPLING[name]) or "null"
            raise RequestRefused(
                f"{name} = {formatted(value)}: this server doesn't support this sampling; valid: {valid}", param=name
            )
    return effective
