"""Fetch a model's files from the Hugging Face hub (or its local cache)."""

from __future__ import annotations

import re
from pathlib import Path

from engine.errors import ModelFileError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_DESCRIPTION = ["*.json", "*.model", "*.jinja"]
_WEIGHTS = ["*.safetensors"]
_IGNORED = ["*/*", "consolidated*"]
"""Subfolders (other formats' copies) and the second copy of the weights some repositories carry."""


def is_hub_name(model: str) -> bool:
    """Whether `model` has the form organisation/name."""
    return _NAME.fullmatch(model) is not None


def fetch_from_hub(name: str, revision: str | None, *, weights: bool) -> Path:
    """The local snapshot directory of a hub model. Honours HF_HUB_OFFLINE and the hub's own environment.

    Raises ModelFileError saying what was tried.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE, is_offline_mode
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    what = name if revision is None else f"{name} at revision {revision}"
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=_DESCRIPTION + (_WEIGHTS if weights else []),
                ignore_patterns=_IGNORED,
            )
        )
    except LocalEntryNotFoundError as error:
        hub = "HF_HUB_OFFLINE is set, so the hub was not asked" if is_offline_mode() else "the hub cannot be reached"
        raise ModelFileError(
            f"model {what} not found: no local path {name}, not in the local cache {HF_HUB_CACHE}, and {hub}"
        ) from error
    except HFValidationError as error:
        raise ModelFileError(f"model {what}: not a valid hub name: {error}") from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelFileError(
            f"model {what} not found: no local path {name}, not in the local cache {HF_HUB_CACHE}, "
            f"and the hub said: {_first_sentence(error)}"
        ) from error


def _first_sentence(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
