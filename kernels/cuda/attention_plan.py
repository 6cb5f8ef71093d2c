"""How the tokens of a step are cut into the tiles of the attention kernel, by the lengths of queries alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.attention import AttentionBatch, CommonPrefix, SharedPrefix
from kernels.cuda.attention_kernel import LIST_COLUMNS, REST, SHARED, WHOLE
from kernels.cuda.attention_lists import common_lists, device_list
from kernels.cuda.context import is_capturing

DECODE, DRAFT, PREFILL = 0, 1, 2
"""Kinds of tiles: for single tokens, for a few drafted ones, for prompts."""

_LANES = (16, 64, 128)
# Products of float32 are made without matrix units, of operands in registers.
_FLOAT32_LANES = (16, 32, 32)
_FIXED_LANES, _FIXED_FLOAT32_LANES = 64, 32


@dataclass(frozen=True, eq=False)
class Launch:
    """Tiles of one kind."""

    kind: int
    lanes: int
    """BLOCK_M of the kernel: tokens times query heads of a head of keys."""
    part: int
    """WHOLE, SHARED or REST, of `attention_kernel`."""
    num_tiles: int
    q_len: int
    """Tokens of the longest row; of every row where there is no list."""
    max_keys: int
    """Upper bound of a row's keys."""
    tiles: Tensor | None
    """Device int32 `[num_tiles, LIST_COLUMNS]`, or None where tiles follow from q_len."""

    @property
    def is_ragged(self) -> bool:
        """Whether rows may differ in length, and the longest from step to step."""
        return self.tiles is not None and self.part == WHOLE


@dataclass(frozen=True, eq=False)
class Plan:
    """What to launch, in order."""

    launches: tuple[Launch, ...]

    @property
    def shares(self) -> bool:
        """Whether launches of SHARED come before those of REST."""
        return self.launches[0].part == SHARED

    @property
    def has_lists(self) -> bool:
        """Whether something was copied to the device."""
        return self.launches[0].tiles is not None


def make_plan(batch: AttentionBatch, group: int, lanes_of_kind: tuple[int, ...], min_saved: int | None) -> Plan | None:
    """The tiles of a step, for `group` query heads to a head of keys; None if it has no tokens.

    lanes_of_kind: of the tiles of each kind that there is, ascending. Keys that rows share are gone through once where
    that saves min_saved keys or more in all; None: never. Rows of one length without shared keys need no list, so
    nothing is uploaded for them; nor for a batch with q_starts or a common prefix, whose lists the device makes.
    """
    q_lens = np.asarray(batch.q_lens, dtype=np.int64)
    num_tokens = int(q_lens.sum())
    if num_tokens == 0:
        return None
    if batch.q_starts is not None:
        return _device_plan(batch, batch.q_starts, num_tokens, group, lanes_of_kind)
    if batch.common is not None and min_saved is not None:
        return _common_plan(batch.common, num_tokens, group, lanes_of_kind, batch.max_kv_len)
    borders = None
    if batch.prefix is not None and min_saved is not None:
        borders = _borders(batch.prefix, q_lens, min_saved)
    longest = int(q_lens.max())
    if borders is None and longest * len(q_lens) == num_tokens:
        kind = int(_kinds(q_lens[:1], group, lanes_of_kind)[0])
        lanes = lanes_of_kind[kind]
        tiles_of_row = -(-longest // (lanes // group))
        tiles = tiles_of_row * len(q_lens)
        return Plan((Launch(kind, lanes, WHOLE, tiles, longest, batch.max_kv_len, None),))
    starts = np.cumsum(q_lens) - q_lens
    rows = np.arange(len(q_lens))
    drafts: list[tuple[Launch, np.ndarray]] = []
    if borders is not None:
        assert batch.prefix is not None
        first_rows = batch.prefix.row_starts[:-1].astype(np.int64)
        group_lens = np.add.reduceat(q_lens, first_rows)
        group_borders = borders[first_rows]
        used = (group_borders > 0) & (group_lens > 0)
        columns = (first_rows[used], starts[first_rows][used], group_lens[used], group_borders[used])
        drafts += _lists(columns, group, lanes_of_kind, SHARED, int(group_borders.max()))
    own_borders = np.zeros_like(q_lens) if borders is None else borders
    part = WHOLE if borders is None else REST
    drafts += _lists((rows, starts, q_lens, own_borders), group, lanes_of_kind, part, batch.max_kv_len)
    host = np.concatenate([entries for _, entries in drafts])
    if is_capturing(batch.kv_lens.device):
        raise RuntimeError("a batch of rows that differ in length must run once before it is captured in a graph")
    device = torch.from_numpy(host).to(batch.kv_lens.device, non_blocking=True)
    pieces = device.split([len(entries) for _, entries in drafts])
    launches = (
        Launch(draft.kind, draft.lanes, draft.part, draft.num_tiles, draft.q_len, draft.max_keys, piece)
        for (draft, _), piece in zip(drafts, pieces, strict=True)
    )
    return Plan(tuple(launches))


def _device_plan(
    batch: AttentionBatch, q_starts: Tensor, num_tokens: int, group: int, lanes_of_kind: tuple[int, ...]
) -> Plan:
    """Two kinds of tiles are enough for what is short: rows that fit into the smallest, and all others."""
    launches: list[Launch] = []
    num_rows, least = len(q_starts) - 1, 1
    for kind in sorted({0, len(lanes_of_kind) - 1}):
        lanes = lanes_of_kind[kind]
        tokens = lanes // group
        is_last = kind == len(lanes_of_kind) - 1
        most = num_tokens if is_last else min(tokens, num_tokens)
        capacity = min(num_rows, num_tokens // least)
        if is_last:
            # No more tiles begin amid a row than there are whole ones in all.
            capacity += num_tokens // tokens
        if capacity and most >= least:
            tiles = device_list(q_starts, least, most, tokens, capacity)
            launches.append(Launch(kind, lanes, WHOLE, capacity, most, batch.max_kv_len, tiles))
        least = most + 1
    return Plan(tuple(reversed(launches)))


def _common_plan(
    common: CommonPrefix, num_rows: int, group: int, lanes_of_kind: tuple[int, ...], max_keys: int
) -> Plan:
    """All queries together against what rows have in common, as if they were one row's; then each against its rest."""
    assert num_rows == len(common.lens), "with a common prefix every row adds one token"
    kind = int(_kinds(np.array([num_rows]), group, lanes_of_kind)[0])
    shared, rest = common_lists(common.lens, lanes_of_kind[kind] // group)
    return Plan(
        (
            Launch(kind, lanes_of_kind[kind], SHARED, len(shared), num_rows, max_keys, shared),
            Launch(DECODE, lanes_of_kind[DECODE], REST, num_rows, 1, max_keys, rest),
        )
    )


def tile_lanes(group: int, is_float32: bool) -> tuple[int, int, int]:
    """Lanes of the tiles of each kind; more than usual where more heads than that share one of keys."""
    least = 1 << (group - 1).bit_length()
    narrow, middle, wide = _FLOAT32_LANES if is_float32 else _LANES
    return max(narrow, least), max(middle, least), max(wide, least)


def fixed_lanes(group: int, is_float32: bool) -> tuple[int]:
    """Where one kind of tile has to do for all rows, as large as Hopper's matrix units want it."""
    return (max(_FIXED_FLOAT32_LANES if is_float32 else _FIXED_LANES, 1 << (group - 1).bit_length()),)


def _kinds(q_lens: np.ndarray, group: int, lanes_of_kind: tuple[int, ...]) -> np.ndarray:
    """The smallest kind of tile that has room for all of a row, or the largest."""
    return np.searchsorted(np.array(lanes_of_kind[:-1], dtype=np.int64), q_lens * group)


def _borders(prefix: SharedPrefix, q_lens: np.ndarray, min_saved: int) -> np.ndarray | None:
    """Keys of each row that its group goes through together, int64 `[rows]`; None if that is not worth while."""
    sizes = np.diff(prefix.row_starts)
    active = np.add.reduceat(q_lens > 0, prefix.row_starts[:-1].astype(np.int64), dtype=np.int64)
    lens = np.where(active >= 2, prefix.lens.astype(np.int64), 0)
    saved = int((lens * (active - 1)).sum())
    if saved < max(min_saved, 1):
        return None
    return np.repeat(lens, sizes)


def _lists(
    columns: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    group: int,
    lanes_of_kind: tuple[int, ...],
    part: int,
    max_keys: int,
) -> list[tuple[Launch, np.ndarray]]:
    """A launch and its list for each kind of tile that (rows, first tokens, numbers of tokens, borders) need."""
    q_lens = columns[2]
    kinds = _kinds(q_lens, group, lanes_of_kind)
    found: list[tuple[Launch, np.ndarray]] = []
    for kind in np.unique(kinds[q_lens > 0])[::-1].tolist():
        chosen = (kinds == kind) & (q_lens > 0)
        rows, origins, lens, borders = (column[chosen] for column in columns)
        lanes = lanes_of_kind[kind]
        tokens = lanes // group
        counts = -(-lens // tokens)
        total = int(counts.sum())
        entry = np.repeat(np.arange(len(rows)), counts)
        nth = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        entries = np.zeros((total, LIST_COLUMNS), dtype=np.int32)
        entries[:, 0] = rows[entry]
        entries[:, 1] = nth * tokens
        entries[:, 2] = origins[entry]
        entries[:, 3] = lens[entry]
        entries[:, 4] = borders[entry]
        found.append((Launch(kind, lanes, part, total, int(lens.max()), max_keys, None), entries))
    return found
