"""Tokenizers and chat templates of Hugging Face model folders, without torch or transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from headway.config.schema import Experiment
from headway.records.errors import ConfigurationError
from headway.records.tokens import TokenIds
from headway.tokens.chat_template import CLOSE, MARK, OPEN, ChatTemplates
from headway.tokens.messages import common_prefix

Template = Literal["raw", "chat"]
_LONG_TOKEN = 16  # characters; the average token of a text is shorter
_PIECE = 1 << 16  # characters encoded at a time
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # GPT-2: these bytes stand for themselves
_BYTE_LEVEL = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + n): byte for n, byte in enumerate(sorted({*range(256)} - {*_PRINTABLE}))
}
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Converts text to token ids and back, as the files of the model folder define it.

    Text is encoded once, on its way in; sampled tokens are never decoded and encoded again.
    """

    def __init__(
        self,
        backend: Backend,
        eos_ids: Sequence[int],
        *,
        pad_id: int | None = None,
        chat_template: str | Mapping[str, str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
        origin: str = "tokenizer",
        arguments: Mapping[str, Any] | None = None,
        started: datetime | None = None,
    ) -> None:
        """``chat_template``: the template's source, or several by name; ``arguments``, ``started``: as in `load`."""
        if not eos_ids:
            source_hint = "eos_token in tokenizer_config.json, or eos_token_id in generation_config.json or config.json"
            raise ConfigurationError(f"{origin}: no end-of-sequence token; set {source_hint}")
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._origin = origin
        named = {"default": chat_template} if isinstance(chat_template, str) else dict(chat_template or {})
        self.chat_template = named.get("default") or next(iter(named.values()), None)  # its source; None: there is none
        variables = {**(special_tokens or {}), **(arguments or {})}
        self.templates = ChatTemplates(named, variables, started or datetime.now(), origin)
        # for a template that writes no end of turn: the next turn's mark, which ends the turn; key: turn with calls
        self.next_marks: dict[bool, int] = {}
        self.added_stops: tuple[str, ...] = ()  # tokens that end a response because the chat template ends turns so
        self.eos_id = eos_ids[0]
        self.stop_ids = tuple(dict.fromkeys(eos_ids))  # every id that ends a response; eos_id first
        self.pad_id = eos_ids[0] if pad_id is None else pad_id
        self.vocabulary_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        outside_ids = [i for i in (*self.stop_ids, self.pad_id) if not 0 <= i < self.vocabulary_size]
        if outside_ids:
            raise ConfigurationError(
                f"{origin}: end or padding token {outside_ids[0]} is outside the vocabulary of {self.vocabulary_size}"
            )

    @classmethod
    def of(cls, experiment: Experiment, started: datetime | None = None) -> Tokenizer:
        """Load the tokenizer of an experiment's model, equal in all of its processes. ``started``: as in `load`."""
        model = experiment.model
        return cls.load(model.path, chat=experiment.uses_chat, arguments=model.chat_template_kwargs, started=started)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        chat: bool = False,
        arguments: Mapping[str, Any] | None = None,
        started: datetime | None = None,
    ) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json, the chat templates and, for eos, generation_config.json and
        config.json.

        tokenizer.json alone defines how text is split and joined, whatever class tokenizer_config.json names.
        ``chat``: responses are turns of the chat template, so what ends its turns ends a response. ``arguments``:
        further variables of the template. ``started``: when the run started, for templates that write the date; None:
        now. Raises ConfigurationError for a missing or unreadable file, when no eos is defined, and when a turn
        (``chat``) has no end at which generation could stop.
        """
        folder = Path(path)
        tokenizer_file = folder / "tokenizer.json"
        if not tokenizer_file.is_file():
            raise ConfigurationError(_missing_file_message(folder, tokenizer_file))
        try:
            backend = Backend.from_file(str(tokenizer_file))
        except Exception as error:  # tokenizers raises plain Exception for any malformed file
            raise ConfigurationError(f"{tokenizer_file}: not a readable tokenizer: {error}") from None
        tokenizer_config = _json_object(folder / "tokenizer_config.json")
        _add_tokens(backend, tokenizer_config, folder / "tokenizer_config.json")
        named_tokens = {**_json_object(folder / "special_tokens_map.json"), **tokenizer_config}
        specials = {name: text for name in _NAMED_TOKENS if (text := _token_text(named_tokens.get(name))) is not None}
        eos_ids = _token_id(backend, specials.get("eos_token"), tokenizer_file)
        for name in ("generation_config.json", "config.json"):
            eos_ids += _id_list(_json_object(folder / name).get("eos_token_id"), folder / name)
        pad_ids = _token_id(backend, specials.get("pad_token"), tokenizer_file)
        tokenizer = cls(
            backend,
            eos_ids,
            pad_id=pad_ids[0] if pad_ids else None,
            chat_template=_chat_templates(folder, tokenizer_config),
            special_tokens=specials,
            origin=str(folder),
            arguments=arguments,
            started=started,
        )
        if chat and tokenizer.chat_template is not None:
            tokenizer._stop_at_turn_ends()
        return tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = False, max_tokens: int | None = None) -> list[int]:
        """Encode ``text`` as token ids; ``add_special_tokens`` lets the tokenizer's post-processor add its own (a bos).
        ``max_tokens``: number of ids that the caller can use. A far longer text is encoded only until it surely
        exceeds that: the ids of its beginning are returned, more than twice ``max_tokens``."""
        if max_tokens is not None and len(text) > _LONG_TOKEN * max_tokens:
            ids: list[int] = []
            for offset in range(0, len(text), _PIECE):
                ids += self._backend.encode(text[offset : offset + _PIECE], add_special_tokens=False).ids
                if len(ids) > 2 * max_tokens:
                    return ids
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_prompt(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Encode a prompt's whole text. The ids that the tokenizer's post-processor puts before a text (a bos) come
        first, unless the text begins with them; none are appended, since a response follows. ``max_tokens``: as in
        `encode`."""
        ids = self.encode(text, max_tokens=max_tokens)
        return ids if ids[: len(self._prefix_ids)] == self._prefix_ids else self._prefix_ids + ids

    @cached_property
    def _prefix_ids(self) -> list[int]:
        """The ids that the post-processor puts before a text."""
        bare_ids, full_ids = self.encode("a"), self.encode("a", add_special_tokens=True)
        starts = range(len(full_ids) - len(bare_ids) + 1)
        return full_ids[: next((start for start in starts if full_ids[start : start + len(bare_ids)] == bare_ids), 0)]

    @cached_property
    def _marks_text_start(self) -> bool:
        """Whether encoding a text by itself marks its beginning (SentencePiece's blank)."""
        normalizer, splitter = self._backend.normalizer, self._backend.pre_tokenizer
        text = "a" if normalizer is None else normalizer.normalize_str("a")
        pieces = [(text, (0, 1))] if splitter is None else splitter.pre_tokenize_str(text)
        return bool(pieces) and pieces[0][0] != "a"

    def encode_after(self, prior_id: int | None, text: str, max_tokens: int | None = None) -> list[int]:
        """Encode ``text`` as it continues the token ``prior_id`` (None: at the beginning). The ids are those of the
        joint text, but no token crosses the border. ``max_tokens``: as in `encode`."""
        if prior_id is not None and prior_id in self.special_ids and (token := self.token(prior_id)):
            ids = self.encode(token + text, max_tokens=max_tokens)
            if ids and ids[0] == prior_id:
                return ids[1:]
        needs_anchor = prior_id is not None and self._marks_text_start and 0 < len(text) <= _PIECE
        return self.encode_with_spans(text, prior_id)[0] if needs_anchor else self.encode(text, max_tokens=max_tokens)

    def encode_with_spans(self, text: str, prior_id: int | None = None) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode ``text``, without special tokens; return the ids and each id's span of characters, [first, end).
        ``prior_id``: the token that the text follows, as in `encode_after`.

        Blanks that a token swallows without counting them belong to it; tokens for the bytes of one character all
        span that character.
        """
        # after a special token the tokenizer decides whether a beginning is marked; after any other token it isn't
        anchors = (self.token(prior_id) or "",) if prior_id in self.special_ids and prior_id is not None else ()
        for anchor in anchors or (("\n", ".", "a", "0") if prior_id is not None and self._marks_text_start else ()):
            ids, spans = self.encode_with_spans(anchor + text)
            text_index = next((index for index, (start, _) in enumerate(spans) if start >= len(anchor)), len(ids))
            if all(end <= len(anchor) for _, end in spans[:text_index]):  # no token joins it with the text
                return ids[text_index:], [(first - len(anchor), end - len(anchor)) for first, end in spans[text_index:]]
        encoding = self._backend.encode(text, add_special_tokens=False)
        spans: list[tuple[int, int]] = []
        reached_end = 0
        for first, end in encoding.offsets:
            spans.append((min(first, reached_end), end))
            reached_end = max(reached_end, end)
        return encoding.ids, spans

    def decode(self, ids: Iterable[int], *, keep_special: bool = False) -> str:
        """Decode token ids to text; special tokens are left out unless ``keep_special``."""
        return self._backend.decode(list(ids), skip_special_tokens=not keep_special)

    def vocabulary_bytes(self) -> list[bytes]:
        """Return the bytes of each id's text, special tokens included. Joined, they are what `decode` turns into
        characters, but a blank that a decoder strips from the start of a text stays, and so do those that WordPiece
        puts between words only when it decodes whole texts. Ids without a token have no bytes."""
        decoder = self._backend.decoder
        pickled = b"" if decoder is None else decoder.__getstate__()
        added_bytes = {i: token.content.encode() for i, token in self._backend.get_added_tokens_decoder().items()}
        bytes_by_id = [b""] * self.vocabulary_size
        for token, i in self._backend.get_vocab(with_added_tokens=True).items():
            if i in added_bytes:
                bytes_by_id[i] = added_bytes[i]
            elif b'"ByteLevel"' in pickled:
                is_byte_level = all(c in _BYTE_LEVEL for c in token)
                bytes_by_id[i] = bytes(_BYTE_LEVEL[c] for c in token) if is_byte_level else token.encode()
            elif b'"ByteFallback"' in pickled and _BYTE_TOKEN.fullmatch(token):
                bytes_by_id[i] = bytes([int(token[3:5], 16)])
            elif "▁".encode() in pickled or b'"ByteFallback"' in pickled:  # SentencePiece's: Metaspace, or Replace
                bytes_by_id[i] = (token.replace("▁", " ") if "▁".encode() in pickled else token).encode()
            else:
                bytes_by_id[i] = self.decode([i], keep_special=True).encode()
        return bytes_by_id

    def verbatim_tokens(self) -> dict[str, bool]:
        """Map each added token that is matched in the unnormalised text to whether the text always splits at it: it is
        special, and matches beside any character."""
        added_tokens = (token for token in self._backend.get_added_tokens_decoder().values() if not token.normalized)
        return {token.content: token.special and not (token.lstrip or token.single_word) for token in added_tokens}

    def token(self, token_id: int) -> str | None:
        """Return the vocabulary's entry for an id; None for an unknown id."""
        return self._backend.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def render(self, prompt: str | Sequence[Mapping[str, Any]], template: Template = "raw") -> TokenIds:
        """Encode the prompt of a task: its text as it is ("raw"), or a user turn or conversation rendered by the
        folder's chat template ("chat"). Raises ConfigurationError."""
        if template == "raw":
            if not isinstance(prompt, str):
                raise ConfigurationError("template = 'raw' takes texts; a conversation needs 'chat'")
            return TokenIds(self.encode_prompt(prompt))
        if template != "chat":
            raise ConfigurationError(f"template = {template!r}: valid: 'raw' and 'chat'")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return TokenIds(self.encode(self.render_messages(messages)))

    def render_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        marks: bool = False,
    ) -> str:
        """Render ``messages`` by the chat template. ``variables``: additional template variables. ``marks``: whether
        marks enclose its ``{% generation %}`` blocks. Raises ConfigurationError when there is no template or it
        fails."""
        all_variables = {**(variables or {}), "add_generation_prompt": add_generation_prompt}
        return self.templates.render(messages, tools, all_variables, marks)

    def render_marked(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render a whole conversation; return its text and the spans of characters of the template's
        ``{% generation %}`` blocks in it, [first, end). Without blocks the list is empty."""
        text = self.render_messages(messages, tools=tools, add_generation_prompt=False)
        if "generation" not in self.templates.source(tools):
            return text, []
        marked_text = self.render_messages(messages, tools=tools, add_generation_prompt=False, marks=True)
        spans: list[tuple[int, int]] = []
        plain_length, open_start = 0, -1
        for piece in MARK.split(marked_text):
            if piece == OPEN:
                open_start = plain_length
            elif piece == CLOSE:
                spans.append((open_start, plain_length))
            else:
                plain_length += len(piece)
        if MARK.sub("", marked_text) != text:
            raise ConfigurationError(
                f"{self._origin}: the chat template changes what its {{% generation %}} blocks hold after they end (a "
                "filter around them?), so what the assistant wrote can't be determined: put the filter inside"
            )
        return text, [span for span in spans if span[0] < span[1]]

    def _stop_at_turn_ends(self) -> None:
        """End responses where the chat template ends the assistant's turns: at a turn's own end, or at the mark of the
        next one. Raises ConfigurationError where that is no special token."""
        for end in self.templates.turn_ends():
            text = end.final.strip() or end.followed.strip()
            end_ids, followed_ids = self.encode(end.final.strip()), self.encode(end.followed.strip())
            shared_ids = common_prefix(end_ids, followed_ids)  # tokens that close a conversation aren't its last turn's
            following_ids = followed_ids[len(shared_ids) :] if shared_ids or not end_ids else []
            end_ids = shared_ids or end_ids
            is_ended = any(i in self.stop_ids for i in end_ids)
            if end.calls and not is_ended and not ({*end_ids[-1:]} & self.special_ids - {*self.encode(end.between)}):
                end_ids = []  # its last token is the call's, which another call may follow
            mark_ids = (i for i in following_ids if self.decode([i], keep_special=True).strip())
            new_stop = (end_ids[-1:] if end.calls else end_ids[:1]) or [*islice(mark_ids, 1)]
            if new_stop and not end_ids:
                self.next_marks[end.calls] = new_stop[0]
            if not new_stop or is_ended or new_stop[0] in self.stop_ids:
                continue
            if new_stop[0] not in self.special_ids:
                known_stops = ", ".join(repr(self.token(i)) for i in self.stop_ids)
                raise ConfigurationError(
                    f"{self._origin}: the chat template ends the assistant's turn{' with calls' * end.calls} with "
                    f"{text[:40]!r}, where no special token is, and generation stops only at "
                    f"{known_stops}: end turns with a token that is there"
                )
            self.stop_ids += (new_stop[0],)
            self.added_stops += (self.token(new_stop[0]) or "",)

    @property
    def added_text(self) -> str:
        """The sentence about ``added_stops`` in messages to the user."""
        stop_names = ", ".join(map(repr, self.added_stops))
        return f"{stop_names} ends a response too, as the chat template ends turns so; eos_token_id doesn't name it"

    def is_open(self, token_id: int) -> bool:
        """Whether the next token may change the text of this one, which is part of a character."""
        token = self._backend.id_to_token(token_id) or ""
        return token_id in self.special_ids or bool(_BYTE_TOKEN.fullmatch(token))


class IncrementalDecoder:
    """Decodes a growing response token by token, and detects stop strings.

    Invariant: ``text == tokenizer.decode(ids pushed so far)`` after every push, at a cost that does not grow with the
    response: text up to a token boundary that no later token can change is settled; only the rest is decoded again.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, keep_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._keep_special = keep_special
        self._stop = tuple(text for text in stop if text)
        self._reach = max((len(text) for text in self._stop), default=1) - 1
        self.settled = ""  # text that no further token can change: up to the tail's anchor, with the anchor's own
        self._tail: list[int] = []  # the anchor tokens, then those not settled
        self._anchor = 0  # number of the tail's tokens that are settled
        self._anchor_text = ""  # text of those: context that keeps a leading space of the next token
        self._open_text = ""  # text of the unsettled rest
        self.stopped: str | None = None  # the stop string that appeared first

    @property
    def text(self) -> str:
        return self.settled + self._open_text

    def push(self, token_id: int) -> bool:
        """Append a sampled token; True when a stop string is now in the text."""
        self._tail.append(token_id)
        tail_text = self._tokenizer.decode(self._tail, keep_special=self._keep_special)
        self._open_text = tail_text[len(self._anchor_text) :]
        if self._stop and self.stopped is None:
            self._search()
        if self._open_text and not tail_text.endswith("�") and not self._tokenizer.is_open(token_id):
            self.settled += self._open_text
            self._open_text = ""
            self._tail = self._tail[self._anchor :]
            self._anchor = len(self._tail)
            self._anchor_text = self._tokenizer.decode(self._tail, keep_special=self._keep_special)
        return self.stopped is not None

    def _search(self) -> None:
        search_text = self.settled[max(0, len(self.settled) - self._reach) :] + self._open_text
        matches = [(position, text) for text in self._stop if (position := search_text.find(text)) >= 0]
        self.stopped = min(matches)[1] if matches else None


def _missing_file_message(folder: Path, file: Path) -> str:
    if not folder.is_dir():
        return f"no such folder: {folder}"
    reason = f"no such file: {file}"
    if (best_file := folder / "best" / file.name).is_file():
        return f"{reason}; {folder} is a run's folder, its model is {best_file.parent}"
    if others := [name for name in ("tokenizer.model", "vocab.json") if (folder / name).is_file()]:
        reason += (
            f"; {others[0]} alone is not read: transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...) "
            "writes tokenizer.json out of it"
        )
    return reason


def _add_tokens(backend: Backend, settings: Mapping[str, Any], file: Path) -> None:
    """Add the tokens that only tokenizer_config.json has (added to a model after its tokenizer.json was written)."""
    listed_tokens: Mapping[str, Mapping[str, Any]] = settings.get("added_tokens_decoder") or {}
    for id_text, entry in sorted(listed_tokens.items(), key=lambda item: int(item[0])):
        text = _token_text(dict(entry))
        if text is None or backend.token_to_id(text) is not None:
            continue
        options = {name: bool(entry.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized")}
        special = bool(entry.get("special", False))
        (backend.add_special_tokens if special else backend.add_tokens)([AddedToken(text, special=special, **options)])
        if backend.token_to_id(text) != int(id_text):
            raise ConfigurationError(
                f"{file}: added_tokens_decoder gives {text!r} the id {id_text}, but tokenizer.json leaves it "
                f"{backend.token_to_id(text)}: the two files don't belong together"
            )


def _json_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigurationError(f"{file}: not readable as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigurationError(f"{file}: a JSON object is needed, not {type(raw).__name__}")
    return raw


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _token_id(backend: Backend, text: str | None, file: Path) -> list[int]:
    if text is None:
        return []
    token_id = backend.token_to_id(text)
    if token_id is None:
        raise ConfigurationError(f"{file}: tokenizer_config.json names {text!r}, which is not in the vocabulary")
    return [token_id]


def _id_list(value: Any, file: Path) -> list[int]:
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ConfigurationError(f"{file}: eos_token_id = {value!r}: an integer or a list of integers is needed")
    return list(ids)


def _chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Read the folder's chat templates, by name, as transformers does: separate template files replace the value in
    tokenizer_config.json, which is a text or a list of named texts."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if templates_by_name := {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}:
        return templates_by_name
    configured = _json_object(folder / "chat_template.json").get("chat_template", settings.get("chat_template"))
    listed = [{"name": "default", "template": configured}] if isinstance(configured, str) else configured or []
    named: dict[str, Any] = {str(raw.get("name")): raw.get("template") for raw in listed if isinstance(raw, dict)}
    if not isinstance(listed, list) or not all(isinstance(text, str) for text in named.values()):
        raise ConfigurationError(f"{folder}: chat_template: valid: a text, or a list of objects of name and template")
    return named
