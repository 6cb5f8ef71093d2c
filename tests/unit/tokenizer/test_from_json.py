from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from engine.errors import ModelFileError
from engine.tokenizer.load import tokenizer_from_path
from tests.support.tiny_tokenizer import CHATML_TEMPLATE, CORPUS, write_tiny_tokenizer
from tests.support.tiny_tokenizer_texts import TEXTS


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_tiny_tokenizer(tmp_path, 420)
    return tmp_path


def change_config(directory: Path, **changes: object) -> None:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_json(directory: Path, **changes: object) -> None:
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_facts(directory: Path) -> None:
    tokenizer = tokenizer_from_path(directory)
    assert tokenizer.vocab_size == 420
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2,))
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.chat_template == CHATML_TEMPLATE
    assert tokenizer.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
    }


def test_round_trip_and_agreement_with_the_library(directory: Path) -> None:
    tokenizer = tokenizer_from_path(directory)
    library = Tokenizer.from_file(str(directory / "tokenizer.json"))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == library.encode(text, add_special_tokens=False).ids
        assert b"".join(tokenizer.token_bytes(id) for id in ids) == text.encode()
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch(TEXTS, add_special_tokens=False) == [
        tokenizer.encode(text, add_special_tokens=False) for text in TEXTS
    ]


def test_bytes_of_random_ids_decode_like_the_library(directory: Path) -> None:
    tokenizer = tokenizer_from_path(directory)
    library = Tokenizer.from_file(str(directory / "tokenizer.json"))
    random.seed(3)
    for _ in range(300):
        ids = [random.randrange(tokenizer.vocab_size) for _ in range(random.randrange(1, 30))]
        ours = b"".join(tokenizer.token_bytes(id) for id in ids).decode(errors="replace")
        assert ours == library.decode(ids, skip_special_tokens=False)
        assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=True)


def test_markers_as_text(directory: Path) -> None:
    tokenizer = tokenizer_from_path(directory)
    text = "<|im_start|>user <|im_end|>"
    assert {1, 2} <= set(tokenizer.encode(text, add_special_tokens=False))
    plain = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert not tokenizer.special_ids & set(plain)
    assert b"".join(tokenizer.token_bytes(id) for id in plain) == text.encode()
    assert tokenizer.decode([1, *plain, 2]) == text


def test_plain_reading_survives_added_ids_with_gaps(directory: Path) -> None:
    data = json.loads((directory / "tokenizer.json").read_text())
    data["added_tokens"].append({**data["added_tokens"][0], "id": 999, "content": "<far>"})
    change_json(directory, added_tokens=data["added_tokens"])
    tokenizer = tokenizer_from_path(directory)
    (far,) = tokenizer.encode("<far>", add_special_tokens=False)
    assert tokenizer.token_bytes(far) == b"<far>"
    assert far in tokenizer.special_ids
    assert far not in tokenizer.encode("<far>", add_special_tokens=False, parse_special=False)


def test_mixed_parts_are_one_text(directory: Path) -> None:
    tokenizer = tokenizer_from_path(directory)
    parts = [("<|im_start|>the", True), ("<|im_end|>", False), (" dog<|im_end|>", True)]
    plain = tokenizer.encode("the<|im_end|> dog", add_special_tokens=False, parse_special=False)
    assert tokenizer.encode_mixed(parts) == [1, *plain, 2]
    assert tokenizer.encode_mixed([]) == []


def test_ids_beyond_the_vocabulary_add_nothing(directory: Path) -> None:
    tokenizer = tokenizer_from_path(directory)
    assert tokenizer.token_bytes(420) == tokenizer.token_bytes(-1) == b""
    assert tokenizer.decode([5, 100_000]) == tokenizer.decode([5])
    assert len(tokenizer.token_table()) == 420


def test_added_tokens_are_literal_text(directory: Path) -> None:
    library = Tokenizer.from_file(str(directory / "tokenizer.json"))
    library.add_tokens([AddedToken("ñandú é", normalized=False)])
    library.save(str(directory / "tokenizer.json"))
    tokenizer = tokenizer_from_path(directory)
    assert tokenizer.token_bytes(420) == "ñandú é".encode()
    assert 420 in tokenizer.encode("a ñandú é b", add_special_tokens=False, parse_special=False)


def test_tokens_only_the_config_knows(directory: Path) -> None:
    token = {"content": "<|new|>", "special": True}
    change_config(directory, added_tokens_decoder={"420": token, "777": {"content": "<|misplaced|>", "special": True}})
    tokenizer = tokenizer_from_path(directory)
    assert tokenizer.encode("<|new|>", add_special_tokens=False) == [420]
    assert 420 in tokenizer.special_ids
    assert tokenizer.vocab_size == 421


def test_bos_and_eos_flags(directory: Path) -> None:
    plain = tokenizer_from_path(directory).encode("the", add_special_tokens=False)
    change_config(directory, add_bos_token=True)
    assert tokenizer_from_path(directory).encode("the", add_special_tokens=True) == [1, *plain]
    change_config(directory, add_bos_token=True, add_eos_token=True)
    assert tokenizer_from_path(directory).encode("the", add_special_tokens=True) == [1, *plain, 2]
    assert tokenizer_from_path(directory).encode("the", add_special_tokens=False) == plain


def test_post_processor_is_neither_lost_nor_doubled(directory: Path) -> None:
    library = Tokenizer.from_file(str(directory / "tokenizer.json"))
    library.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    library.save(str(directory / "tokenizer.json"))
    plain = tokenizer_from_path(directory).encode("the", add_special_tokens=False)
    change_config(directory, add_bos_token=None)
    assert tokenizer_from_path(directory).encode("the", add_special_tokens=True) == [1, *plain]
    change_config(directory, add_bos_token=True)
    assert tokenizer_from_path(directory).encode("the", add_special_tokens=True) == [1, *plain]


def test_truncation_and_padding_in_the_file_are_ignored(directory: Path) -> None:
    library = Tokenizer.from_file(str(directory / "tokenizer.json"))
    library.enable_truncation(4)
    library.enable_padding(length=64)
    library.save(str(directory / "tokenizer.json"))
    text = "The quick brown fox jumps over the lazy dog. " * 3
    tokenizer = tokenizer_from_path(directory)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_template_places(directory: Path) -> None:
    change_config(
        directory, chat_template=[{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    )
    assert tokenizer_from_path(directory).chat_template == "D"
    change_config(directory, chat_template=None)
    assert tokenizer_from_path(directory).chat_template is None
    (directory / "chat_template.jinja").write_text("J")
    assert tokenizer_from_path(directory).chat_template == "J"


def test_special_tokens_map(directory: Path) -> None:
    change_config(directory, eos_token=None)
    (directory / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))
    assert tokenizer_from_path(directory).eos_ids == (0,)


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (
            {"type": "WordPiece", "prefix": "##", "cleanup": True},
            "'WordPiece' is not supported; supported are ByteLevel",
        ),
        (None, "no decoder is given"),
        ({"type": "Sequence", "decoders": [{"type": "CTC"}]}, "'CTC' is not supported"),
        (
            {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"Regex": "."}, "content": " "}]},
            "must have a String pattern",
        ),
    ],
)
def test_other_decoders_are_refused(directory: Path, decoder: object, message: str) -> None:
    change_json(directory, decoder=decoder)
    with pytest.raises(ModelFileError, match=message):
        tokenizer_from_path(directory)


def test_broken_files(directory: Path) -> None:
    (directory / "tokenizer.json").write_text('{"decoder": {"type": "ByteLevel"}, "model": 3}')
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: the tokenizers library cannot read it"):
        tokenizer_from_path(directory)
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"not a readable tokenizer\.json"):
        tokenizer_from_path(directory)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match=r"no tokenizer\.json or tokenizer\.model"):
        tokenizer_from_path(directory)


def write_sentencepiece_like(directory: Path, *, metaspace: bool) -> Tokenizer:
    """A tokenizer.json built as Llama 2's (or, with metaspace, as its later form), with byte fallback."""
    library = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    byte_entries = [f"<0x{byte:02X}>" for byte in range(256)]
    strip = [decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    if metaspace:
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=450, show_progress=False, special_tokens=["<unk>", "<s>", "</s>", *byte_entries]
    )
    library.train_from_iterator(CORPUS[:2], trainer)
    data = json.loads(library.to_str())
    data["added_tokens"] = data["added_tokens"][:3]
    (directory / "tokenizer.json").write_text(json.dumps(data))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.mark.parametrize("metaspace", [False, True])
def test_sentencepiece_like(tmp_path: Path, metaspace: bool) -> None:
    library = write_sentencepiece_like(tmp_path, metaspace=metaspace)
    tokenizer = tokenizer_from_path(tmp_path)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == library.encode(text, add_special_tokens=False).ids
        # Metaspace adds no space in front of a text that begins with one, and takes that one away again.
        assert tokenizer.decode(ids) == library.decode(ids) == (text.removeprefix(" ") if metaspace else text)
    random.seed(5)
    whole = [id for id in range(tokenizer.vocab_size) if not (library.id_to_token(id) or "").startswith("<0x")]
    for _ in range(200):
        ids = [random.choice(whole) for _ in range(12)]
        assert tokenizer.decode(ids) == library.decode(ids)
    assert tokenizer.token_bytes(library.token_to_id("<0xE4>")) == b"\xe4"
    assert tokenizer.token_bytes(tokenizer.bos_id or 0) == b"<s>"
