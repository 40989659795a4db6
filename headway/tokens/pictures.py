"""Pictures in messages, as parts in OpenAI's form. Reading tasks checks them; computing pixels opens them."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from headway.records.errors import ConfigurationError

_DATA = "data:"
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # for some others Pillow starts external programs


def require_parts(value: Sequence[Any], field: str, folder: Path) -> list[dict[str, Any]]:
    """Check a message's content of parts, texts and pictures; relative paths start at ``folder``.

    Returns the parts with absolute paths. Raises ConfigurationError naming ``field`` for another kind of part, a
    missing picture, and a file that is no picture.
    """
    parts: list[dict[str, Any]] = []
    for number, raw_part in enumerate(value):
        part: Mapping[str, Any] = cast("Mapping[str, Any]", raw_part) if isinstance(raw_part, Mapping) else {}
        kind, location = str(part.get("type")), f"{field}[{number}]"
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind == "image_url":
            image = part.get("image_url")
            parts.append(picture_part(image.get("url") if isinstance(image, Mapping) else image, location, folder))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        else:  # sound and video, too
            raise ConfigurationError(f"{location}: type = {kind!r}: valid: text with its text, image_url with its url")
    return parts


def picture_part(url: Any, field: str, folder: Path) -> dict[str, Any]:
    """Make the part of a picture, a path relative to ``folder`` or a data: URL, with its content hash. Raises as
    `require_parts`."""
    if not isinstance(url, str) or not url or url.startswith(("http:", "https:")):
        reason = f"url = {str(url)[:80]!r}: nothing is fetched"
        raise ConfigurationError(f"{field}: {reason}; valid: a path, or a data: URL of base64")
    address = url if url.startswith(_DATA) else str((folder / url.removeprefix("file://")).resolve())
    try:
        _, content_hash = open_picture(address, decode=False)
    except ConfigurationError as error:
        raise ConfigurationError(f"{field}: {error}") from None
    return {"type": "image_url", "image_url": {"url": address}, "content_hash": content_hash}


def open_picture(url: str, *, decode: bool = True) -> tuple[Any, str]:
    """Open the picture at a path or in a data: URL; return it in RGB, and the hash of its bytes. With ``decode`` False
    it is only verified, as far as its format allows, and None is returned for it. Raises ConfigurationError."""
    from PIL import Image, UnidentifiedImageError  # a tenth of a second: only where there are pictures

    displayed_url = f"{url[:40]}..." if url.startswith(_DATA) else url
    try:
        header, _, payload = url.partition(";base64,")
        picture_bytes = base64.b64decode(payload, validate=True) if header.startswith(_DATA) else Path(url).read_bytes()
        with Image.open(io.BytesIO(picture_bytes), formats=_FORMATS) as image:
            picture = image.convert("RGB") if decode else image.verify()
        return picture, hashlib.blake2b(picture_bytes, digest_size=16).hexdigest()
    except FileNotFoundError:
        raise ConfigurationError(f"no such picture: {displayed_url}") from None
    except Exception as error:  # the boundary to readers of many formats, which raise any exception for bad files
        is_unknown = isinstance(error, UnidentifiedImageError)
        reason = f"it is none of {', '.join(_FORMATS)}" if is_unknown else str(error) or type(error).__name__
        reason = "a data: URL needs base64 of a picture" if url.startswith(_DATA) else reason
        raise ConfigurationError(f"{displayed_url} can't be read as a picture: {reason}") from None


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert messages for chat templates of models with vision: every content becomes parts, and a picture's part
    keeps its hash alone, which doesn't depend on where its file is."""

    def parts(content: Any) -> list[dict[str, Any]]:
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        return [
            {"type": "image", "content_hash": part.get("content_hash")} if part["type"] == "image_url" else part
            for part in content
        ]

    return [{**message, "content": parts(message["content"])} for message in messages]


def content_text(content: Any) -> str:
    """Return the text of a message's content, without its pictures."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")
