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
from headway.tokens.messages import shared_beginning

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
    """Conversion of text to token ids and back, as the model folder's own files define it.

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
        """``chat_template``: its source, or several by name; ``arguments``, ``started``: as in `load`."""
        if not eos_ids:
            where = "eos_token in tokenizer_config.json, or eos_token_id in generation_config.json or config.json"
            raise ConfigurationError(f"{origin}: no end-of-sequence token; set {where}")
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._origin = origin
        named = {"default": chat_template} if isinstance(chat_template, str) else dict(chat_template or {})
        self.chat_template = named.get("default") or next(iter(named.values()), None)  # its source; None: there is none
        variables = {**(special_tokens or {}), **(arguments or {})}
        self.templates = ChatTemplates(named, variables, started or datetime.now(), origin)
        self.next_marks: dict[bool, int] = {}  # of turns without an end of their own, with calls or not: what ends them
        self.added_stops: tuple[str, ...] = ()  # tokens that end a response because the chat template ends turns so
        self.eos_id = eos_ids[0]
        self.stop_ids = tuple(dict.fromkeys(eos_ids))  # every id that ends a response; eos_id first
        self.pad_id = eos_ids[0] if pad_id is None else pad_id
        self.vocabulary_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        outside = [i for i in (*self.stop_ids, self.pad_id) if not 0 <= i < self.vocabulary_size]
        if outside:
            raise ConfigurationError(
                f"{origin}: end or padding token {outside[0]} is outside the vocabulary of {self.vocabulary_size}"
            )

    @classmethod
    def of(cls, experiment: Experiment, started: datetime | None = None) -> Tokenizer:
        """The tokenizer of an experiment's model, as every party of it has it. ``started``: as in `load`."""
        model = experiment.model
        return cls.load(model.path, chat=experiment.chats, arguments=model.chat_template_kwargs, started=started)

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
        further variables of the template. ``started``: when the run started, for templates that tell the date; None:
        now. Raises ConfigurationError for a missing or unreadable file, when no eos is defined, and when a turn
        (``chat``) has no end at which generation could stop.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigurationError(_missing(folder, file))
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # tokenizers raises plain Exception for any malformed file
            raise ConfigurationError(f"{file}: not a readable tokenizer: {error}") from None
        settings = _json_object(folder / "tokenizer_config.json")
        _add_tokens(backend, settings, folder / "tokenizer_config.json")
        named = {**_json_object(folder / "special_tokens_map.json"), **settings}
        special = {name: text for name in _NAMED_TOKENS if (text := _token_text(named.get(name))) is not None}
        eos_ids = _token_id(backend, special.get("eos_token"), file)
        for name in ("generation_config.json", "config.json"):
            eos_ids += _id_list(_json_object(folder / name).get("eos_token_id"), folder / name)
        pad = _token_id(backend, special.get("pad_token"), file)
        made = cls(
            backend,
            eos_ids,
            pad_id=pad[0] if pad else None,
            chat_template=_chat_templates(folder, settings),
            special_tokens=special,
            origin=str(folder),
            arguments=arguments,
            started=started,
        )
        if chat and made.chat_template is not None:
            made._stop_at_turn_ends()
        return made

    def encode(self, text: str, *, add_special_tokens: bool = False, most: int | None = None) -> list[int]:
        """Token ids of ``text``; ``add_special_tokens`` lets the tokenizer's post-processor add its own (a bos).
        ``most``: number of ids the caller can use. A far longer text is encoded only until it surely exceeds that:
        the result is then more than twice as many ids of its beginning."""
        if most is not None and len(text) > _LONG_TOKEN * most:
            ids: list[int] = []
            for at in range(0, len(text), _PIECE):
                ids += self._backend.encode(text[at : at + _PIECE], add_special_tokens=False).ids
                if len(ids) > 2 * most:
                    return ids
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_prompt(self, text: str, most: int | None = None) -> list[int]:
        """Token ids of a prompt's whole text, with those that the tokenizer's post-processor puts before a text (a
        bos), unless it begins with them, and without any behind it: a response follows. ``most``: as in `encode`."""
        ids = self.encode(text, most=most)
        return ids if ids[: len(self._begins)] == self._begins else self._begins + ids

    @cached_property
    def _begins(self) -> list[int]:
        """Ids that the post-processor puts before a text."""
        bare, whole = self.encode("a"), self.encode("a", add_special_tokens=True)
        places = range(len(whole) - len(bare) + 1)
        return whole[: next((at for at in places if whole[at : at + len(bare)] == bare), 0)]

    @cached_property
    def _marks_beginnings(self) -> bool:
        """Whether a text that is encoded by itself has a mark of its beginning (SentencePiece's blank)."""
        normalizer, splitter = self._backend.normalizer, self._backend.pre_tokenizer
        text = "a" if normalizer is None else normalizer.normalize_str("a")
        pieces = [(text, (0, 1))] if splitter is None else splitter.pre_tokenize_str(text)
        return bool(pieces) and pieces[0][0] != "a"

    def encode_behind(self, before: int | None, text: str, most: int | None = None) -> list[int]:
        """Token ids of ``text`` that follows the token ``before`` (None: at the beginning), as the joint text has them;
        no token crosses the border. ``most``: as in `encode`."""
        if before is not None and before in self.special_ids and (token := self.token(before)):
            ids = self.encode(token + text, most=most)
            if ids and ids[0] == before:
                return ids[1:]
        marked = before is not None and self._marks_beginnings and 0 < len(text) <= _PIECE
        return self.encode_with_spans(text, before)[0] if marked else self.encode(text, most=most)

    def encode_with_spans(self, text: str, before: int | None = None) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of ``text`` (no special tokens added), and each one's span of characters: [first, behind).
        ``before``: the token that it follows, as in `encode_behind`.

        Blanks that a token swallows without counting them belong to it; tokens for the bytes of one character all
        span that character.
        """
        # behind a special token, a beginning is marked or not as the tokenizer does there; behind any other it isn't
        special = (self.token(before) or "",) if before in self.special_ids and before is not None else ()
        for anchor in special or (("\n", ".", "a", "0") if before is not None and self._marks_beginnings else ()):
            ids, spans = self.encode_with_spans(anchor + text)
            inside = next((place for place, (start, _) in enumerate(spans) if start >= len(anchor)), len(ids))
            if all(end <= len(anchor) for _, end in spans[:inside]):  # no token joins it with the text
                return ids[inside:], [(first - len(anchor), end - len(anchor)) for first, end in spans[inside:]]
        encoding = self._backend.encode(text, add_special_tokens=False)
        spans: list[tuple[int, int]] = []
        reached = 0
        for first, end in encoding.offsets:
            spans.append((min(first, reached), end))
            reached = max(reached, end)
        return encoding.ids, spans

    def decode(self, ids: Iterable[int], *, keep_special: bool = False) -> str:
        """Text of token ids; special tokens are left out unless ``keep_special``."""
        return self._backend.decode(list(ids), skip_special_tokens=not keep_special)

    def vocabulary_bytes(self) -> list[bytes]:
        """Bytes of each id's text, special tokens' too, so that joined they are what `decode` makes into characters. A
        blank that a decoder strips from the start of a text stays, and so do those that WordPiece puts between words
        only when it decodes whole texts. Ids without a token: empty."""
        decoder = self._backend.decoder
        kind = b"" if decoder is None else decoder.__getstate__()
        added = {i: token.content.encode() for i, token in self._backend.get_added_tokens_decoder().items()}
        texts = [b""] * self.vocabulary_size
        for token, i in self._backend.get_vocab(with_added_tokens=True).items():
            if i in added:
                texts[i] = added[i]
            elif b'"ByteLevel"' in kind:
                whole = all(c in _BYTE_LEVEL for c in token)
                texts[i] = bytes(_BYTE_LEVEL[c] for c in token) if whole else token.encode()
            elif b'"ByteFallback"' in kind and _BYTE_TOKEN.fullmatch(token):
                texts[i] = bytes([int(token[3:5], 16)])
            elif "▁".encode() in kind or b'"ByteFallback"' in kind:  # SentencePiece's: Metaspace, or Replace
                texts[i] = (token.replace("▁", " ") if "▁".encode() in kind else token).encode()
            else:
                texts[i] = self.decode([i], keep_special=True).encode()
        return texts

    def verbatim_tokens(self) -> dict[str, bool]:
        """Added tokens that are matched in the unnormalised text -> whether the text always splits there: special
        tokens that match whatever stands beside them."""
        added = (token for token in self._backend.get_added_tokens_decoder().values() if not token.normalized)
        return {token.content: token.special and not (token.lstrip or token.single_word) for token in added}

    def token(self, token_id: int) -> str | None:
        """The vocabulary's entry for an id; None for an unknown id."""
        return self._backend.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def render(self, prompt: str | Sequence[Mapping[str, Any]], template: Template = "raw") -> TokenIds:
        """Prompt ids of a task: its text as it is ("raw"), or a user turn or conversation rendered by the folder's chat
        template ("chat"). Raises ConfigurationError."""
        if template == "raw":
            if not isinstance(prompt, str):
                raise ConfigurationError("template = 'raw' takes texts; a conversation needs 'chat'")
            return TokenIds(self.encode_prompt(prompt))
        if template != "chat":
            raise ConfigurationError(f"template = {template!r}: valid are 'raw' and 'chat'")
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
        """The chat template's text for ``messages``; ``variables``: additional template variables; ``marks``: around
        its ``{% generation %}`` blocks. Raises ConfigurationError when there is no template or it fails."""
        given = {**(variables or {}), "add_generation_prompt": add_generation_prompt}
        return self.templates.render(messages, tools, given, marks)

    def render_marked(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a whole conversation, and the spans of the template's ``{% generation %}`` blocks in it:
        [first character, behind the last). Without blocks: an empty list."""
        text = self.render_messages(messages, tools=tools, add_generation_prompt=False)
        if "generation" not in self.templates.source(tools):
            return text, []
        marked = self.render_messages(messages, tools=tools, add_generation_prompt=False, marks=True)
        spans: list[tuple[int, int]] = []
        plain, opened = 0, -1
        for piece in MARK.split(marked):
            if piece == OPEN:
                opened = plain
            elif piece == CLOSE:
                spans.append((opened, plain))
            else:
                plain += len(piece)
        if MARK.sub("", marked) != text:
            raise ConfigurationError(
                f"{self._origin}: the chat template changes what its {{% generation %}} blocks hold after they end (a "
                "filter around them?), so it can't be told what the assistant wrote: put the filter inside"
            )
        return text, [span for span in spans if span[0] < span[1]]

    def _stop_at_turn_ends(self) -> None:
        """End responses where the chat template ends the assistant's turns: at a turn's own end, or at the mark of the
        next one. Raises ConfigurationError where that is no special token."""
        for end in self.templates.turn_ends():
            text = end.own.strip() or end.followed.strip()
            own, followed = self.encode(end.own.strip()), self.encode(end.followed.strip())
            shared = shared_beginning(own, followed)  # what closes a conversation isn't its last turn's
            following = followed[len(shared) :] if shared or not own else []
            own = shared or own
            ended = any(i in self.stop_ids for i in own)
            if end.calls and not ended and not ({*own[-1:]} & self.special_ids - {*self.encode(end.between)}):
                own = []  # its last token is the call's, which another call may follow
            marks = (i for i in following if self.decode([i], keep_special=True).strip())
            first = (own[-1:] if end.calls else own[:1]) or [*islice(marks, 1)]
            if first and not own:
                self.next_marks[end.calls] = first[0]
            if not first or ended or first[0] in self.stop_ids:
                continue
            if first[0] not in self.special_ids:
                known = ", ".join(repr(self.token(i)) for i in self.stop_ids)
                raise ConfigurationError(
                    f"{self._origin}: the chat template ends the assistant's turn{' with calls' * end.calls} with "
                    f"{text[:40]!r}, where no special token is, and generation stops only at "
                    f"{known}: end turns with a token that is there"
                )
            self.stop_ids += (first[0],)
            self.added_stops += (self.token(first[0]) or "",)

    @property
    def added_text(self) -> str:
        """A sentence for people about ``added_stops``."""
        ends = ", ".join(map(repr, self.added_stops))
        return f"{ends} ends a response too, as the chat template ends turns so; eos_token_id doesn't name it"

    def is_open(self, token_id: int) -> bool:
        """Whether the text of this token may change with the next: it is part of a character."""
        token = self._backend.id_to_token(token_id) or ""
        return token_id in self.special_ids or bool(_BYTE_TOKEN.fullmatch(token))


class IncrementalDecoder:
    """Text of a growing response, with detection of stop strings.

    Invariant: ``text == tokenizer.decode(ids pushed so far)`` after every push, at a cost that does not grow with the
    response: text up to a token boundary that no later token can change is settled; only the rest is decoded again.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, keep_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._keep_special = keep_special
        self._stop = tuple(text for text in stop if text)
        self._reach = max((len(text) for text in self._stop), default=1) - 1
        self.settled = (
            ""  # what no further token can change: text of everything before the tail's anchor and of the anchor itself
        )
        self._tail: list[int] = []  # the anchor tokens, then those not settled
        self._anchor = 0  # how many of the tail's tokens are settled
        self._anchor_text = ""  # text of those: context that keeps a leading space of the next token
        self._open_text = ""  # text of the unsettled rest
        self.stopped: str | None = None  # the stop string that appeared first

    @property
    def text(self) -> str:
        return self.settled + self._open_text

    def push(self, token_id: int) -> bool:
        """Append a sampled token; True when a stop string is now in the text."""
        self._tail.append(token_id)
        whole = self._tokenizer.decode(self._tail, keep_special=self._keep_special)
        self._open_text = whole[len(self._anchor_text) :]
        if self._stop and self.stopped is None:
            self._search()
        if self._open_text and not whole.endswith("�") and not self._tokenizer.is_open(token_id):
            self.settled += self._open_text
            self._open_text = ""
            self._tail = self._tail[self._anchor :]
            self._anchor = len(self._tail)
            self._anchor_text = self._tokenizer.decode(self._tail, keep_special=self._keep_special)
        return self.stopped is not None

    def _search(self) -> None:
        window = self.settled[max(0, len(self.settled) - self._reach) :] + self._open_text
        found = [(at, text) for text in self._stop if (at := window.find(text)) >= 0]
        self.stopped = min(found)[1] if found else None


def _missing(folder: Path, file: Path) -> str:
    if not folder.is_dir():
        return f"no such folder: {folder}"
    message = f"no such file: {file}"
    if (best := folder / "best" / file.name).is_file():
        return f"{message}; {folder} is a run's folder, its model is {best.parent}"
    if other := [name for name in ("tokenizer.model", "vocab.json") if (folder / name).is_file()]:
        message += (
            f"; {other[0]} alone is not read: transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...) "
            "writes tokenizer.json out of it"
        )
    return message


def _add_tokens(backend: Backend, settings: Mapping[str, Any], file: Path) -> None:
    """Add the tokens that only tokenizer_config.json has (added to a model after its tokenizer.json was written)."""
    listed: Mapping[str, Mapping[str, Any]] = settings.get("added_tokens_decoder") or {}
    for key, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        text = _token_text(dict(entry))
        if text is None or backend.token_to_id(text) is not None:
            continue
        options = {name: bool(entry.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized")}
        special = bool(entry.get("special", False))
        (backend.add_special_tokens if special else backend.add_tokens)([AddedToken(text, special=special, **options)])
        if backend.token_to_id(text) != int(key):
            raise ConfigurationError(
                f"{file}: added_tokens_decoder gives {text!r} the id {key}, but tokenizer.json leaves it "
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
    found = backend.token_to_id(text)
    if found is None:
        raise ConfigurationError(f"{file}: tokenizer_config.json names {text!r}, which is not in the vocabulary")
    return [found]


def _id_list(value: Any, file: Path) -> list[int]:
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ConfigurationError(f"{file}: eos_token_id = {value!r}: an integer or a list of integers is needed")
    return list(ids)


def _chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The folder's chat templates by name, as transformers takes them: files of their own stand for all of
    tokenizer_config.json, whose value is a text or a list of named texts."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if found := {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}:
        return found
    value = _json_object(folder / "chat_template.json").get("chat_template", settings.get("chat_template"))
    listed = [{"name": "default", "template": value}] if isinstance(value, str) else value or []
    named: dict[str, Any] = {str(one.get("name")): one.get("template") for one in listed if isinstance(one, dict)}
    if not isinstance(listed, list) or not all(isinstance(text, str) for text in named.values()):
        raise ConfigurationError(f"{folder}: chat_template: valid is a text, or a list of objects of name and template")
    return named
