"""Trains what drafts for a model, on the model's own answers, and says how much of its drafts is accepted.

    PYTHONPATH=. python tools/train_draft.py --out head --num-prompts 24000 --data answers.npz
    PYTHONPATH=. python tools/train_draft.py --out drafter --algorithm DFLASH --data answers.npz
    engine-serve --speculative-algorithm EAGLE3 --speculative-draft-model-path head

The model answers generated prompts (tools/draft_training/prompts.py), half of them greedily; its hidden states are
computed anew from the texts, and an EAGLE-3 head or a DFlash drafter learns to continue them. Then the engine drafts
with it, greedily, on prompts whose topics or kinds of task were never trained on, and on 40 that somebody wrote by
hand. The answers are kept in --data, and read from there if it exists.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch

from engine.bench.options import count
from engine.config import EngineConfig, ModelOptions, ProcessOptions, SchedulerOptions, SpeculativeOptions
from engine.errors import EngineError
from engine.model_files.resolve import resolve
from engine.model_files.types import ModelFiles
from kernels.dispatch import select
from scheduler_proc.model_parts import load_decoder, num_threads
from scheduler_proc.numerics import choose_numerics
from scheduler_proc.parallel.group import Alone
from scheduler_proc.settle import settle
from scheduler_proc.speculative.dflash import DFlashSpec
from scheduler_proc.speculative.eagle3 import Eagle3Spec
from tools.decode_bench.driver import Driver
from tools.decode_bench.engine import release
from tools.draft_training import train_dflash as dflash
from tools.draft_training import train_eagle3 as eagle3
from tools.draft_training.completions import Chats, acceptance, complete, load, save
from tools.draft_training.fit import Text, Training, draft_vocabulary
from tools.draft_training.hand_written import HAND_WRITTEN
from tools.draft_training.prompts import prompts
from tools.draft_training.target import Target

SPLITS = ("train", "held_topic", "held_task")
TEMPERATURES = (0.0, 0.8)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the engine's default model")
    parser.add_argument("--algorithm", choices=["EAGLE3", "DFLASH"], default="EAGLE3", help="default: %(default)s")
    parser.add_argument("--out", type=Path, required=True, help="directory of what is trained")
    parser.add_argument("--data", type=Path, help="file for the model's answers (.npz)")
    parser.add_argument("--num-prompts", type=count, default=16000, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=count, default=256, help="of an answer; default: %(default)s")
    parser.add_argument("--intermediate-size", type=count, help="of its layers; default: the model's")
    parser.add_argument("--draft-vocab-size", type=count, default=4096, help="EAGLE3; default: %(default)s")
    parser.add_argument("--depth", type=count, default=5, help="EAGLE3: steps of unrolling; default: %(default)s")
    parser.add_argument("--num-layers", type=count, default=3, help="DFLASH; default: %(default)s")
    parser.add_argument("--block-size", type=count, default=16, help="DFLASH; default: %(default)s")
    parser.add_argument("--block-tokens", type=count, default=24576, help="DFLASH: of a step; default: %(default)s")
    parser.add_argument("--epochs", type=count, default=3, help="default: %(default)s")
    parser.add_argument("--most-seconds", type=float, help="of training; default: as long as the epochs take")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate; default: %(default)s")
    parser.add_argument("--batch-tokens", type=count, default=8192, help="default: %(default)s")
    parser.add_argument("--eval-prompts", type=count, default=64, help="of each kind; default: %(default)s")
    parser.add_argument("--num-draft-tokens", type=count, default=6, help="when it is measured; default: %(default)s")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--cpu-threads", type=count)
    parser.add_argument("--skip-training", action="store_true", help="measure the head that is in --out")
    return parser.parse_args(arguments)


def configure(options: argparse.Namespace) -> EngineConfig:
    """The engine that answers."""
    on_cuda = options.device != "cpu" and torch.cuda.is_available()
    return settle(
        EngineConfig(
            model=ModelOptions(model=options.model, dtype="bfloat16" if on_cuda else "auto"),
            scheduler=SchedulerOptions(device=options.device),
            process=ProcessOptions(cpu_threads=options.cpu_threads),
        )
    )


def answers(options: argparse.Namespace, config: EngineConfig, model: ModelFiles, chats: Chats) -> list[Text]:
    """The model's answers to training prompts."""
    if options.data and options.data.exists():
        return load(options.data)
    with _driver(config, model) as driver:
        begin = time.monotonic()
        texts = complete(driver, chats.of(prompts(options.num_prompts, 0)), options.max_tokens, TEMPERATURES)
    tokens = sum(len(text.ids) - text.prompt_len for text in texts)
    print(f"{len(texts)} answers, {tokens} tokens, {time.monotonic() - begin:.0f} s", flush=True)
    if options.data:
        save(texts, options.data)
    return texts


def learn(options: argparse.Namespace, config: EngineConfig, model: ModelFiles, texts: list[Text]) -> None:
    """Train it, and write it."""
    numerics = choose_numerics(config, model)
    if config.device == "cuda":
        kernels, place = select("cuda", numerics.dtype), torch.device("cuda")
    else:
        torch.set_num_threads(num_threads(config, 1))
        kernels, place = select("cpu", numerics.dtype, packed=numerics.packed), torch.device("cpu")
    target = Target(load_decoder(config, model, numerics, kernels, place, Alone()), numerics.kv_dtype)
    how = Training(
        rate=options.rate,
        batch_tokens=options.batch_tokens,
        epochs=options.epochs,
        most_seconds=options.most_seconds,
    )
    (_learn_eagle3 if options.algorithm == "EAGLE3" else _learn_dflash)(
        options, target, texts, how, model.config.eos_ids
    )
    size = (options.out / "model.safetensors").stat().st_size
    print(f"{options.out}: {size / 1e6:.1f} MB", flush=True)


def _learn_eagle3(
    options: argparse.Namespace, target: Target, texts: list[Text], how: Training, ends: tuple[int, ...]
) -> None:
    num_layers, vocab_size = target.decoder.spec.num_layers, target.decoder.spec.vocab_size
    vocabulary = draft_vocabulary(texts, options.draft_vocab_size, vocab_size)
    layers = (2, num_layers // 2, num_layers - 3)
    spec = Eagle3Spec(**_shape(options, target), draft_vocab_size=len(vocabulary), layers=layers)
    eagle3.train(target, texts, spec, vocabulary, how, options.depth, options.out, _tell)


def _learn_dflash(
    options: argparse.Namespace, target: Target, texts: list[Text], how: Training, ends: tuple[int, ...]
) -> None:
    num_layers = target.decoder.spec.num_layers
    spec = DFlashSpec(
        **_shape(options, target),
        windows=(None,) * options.num_layers,
        block_size=options.block_size,
        # Nothing follows an end, so no block begins with one.
        mask_id=ends[0],
        layers=(2, num_layers // 2, num_layers - 2),
    )
    dflash.train(target, texts, spec, how, options.block_tokens, options.out, _tell)


def _shape(options: argparse.Namespace, target: Target) -> dict[str, Any]:
    """Of its layers: the target's, mostly."""
    spec = target.decoder.spec
    return {
        "hidden_size": spec.hidden_size,
        "intermediate_size": options.intermediate_size or spec.intermediate_size,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "norm_eps": spec.norm_eps,
        "rope": spec.rope,
    }


def _tell(line: str) -> None:
    print(line, flush=True)


def measure(options: argparse.Namespace, config: EngineConfig, model: ModelFiles, chats: Chats) -> None:
    """Accept lengths, by kind of prompt; also written beside the head."""
    speculative = SpeculativeOptions(
        speculative_algorithm=options.algorithm,
        speculative_draft_model_path=str(options.out),
        speculative_num_draft_tokens=options.num_draft_tokens,
        speculative_adaptive=False,
    )
    found = {}
    with _driver(msgspec.structs.replace(config, speculative=speculative), model) as driver:
        for name in (*SPLITS, "hand_written"):
            texts = HAND_WRITTEN if name == "hand_written" else prompts(options.eval_prompts, 1, name)
            one = acceptance(driver, chats.of(texts), options.max_tokens)
            found[name] = asdict(one)
            print(f"{name:12} accept length {one.accept_len:.2f}, {one.share:.1%} of drafts, {one.num_tokens} tokens")
    (options.out / "acceptance.json").write_text(json.dumps(found, indent=1) + "\n")


@contextmanager
def _driver(config: EngineConfig, model: ModelFiles) -> Generator[Driver]:
    """An engine, for a while."""
    with tempfile.TemporaryDirectory(prefix="draft-") as folder:
        driver = Driver(config, model, Path(folder))
        try:
            yield driver
        finally:
            driver.close()


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    try:
        config, model = configure(options), resolve(options.model)
        chats = Chats(model)
        if not options.skip_training:
            texts = answers(options, config, model, chats)
            release()
            learn(options, config, model, texts)
            release()
        measure(options, config, model, chats)
    except (EngineError, ValueError) as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
