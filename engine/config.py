"""`ContinuousBatchingConfig`: the fields of the guide, their help, validation and deprecations.

Made by users and by `install()`; read only by `engine.settings.resolve`. Knows nothing of models or devices and
loads no torch: what a device cannot do is found out, and said, when the config is resolved.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from engine.distributed.nccl import disable_graph_mixing

if TYPE_CHECKING:
    from transformers import CompileConfig

T = TypeVar("T")

_MOST = 2**40  # what no machine has of anything
SCHEDULER_TYPES = ("fifo", "prefill_first")
QUANTIZATIONS = ("int8",)
COMPILE_FIELDS = ("fullgraph", "dynamic", "backend", "mode", "options")


def _field(default: Any, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})


def _unknown(name: object, names: list[str]) -> str:
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; its fields are {', '.join(names)}"
    return f"ContinuousBatchingConfig has no field {name!r}{hint}"


def _naming_near_fields(cls: type[T]) -> type[T]:
    """Has the constructor of a dataclass name the field that an unknown one may mean."""
    init, names = cls.__init__, [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]

    @functools.wraps(init)
    def checked(self: T, *args: Any, **values: Any) -> None:
        for name in values:
            if name not in names:
                raise TypeError(_unknown(name, names))
        init(self, *args, **values)

    cls.__init__ = checked  # type: ignore[method-assign, assignment]
    return cls


@_naming_near_fields
@dataclass(frozen=True, kw_only=True)
class ContinuousBatchingConfig:
    """How the engine uses the hardware: KV cache, step budgets, scheduling. What a request generates is described by
    `GenerationConfig`.

    Every field has its help in the dataclass metadata (`help_text`). None means "the engine chooses".

    Raises:
        ValueError: a value has the wrong type, is out of range or contradicts another.
        NotImplementedError: a compile config wants one graph of the whole model.
    """

    page_size: int | None = _field(
        None, "Tokens per block of the KV cache, at least 4. None: 256 on CUDA, 32 elsewhere."
    )
    num_blocks: int | None = _field(None, "Blocks of the KV cache. None: as many as the memory budget holds.")
    max_batch_tokens: int | None = _field(
        None,
        "Tokens that one step computes at most. None: 8192 on CUDA, 512 elsewhere, less where memory is short, never "
        "below 256.",
    )
    max_memory_percent: float | None = _field(
        None,
        "Share of the free memory, in (0, 1], for KV cache and steps. None: 0.9 on CUDA, where the largest step is run "
        "to see what it takes, 0.6 elsewhere.",
    )
    max_requests_per_batch: int | None = _field(
        None,
        "Requests that run at the same time; bounds the logits. None: as many as the workload hints name, else 1024. "
        "Never more than max_batch_tokens or num_blocks.",
    )
    max_blocks_per_request: int | None = _field(
        None,
        "Width of the block table of the kernel for decode-only steps, which steps with longer rows do not take; 0: "
        "such steps run as all others do. None: for the lengths of the workload hints, else for the model's context up "
        "to 32768 tokens and 512 blocks, less where memory is short, else 32; 0 where there is no such kernel.",
    )
    allow_block_sharing: bool = _field(True, "Requests with a common prefix share its blocks (prefix caching).")
    use_async_batching: bool | None = _field(
        None, "Schedule the next step while this one runs; needs CUDA graphs. None: wherever there are any."
    )
    use_cuda_graph: bool | tuple[bool, bool] | None = _field(
        None,
        "Replay recorded CUDA graphs, for (mixed, decode-only) steps or both. None: of both if a padding interval is "
        "set; else, on CUDA where attention runs in a flash kernel or in the engine's own, of decode-only steps and, "
        "if that kernel can replay them, of mixed ones of up to 512 tokens, unless the model's forward makes the host "
        "wait. use_async_batching=True asks for those of decode-only steps with any kernel.",
    )
    q_padding_interval_size: int = _field(
        0, "Multiple to which steps that are replayed pad their query tokens; asks for CUDA graphs. 0: 64."
    )
    kv_padding_interval_size: int = _field(
        0, "Multiple to which steps that are replayed pad their cached tokens; asks for CUDA graphs. 0: 16384."
    )
    varlen_compile_config: CompileConfig | dict[str, Any] | None = dataclasses.field(
        default=None, metadata={"help": "`CompileConfig` of mixed steps, or its fields. None: default_compile_level."}
    )
    decode_compile_config: CompileConfig | dict[str, Any] | None = dataclasses.field(
        default=None,
        metadata={"help": "`CompileConfig` of decode-only steps, or its fields. None: default_compile_level."},
    )
    default_compile_level: int = _field(
        0,
        "How hard to compile the model where no compile config is set: 0 not, 1 mode 'default', 2 "
        "'max-autotune-no-cudagraphs', 3 as 2 for fixed shapes. Mixed steps with FlashAttention are not compiled.",
    )
    scheduler_type: str = _field(
        "fifo", "'fifo': decoding requests first; 'prefill_first': those whose prompt is not complete."
    )
    safety_margin: float | None = _field(
        None,
        "Share of the blocks, in [0, 1], that waiting requests must leave free for running ones. None: 0.15 for fifo, "
        "0 for prefill_first.",
    )
    return_logprobs: bool = _field(False, "Return the log-probability of every generated token.")
    seed: int | None = _field(None, "What the random streams of requests without a seed derive from. None: random.")
    auto_switch_to_flash: bool = _field(
        True,
        "Models loaded with eager or sdpa attention may run a faster one that the device has. False: they keep it.",
    )
    cpu_offload_space: float | None = _field(
        0.0,
        "GiB of host memory for blocks that leave the device, where copies need a 64th of the cache, too. None: "
        "what cpu_offload_space_safety_threshold allows.",
    )
    cpu_offload_space_safety_threshold: float = _field(
        0.8, "Share of the host's free memory, in [0, 1], that offloading may take; 0: no offloading."
    )
    max_queue_size: int = _field(0, "Requests that may wait for their first step; 0: no bound.")
    weight_quantization: str | None = _field(
        None,
        "'int8': matrices are kept in 8 bits with a scale for each output, which makes single streams faster and the "
        "scores less exact; on CPU, for models whose layers run fused. None: in the dtype of the model.",
    )
    release_weights: bool = _field(
        False,
        "The model is the engine's alone: where packed copies of its weights are computed with, the weights themselves "
        "are given up, and cannot be changed or used any more. On a GPU they are moved together instead, and stay.",
    )
    per_request_processors: bool = _field(
        False, "Requests may bring their own sampling arguments: temperature, top_p, penalties, logit_bias, ..."
    )
    drop_unsupported_processors: bool = _field(
        False,
        "Drop settings of the GenerationConfig that the engine does not support, with a warning. False: such a "
        "setting is an error that names it.",
    )
    disable_nccl_graph_mixing: bool = _field(
        True,
        "Where there are several processes: switch NCCL's support for mixing calls inside and outside of CUDA graphs "
        "off, unless NCCL_GRAPH_MIXING_SUPPORT is set; steps that are not replayed then wait for those that are. Make "
        "the config before the model is loaded.",
    )
    cpu_group_timeout: float | None = _field(
        300.0, "Seconds that one tensor parallel process waits for another, above 0; None: without limit."
    )
    use_default_compile_configs: bool | None = _field(None, "Deprecated: default_compile_level 3 (True) or 0 (False).")
    max_cached_graphs: int | None = _field(None, "Deprecated, has no effect: the number of graphs is not a concern.")
    block_size: int | None = _field(None, "Deprecated: page_size.")

    def __post_init__(self) -> None:
        self._replace_deprecated()
        self._check_ranges()
        self._check_graphs()
        for name in ("varlen_compile_config", "decode_compile_config"):
            self._check_compile(name)
        if self.disable_nccl_graph_mixing:
            disable_graph_mixing()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ContinuousBatchingConfig:
        """A config from names and values; ValueError for an unknown name, with the nearest valid one."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                raise ValueError(_unknown(name, names))
        return cls(**values)

    @classmethod
    def from_transformers(cls, config: Any) -> ContinuousBatchingConfig:
        """Ours from the object of the same name in transformers, recognised by its fields.

        A value equal to that class's default counts as not set, so that defaults by device apply (its page_size of
        256 included).

        Raises:
            TypeError: not such an object.
            NotImplementedError: it sets a field that this engine does not know.
        """
        if isinstance(config, cls):
            return config
        if isinstance(config, type) or not dataclasses.is_dataclass(config) or not hasattr(config, "max_batch_tokens"):
            raise TypeError(f"expected a ContinuousBatchingConfig, got {type(config).__name__}")
        known = {field.name for field in dataclasses.fields(cls)}
        values = {
            field.name: getattr(config, field.name)
            for field in dataclasses.fields(config)
            if getattr(config, field.name) != _default(field)
        }
        if not hasattr(config, "page_size") and "block_size" in values:
            values["page_size"] = values.pop("block_size")  # its name up to transformers 5.17
        for name in values.keys() - known:
            raise NotImplementedError(f"{name}={values[name]!r} is not supported: this engine has no such setting")
        return cls(**values)

    @classmethod
    def help_text(cls) -> dict[str, str]:
        """Help of every field."""
        return {field.name: field.metadata["help"] for field in dataclasses.fields(cls)}

    def non_default(self) -> dict[str, Any]:
        """The fields that differ from their defaults, for start-up logs."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }

    def compile_fields(self, name: str) -> dict[str, Any] | None:
        """The fields that `varlen_compile_config` or `decode_compile_config` sets; None when it is not set."""
        value = getattr(self, name)
        if value is None:
            return None
        if isinstance(value, Mapping):
            return dict(value)
        if not all(hasattr(value, field) for field in COMPILE_FIELDS):
            self._reject(name, "a CompileConfig, a dict of its fields, or None")
        return {field: getattr(value, field) for field in COMPILE_FIELDS}

    def _replace_deprecated(self) -> None:
        if self.block_size is not None:
            _deprecated("block_size", "use page_size")
            if self.page_size not in (None, self.block_size):
                raise ValueError(
                    f"block_size={self.block_size} and page_size={self.page_size} differ; set page_size only"
                )
            self._set("page_size", self.block_size)
            self._set("block_size", None)
        if self.use_default_compile_configs is not None:
            _deprecated("use_default_compile_configs", "use default_compile_level")
            if not isinstance(self.use_default_compile_configs, bool):
                self._reject("use_default_compile_configs", "True or False")
            self._set("default_compile_level", 3 if self.use_default_compile_configs else 0)
            self._set("use_default_compile_configs", None)
        if self.max_cached_graphs is not None:
            _deprecated("max_cached_graphs", "it has no effect, leave it out")
            self._set("max_cached_graphs", None)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_ranges(self) -> None:
        self._check_int("page_size", 4, optional=True)
        for name in ("num_blocks", "max_batch_tokens", "max_requests_per_batch"):
            self._check_int(name, 1, optional=True)
        self._check_int("max_blocks_per_request", 0, optional=True)
        for name in ("q_padding_interval_size", "kv_padding_interval_size", "max_queue_size"):
            self._check_int(name, 0)
        self._check_int("default_compile_level", 0, 3)
        self._check_int("seed", None, optional=True)
        self._check_number("max_memory_percent", 0, 1, optional=True)
        if self.max_memory_percent == 0:
            self._reject("max_memory_percent", "above 0 and at most 1")
        self._check_number("safety_margin", 0, 1, optional=True)
        self._check_number("cpu_offload_space", 0, _MOST, optional=True)
        self._check_number("cpu_offload_space_safety_threshold", 0, 1)
        self._check_number("cpu_group_timeout", 0, _MOST, optional=True)
        if self.cpu_group_timeout == 0:
            self._reject("cpu_group_timeout", "above 0, or None for no limit")
        for field in dataclasses.fields(self):
            if field.type == "bool" and not isinstance(getattr(self, field.name), bool):
                self._reject(field.name, "True or False")
        if not isinstance(self.use_async_batching, bool | None):
            self._reject("use_async_batching", "True, False or None")
        if not isinstance(self.scheduler_type, str) or self.scheduler_type not in SCHEDULER_TYPES:
            self._reject("scheduler_type", " or ".join(map(repr, SCHEDULER_TYPES)))
        if self.weight_quantization not in (None, *QUANTIZATIONS):
            self._reject("weight_quantization", f"None or {' or '.join(map(repr, QUANTIZATIONS))}")

    def _check_graphs(self) -> None:
        if isinstance(self.use_cuda_graph, list):
            self._set("use_cuda_graph", tuple(self.use_cuda_graph))
        value = self.use_cuda_graph
        pair = isinstance(value, tuple) and len(value) == 2 and all(isinstance(each, bool) for each in value)
        if not (value is None or isinstance(value, bool) or pair):
            self._reject("use_cuda_graph", "True, False, None or a pair of booleans")
        if self.use_async_batching and value in (False, (False, False)):
            raise ValueError(
                f"use_async_batching=True needs CUDA graphs, and use_cuda_graph={value!r} switches them off: leave one "
                "of the two None"
            )

    def _check_compile(self, name: str) -> None:
        fields = self.compile_fields(name) or {}
        unknown = [key for key in fields if key not in COMPILE_FIELDS]
        if unknown:
            raise ValueError(f"{name} has the key {unknown[0]!r}: it may have {', '.join(COMPILE_FIELDS)}")
        if fields.get("fullgraph"):
            raise NotImplementedError(
                f"{name} sets fullgraph=True: attention stays outside of the compiled graphs, leave fullgraph False"
            )
        if not isinstance(fields.get("dynamic"), bool | None):
            self._reject(name, "a CompileConfig whose dynamic is True, False or None")
        if not isinstance(fields.get("mode"), str | None) or not isinstance(fields.get("options"), Mapping | None):
            self._reject(name, "a CompileConfig whose mode is a string or None and whose options are a dict or None")

    def _check_int(self, name: str, low: int | None, high: int | None = None, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            self._reject(name, "an integer" + (" or None" if optional else ""))
        most = _MOST if high is None and low is not None else high
        if (low is not None and value < low) or (most is not None and value > most):
            self._reject(name, f"at least {low}" if high is None and value <= _MOST else f"between {low} and {most}")

    def _check_number(self, name: str, low: float, high: float, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if isinstance(value, bool) or not isinstance(value, int | float) or value in (math.inf, -math.inf):
            self._reject(name, "a finite number" + (" or None" if optional else ""))
        if not low <= value <= high:
            self._reject(name, f"between {low} and {high}")

    def _reject(self, name: str, expected: str) -> NoReturn:
        raise ValueError(f"{name} is {getattr(self, name)!r}: it must be {expected}")


@dataclass(frozen=True)
class WorkloadHints:
    """What is known of the requests to come; 0 means unknown. Sizes defaults, never limits a request.

    Attributes:
        max_prompt_length: tokens of the longest prompt; with the next one, it sizes the decode fast path.
        max_generated_length: tokens that a request generates at most.
        num_requests: requests to come; sizes the request cap.
    """

    max_prompt_length: int = 0
    max_generated_length: int = 0
    num_requests: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{field.name} is {value!r}: it must be an integer of at least 0")


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _deprecated(name: str, instead: str) -> None:
    warnings.warn(f"{name} is deprecated: {instead}", FutureWarning, stacklevel=6)
