"""Pictures in messages, as parts in OpenAI's form: checked where tasks are read, opened where they become pixels."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from headway.records.errors import ConfigurationError

_DATA = "data:"
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # Pillow reads others by programs of theirs


def require_parts(value: Sequence[Any], place: str, folder: Path) -> list[dict[str, Any]]:
    """Check a message's content of parts, texts and pictures; paths are taken from ``folder``.

    Returns them with whole paths. Raises ConfigurationError naming ``place``: another kind of part, a picture that
    isn't there, or whose file is none.
    """
    parts: list[dict[str, Any]] = []
    for number, raw in enumerate(value):
        part: Mapping[str, Any] = cast("Mapping[str, Any]", raw) if isinstance(raw, Mapping) else {}
        kind, where = str(part.get("type")), f"{place}[{number}]"
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind == "image_url":
            given = part.get("image_url")
            parts.append(picture_part(given.get("url") if isinstance(given, Mapping) else given, where, folder))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        else:  # sound and video, too
            raise ConfigurationError(f"{where}: type = {kind!r}: valid: text with its text, image_url with its url")
    return parts


def picture_part(url: Any, where: str, folder: Path) -> dict[str, Any]:
    """The part of a picture, a path from ``folder`` or a data: URL, with its content hash. Raises as
    `require_parts`."""
    if not isinstance(url, str) or not url or url.startswith(("http:", "https:")):
        what = f"url = {str(url)[:80]!r}: nothing is fetched"
        raise ConfigurationError(f"{where}: {what}; valid: a path, or a data: URL of base64")
    address = url if url.startswith(_DATA) else str((folder / url.removeprefix("file://")).resolve())
    try:
        _, content = open_picture(address, whole=False)
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from None
    return {"type": "image_url", "image_url": {"url": address}, "content_hash": content}


def open_picture(url: str, *, whole: bool = True) -> tuple[Any, str]:
    """The picture at a path or in a data: URL, in RGB, and the hash of its bytes; ``whole`` False: only looked at, as
    far as its format allows. Raises ConfigurationError."""
    from PIL import Image, UnidentifiedImageError  # a tenth of a second: only where there are pictures

    shown = f"{url[:40]}..." if url.startswith(_DATA) else url
    try:
        head, _, data = url.partition(";base64,")
        content = base64.b64decode(data, validate=True) if head.startswith(_DATA) else Path(url).read_bytes()
        with Image.open(io.BytesIO(content), formats=_FORMATS) as found:
            picture = found.convert("RGB") if whole else found.verify()
        return picture, hashlib.blake2b(content, digest_size=16).hexdigest()
    except FileNotFoundError:
        raise ConfigurationError(f"no such picture: {shown}") from None
    except Exception as error:  # the boundary to readers of many formats, which raise whatever they like of bad files
        unknown = isinstance(error, UnidentifiedImageError)
        what = f"it is none of {', '.join(_FORMATS)}" if unknown else str(error) or type(error).__name__
        what = "a data: URL needs base64 of a picture" if url.startswith(_DATA) else what
        raise ConfigurationError(f"{shown} can't be read as a picture: {what}") from None


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as chat templates of models that see take them: every content is parts, a picture's with its hash
    alone, which is the same wherever its file lies."""

    def parts(content: Any) -> list[dict[str, Any]]:
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        return [
            {"type": "image", "content_hash": part.get("content_hash")} if part["type"] == "image_url" else part
            for part in content
        ]

    return [{**message, "content": parts(message["content"])} for message in messages]


def said(content: Any) -> str:
    """The text of a message's content."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")
