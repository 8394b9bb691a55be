"""How steps run: recorded graphs, async batching, the decode-only path, compilation; chosen by config and device.

Called when settings are resolved. What was asked for and cannot be had on the device is said in the log. Knows no
model beyond its facts and loads no torch.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.config import ContinuousBatchingConfig, WorkloadHints

if TYPE_CHECKING:
    from engine.facts import ModelFacts
    from engine.ops.flash.kernels import FlashKernel

logger = logging.getLogger(__name__)

_FALLBACK_BLOCKS = 32  # of a request, where neither hints nor the model tell how long they get
# Beyond these, longer rows run by the mixed path: a table's entries are copied to the device in every step.
_MOST_TOKENS, _MOST_BLOCKS = 32768, 512
_Q_PADDING, _KV_PADDING = 64, 16384
# Mixed steps of more tokens hide what their launches cost, and each recorded shape takes time and memory.
_RECORDED_TOKENS = 512
_LEVEL_MODES = {1: "default", 2: "max-autotune-no-cudagraphs", 3: "max-autotune-no-cudagraphs"}
_RECORDING_MODES = ("reduce-overhead", "max-autotune")  # of torch.compile: they record CUDA graphs themselves
_DEFAULT_MODE = "reduce-overhead"  # what a CompileConfig has that names none


@dataclass(frozen=True)
class Capabilities:
    """What a device, with the attention that runs on it, can do.

    Attributes:
        graphs: record steps and replay them.
        block_tables: a kernel for one-token rows that reads the cache through block tables, also of layers with a
            window. Without it decode-only steps of fixed shapes are possible, but worth it only where they are
            replayed, and not with windows.
        splits: that kernel keeps partial results of every row and every 256 tokens of its table's width.
        mixed_graphs: a recorded mixed step serves others of its padded shape.
        flash: attention is FlashAttention.
        flash_package: which one, as `engine.ops.flash.loading.load` knows it; None: none.
        page_multiple: pages must be a multiple of so many tokens.
    """

    graphs: bool = False
    block_tables: bool = False
    splits: bool = False
    mixed_graphs: bool = False
    flash: bool = False
    flash_package: str | None = None
    page_multiple: int = 1

    @classmethod
    def of(cls, device_type: str, kernel: FlashKernel | None = None, *, triton: bool = False) -> Capabilities:
        """With a flash kernel, else with the engine's Triton kernels, else with plain operations."""
        graphs = device_type == "cuda"
        if kernel is None:
            return cls(graphs, block_tables=triton, splits=triton, mixed_graphs=triton)
        return cls(
            graphs,
            block_tables=True,
            mixed_graphs=kernel.mixed_graphs,
            flash=True,
            flash_package=kernel.package,
            page_multiple=kernel.page_multiple,
        )


@dataclass(frozen=True)
class CompileSettings:
    """Arguments of `torch.compile`."""

    mode: str | None = None
    dynamic: bool | None = None
    backend: Any = "inductor"
    options: dict[str, Any] | None = None

    @property
    def records_graphs(self) -> bool:
        """Whether the compiled code records CUDA graphs of its own."""
        return self.mode in _RECORDING_MODES or bool((self.options or {}).get("triton.cudagraphs"))


@dataclass(frozen=True)
class Acceleration:
    """How steps run; the attributes are those of `Settings`."""

    max_blocks_per_request: int
    mixed_compile: CompileSettings | None
    decode_compile: CompileSettings | None
    graphs: tuple[bool, bool]
    recorded_tokens: int | None
    q_padding: int
    kv_padding: int
    async_batching: bool


def resolve_acceleration(
    config: ContinuousBatchingConfig,
    facts: ModelFacts,
    hints: WorkloadHints,
    page_size: int,
    device: Capabilities,
    most_tokens: int | None = None,
) -> Acceleration:
    """How steps run.

    Args:
        most_tokens: of a row in decode-only steps, where no one says how many there are; None: any number.

    Raises:
        ValueError: a compile config has both a mode and options.
    """
    wanted = _wanted_graphs(config, facts, device)
    most_tokens = min(_MOST_TOKENS, most_tokens or _MOST_TOKENS)
    fallback = _fallback_blocks(facts.context_length, page_size, device.block_tables, most_tokens)
    max_blocks = _max_blocks_per_request(config, facts, hints, page_size, device.block_tables, wanted[1], fallback)
    mixed_compile = _mixed_compile(config, device)
    decode_compile = _decode_compile(config, max_blocks)
    is_asked = asked_graphs(config) is not None
    level = logging.WARNING if is_asked else logging.INFO
    graphs = _graphs((wanted[0], wanted[1] and max_blocks > 0), (mixed_compile, decode_compile), level)
    return Acceleration(
        max_blocks_per_request=max_blocks,
        mixed_compile=mixed_compile,
        decode_compile=decode_compile,
        graphs=graphs,
        recorded_tokens=None if is_asked else _RECORDED_TOKENS,
        q_padding=config.q_padding_interval_size or _Q_PADDING,
        kv_padding=config.kv_padding_interval_size or _KV_PADDING,
        async_batching=_async_batching(config, facts, graphs, max_blocks > 0),
    )


def _max_blocks_per_request(
    config: ContinuousBatchingConfig,
    facts: ModelFacts,
    hints: WorkloadHints,
    page_size: int,
    has_kernel: bool,
    replayed: bool,
    fallback: int,
) -> int:
    asked = config.max_blocks_per_request
    if asked == 0:
        return 0
    if not has_kernel and any(window is not None for window in facts.windows):
        logger.log(
            logging.INFO if asked is None else logging.WARNING,
            "the decode fast path is not available (max_blocks_per_request is %s, 0 is used): layers with a sliding "
            "window have no kernel that reads block tables",
            asked,
        )
        return 0
    if not has_kernel and not replayed:
        if asked is not None:
            logger.warning(
                "the decode fast path is not available (max_blocks_per_request is %d, 0 is used): there is no kernel "
                "for %s that reads block tables, and its steps are not replayed",
                asked,
                facts.device_type,
            )
        return 0
    if asked is not None:
        return asked
    if not (hints.max_prompt_length and hints.max_generated_length):
        return fallback
    blocks = -(-(hints.max_prompt_length + hints.max_generated_length) // page_size) + 1
    return blocks + blocks % 2


def _fallback_blocks(context_length: int | None, page_size: int, has_kernel: bool, most_tokens: int) -> int:
    """For any request, within bounds. Without a kernel every row reads as many blocks as its table is wide."""
    if context_length is None:
        return _FALLBACK_BLOCKS
    most = min(max(1, most_tokens // page_size), _MOST_BLOCKS) if has_kernel else _FALLBACK_BLOCKS
    return min(-(-context_length // page_size), most)


def _mixed_compile(config: ContinuousBatchingConfig, device: Capabilities) -> CompileSettings | None:
    explicit = _explicit_compile(config, "varlen_compile_config")
    level = _level(config)
    if explicit is None and level is not None and device.flash:
        logger.info(
            "default_compile_level=%d compiles decode-only steps alone: with FlashAttention the mixed ones would be "
            "compiled again and again",
            config.default_compile_level,
        )
        return None
    return explicit or level


def _decode_compile(config: ContinuousBatchingConfig, max_blocks: int) -> CompileSettings | None:
    explicit = _explicit_compile(config, "decode_compile_config")
    if max_blocks:
        return explicit or _level(config)
    if explicit is not None:
        logger.warning("decode_compile_config has no effect: there is no decode fast path to compile")
    return None


def _level(config: ContinuousBatchingConfig) -> CompileSettings | None:
    level = config.default_compile_level
    return CompileSettings(mode=_LEVEL_MODES[level], dynamic=level < 3) if level else None


def _explicit_compile(config: ContinuousBatchingConfig, name: str) -> CompileSettings | None:
    fields = config.compile_fields(name)
    if fields is None:
        return None
    fields.pop("fullgraph", None)
    mode = fields.setdefault("mode", _DEFAULT_MODE)
    if fields.get("options"):  # torch takes one of the two
        if mode not in (None, _DEFAULT_MODE):
            raise ValueError(f"{name} sets mode {mode!r} and options {fields['options']!r}: set one of them")
        fields["mode"] = None
    return CompileSettings(**fields)


def asked_graphs(config: ContinuousBatchingConfig) -> tuple[bool, bool] | None:
    """Of (mixed, decode-only) steps, None where the config leaves the choice to the engine."""
    choice = config.use_cuda_graph
    if choice is None:
        padded = config.q_padding_interval_size or config.kv_padding_interval_size
        return (True, True) if padded else None
    return choice if isinstance(choice, tuple) else (choice, choice)


def _wanted_graphs(config: ContinuousBatchingConfig, facts: ModelFacts, device: Capabilities) -> tuple[bool, bool]:
    """Where nothing is asked, those whose kernels can be replayed."""
    asked = asked_graphs(config)
    if not device.graphs:
        if asked is not None and any(asked):
            logger.warning("CUDA graphs were asked for and are off: the model is on %s", facts.device_type)
        return False, False
    return asked or (device.mixed_graphs, device.block_tables or bool(config.use_async_batching))


def _graphs(
    wanted: tuple[bool, bool], compiled: tuple[CompileSettings | None, CompileSettings | None], level: int
) -> tuple[bool, bool]:
    """Those that compiled code does not record itself; `level`: how loudly that is said."""
    paths = []
    for name, is_wanted, settings in zip(("mixed", "decode-only"), wanted, compiled, strict=True):
        if is_wanted and settings is not None and settings.records_graphs:
            logger.log(
                level,
                "%s steps are not recorded as CUDA graphs: compiled with mode %r they record graphs of their own; "
                "mode 'max-autotune-no-cudagraphs' does not",
                name,
                settings.mode,
            )
            is_wanted = False
        paths.append(is_wanted)
    return paths[0], paths[1]


def _async_batching(
    config: ContinuousBatchingConfig, facts: ModelFacts, graphs: tuple[bool, bool], has_decode_path: bool
) -> bool:
    if config.use_async_batching and not any(graphs):
        logger.warning(
            "use_async_batching=True is off: it needs CUDA graphs, which are off (the model is on %s%s)",
            facts.device_type,
            "" if has_decode_path else ", without a decode fast path",
        )
    return any(graphs) and config.use_async_batching is not False
