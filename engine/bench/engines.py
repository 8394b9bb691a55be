"""The engines that are compared, each behind `run` (a batch) and `stream` (one request, with the time of each token).

Used in the process of `engine.bench.child` alone. Every engine imports its own packages when it is made, and gets the
same token ids, greedy decoding and EOS ignored. Knows nothing of workloads or clocks but the stamps of `stream`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

Batch = Sequence[tuple[list[int], int]]  # prompt ids, tokens to generate


class Engine(Protocol):
    """One loaded engine."""

    version: str

    def run(self, work: Batch) -> list[list[int]]:
        """The generated ids of each request, in their order; all are submitted at once."""

    def stream(self, prompt: list[int], new_tokens: int) -> tuple[list[int], list[float]]:
        """The generated ids of one request, and `time.perf_counter()` when each of them was there."""


def make_engine(name: str, model: str, dtype: str, config: dict[str, Any]) -> Engine:
    """Loads an engine.

    Args:
        name: a key of `ENGINES`.
        model: the model's folder (openvino: or a .gguf file).
        dtype: "bfloat16" or "float32".
        config: settings in the engine's own terms, over those chosen here.

    Raises:
        KeyError: there is no such engine.
    """
    return ENGINES[name](model, dtype, dict(config))


def _stamped(snapshots: Iterator[Sequence[int]]) -> tuple[list[int], list[float]]:
    """Tokens and stamps from cumulative snapshots of one output; tokens that come together have the same stamp."""
    tokens: list[int] = []
    stamps: list[float] = []
    for snapshot in snapshots:
        now = time.perf_counter()
        stamps += [now] * (len(snapshot) - len(tokens))
        tokens = list(snapshot)
    return tokens, stamps


def _has_bfloat16() -> bool:
    import torch

    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _transformers_model(model: str, dtype: str, **settings: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype), **settings)
    return loaded.eval().requires_grad_(False)


class Convoy:
    """This engine, through its manager. `config`: fields of `ContinuousBatchingConfig`."""

    def __init__(self, model: str, dtype: str, config: dict[str, Any]) -> None:
        import torch
        from transformers import GenerationConfig

        import engine
        from engine.model.loader import load_model

        self.version = engine.__version__
        self._context = engine.continuous_batching_context_manager(
            load_model(model, getattr(torch, dtype)),
            GenerationConfig(do_sample=False, eos_token_id=-1),
            continuous_batching_config=engine.ContinuousBatchingConfig(**config),
        )
        self._manager = self._context.__enter__()

    def run(self, work: Batch) -> list[list[int]]:
        ids = [self._manager.add_request(prompt, max_new_tokens=new_tokens) for prompt, new_tokens in work]
        outputs = {output.request_id: output.generated_tokens for output in self._manager}
        return [list(outputs[request_id]) for request_id in ids if request_id is not None]

    def stream(self, prompt: list[int], new_tokens: int) -> tuple[list[int], list[float]]:
        request_id = self._manager.add_request(prompt, max_new_tokens=new_tokens, streaming=True)
        assert request_id is not None
        return _stamped(output.generated_tokens for output in self._manager.request_id_iter(request_id))


class TransformersContinuousBatching:
    """Continuous batching of transformers. `config`: fields of its `ContinuousBatchingConfig`, `attention` and `dtype`.

    Where torch has no instructions for bfloat16 the model is float32, which is many times faster there.
    """

    def __init__(self, model: str, dtype: str, config: dict[str, Any]) -> None:
        import transformers
        from transformers import GenerationConfig
        from transformers.generation import ContinuousBatchingConfig

        dtype = config.pop("dtype", dtype if _has_bfloat16() else "float32")
        self.version = f"{transformers.__version__} in {dtype}"
        loaded = _transformers_model(model, dtype, attn_implementation=config.pop("attention", "sdpa"))
        # Without a size the cache takes most of the memory, and a switch to flash attention fails where it is missing.
        settings = {"num_blocks": 512, "page_size": 128, "max_batch_tokens": 2048, "auto_switch_to_flash": False}
        self._context = loaded.continuous_batching_context_manager(
            generation_config=GenerationConfig(max_new_tokens=4096, eos_token_id=-1, do_sample=False),
            continuous_batching_config=ContinuousBatchingConfig(**settings | config),
        )
        self._manager = self._context.__enter__()
        self._count = 0

    def _add(self, prompt: list[int], new_tokens: int, streaming: bool = False) -> str:
        self._count += 1
        name = f"r{self._count}"
        self._manager.add_request(prompt, request_id=name, max_new_tokens=new_tokens, streaming=streaming)
        return name

    def run(self, work: Batch) -> list[list[int]]:
        names = [self._add(*item) for item in work]
        outputs: dict[str, list[int]] = {}
        for output in self._manager:
            outputs[output.request_id] = list(output.generated_tokens)
            if len(outputs) == len(names):  # its iterator does not end by itself
                break
        return [outputs[name] for name in names]

    def stream(self, prompt: list[int], new_tokens: int) -> tuple[list[int], list[float]]:
        name = self._add(prompt, new_tokens, streaming=True)

        def snapshots() -> Iterator[list[int]]:
            for output in self._manager.request_id_iter(name):
                yield list(output.generated_tokens)
                if len(output.generated_tokens) >= new_tokens:
                    return

        return _stamped(snapshots())


class TransformersGenerate:
    """Plain `generate()`, one request after the other: what greedy tokens in float32 are compared with."""

    def __init__(self, model: str, dtype: str, config: dict[str, Any]) -> None:
        import transformers

        self.version = transformers.__version__
        self._model = _transformers_model(model, dtype, **config)

    def run(self, work: Batch) -> list[list[int]]:
        return [self._generate(prompt, new_tokens) for prompt, new_tokens in work]

    def _generate(self, prompt: list[int], new_tokens: int) -> list[int]:
        import torch
        from transformers import GenerationConfig

        ids = torch.tensor([prompt])
        # An id that no token has: None would mean the model's own.
        config = GenerationConfig(
            do_sample=False, max_new_tokens=new_tokens, eos_token_id=self._model.config.vocab_size, pad_token_id=0
        )
        with torch.inference_mode():
            out = self._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return list(out[0, len(prompt) :].tolist())

    def stream(self, prompt: list[int], new_tokens: int) -> tuple[list[int], list[float]]:
        tokens = self._generate(prompt, new_tokens)
        return tokens, [time.perf_counter()] * len(tokens)


class OpenVINO:
    """OpenVINO GenAI's continuous batching. `config`: fields of its `SchedulerConfig`, and its `properties`."""

    def __init__(self, model: str, dtype: str, config: dict[str, Any]) -> None:
        import openvino
        import openvino_genai

        self._ov, self._genai = openvino, openvino_genai
        self.version = openvino_genai.__version__
        # Where the processor has no bfloat16 the hint is one to float32.
        hint = {"bfloat16": "bf16", "float32": "f32"}[dtype]
        properties = {"INFERENCE_PRECISION_HINT": hint} | config.pop("properties", {})
        scheduler = openvino_genai.SchedulerConfig()
        settings = {"cache_size": 4, "enable_prefix_caching": True, "max_num_batched_tokens": 2048}
        for name, value in (settings | config).items():
            setattr(scheduler, name, value)
        self._pipe = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._count = 0

    def _config(self, new_tokens: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new_tokens, True, False
        return config

    def _tensor(self, prompt: list[int]) -> Any:
        import numpy

        return self._ov.Tensor(numpy.array([prompt], dtype=numpy.int64))

    def run(self, work: Batch) -> list[list[int]]:
        prompts = [self._tensor(prompt) for prompt, _ in work]
        results = self._pipe.generate(prompts, [self._config(new_tokens) for _, new_tokens in work])
        return [[int(token) for token in result.m_generation_ids[0]] for result in results]

    def stream(self, prompt: list[int], new_tokens: int) -> tuple[list[int], list[float]]:
        self._count += 1
        handle = self._pipe.add_request(self._count, self._tensor(prompt), self._config(new_tokens))

        def snapshots() -> Iterator[list[int]]:
            tokens: list[int] = []
            while self._pipe.has_non_finished_requests():
                self._pipe.step()
                while handle.can_read():
                    for output in handle.read().values():
                        tokens += [int(token) for token in output.generated_ids]
                yield tokens

        return _stamped(snapshots())


class VLLM:
    """vLLM for CPU. `config`: arguments of `LLM`."""

    def __init__(self, model: str, dtype: str, config: dict[str, Any]) -> None:
        cores = sorted(os.sched_getaffinity(0))
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
        # By default it leaves a core to its front end, which the others do not.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
        import vllm

        self._vllm = vllm
        self.version = vllm.__version__
        settings = {"dtype": dtype, "max_model_len": 4096, "seed": 0, "max_num_seqs": 256}
        self._llm = vllm.LLM(model, enable_prefix_caching=True, **settings | config)
        self._count = 0

    def _params(self, new_tokens: int) -> Any:
        return self._vllm.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)

    def run(self, work: Batch) -> list[list[int]]:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in work]
        params = [self._params(new_tokens) for _, new_tokens in work]
        return [list(r.outputs[0].token_ids) for r in self._llm.generate(prompts, params, use_tqdm=False)]

    def stream(self, prompt: list[int], new_tokens: int) -> tuple[list[int], list[float]]:
        self._count += 1
        core = self._llm.llm_engine
        core.add_request(f"stream-{self._count}", {"prompt_token_ids": prompt}, self._params(new_tokens))

        def snapshots() -> Iterator[list[int]]:
            while core.has_unfinished_requests():
                for output in core.step():
                    yield list(output.outputs[0].token_ids)

        return _stamped(snapshots())


ENGINES: dict[str, Any] = {
    "convoy": Convoy,
    "transformers": TransformersContinuousBatching,
    "generate": TransformersGenerate,
    "openvino": OpenVINO,
    "vllm": VLLM,
}
