"""The worker that makes token ids and pixel arrays of prompts with pictures, with the model folder's processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoProcessor

from headway.models.configuration import read_json
from headway.models.hf.pixels import PixelStore
from headway.records.errors import ConfigurationError
from headway.records.tokens import TokenIds
from headway.tokens.pictures import open_picture, template_messages
from headway.tokens.tokenizer import Tokenizer

# Inputs per token, which `HfModel` makes itself.
_TOKEN_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


class PictureWorker:
    """The worker class that runs the processor of a model folder. ``folder``: of the run's pixel arrays."""

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
        """Raises ConfigurationError if transformers can't load a processor from the model folder."""
        self._path = model_path
        start_time = datetime.fromisoformat(started) if started else None
        self._tokenizer = Tokenizer.load(model_path, arguments=template_arguments, started=start_time)
        self._processor = load_processor(model_path, trust)
        self._store = PixelStore(folder)

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], addresses: Sequence[tuple[str, str]]
    ) -> tuple[TokenIds, str, int]:
        """The conversation's token ids, with each picture's placeholders, and the content hash and size in bytes of its
        pictures' pixel arrays (`Task.pictures`), which this call stores. Raises ConfigurationError for a picture that
        can't be read or has changed, and for a prompt that the processor refuses."""
        pictures: list[Any] = []
        for address, expected_hash in addresses:
            picture, content_hash = open_picture(address)
            if expected_hash not in ("", content_hash):
                raise ConfigurationError(f"{address}: the picture has changed since the tasks were read")
            pictures.append(picture)
        text = self._tokenizer.render_messages(template_messages(messages))
        try:
            features = self._processor(text=[text], images=pictures, return_tensors="np", add_special_tokens=False)
        except Exception as error:  # the boundary to the processor's code
            raise ConfigurationError(
                f"{self._path}: its processor refuses a prompt with {len(pictures)} pictures: "
                f"{type(error).__name__}: {str(error).strip()[:300]}"
            ) from error
        arrays = {name: np.asarray(value) for name, value in features.items() if name not in _TOKEN_INPUTS}
        ids = TokenIds(features["input_ids"][0])
        for name, array in arrays.items():
            per_token = array.dtype.kind in "iub" and array.shape[-1:] == (len(ids),)  # a response would need them too
            if array.dtype.hasobject or name.startswith("cross_") or per_token:
                description = f"{name} {list(array.shape)} of {len(ids)} tokens" if per_token else name
                raise ConfigurationError(f"{self._path}: its processor makes {description}, which isn't supported")
        return ids, self._store.write(arrays), sum(array.nbytes for array in arrays.values())


def load_processor(path: str | Path, trust_remote_code: bool = False) -> Any:
    """Load the processor of a model folder, never from the network. Raises ConfigurationError.

    Its part for videos is left out if that needs torchvision and torchvision isn't installed.
    """
    load_options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    try:
        try:
            processor = AutoProcessor.from_pretrained(path, **load_options)
        except (ImportError, ValueError) as error:
            if "torchvision" not in str(error).lower():
                raise
            processor = _without_videos(Path(path)).from_pretrained(path, **load_options)
    except Exception as error:  # any error of transformers for a folder
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigurationError(f"{path}: transformers can make no processor of it: {' '.join(lines[:3])}") from error
    if not hasattr(processor, "image_processor"):
        raise ConfigurationError(f"{path}: images without a processor: transformers finds a {type(processor).__name__}")
    return processor


def _without_videos(folder: Path) -> Any:
    import transformers
    from transformers.models.auto import processing_auto

    class_by_type: Any = processing_auto.PROCESSOR_MAPPING_NAMES  # pyright: ignore[reportPrivateImportUsage]
    processor_class: Any = getattr(transformers, class_by_type[read_json(folder / "config.json")["model_type"]])
    attributes = [name for name in processor_class.get_attributes() if "video" not in name]
    return type(processor_class.__name__, (processor_class,), {"get_attributes": classmethod(lambda cls: attributes)})
