"""Models of the Hugging Face hub by name, ``Qwen/Qwen3-4B@REVISION``, as folders of its own cache. Torch-free."""

from __future__ import annotations

import re
from pathlib import Path

from headway.config.model import hf_name
from headway.records.errors import ConfigurationError

_NAME = re.compile(r"([\w-][\w.-]*/[\w.-]+)(?:@([\w.][\w./-]*))?")
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")
_WEIGHTS = ("*.safetensors",)


def model_folder(name: str, *, stored: str = "", weights: bool = True, key: str = "model.path") -> str:
    """Return the folder of the model ``name``, which a download fills if the cache lacks it: HF_HOME, HF_ENDPOINT,
    HF_TOKEN and HF_HUB_OFFLINE apply. Anything but ORGANISATION/MODEL[@REVISION] is a folder already, as is a name
    without a revision whose first part is a folder here.

    ``stored``: the folder that the run to be resumed has, whose commit is kept, also where a branch has moved, unless
    the name has another commit. ``weights``: needed too. Raises ConfigurationError.
    """
    match = _NAME.fullmatch(name)
    if match is None or Path(name).exists() or (match[2] is None and Path(name).parent.is_dir()):
        return name
    repository, revision = match[1], match[2]
    stored_name, _, commit = hf_name(stored).partition("@")
    if commit and stored_name == repository and not re.fullmatch("[0-9a-f]{40}", revision or ""):
        revision = commit
    return _download(repository, revision, weights, f"{key} = {name!r}")


def _download(repository: str, revision: str | None, weights: bool, subject: str) -> str:
    from huggingface_hub import constants, errors, snapshot_download  # only where a model has such a name

    server = constants.ENDPOINT
    try:
        return snapshot_download(
            repository,
            revision=revision,
            allow_patterns=[*_SMALL_FILES, *(_WEIGHTS if weights else ())],
            ignore_patterns=["*/*"],
        )
    except errors.GatedRepoError:
        reason = f"{server}/{repository} is gated: accept its terms there, then log in by `hf auth login` or HF_TOKEN"
    except errors.RepositoryNotFoundError:
        reason = f"no such folder, and {server} has no such model, or it is private and wants a token (HF_TOKEN)"
    except errors.RevisionNotFoundError:
        reason = f"{server}/{repository} has no revision {revision!r}; valid: a branch, a tag or a commit"
    except Exception as error:  # the boundary to huggingface_hub, whose client's errors have no common class
        problem = str(error.__cause__ or error).splitlines()[0]
        reason = (
            f"no such folder, and {server} can't be reached for what {constants.HF_HUB_CACHE} lacks ({problem}); "
            "valid: the folder of a model, or HF_ENDPOINT, the address of a mirror"
        )
    raise ConfigurationError(f"{subject}: {reason}")
