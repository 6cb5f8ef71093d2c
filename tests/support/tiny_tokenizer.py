"""A tiny byte-level BPE tokenizer on disk, for tests that need a model directory but no download."""

from __future__ import annotations

import json
from pathlib import Path

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Their ids are 0, 1 and 2."""

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CORPUS = (
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox runs on.",
    "def add(left: int, right: int) -> int:\n    return left + right\n",
    "She sells sea shells on the sea shore, and the shells she sells are sea shells for sure.",
    "Once upon a time there was a small engine that could read and write one token at a time.",
    "user\nassistant\nsystem\nYou are a helpful assistant.\nHello! How are you today?\n",
    "1 2 3 4 5 10 20 30 100 1000 2024; naïve café, Zürich, 東京, 你好, 😀👩‍👩‍👧",
)


def write_tiny_tokenizer(dir: Path, vocab_size: int = 400) -> None:
    """Write tokenizer.json and tokenizer_config.json (ChatML template) of exactly `vocab_size` tokens.

    ids: 0..2 the special tokens, then 256 bytes, then merges; what training does not fill is padded with
    plain added tokens `<|pad_N|>`. Raises ValueError below 259.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE

    if vocab_size < 256 + len(SPECIAL_TOKENS):
        raise ValueError(f"vocab_size must be at least {256 + len(SPECIAL_TOKENS)}, not {vocab_size}")
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    filled = tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<|pad_{index}|>" for index in range(filled, vocab_size)])

    dir.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(dir / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHATML_TEMPLATE,
        "added_tokens_decoder": {
            str(id): {"content": text, "special": True, "lstrip": False, "rstrip": False, "normalized": False}
            for id, text in enumerate(SPECIAL_TOKENS)
        },
    }
    (dir / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
