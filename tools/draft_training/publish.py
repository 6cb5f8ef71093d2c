"""Writing what was trained as drafters are published: config.json and model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def publish(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Matrices in float16; ids as they are."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    kept = {
        name: (value if value.dtype == torch.int64 else value.detach().half()).cpu().contiguous()
        for name, value in tensors.items()
    }
    save_file(kept, directory / "model.safetensors")
