"""load_weights: fill a decoder's parameters from a resolved model, after checking every name and shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.errors import ModelFileError
from engine.model_files.types import ModelFiles
from kernels.packed_rows import PackedRows
from scheduler_proc.layers.target import LoadTarget
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.models.registry import family_of
from scheduler_proc.models.spec import DecoderSpec, Family
from scheduler_proc.weights.checkpoint import CheckpointTensor
from scheduler_proc.weights.dummy import dummy_tensor

Progress = Callable[[str, int, int], None]
"""Called after each tensor with (its file, bytes read so far, bytes in all)."""

INT8 = "int8"
"""The kind of weights that a checkpoint has as floats and the model keeps packed."""

_MAX_LISTED = 8


@torch.inference_mode()
def load_weights(decoder: Decoder, files: ModelFiles, progress: Progress | None = None) -> Counter[str]:
    """Fill every parameter of `decoder` from `files`, tensor by tensor.

    Returns how many tensors went packed into the model, by kind: GGUF's name of it, or INT8 for what was packed only
    now. Host memory beyond the parameters stays within one mapped file and one tensor. Raises ModelFileError: once,
    before anything is read, for all missing, unknown and misshapen tensors together; or for a tensor that cannot be
    read.
    """
    targets = decoder.targets()
    if files.format == "dummy":
        return _load_dummy(targets, decoder, progress or _silent)
    return _load_checkpoint(decoder.spec, targets, files, progress or _silent)


def _silent(file: str, done_bytes: int, total_bytes: int) -> None:
    pass


def _load_dummy(targets: Mapping[str, LoadTarget], decoder: Decoder, progress: Progress) -> Counter[str]:
    # On a device they are made there: drawing them on the host would take most of a start.
    on_cpu = decoder.device.type == "cpu"
    place, dtype = decoder.device, torch.float32 if on_cpu else decoder.dtype
    sizes = {name: 4 * torch.Size(target.shape).numel() for name, target in targets.items()}
    done, total = 0, sum(sizes.values())
    for name, target in targets.items():
        target.load(dummy_tensor(name, target, device=place, dtype=dtype))
        done += sizes[name]
        progress("dummy", done, total)
    return Counter({INT8: sum(target.takes_packed for target in targets.values())})


def _load_checkpoint(
    spec: DecoderSpec, targets: Mapping[str, LoadTarget], files: ModelFiles, progress: Progress
) -> Counter[str]:
    family = family_of(files.config.architecture)
    names = family.gguf_names if files.format == "gguf" else family.hf_names
    own_names = {family.checkpoint_name(name, names): name for name in targets}
    tensors = _tensors_of(files)
    _check(spec, family, names, own_names, targets, tensors, files)
    permuted = files.format == "gguf" and family.gguf_permuted_qk
    wanted = [tensor for tensor in tensors if tensor.name in own_names]
    packed: Counter[str] = Counter()
    done, total = 0, sum(tensor.size_bytes for tensor in wanted)
    for tensor in wanted:
        own_name = own_names[tensor.name]
        target = targets[own_name]
        value = tensor.read_packed() if target.takes_packed and tensor.read_packed is not None else tensor.read()
        if permuted:
            value = _unpermute(spec, own_name, value)
        try:
            target.load(value)
        except ValueError as error:
            raise ModelFileError(f"{tensor.file}: tensor {tensor.name} cannot be used: {error}") from error
        if target.takes_packed:
            packed[value.kind if isinstance(value, PackedRows) else INT8] += 1
        done += tensor.size_bytes
        progress(tensor.file, done, total)
    return packed


def _tensors_of(files: ModelFiles) -> list[CheckpointTensor]:
    if files.format == "gguf":
        from scheduler_proc.weights.gguf_file import gguf_tensors

        return gguf_tensors(files.weight_files)
    from scheduler_proc.weights.safetensors_files import safetensors_tensors

    return safetensors_tensors(files.weight_files)


def _unpermute(spec: DecoderSpec, own_name: str, value: Tensor | PackedRows) -> Tensor | PackedRows:
    from scheduler_proc.weights.gguf_file import unpermute_rotary_rows

    layer_part = own_name.partition(".attn.")[2].rpartition(".")[0]
    num_heads = {"q": spec.num_heads, "k": spec.num_kv_heads}.get(layer_part)
    if num_heads is None:
        return value
    if isinstance(value, PackedRows):
        return replace(value, data=unpermute_rotary_rows(value.data, num_heads))
    return unpermute_rotary_rows(value, num_heads)


def _check(
    spec: DecoderSpec,
    family: Family,
    names: Mapping[str, str],
    own_names: Mapping[str, str],
    targets: Mapping[str, LoadTarget],
    tensors: Sequence[CheckpointTensor],
    files: ModelFiles,
) -> None:
    """Raise one ModelFileError for everything about names and shapes that does not fit."""
    found = {tensor.name: tensor for tensor in tensors}
    missing = [f"{name} {_shape(targets[own].shape)}" for name, own in own_names.items() if name not in found]
    misshapen = [
        f"{name} in {found[name].file}: expected {_shape(targets[own].shape)}, found {_shape(found[name].shape)}"
        for name, own in own_names.items()
        if name in found and found[name].shape != targets[own].shape
    ]
    tied_name = family.checkpoint_name("lm_head.weight", names) if spec.tie_embeddings else None
    extra = [
        f"{tensor.name} {_shape(tensor.shape)} in {tensor.file}"
        for tensor in tensors
        if tensor.name not in own_names and tensor.name != tied_name and not family.is_ignored(tensor.name)
    ]
    problems = [
        _listing("missing tensors", missing),
        _listing("tensors of the wrong shape", misshapen),
        _listing("tensors the model has no place for", extra),
    ]
    embed_name = family.checkpoint_name("embed.weight", names)
    if tied_name in found and embed_name in found and not _equal(found[tied_name], found[embed_name]):
        problems.append(f"{tied_name} differs from {embed_name}, though the config ties them")
    told = "; ".join(problem for problem in problems if problem)
    if told:
        raise ModelFileError(f"{files.path} does not fit {spec.architecture} as configured: {told}")


def _equal(one: CheckpointTensor, other: CheckpointTensor) -> bool:
    if one.shape != other.shape:
        return False
    if one.read_packed is not None and other.read_packed is not None:
        this, that = one.read_packed(), other.read_packed()
        if this.kind == that.kind and torch.equal(this.data, that.data):
            return True
    return torch.equal(one.read(), other.read())


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _listing(what: str, items: Sequence[str]) -> str:
    if not items:
        return ""
    more = f" and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return f"{len(items)} {what}: {', '.join(items[:_MAX_LISTED])}{more}"
