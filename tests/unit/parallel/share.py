"""`python -m tests.unit.parallel.share RANK SIZE MEETING MODELS OUT [DEVICE]`: one rank's share of the models' work.

Loads each model of the folder MODELS, runs it chunk by chunk and token by token, and leaves in OUT/MODEL-RANK.npz the
logits, and the bytes of every parameter and of a token's keys and values.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np
import psutil
import torch

from engine.model_files.types import ModelFiles
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.parallel.group import Distributed, Group
from tests.unit.models.paging import run_one
from tests.unit.parallel.ranks import loaded_decoder
from tests.unit.weights.files import hf_files

NUM_TOKENS, CHUNK, DECODE_FROM = 40, 16, 34


def logits_of(decoder: Decoder) -> np.ndarray:
    """float32 [NUM_TOKENS, vocab]: prefilled in chunks, then decoded."""
    ids = torch.randint(decoder.spec.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))
    # The last token of the vocabulary is the last row of the last share.
    ids[3] = decoder.spec.vocab_size - 1
    return run_one(decoder, ids, chunk=CHUNK, decode_from=DECODE_FROM).cpu().numpy()


def files_of(directory: Path) -> tuple[ModelFiles, bool]:
    """The model of a case, and whether its weights are packed; the folder's name says what is special about it."""
    files = hf_files(directory)
    if "dummy" in directory.name:
        files = msgspec.structs.replace(files, format="dummy", weight_files=())
    return files, "packed" in directory.name


def sizes_of(decoder: Decoder) -> dict[str, int]:
    """Bytes of each parameter, and under `kv` of what one token keeps."""
    sizes = {name: tensor.nbytes for name, tensor in decoder.parameters().items()}
    shape = decoder.kv_shape
    return sizes | {"kv": shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * 4}


def check_group(group: Group, device: torch.device) -> None:
    """Every collective, on small numbers."""
    rank, size = group.rank, group.size
    x = torch.full((3, 2), float(rank + 1), device=device)
    assert group.all_reduce(x) is x
    assert x.eq(size * (size + 1) / 2).all()
    own = torch.arange(6, device=device).view(2, 3) + 10 * rank
    every = [torch.arange(6, device=device).view(2, 3) + 10 * other for other in range(size)]
    for dim in (0, 1):
        assert torch.equal(group.all_gather(own, dim), torch.cat(every, dim))
    ids = torch.full((4,), 7 + rank, dtype=torch.int32, device=device)
    group.broadcast(ids)
    assert ids.eq(7).all()
    assert group.least(5 - rank) == 5 - (size - 1)
    assert group.least(2**40 + rank) == 2**40


def check_capture(group: Group, device: torch.device) -> None:
    """Collectives in a CUDA graph, which says what its inputs hold when it is replayed."""
    x, ids = torch.zeros(8, 16, device=device), torch.zeros(8, dtype=torch.int32, device=device)
    torch.cuda.set_stream(torch.cuda.Stream())

    def work() -> torch.Tensor:
        summed = group.all_reduce(x + 1.0)
        every = group.all_gather(summed + group.rank, 1)
        group.broadcast(ids)
        return every

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    every = work()
    graph.capture_end()
    for value in (1.0, 5.0):
        x.fill_(value)
        ids.fill_(int(value) + group.rank)
        graph.replay()
        wanted = [torch.full((8, 16), group.size * (value + 1.0) + rank, device=device) for rank in range(group.size)]
        assert torch.equal(every, torch.cat(wanted, 1))
        assert ids.eq(int(value)).all()


def main() -> None:
    rank, size, meeting, models, out = int(sys.argv[1]), int(sys.argv[2]), *map(Path, sys.argv[3:6])
    device = torch.device("cuda", rank) if sys.argv[6:] == ["cuda"] else torch.device("cpu")
    torch.set_num_threads(1)
    group = Distributed(rank, size, meeting, device, 60.0)
    listening = [c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
    assert set(listening) <= {"127.0.0.1", "::1"}, listening
    with torch.inference_mode():
        check_group(group, device)
        if device.type == "cuda":
            check_capture(group, device)
    for directory in sorted(models.iterdir()):
        files, packed = files_of(directory)
        decoder = loaded_decoder(files, group, packed=packed, device=str(device))
        logits = logits_of(decoder)
        np.savez(out / f"{directory.name}-{rank}.npz", logits=logits, **sizes_of(decoder))
    group.close()


if __name__ == "__main__":
    main()
