"""The kernels of verifying drafts as they are launched, compiled without a GPU.

Not a test by itself: `compile_all` is for a process whose kernels are not interpreted.
"""

from __future__ import annotations

from kernels.cuda.beams import VOCAB_BLOCK, before_nodes, best_rows, grow_rows, keep_nodes, likeliest_rows
from kernels.cuda.places import place_rows
from kernels.cuda.speculative import PAGE_BLOCK, TEXT_BLOCK, append_rows, match_rows, move_rows, node_rows, walk_rows
from tests.support.triton_compile import Compiled, compile_kernel

SLOTS = {
    "rows": "*i64",
    "seq_len": "*i64",
    "last_token": "*i64",
    "ended": "*u8",
    "full_lens": "*i64",
    "draft_tokens": "*i64",
    "parents": "*i64",
}
NODES = {
    "most_drafts": "*i32",
    "page_table": "*i32",
    "tokens": "*i64",
    "positions": "*i64",
    "locations": "*i64",
    "kv_lens": "*i64",
    "out_table": "*i32",
    "context_out": "*i64",
    "usable_out": "*u8",
    "depths_out": "*i32",
    "node_lens_out": "*i64",
    "visible_out": "*u8",
    "num_drafts": "i32",
    "max_pages": "i32",
    "width": "i32",
    "table_stride": "i32",
    "out_stride": "i32",
    "scratch_location": "i64",
}
PLACES = {
    **{name: NODES[name] for name in ("page_table", "tokens", "positions", "locations", "kv_lens", "out_table")},
    **dict.fromkeys(("num_passes", "most", "filler", "max_pages", "width", "table_stride"), "i32"),
    "scratch_location": "i64",
}
WALK = {
    "drawn": "*i32",
    "usable": "*u8",
    "context": "*i64",
    "stop_ids": "*i32",
    "numbers_out": "*i32",
    "way_out": "*i64",
    "size": "i32",
    "widest": "i32",
    "stop_stride": "i32",
}
MOVES = {
    **{name: NODES[name] for name in ("page_table", "max_pages", "table_stride", "scratch_location")},
    **dict.fromkeys(("rows", "context", "way", "sources", "targets", "moved"), "*i64"),
    "counts": "*i32",
    "size": "i32",
    "count_stride": "i32",
}
TEXTS = {"texts": "*i32", "seq_len": "*i64", "rows": "*i64", "text_stride": "i32"}
APPEND = {
    "tokens": "*i32",
    "counts": "*i32",
    "num": "i32",
    "nowhere": "i32",
    "token_stride": "i32",
    "count_stride": "i32",
}
MATCH = {"drafts": "*i64", "num_drafts": "i32", "least": "i32", "last_place": "i32"}
LIKELIEST = {
    "logits": "*bf16",
    "offsets": "*i64",
    "log_probs": "*fp32",
    "ids": "*i64",
    "vocab": "i32",
    "stride": "i32",
}
TREE = {
    "log_probs": "*fp32",
    "ids": "*i64",
    "scores": "*fp32",
    "tokens": "*i64",
    "extended": "*i64",
    "last": "*i64",
    "old_tokens": "*i64",
    "old_parents": "*i64",
    "old_visible": "*u8",
    "out_tokens": "*i64",
    "out_parents": "*i64",
    "out_visible": "*u8",
    "out_depths": "*i32",
    **dict.fromkeys(("first", "capacity", "num_extended", "step", "size", "num", "total"), "i32"),
}
FEATURES = {
    "own": "*bf16",
    "features": "*bf16",
    "out": "*bf16",
    "of_slots": "*bf16",
    "of_pages": "*bf16",
    "rows": "*i64",
    "parents": "*i64",
    "way": "*i64",
    "counts": "*i32",
    "locations": "*i64",
    **dict.fromkeys(("own_stride", "num", "size", "page_size", "count_stride"), "i32"),
}


def compile_all(capability: int = 90) -> list[tuple[str, Compiled]]:
    """Names and results."""
    done = []
    for is_tree in (False, True):
        none: dict[str, object] = {} if is_tree else {"parents": None}
        for size in (2, 8, 64):
            constants = {"PAGE_SIZE": 64, "SIZE": size, "PAGES": PAGE_BLOCK, **none}
            if not is_tree:
                constants["visible_out"] = None
            name = f"{size} nodes{', tree' if is_tree else ''}"
            warps = 4 if is_tree else 1
            made = compile_kernel(node_rows, SLOTS | NODES, constants, capability=capability, num_warps=warps)
            done.append((f"node_rows, {name}", made))
            constants = {"SIZE": size, "STOPS": 16, **none}
            made = compile_kernel(walk_rows, SLOTS | WALK, constants, capability=capability, num_warps=1)
            done.append((f"walk_rows, {name}", made))
    for size in (8, 64):
        constants = {"PAGE_SIZE": 64, "SIZE": size}
        made = compile_kernel(move_rows, MOVES, constants, capability=capability, num_warps=1)
        done.append((f"move_rows, {size}", made))
    for tokens, growth, size in ((1, 0, 8), (16, 0, 16), (1, 4, 32), (1, 16, 1024)):
        constants = {"PAGE_SIZE": 64, "TOKENS": tokens, "GROWTH": growth, "SIZE": size, "PAGES": PAGE_BLOCK}
        warps = 1 if size <= 128 else 4
        made = compile_kernel(place_rows, SLOTS | PLACES, constants, capability=capability, num_warps=warps)
        done.append((f"place_rows, {tokens} and {growth} more, {size}", made))
    made = compile_kernel(append_rows, TEXTS | APPEND, {"SIZE": 8}, capability=capability, num_warps=1)
    done.append(("append_rows", made))
    constants = {"MOST": 8, "BLOCK": TEXT_BLOCK, "SIZE": 8}
    made = compile_kernel(match_rows, TEXTS | MATCH, constants, capability=capability, num_warps=4)
    done.append(("match_rows", made))
    for width in (1, 4, 16):
        constants = {"WIDTH": width, "BLOCK": VOCAB_BLOCK}
        made = compile_kernel(likeliest_rows, LIKELIEST, constants, capability=capability, num_warps=8)
        done.append((f"likeliest_rows, {width}", made))
    none = {"old_tokens": None, "old_parents": None, "old_visible": None}
    for nodes, constants in ((8, none), (32, {}), (64, {})):
        constants = {**constants, "WIDTH": 4, "SIZE": 16, "NODES": nodes}
        warps = 1 if nodes <= 16 else 4
        made = compile_kernel(grow_rows, TREE, constants, capability=capability, num_warps=warps)
        done.append((f"grow_rows, {nodes}", made))
    for size in (128, 1024):
        warps = 1 if size <= 256 else 4
        made = compile_kernel(best_rows, TREE, {"WIDTH": 4, "SIZE": size}, capability=capability, num_warps=warps)
        done.append((f"best_rows, {size}", made))
    for hidden, block, warps in ((576, 1024, 4), (4096, 4096, 8)):
        constants = {"HIDDEN": hidden, "BLOCK": block}
        for kernel in (before_nodes, keep_nodes):
            made = compile_kernel(kernel, FEATURES, constants, capability=capability, num_warps=warps)
            done.append((f"{kernel.__name__}, {hidden}", made))
    return done
