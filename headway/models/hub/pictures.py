"""The worker that makes token ids and pixel arrays of prompts with pictures, by the model folder's own processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoProcessor

from headway.models.configuration import read_json
from headway.models.hub.pixels import PixelStore
from headway.records.errors import ConfigurationError
from headway.records.tokens import TokenIds
from headway.tokens.pictures import for_template, open_picture
from headway.tokens.tokenizer import Tokenizer

# Of tokens: `HubModel` makes what a module takes of them.
_OF_TOKENS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


class PictureWorker:
    """Worker class: the processor of a model folder. ``folder``: of the run's pixel arrays."""

    def __init__(
        self,
        context: Any,
        *,
        model_path: str,
        trust: bool,
        folder: str,
        template_arguments: Mapping[str, Any] | None = None,
        started: str = "",
    ) -> None:
        """Raises ConfigurationError where transformers can make no processor of the model folder."""
        self._path = model_path
        when = datetime.fromisoformat(started) if started else None
        self._tokenizer = Tokenizer.load(model_path, arguments=template_arguments, started=when)
        self._processor = load_processor(model_path, trust)
        self._store = PixelStore(folder)

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], addresses: Sequence[tuple[str, str]]
    ) -> tuple[TokenIds, str, int]:
        """The conversation's token ids, a picture's placeholders as many as it takes; the content hash of the pixel
        arrays of its pictures (`Task.pictures`), which are stored now, and their bytes. Raises ConfigurationError for a
        picture that can't be read or isn't what it was, and for what the processor refuses."""
        pictures: list[Any] = []
        for address, content in addresses:
            picture, found = open_picture(address)
            if content not in ("", found):
                raise ConfigurationError(f"{address}: the picture has changed since the tasks were read")
            pictures.append(picture)
        text = self._tokenizer.render_messages(for_template(messages))
        try:
            made = self._processor(text=[text], images=pictures, return_tensors="np", add_special_tokens=False)
        except Exception as error:  # the boundary to a processor's own code
            raise ConfigurationError(
                f"{self._path}: its processor refuses a prompt with {len(pictures)} pictures: "
                f"{type(error).__name__}: {str(error).strip()[:300]}"
            ) from error
        arrays = {name: np.asarray(value) for name, value in made.items() if name not in _OF_TOKENS}
        ids = TokenIds(made["input_ids"][0])
        for name, one in arrays.items():
            of_tokens = one.dtype.kind in "iub" and one.shape[-1:] == (len(ids),)  # a response would need its own
            if one.dtype.hasobject or name.startswith("cross_") or of_tokens:
                what = f"{name} {list(one.shape)} of {len(ids)} tokens" if of_tokens else name
                raise ConfigurationError(f"{self._path}: its processor makes {what}, which isn't supported")
        return ids, self._store.write(arrays), sum(one.nbytes for one in arrays.values())


def load_processor(path: str | Path, trust_remote_code: bool = False) -> Any:
    """The processor of a model folder, never from the network. Raises ConfigurationError.

    What it has for videos is left out where that needs torchvision, which isn't installed.
    """
    keys: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    try:
        try:
            found = AutoProcessor.from_pretrained(path, **keys)
        except (ImportError, ValueError) as error:
            if "torchvision" not in str(error).lower():
                raise
            found = _without_videos(Path(path)).from_pretrained(path, **keys)
    except Exception as error:  # whatever transformers says of a folder
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigurationError(f"{path}: transformers can make no processor of it: {' '.join(first[:3])}") from error
    if not hasattr(found, "image_processor"):
        raise ConfigurationError(f"{path}: images without a processor: transformers finds a {type(found).__name__}")
    return found


def _without_videos(folder: Path) -> Any:
    import transformers
    from transformers.models.auto import processing_auto

    names: Any = processing_auto.PROCESSOR_MAPPING_NAMES  # pyright: ignore[reportPrivateImportUsage]
    whole: Any = getattr(transformers, names[read_json(folder / "config.json")["model_type"]])
    attributes = [name for name in whole.get_attributes() if "video" not in name]
    return type(whole.__name__, (whole,), {"get_attributes": classmethod(lambda cls: attributes)})
