"""Broken GGUF files: whatever their bytes are, reading them works or is a ModelFileError, in little time and memory."""

from __future__ import annotations

import random
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import ModelFileError
from engine.model_files.gguf_config import gguf_model_config
from engine.model_files.gguf_header import GgufHeader, read_gguf_header
from engine.tokenizer.byte_level import byte_alphabet
from engine.tokenizer.chat_template import ChatTemplate
from engine.tokenizer.from_gguf import tokenizer_from_gguf
from scheduler_proc.models.registry import spec_of
from scheduler_proc.weights.gguf_file import gguf_tensors, has_packed_matrices
from tests.support.gguf_writer import raw_gguf, raw_tensor, raw_value

MEBIBYTE = 1 << 20
HIDDEN, FEED_FORWARD, VOCABULARY = 32, 64, 264

Keys = list[tuple[str, bytes]]


def read(path: Path) -> int:
    """Everything that is read of a file at a start before its weights; the number of things that could be read."""
    try:
        header = read_gguf_header(path)
    except ModelFileError:
        return 0
    readers: tuple[Callable[[], object], ...] = (
        lambda: spec_of(gguf_model_config(header)),
        lambda: tokenizer_facts(header),
        lambda: gguf_tensors([str(path)]),
        lambda: has_packed_matrices([str(path)]),
    )
    return 1 + sum(works(reader) for reader in readers)


def works(reader: Callable[[], object]) -> bool:
    try:
        reader()
    except ModelFileError as error:
        assert len(error.message) < 10_000 and error.message.isprintable(), error.message
        return False
    return True


def tokenizer_facts(header: GgufHeader) -> None:
    tokenizer = tokenizer_from_gguf(header)
    tokenizer.token_table()
    if tokenizer.chat_template is not None:
        ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)


def model_keys() -> Keys:
    numbers = {
        "block_count": 1,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": FEED_FORWARD,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 8,
        "attention.value_length": 8,
        "attention.sliding_window": 16,
        "rope.dimension_count": 8,
        "rope.scaling.original_context_length": 64,
        "expert_count": 0,
        "vocab_size": VOCABULARY,
    }
    floats = {
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e4,
        "rope.scale_linear": 1.0,
        "rope.scaling.factor": 2.0,
        "rope.scaling.attn_factor": 1.5,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
    }
    return [
        ("general.architecture", raw_value("string", "llama")),
        ("general.alignment", raw_value("u32", 32)),
        ("split.count", raw_value("u16", 1)),
        *((f"llama.{name}", raw_value("u32", value)) for name, value in numbers.items()),
        *((f"llama.{name}", raw_value("f32", value)) for name, value in floats.items()),
        ("llama.rope.scaling.type", raw_value("string", "yarn")),
    ]


def special_keys() -> Keys:
    names = ("unknown_token_id", "bos_token_id", "eos_token_id", "padding_token_id", "eot_token_id", "eom_token_id")
    flags = ("add_bos_token", "add_eos_token", "add_space_prefix", "remove_extra_whitespaces")
    return [
        *((f"tokenizer.ggml.{name}", raw_value("u32", id)) for id, name in enumerate(names)),
        *((f"tokenizer.ggml.{name}", raw_value("bool", True)) for name in flags),
        ("tokenizer.chat_template", raw_value("string", "{% for m in messages %}{{ m['content'] }}{% endfor %}")),
    ]


def bpe_keys() -> Keys:
    tokens = ["<s>", "</s>", "<pad>", *byte_alphabet(), "th", "the", "in", "er", "an"]
    return [
        ("tokenizer.ggml.model", raw_value("string", "gpt2")),
        ("tokenizer.ggml.pre", raw_value("string", "llama-bpe")),
        ("tokenizer.ggml.tokens", raw_value("string[]", tokens)),
        ("tokenizer.ggml.token_type", raw_value("i32[]", [3, 3, 4] + [1] * (len(tokens) - 3))),
        ("tokenizer.ggml.merges", raw_value("string[]", ["t h", "th e", "i n", "e r", "a n"])),
        *special_keys(),
    ]


def sentencepiece_keys() -> Keys:
    tokens = ["<unk>", "<s>", "</s>", "<tool>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "é"]
    return [
        ("tokenizer.ggml.model", raw_value("string", "llama")),
        ("tokenizer.ggml.tokens", raw_value("string[]", tokens)),
        ("tokenizer.ggml.scores", raw_value("f32[]", [-float(id) for id in range(len(tokens))])),
        ("tokenizer.ggml.token_type", raw_value("i32[]", [2, 3, 3, 4] + [6] * 256 + [1] * 4)),
        *special_keys(),
    ]


TOKENIZERS = {"bpe": bpe_keys, "sentencepiece": sentencepiece_keys}
TENSORS = (
    raw_tensor("token_embd.weight", (HIDDEN, VOCABULARY)),
    raw_tensor("blk.0.attn_q.weight", (HIDDEN, HIDDEN), 8, 33408),
    raw_tensor("blk.0.attn_q.bias", (HIDDEN,), 0, 34496),
    raw_tensor("output_norm.weight", (HIDDEN,), 0, 34624),
)
DATA_BYTES = 34752


def whole(keys: Keys, **claims: int) -> bytes:
    return raw_gguf(keys, TENSORS, DATA_BYTES, **claims)


@pytest.fixture(autouse=True)
def bounds():
    """A test takes no second a file and no memory worth mentioning."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < 200 * MEBIBYTE


@pytest.fixture
def check(tmp_path: Path) -> Callable[[bytes], int]:
    path = tmp_path / "fuzz.gguf"

    def run(data: bytes) -> int:
        path.write_bytes(data)
        begin = time.perf_counter()
        found = read(path)
        assert time.perf_counter() - begin < 5
        return found

    return run


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_the_whole_file_can_be_read(check: Callable[[bytes], int], tokenizer: str) -> None:
    assert check(whole([*model_keys(), *TOKENIZERS[tokenizer]()])) == 5


def flip(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(4, header_bytes(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def number(data: bytearray, rng: random.Random) -> None:
    code, values = rng.choice((("<I", (0, 1, 2**31, 2**32 - 1)), ("<Q", (0, 2**31, 2**32, 2**62, 2**63, 2**64 - 1))))
    struct.pack_into(code, data, rng.randrange(4, header_bytes(data) - 8), rng.choice(values))


def truncate(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(header_bytes(data)) :]


def insert(data: bytearray, rng: random.Random) -> None:
    place = rng.randrange(4, header_bytes(data))
    data[place:place] = rng.randbytes(rng.choice((1, 4, 8, 64)))


def remove(data: bytearray, rng: random.Random) -> None:
    place = rng.randrange(4, header_bytes(data))
    del data[place : place + rng.choice((1, 4, 8, 64))]


def swap(data: bytearray, rng: random.Random) -> None:
    size = rng.choice((4, 8, 32))
    one, other = (rng.randrange(4, header_bytes(data) - size) for _ in range(2))
    data[one : one + size], data[other : other + size] = data[other : other + size], data[one : one + size]


def header_bytes(data: bytearray) -> int:
    return len(data) - DATA_BYTES


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("damage", [flip, number, truncate, insert, remove, swap])
def test_damaged_files(
    check: Callable[[bytes], int], tokenizer: str, damage: Callable[[bytearray, random.Random], None]
) -> None:
    data = whole([*model_keys(), *TOKENIZERS[tokenizer]()])
    found = []
    for seed in range(500):
        rng, damaged = random.Random(seed), bytearray(data)
        damage(damaged, rng)
        found.append(check(bytes(damaged)))
    assert set(found) > {0} or damage in (truncate, insert, remove)


STRANGE = {
    "string": raw_value("string", "x"),
    "no UTF-8": raw_value("string", b"\xff\xfe"),
    "empty": raw_value("string", ""),
    "lines": raw_value("string", "{% a\n\x00%}"),
    "zero": raw_value("u8", 0),
    "negative": raw_value("i32", -1),
    "2^31": raw_value("u32", 2**31),
    "2^64 - 1": raw_value("u64", 2**64 - 1),
    "-2^63": raw_value("i64", -(2**63)),
    "bool": raw_value("bool", True),
    "0.0": raw_value("f32", 0.0),
    "-1.5": raw_value("f64", -1.5),
    "1e300": raw_value("f64", 1e300),
    "inf": raw_value("f32", float("inf")),
    "nan": raw_value("f64", float("nan")),
    "no strings": raw_value("string[]", []),
    "strings": raw_value("string[]", ["", "a b", "\x00", "a b"]),
    "same strings": raw_value("string[]", ["a"] * VOCABULARY),
    "no UTF-8s": raw_value("string[]", [b"\xff"]),  # type: ignore[list-item]
    "bytes": raw_value("u8[]", range(16)),
    "nans": raw_value("f32[]", [float("nan")] * VOCABULARY),
    "huge": raw_value("f64[]", [1e300] * 16),
    "numbers": raw_value("u64[]", [2**64 - 1] * 16),
    "negatives": raw_value("i64[]", [-(2**63)] * VOCABULARY),
    "bools": raw_value("bool[]", [True] * 16),
}


@pytest.mark.parametrize("keys", [model_keys, *TOKENIZERS.values()])
def test_every_key_with_every_strange_value(check: Callable[[bytes], int], keys: Callable[[], Keys]) -> None:
    whole_keys = keys()
    for index, (name, _) in enumerate(whole_keys):
        before, after = whole_keys[:index], whole_keys[index + 1 :]
        check(whole([*before, *after]))
        for value in STRANGE.values():
            check(whole([*before, (name, value), *after]))


@pytest.mark.parametrize("kind", ["none", "linear", "longrope"])
def test_every_kind_of_rope_with_every_strange_factor(check: Callable[[bytes], int], kind: str) -> None:
    keys = dict(model_keys()) | {"llama.rope.scaling.type": raw_value("string", kind)}
    for factor in STRANGE.values():
        for name in ("llama.rope.scaling.factor", "llama.rope.scale_linear"):
            check(whole(list((keys | {name: factor}).items())))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([raw_tensor("a", ())], "a has 0 dimensions"),
        ([raw_tensor("a", (1,) * 5)], "a has 5 dimensions"),
        ([raw_tensor("a", (0,))], r"a is empty: its shape is \(0,\)"),
        ([raw_tensor("a", (32, 0, 4))], "a is empty"),
        ([raw_tensor("a", (2**32, 2**32))], "truncated: tensor a ends at byte"),
        ([raw_tensor("a", (2**63, 2, 2**62, 4))], "truncated: tensor a ends at byte"),
        ([raw_tensor("a", (2**64 - 1,) * 4)], "truncated: tensor a ends at byte"),
        ([raw_tensor("a", (4,), 0, 2**64 - 16)], "truncated: tensor a ends at byte"),
        ([raw_tensor("a", (4,), 0, 1024)], "truncated: tensor a ends at byte"),
        ([raw_tensor("a", (33,), 2)], "Q4_0 blocks of 32 do not divide"),
        ([raw_tensor("a", (32,), 4)], "unknown element type 4"),
        ([raw_tensor("a", (32,), 2**32 - 1)], "unknown element type"),
        ([raw_tensor("a", (4,)), raw_tensor("a", (4,))], "tensor a is there twice"),
        ([raw_tensor("a\nb", (4,))], r"a tensor name is 'a\\nb'"),
        ([raw_tensor("a" * 70_000, (4,))], "a tensor name is 'aaa"),
    ],
)
def test_tensors_that_are_none(tmp_path: Path, tensors: list[bytes], message: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(raw_gguf([], tensors, 512))
    with pytest.raises(ModelFileError, match=message) as caught:
        read_gguf_header(path)
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize("count", [5, 2**31, 2**63, 2**64 - 1])
@pytest.mark.parametrize("claim", ["num_keys", "num_tensors"])
def test_counts_that_are_too_large(check: Callable[[bytes], int], claim: str, count: int) -> None:
    assert check(whole([("a", raw_value("u8", 1))], **{claim: count})) == 0


@pytest.mark.parametrize(
    "alignment", [raw_value("u32", 0), raw_value("u32", 3), raw_value("i32", -32), raw_value("bool", True)]
)
def test_alignments_that_are_none(tmp_path: Path, alignment: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(raw_gguf([("general.alignment", alignment)], [raw_tensor("a", (4,))], 512))
    with pytest.raises(ModelFileError, match=r"general\.alignment must be a power of two"):
        read_gguf_header(path)


def test_a_key_that_is_there_twice(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(raw_gguf([("a", raw_value("u8", 1))] * 2, []))
    with pytest.raises(ModelFileError, match="the metadata key a is there twice"):
        read_gguf_header(path)


@pytest.mark.parametrize("kind", [8, 4], ids=["strings", "numbers"])
def test_weights_are_not_taken_for_metadata(tmp_path: Path, kind: int) -> None:
    """A length that is wrong, but within the file: 8 GiB of it, in a hole on the disk."""
    path, size = tmp_path / "x.gguf", 8 << 30
    array = struct.pack("<IIQ", 9, kind, (size - 4096) // 8)
    path.write_bytes(raw_gguf([("a", array)], []))
    with path.open("r+b") as file:
        file.truncate(size)
    with pytest.raises(ModelFileError, match="corrupt"):
        read_gguf_header(path)


def test_layers_that_are_only_claimed(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    keys = dict(model_keys()) | {"llama.block_count": raw_value("u32", 2**31 - 1)}
    path.write_bytes(whole(list(keys.items())))
    with pytest.raises(ModelFileError, match=r"block_count is 2147483647, but there are only 4 tensors"):
        gguf_model_config(read_gguf_header(path))
