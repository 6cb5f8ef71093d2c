"""What options stand for here: `auto` on this machine, where only the scheduler knows torch; lengths for this model."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from engine.config import DRAFT_HEADS, EngineConfig
from engine.errors import ConfigError
from engine.model_files.default_model import drafter_of_default_model
from engine.model_files.types import ModelConfig, ModelFiles

log = logging.getLogger(__name__)

MIXED_STEP_FLOPS = 60_000_000_000_000
"""What an H200 does in about 100 ms: more at a time makes prompts hardly faster, and everybody waits for it."""
LEAST_MIXED_TOKENS = 512
"""Steps of fewer tokens would read the weights too often."""

LEAST_CAPABILITY = (8, 0)
"""Of a CUDA device: the kernels want what came with Ampere."""


def settle(config: EngineConfig) -> EngineConfig:
    """The configuration with `--device auto` replaced by the device it means here. Raises ConfigError where a CUDA
    device is asked for and there is none that can be used."""
    asked = config.scheduler.device
    config = _settle_speculative(config)
    if asked not in ("auto", "cuda"):
        _warn_of_options(config, asked)
        return config
    import torch

    reason = _why_no_cuda()
    if asked == "cuda" and reason:
        raise ConfigError(f"--device cuda: {reason} (torch {torch.__version__}). Leave it out to run on the CPU.")
    device = "cpu" if reason else "cuda"
    if asked == "auto":
        log.info("event=device device=%s%s", device, f" reason={reason}" if reason else "")
    if reason:
        _warn_of_options(config, device)
    return msgspec.structs.replace(config, scheduler=msgspec.structs.replace(config.scheduler, device=device))


def _settle_speculative(config: EngineConfig) -> EngineConfig:
    """With the drafter that is there for the default model, and a drafter's own block size, where none are named."""
    options = config.speculative
    is_default_model = config.model.model in (None, "default")
    if is_default_model and options.speculative_algorithm and options.speculative_draft_model_path is None:
        path = drafter_of_default_model(options.speculative_algorithm)
        options = msgspec.structs.replace(options, speculative_draft_model_path=path and str(path))
        config = msgspec.structs.replace(config, speculative=options)
    _check_speculative(config)
    if options.speculative_algorithm == "DFLASH":
        from scheduler_proc.speculative.dflash_files import read_block_size

        path, asked = options.speculative_draft_model_path, options.speculative_dflash_block_size
        size = read_block_size(Path(str(path)))
        if asked is not None and asked > size:
            raise ConfigError(
                f"--speculative-dflash-block-size is {asked}, more than the {size} that the drafter in {path} is for."
            )
        options = msgspec.structs.replace(options, speculative_dflash_block_size=asked or size)
    return msgspec.structs.replace(config, speculative=options)


def _check_speculative(config: EngineConfig) -> None:
    options = config.speculative
    corpus = options.speculative_ngram_external_corpus_path
    if corpus is not None and options.speculative_algorithm != "NGRAM":
        raise ConfigError("--speculative-ngram-external-corpus-path needs --speculative-algorithm NGRAM.")
    if options.speculative_algorithm is None and options.speculative_draft_model_path is not None:
        raise ConfigError("--speculative-draft-model-path needs --speculative-algorithm.")
    if options.speculative_algorithm is None:
        return
    algorithm, path = options.speculative_algorithm, options.speculative_draft_model_path
    if algorithm == "NGRAM" and path is not None:
        raise ConfigError("--speculative-draft-model-path does not go with --speculative-algorithm NGRAM.")
    if algorithm != "NGRAM" and path is None:
        raise ConfigError(f"--speculative-algorithm {algorithm} needs --speculative-draft-model-path.")
    if algorithm in (*DRAFT_HEADS, "DFLASH") and not (Path(str(path)) / "config.json").is_file():
        raise ConfigError(f"--speculative-draft-model-path {path}: there is no config.json in such a directory.")
    if algorithm in DRAFT_HEADS:
        # Before the model is loaded, which may take minutes.
        from scheduler_proc.speculative import eagle3_files, eagle_files
        from scheduler_proc.speculative.head_files import read_config

        names = (eagle3_files.ARCHITECTURE,) if algorithm == "EAGLE3" else eagle_files.ARCHITECTURES
        read_config(Path(str(path)), names)
    if config.scheduler.device == "null":
        raise ConfigError("--speculative-algorithm needs a model, and --device null has none.")
    if config.process.tp_size > 1:
        raise ConfigError(
            f"--speculative-algorithm does not go together with --tp-size {config.process.tp_size}; leave out one."
        )
    least, most = options.speculative_ngram_min_match_window_size, options.speculative_ngram_max_match_window_size
    if least > most:
        raise ConfigError(
            f"--speculative-ngram-min-match-window-size is {least}, more than "
            f"--speculative-ngram-max-match-window-size, {most}."
        )
    if corpus is not None:
        from scheduler_proc.speculative.corpus import check_corpus_file

        check_corpus_file(Path(corpus))


def _warn_of_options(config: EngineConfig, device: str) -> None:
    """One configuration may serve machines with and without a GPU, so this is no error."""
    options, is_null = config.scheduler, device == "null"
    given = [
        flag
        for flag, is_given in (
            ("--cuda-graph-max-bs", options.cuda_graph_max_bs is not None),
            ("--disable-cuda-graph", options.disable_cuda_graph),
            ("--mem-fraction-static", is_null and options.mem_fraction_static is not None),
            ("--deterministic", is_null and options.deterministic),
        )
        if is_given
    ]
    if given:
        log.warning("event=option_without_effect option=%s device=%s", ",".join(given), device)


def context_length(config: EngineConfig, model: ModelFiles) -> int:
    """Most tokens of one request; raises ConfigError if more is asked than the model can do."""
    asked = config.model.context_length
    if asked is None:
        return model.config.max_position
    if asked > model.config.max_position:
        raise ConfigError(
            f"--context-length is {asked}, but {model.name} handles at most {model.config.max_position} tokens."
        )
    return asked


def mixed_chunk_size(config: EngineConfig, model: ModelFiles) -> int:
    """Most tokens of a step in which requests decode."""
    asked = config.scheduler.mixed_chunk_size
    if asked is not None:
        return asked
    if config.device != "cuda":
        return config.chunked_prefill_size
    devices = config.process.tp_size
    most = max(devices * MIXED_STEP_FLOPS // flops_per_token(model.config), LEAST_MIXED_TOKENS)
    # A power of two: sizes that have graphs.
    return min(1 << most.bit_length() - 1, config.chunked_prefill_size)


def flops_per_token(model: ModelConfig) -> int:
    """Of all layers' matrices."""
    heads, kv_heads = (count * model.head_dim for count in (model.num_heads, model.num_kv_heads))
    return 2 * model.num_layers * model.hidden_size * (2 * heads + 2 * kv_heads + 3 * model.intermediate_size)


def _why_no_cuda() -> str:
    """Empty if there is a device that the kernels can use."""
    import torch

    if not torch.backends.cuda.is_built():
        return "this torch was built without CUDA; where there is a device, install its CUDA build"
    if not torch.cuda.is_available():
        return "no CUDA device was found"
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        needed = ".".join(map(str, LEAST_CAPABILITY))
        return f"the CUDA device has compute capability {'.'.join(map(str, capability))}, {needed} is needed"
    return ""
