"""Who drafts for a model: chosen, loaded and wired to it, once."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.config import DRAFT_HEADS, EngineConfig
from engine.errors import ConfigError
from engine.model_files.resolve import resolve
from engine.model_files.types import ModelFiles
from kernels.dispatch import KernelSet, can_record, select
from kernels.ngram import NgramCorpus, NgramSearch
from scheduler_proc.cache.kv_pool import KVPool, bytes_per_token
from scheduler_proc.model_parts import Memory, kv_bytes_per_token, load_decoder
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.models.registry import spec_of
from scheduler_proc.numerics import Numerics, choose_numerics
from scheduler_proc.parallel.group import Alone
from scheduler_proc.speculative import dflash_files, eagle3_files, eagle_files
from scheduler_proc.speculative.corpus import load_corpus
from scheduler_proc.speculative.dflash_drafter import DFlashDrafter
from scheduler_proc.speculative.eagle_drafter import EagleDrafter
from scheduler_proc.speculative.head import HeadSpec
from scheduler_proc.speculative.ngram import NgramDrafter
from scheduler_proc.speculative.recorded import MakePass, RecordedPass
from scheduler_proc.speculative.standalone import StandaloneDrafter
from scheduler_proc.speculative.verifier import Verifier
from scheduler_proc.worker.device_slots import DeviceSlots
from scheduler_proc.worker.forward import Pages


class Drafting:
    """What a start needs of it, before there is memory and after. Does nothing where nobody drafts."""

    def __init__(self, config: EngineConfig, model: ModelFiles, decoder: Decoder, kv_dtype: torch.dtype) -> None:
        """model, decoder: the target; kv_dtype: of its pages. A drafting model or a corpus is loaded here. Raises
        ConfigError, ModelFileError for one that does not fit."""
        self._config, self._target, self._kv_dtype = config, decoder, kv_dtype
        self._drafter: Decoder | None = None
        self._corpus: NgramCorpus | None = None
        options = config.speculative
        if options.speculative_ngram_external_corpus_path is not None:
            path = Path(options.speculative_ngram_external_corpus_path)
            self._corpus = load_corpus(path, model, _search(config), decoder.device)
        if options.speculative_algorithm == "STANDALONE":
            files = resolve(options.speculative_draft_model_path)
            numerics = choose_numerics(config, files)
            _check(files, decoder, config)
            kernels = _kernels(config, decoder, numerics)
            self._drafter = load_decoder(config, files, numerics, kernels, decoder.device, Alone(), " role=drafter")
            self._kv_dtype = numerics.kv_dtype

    @property
    def bytes_per_token(self) -> int:
        """Of a token's place in the pages of whoever drafts."""
        config, target = self._config, self._target
        if self._drafter is not None:
            return kv_bytes_per_token(self._drafter, self._kv_dtype)
        if config.speculative.speculative_algorithm == "DFLASH":
            spec = dflash_files.read_spec(_directory(config), target)
            return bytes_per_token(spec.num_layers, spec.num_kv_heads, spec.head_dim, self._kv_dtype)
        if config.speculative.speculative_algorithm not in DRAFT_HEADS:
            return 0
        spec = _head_spec(config, target)
        features = -(-spec.hidden_size * target.dtype.itemsize // config.page_size)
        return bytes_per_token(1, spec.num_kv_heads, spec.head_dim, self._kv_dtype) + features

    def verifier(self, memory: Memory) -> Verifier | None:
        """For a target's slots and pages; None: nobody drafts."""
        options, target, slots, pages = self._config.speculative, self._target, memory.slots, memory.pages
        kernels = target.kernels
        depth, top_k = options.speculative_num_steps, self._config.eagle_topk
        match options.speculative_algorithm:
            case None:
                return None
            case "NGRAM":
                drafter = NgramDrafter(kernels, slots, memory.max_len, _search(self._config), self._corpus)
                return Verifier(kernels, drafter, slots, pages)
            case "EAGLE" | "EAGLE2" | "EAGLE3":
                load = (eagle3_files if options.speculative_algorithm == "EAGLE3" else eagle_files).load_head
                head = load(_directory(self._config), target, memory.max_len + self._config.draft_places)
                (kv,) = self._pool(memory, 1, head.spec.num_kv_heads, head.spec.head_dim)
                num_pages = memory.num_pages + 1
                make = _pass_maker(target, slots, pages)
                follower = EagleDrafter(head, target, slots, pages, kv, num_pages, make, num_steps=depth, top_k=top_k)
            case "DFLASH":
                longest = memory.max_len + self._config.draft_places
                model = dflash_files.load_drafter(_directory(self._config), target, longest)
                layers = self._pool(memory, model.spec.num_layers, model.spec.num_kv_heads, model.spec.head_dim)
                follower = DFlashDrafter(model, target, slots, pages, layers, _pass_maker(target, slots, pages))
            case "STANDALONE":
                assert self._drafter is not None
                shape = self._drafter.kv_shape
                layers = self._pool(memory, shape.num_layers, shape.num_kv_heads, shape.head_dim)
                make = _pass_maker(self._drafter, slots, pages)
                follower = StandaloneDrafter(self._drafter, slots, pages, layers, make, num_steps=depth, top_k=top_k)
        target.follower = follower
        return Verifier(kernels, follower, slots, pages, follower)

    def _pool(self, memory: Memory, num_layers: int, num_kv_heads: int, head_dim: int) -> list[torch.Tensor]:
        """Pages with the ids of the target's."""
        page_size, device = memory.pages.page_size, self._target.device
        num_pages = memory.num_pages + 1
        return KVPool(num_layers, num_pages, page_size, num_kv_heads, head_dim, self._kv_dtype, device).layers


def _search(config: EngineConfig) -> NgramSearch:
    options = config.speculative
    return NgramSearch(
        options.speculative_ngram_min_match_window_size,
        options.speculative_ngram_max_match_window_size,
        options.speculative_ngram_max_bfs_breadth,
    )


def _pass_maker(decoder: Decoder, slots: DeviceSlots, pages: Pages) -> MakePass:
    """For passes by the operations of a decoder, over its kind of weights."""
    if not decoder.method.quantises or not can_record(decoder.kernels):
        return lambda work, widths: work
    max_pages = slots.page_table.shape[1]
    return lambda work, widths: RecordedPass(work, widths, max_pages, pages.page_size)


def _directory(config: EngineConfig) -> Path:
    return Path(str(config.speculative.speculative_draft_model_path))


def _head_spec(config: EngineConfig, target: Decoder) -> HeadSpec:
    directory, spec = _directory(config), target.spec
    if config.speculative.speculative_algorithm == "EAGLE3":
        return eagle3_files.read_spec(directory, spec.hidden_size, spec.num_layers)
    return eagle_files.read_spec(directory, spec.hidden_size)


def _kernels(config: EngineConfig, target: Decoder, numerics: Numerics) -> KernelSet:
    if config.device == "cuda":
        if numerics.dtype != target.dtype:
            raise ConfigError(
                f"--speculative-draft-model-path: that model is {numerics.dtype}, the other one {target.dtype}; say "
                "--dtype for both."
            )
        return target.kernels
    return select("cpu", numerics.dtype, packed=numerics.packed)


def _check(files: ModelFiles, target: Decoder, config: EngineConfig) -> None:
    path, spec = config.speculative.speculative_draft_model_path, spec_of(files.config)
    if spec.vocab_size != target.spec.vocab_size:
        raise ConfigError(
            f"--speculative-draft-model-path {path} has a vocabulary of {spec.vocab_size} tokens, the model one of "
            f"{target.spec.vocab_size}; both must be of one tokenizer."
        )
    longest = config.model.context_length or target.spec.max_position
    if spec.max_position < longest:
        raise ConfigError(
            f"--speculative-draft-model-path {path} handles {spec.max_position} tokens, requests may have {longest}; "
            f"set --context-length {spec.max_position}."
        )
