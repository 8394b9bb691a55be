"""Runs the model on scheduled batches: prepares the input, runs the forward pass, samples, hands the tokens back.

Made and called by the core, in the engine thread. Owns the KV memory and the ops; knows nothing of scheduling or of
whom a block belongs to. Whatever raises leaves the runner as usable as before.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from torch import nn

from engine.acceleration import CompileSettings
from engine.execution.compilation import compile_forward
from engine.execution.forward import Forward, FusedForward
from engine.execution.graphs import CudaGraphs, GraphBackend, GraphRunner
from engine.execution.input_batch import InputPacker, PromptPart
from engine.execution.kv_tensors import HostKV, KVTensors, allocate
from engine.execution.paths import DecodePath, MixedPath, PathSizes
from engine.execution.staging import Staging
from engine.model.fusing import fuse
from engine.model.packed import pack_linears, refresh_packed
from engine.model.shadow import ParameterSource, attention_of, model_facts
from engine.ops import make_ops
from engine.ops.interface import Ops
from engine.outputs import StepOutput
from engine.request import Request
from engine.sampling.logprobs import PromptScores, score_prompt
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import Sampled, Sampler
from engine.sampling.sending import ToDevice
from engine.scheduling.batch import ScheduledBatch
from engine.settings import Settings
from engine.transfers import Event, transfers_of

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_CPU_WARMUP_TOKENS = 16


class Pending:
    """A launched step.

    Attributes:
        requests: those that get a token, in the order of `batch.sampled`.
        logits: [len(requests), vocab_size] in the model's dtype.
        prompts: by row of the batch, logits at prompt positions, the token after each, how many likely ones to list.
        token_ids: int64 [len(requests)] on the device, for the step that follows; None before `sample`.
    """

    __slots__ = ("_ready", "_sampled", "_scored", "logits", "prompts", "requests", "token_ids")

    def __init__(self, requests: list[Request], logits: torch.Tensor, prompts: Sequence[PromptPart] = ()) -> None:
        self.requests = requests
        self.logits = logits[: len(requests)]
        self.prompts = {
            part.row: (logits[part.first : part.first + len(part.next_ids)], torch.tensor(part.next_ids), part.k)
            for part in prompts
        }
        self.token_ids: torch.Tensor | None = None
        self._sampled: Sampled | None = None
        self._ready: Event | None = None
        self._scored: dict[int, PromptScores] = {}

    def set_sampled(self, sampled: Sampled | None, scored: dict[int, PromptScores]) -> None:
        """What came of the step: tokens, None without any, and scores of prompts by row of the batch."""
        self.prompts = {}
        if sampled is not None:
            self.token_ids = sampled.token_ids
        transfers = transfers_of(self.logits.device)
        if transfers is not None:  # to read them later must not wait for a step launched since
            sampled = None if sampled is None else sampled.copied(transfers.to_host)
            scored = {row: scores.copied(transfers.to_host) for row, scores in scored.items()}
            self._ready = transfers.make_event()
            self._ready.record()
        self._sampled, self._scored = sampled, scored

    def result(self) -> StepOutput:
        """Waits for the device and returns the tokens.

        Raises:
            RuntimeError: the step was not sampled.
        """
        if self._ready is not None:
            self._ready.synchronize()
        if self._sampled is not None:
            output = self._sampled.read()
        elif self.requests or self.prompts:
            raise RuntimeError("result() before sample()")
        else:
            output = StepOutput([])
        output.prompt_logprobs = {row: scores.read() for row, scores in self._scored.items()}
        return output


def _on_device(method: Callable[P, R]) -> Callable[P, R]:
    """Kernels, streams and events are those of the current device of the thread: it must be the model's."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        device: torch.device = args[0]._device  # type: ignore[attr-defined]
        if device.type != "cuda":
            return method(*args, **kwargs)
        with torch.cuda.device(device):
            return method(*args, **kwargs)

    return run


class ModelRunner:
    """The model, its KV cache and its sampler on one device.

    Args:
        model: what `make_shadow` returned.
        settings: sizes of the cache and of a step, and how steps run.
        sampler: chooses tokens from logits; made for the model's vocabulary when None.
        ops: operations bound to `kv`; None makes those of the model's device.
        kv: the cache, with a trash block; None allocates one.
        graph_backend: records steps; None takes CUDA graphs on CUDA, and records nothing elsewhere.
        source: where the parameters of `model` come from, if they may be replaced.
        pack: where the model is not fused, its linear layers may compute with packed copies of their weights.

    Raises:
        NotImplementedError: the engine cannot run this architecture; found by running one token.
        MemoryError, torch.OutOfMemoryError: the cache does not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        sampler: Sampler | None = None,
        ops: Ops | None = None,
        kv: KVTensors | None = None,
        graph_backend: GraphBackend | None = None,
        source: ParameterSource | None = None,
        pack: bool = False,
    ) -> None:
        self._model = model
        self._source = source
        self._device = next(model.parameters()).device
        self._facts = facts = model_facts(model)
        self._packer = InputPacker()
        self._num_groups = len(settings.groups)
        self._max_warmup_tokens = min(settings.max_batch_tokens, settings.context_length)
        kv = kv or self._allocate(settings)
        self._host = HostKV(kv, settings.host_slots) if settings.host_slots else None
        self._ops = ops or make_ops(
            kv,
            settings.groups,
            attention=attention_of(model),
            auto_switch=settings.auto_switch_to_flash,
            flash_package=settings.flash_package,
        )
        self._sampler = sampler or Sampler(facts.vocab_size, self._ops.sampling, self._make_to_device())
        self._sizes = PathSizes(
            page_size=settings.page_size,
            trash_block=kv.num_blocks_allocated - 1,
            max_tokens=settings.max_batch_tokens,
            max_rows=settings.max_requests,
            max_length=settings.context_length,
            max_blocks=settings.max_blocks_per_request,
            recorded_tokens=settings.recorded_tokens,
            q_padding=settings.q_padding,
            kv_padding=settings.kv_padding,
        )
        self._fused = fuse(model, self._ops, settings)
        if self._fused is None and pack:
            pack_linears(model)
        if self._fused is not None and settings.release_weights and source is not None:
            source.weights_are_given_up()
        self._make_paths(settings, graph_backend)
        self.probe()

    @_on_device
    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch, previous: Pending | None = None) -> Pending:
        """Runs the forward pass of a batch that is not empty: writes its K/V, computes the sampled rows' logits.

        Copies between device and host that the batch needs are run first.

        Args:
            previous: a step that was sampled and whose tokens are not known yet; rows may begin with one of them.

        Raises:
            Exception: whatever the model raises; the blocks of the batch then hold anything.
        """
        if batch.copies is not None:
            if self._host is None:
                raise RuntimeError("the batch copies blocks from or to the host, which keeps none")
            self._host.run(batch.copies)
        return self._launch(batch, previous)

    @_on_device
    @torch.inference_mode()
    def sample(self, pending: Pending) -> None:
        """Chooses the tokens of a launched step, and scores the prompt tokens that it was asked to."""
        scored = {row: score_prompt(*asked, self._sampler.workspace) for row, asked in pending.prompts.items()}
        if not pending.requests:
            pending.set_sampled(None, scored)
            return
        pending.set_sampled(self._sampler(pending.logits, self._sampler.plan(pending.requests)), scored)

    @_on_device
    def probe(self) -> None:
        """Runs the model on one throw-away token that leaves the cache alone; raises what the model raises."""
        self._dry_run(1, cached=False)

    @_on_device
    @torch.inference_mode()
    def warmup(self) -> None:
        """Runs a large and a smallest step through the real path, so that no request pays for first-time set-up.

        Where the size of a step sets nothing up (on CPU, neither compiled nor recorded), the large one is small too.
        Where steps are replayed, every size of decode-only ones is recorded, and of mixed ones the largest or, where
        they are few, every size: the largest first, in whose memory the others then fit. K/V goes to the trash block.
        """
        tokens = self._max_warmup_tokens
        if not self._has_set_up:
            tokens = min(tokens, _CPU_WARMUP_TOKENS)
        self._dry_run(tokens)
        self._sampler.warm_up(self._device, self._model.dtype)  # type: ignore[arg-type]
        self._set_up("mixed steps of up to %d tokens", self._mixed.recorded_sizes, self._dry_run)
        if (decode := self._decode) is not None:
            self._set_up(
                "decode-only steps of up to %d rows",
                decode.padded_sizes,
                lambda size: decode.run(self._packer.pack(self._dry_batch(1)), size=size),
            )
        self._dry_run(1)

    def _set_up(self, what: str, sizes: list[int], run: Callable[[int], object]) -> None:
        begin = time.monotonic()
        for number, size in enumerate(sorted(sizes, reverse=True), 1):
            run(size)
            passed = time.monotonic() - begin
            logger.info(f"{what} are set up (%d of %d, %.1f s)", size, number, len(sizes), passed)

    def check_weights(self) -> None:
        """Changes nothing.

        Raises:
            RuntimeError: parameters were replaced by others that do not fit.
        """
        if self._source is not None:
            self._source.check()

    @_on_device
    def refresh_weights(self) -> None:
        """Makes what was written into the weights since the last call, or put in their place, count.

        Only while no step runs.

        Raises:
            RuntimeError: parameters were replaced by others that do not fit, or that recorded steps do not know.
        """
        if self._source is not None and self._source.follow() and self._replays:
            raise RuntimeError(
                "parameters were replaced, and recorded steps read the old ones: write into them instead"
            )
        if self._fused is not None:
            self._fused.refresh()
        refresh_packed(self._model)

    def _allocate(self, settings: Settings) -> KVTensors:
        return allocate(
            max(len(group.layers) for group in settings.groups),
            settings.num_blocks,
            self._facts.num_kv_heads,
            settings.page_size,
            self._facts.head_dim,
            self._model.dtype,  # type: ignore[arg-type]
            self._device,
            trash=True,
        )

    def _make_to_device(self) -> ToDevice | None:
        if self._device.type == "cpu":
            return None
        staging = Staging(self._device)
        return lambda numbers: staging.send(torch.from_numpy(numbers))[0]

    def _make_paths(self, settings: Settings, backend: GraphBackend | None) -> None:
        if backend is None and self._device.type == "cuda" and any(settings.graphs):
            backend = CudaGraphs(self._device)
        has_decode_path = settings.max_blocks_per_request > 0 and self._ops.supports_graphs[1]
        possible = (self._ops.supports_graphs[0], has_decode_path)
        recorders = [backend if all(pair) else None for pair in zip(settings.graphs, possible, strict=True)]
        for kind, wanted, recorder in zip(("mixed", "decode-only"), settings.graphs, recorders, strict=True):
            if wanted and recorder is None:
                logger.warning("%s steps are not replayed: the operations of this device have no fixed shapes", kind)
        self._replays = any(recorders)
        self._has_set_up = self._device.type != "cpu" or self._replays or settings.mixed_compile is not None
        self._staging = Staging(self._device) if self._device.type != "cpu" or self._replays else None
        self._mixed = MixedPath(*self._path_parts(settings.mixed_compile, recorders[0]))
        self._decode: DecodePath | None = None
        if has_decode_path:
            self._decode = DecodePath(*self._path_parts(settings.decode_compile, recorders[1]))

    def _path_parts(
        self, compiled: CompileSettings | None, recorder: GraphBackend | None
    ) -> tuple[Forward | FusedForward, Ops, PathSizes, Staging | None, GraphRunner | None, CompileSettings | None]:
        forward: Forward | FusedForward
        if self._fused is not None:
            forward = FusedForward(self._fused)
        else:
            run = None if compiled is None else compile_forward(self._model, compiled)
            forward = Forward(self._model, self._ops, self._facts.num_layers, run)
        graphs = None
        if recorder is not None and self._staging is not None:
            graphs = GraphRunner(forward, recorder, self._staging, self._sizes.max_rows)
        return forward, self._ops, self._sizes, self._staging, graphs, compiled

    @torch.inference_mode()
    def _dry_run(self, tokens: int, *, cached: bool = True) -> None:
        pending = self._launch(self._dry_batch(tokens), cached=cached)
        self.sample(pending)
        pending.result()

    def _dry_batch(self, tokens: int) -> ScheduledBatch:
        """Requests of the engine's own, all in the trash block, with so many tokens together or as many as may be."""
        sizes = self._sizes
        whole, rest = divmod(min(tokens, sizes.max_rows * sizes.max_length), sizes.max_length)
        counts = [sizes.max_length] * whole + [rest] * (rest > 0)
        params = SamplingParams(max_new_tokens=1)
        requests = [Request(f"dry-run-{row}", [0] * count, count, params) for row, count in enumerate(counts)]
        table = np.full((len(counts), -(-max(counts) // sizes.page_size)), sizes.trash_block, dtype=np.int32)
        rows = list(range(len(counts)))
        return ScheduledBatch(requests, [0] * len(counts), counts, rows, [table] * self._num_groups, [0])

    def _launch(self, batch: ScheduledBatch, previous: Pending | None = None, *, cached: bool = True) -> Pending:
        inputs = self._packer.pack(batch, previous.requests if previous else (), cached=cached)
        path: MixedPath | DecodePath = self._mixed
        if self._decode is not None and self._decode.takes(inputs.rows):
            path = self._decode
        logits = path.run(inputs, previous.token_ids if previous else None)
        return Pending(batch.sampled_requests, logits, inputs.prompts)
