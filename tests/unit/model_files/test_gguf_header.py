from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np
import pytest

from engine.errors import ModelFileError
from engine.model_files.gguf_header import read_gguf_header
from tests.support.gguf_writer import write_gguf


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(
        tmp_path / "model.gguf",
        keys={
            "a.string": "grüße",
            "a.bool": True,
            "an.int": 7,
            "a.float": 0.5,
            "some.strings": ["one", "zwei", "", "三"],
            "some.ints": [1, 2, 3],
            "some.floats": [0.5, -1.0],
        },
        tensors={
            "token_embd.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
            "half": np.zeros((2, 3, 4), dtype=np.float16),
        },
    )


def test_values_and_arrays(file: Path) -> None:
    header = read_gguf_header(file)
    assert header.version == 3
    assert header.string("a.string") == "grüße"
    assert header.boolean("a.bool") is True
    assert header.integer("an.int") == 7
    assert header.number("a.float") == 0.5
    assert header.number("an.int") == 7.0
    assert header.strings("some.strings") == ["one", "zwei", "", "三"]
    assert header.count("some.strings") == 4
    assert header.numbers("some.ints") == (1, 2, 3)
    assert header.numbers("some.floats") == (0.5, -1.0)
    assert header.integer("missing", 3) == 3
    assert header.optional_integer("missing") is None


def test_tensors_agree_with_the_reference_reader(file: Path) -> None:
    from gguf import GGUFReader

    header = read_gguf_header(file)
    reference = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    assert header.tensors.keys() == reference.keys()
    for name, tensor in header.tensors.items():
        assert tensor.offset == reference[name].data_offset
        assert tensor.size_bytes == reference[name].n_bytes
        assert list(tensor.shape) == [int(extent) for extent in reversed(reference[name].shape)]
        assert tensor.type.name == reference[name].tensor_type.name
    start = header.tensors["token_embd.weight"].offset
    assert np.frombuffer(file.read_bytes(), np.float32, 12, start).tolist() == list(range(12))


def test_wrong_kinds_name_file_and_key(file: Path) -> None:
    header = read_gguf_header(file)
    with pytest.raises(ModelFileError, match=r"model\.gguf: a\.string must be an integer"):
        header.integer("a.string")
    with pytest.raises(ModelFileError, match=r"a\.bool must be an integer"):
        header.integer("a.bool")
    with pytest.raises(ModelFileError, match=r"some\.ints must be an array of strings"):
        header.strings("some.ints")
    with pytest.raises(ModelFileError, match=r"some\.strings must be an array of numbers"):
        header.numbers("some.strings")
    with pytest.raises(ModelFileError, match=r"some\.ints must be a string, not an array"):
        header.string("some.ints")
    with pytest.raises(ModelFileError, match="lacks no"):
        header.string("no")


def test_every_truncation_is_an_error(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    end = max(tensor.offset + tensor.size_bytes for tensor in read_gguf_header(file).tensors.values())
    cut = tmp_path / "cut.gguf"
    for size in range(0, end, 7):
        cut.write_bytes(data[:size])
        with pytest.raises(ModelFileError, match=r"cut\.gguf: "):
            read_gguf_header(cut)


def test_damaged_bytes_never_escape_as_other_errors(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    random.seed(7)
    broken = tmp_path / "broken.gguf"
    for _ in range(400):
        damaged = bytearray(data)
        for _ in range(random.randint(1, 4)):
            damaged[random.randrange(4, 700)] = random.choice((0, 1, 0x7F, 0xFF, random.randrange(256)))
        broken.write_bytes(damaged)
        try:
            header = read_gguf_header(broken)
            for key in header.metadata:
                if key.startswith("some.strings"):
                    header.strings(key)
        except ModelFileError:
            pass


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04", "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(16), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "tensors do not fit"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**62), "metadata keys do not fit"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**60) + bytes(40), "ends inside"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**58) + bytes(40), "do not fit"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**58) + bytes(40), "do not fit"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77) + bytes(40), "unknown value type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1) + bytes(40), "nested"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=message):
        read_gguf_header(path)


def test_a_missing_file_is_a_model_file_error(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_gguf_header(tmp_path / "none.gguf")
