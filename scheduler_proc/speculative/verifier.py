"""Steps that verify drafts: what goes through the model, and what of it the slots take."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dispatch import KernelSet
from kernels.pages import KVLayers
from kernels.speculative import Drafts, Nodes, Taken, VerifyLimits
from scheduler_proc.plan import Joins, StepPlan
from scheduler_proc.speculative.drafter import Drafter
from scheduler_proc.speculative.follower import Follower
from scheduler_proc.worker.device_slots import DeviceSlots
from scheduler_proc.worker.forward import Forward, Pages


class Verifier:
    """Of one model's slots and pages. Nothing of it waits for the device."""

    def __init__(
        self,
        kernels: KernelSet,
        drafter: Drafter,
        slots: DeviceSlots,
        pages: Pages,
        follower: Follower | None = None,
    ) -> None:
        """follower: the drafter, if it follows the model's passes."""
        self._follower = follower
        self.drafter = drafter
        self._kernels = kernels
        self._slots = slots
        self._pages = pages
        self._layers = [KVLayers.of(kv) for kv in (pages.kv, drafter.kv) if kv]
        """Of the model and of who drafts; graphs read it."""
        size, device = slots.num_slots + 1, slots.transfer.device
        self._limits = VerifyLimits(
            torch.zeros(size, dtype=torch.int64, device=device), torch.zeros(size, dtype=torch.int32, device=device)
        )

    def join(self, joins: Joins) -> None:
        """New occupants of slots; told again, it comes to the same. Made-up ones have no drafts."""
        drafting = joins.drafting
        if drafting is None:
            return
        slots, full_lens, most_drafts = self._slots.transfer.upload_all(
            (joins.slots, torch.int64), (drafting.full_lens, torch.int64), (drafting.most_drafts, torch.int32)
        )
        self._limits.full_lens[slots] = full_lens
        self._limits.most_drafts[slots] = most_drafts
        self.drafter.join(joins)

    def run(self, plan: StepPlan, rows: Tensor, forward: Forward) -> tuple[Nodes, Tensor]:
        """`pass_nodes` for a plan's rows (int64 [n]). On the CPU K is as many drafts as there are: nodes cost time,
        and nobody has to wait to see them."""
        is_trimmed = rows.device.type == "cpu"
        return self.pass_nodes(rows, plan.num_drafts, int(plan.kv_lens.max()), forward, is_trimmed=is_trimmed)

    def pass_nodes(
        self, rows: Tensor, num_drafts: int, longest: int, forward: Forward, *, is_trimmed: bool = False
    ) -> tuple[Nodes, Tensor]:
        """Draft for the slots `rows`, and pass all nodes through the model: they, and their hidden states
        [n * (K + 1), hidden].

        longest: tokens of a row with drafts at most; is_trimmed: K is as many drafts as there are, not num_drafts.
        """
        page_size, table = self._pages.page_size, self._slots.page_table
        longest = min(longest, table.shape[1] * page_size)
        drafts = self.drafter.draft(rows, num_drafts, longest, self._limits)
        if is_trimmed:
            drafts = _without_unused(drafts)
        num_rows, size = len(rows), drafts.tokens.shape[1] + 1
        inputs = forward.room(num_rows * size, num_rows, -(-longest // page_size))
        nodes = self._kernels.verify_inputs(
            rows, drafts, self._slots.tensors, self._limits, page_size, self._pages.scratch_location, inputs
        )
        if self._follower is not None:
            self._follower.expect(rows, None, drafts.parents)
        return nodes, forward.verify(inputs, num_rows, longest, nodes.tree)

    def seat(self, num_rows: int, max_len: int) -> None:
        """Made-up requests in the first slots may have drafts until they are max_len tokens long."""
        self._limits.full_lens[:num_rows] = max_len
        self._limits.most_drafts[:num_rows] = 1 << 20

    def clear(self) -> None:
        """As if nobody had been there."""
        self._limits.full_lens.zero_()
        self._limits.most_drafts.zero_()
        self.drafter.clear()

    def take(self, rows: Tensor, nodes: Nodes, drawn: Tensor) -> Taken:
        """The slots take what the model's draws (int32 [n, K + 1]) accept of the nodes, and its keys and values move to
        where they belong."""
        taken = self._kernels.take_accepted(rows, nodes, drawn, self._slots.tensors, self._limits)
        if nodes.visible is not None:
            pages, table = self._pages, self._slots.page_table
            moves = self._kernels.moves_of(rows, nodes, taken, table, pages.page_size, pages.scratch_location)
            # The likeliest way's first nodes lie where they belong; only a CPU sees at once whether that is all.
            if rows.device.type != "cpu" or _moves_any(*moves):
                for layers in self._layers:
                    self._kernels.compact_kv(layers, *moves)
        self.drafter.verified(rows, nodes, taken)
        return taken


def _moves_any(sources: Tensor, targets: Tensor, counts: Tensor) -> bool:
    """Whether any of some moves (kernels.pages.compact_kv) goes elsewhere."""
    is_move = torch.arange(sources.shape[1]) < counts.unsqueeze(1)
    return bool((is_move & (sources != targets)).any())


def _without_unused(drafts: Drafts) -> Drafts:
    """Without the last nodes, as far as no row has them."""
    used = (drafts.tokens >= 0).any(dim=0).nonzero()
    num = int(used[-1]) + 1 if len(used) else 0
    return Drafts(drafts.tokens[:, :num], None if drafts.parents is None else drafts.parents[:, :num])
