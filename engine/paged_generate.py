"""`model.generate(..., cache_implementation="paged")`: the interface of `generate()` on top of `generate_batch`.

Used by `install()`. Padding is taken off each row before and put back after; what the engine cannot do is refused by
name. Returns what plain `generate()` returns.
"""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING, Any

from engine.generate import generate_batch
from engine.outputs import GenerationOutput

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedModel

_DEFAULT_NEW_TOKENS = 20  # of generate()
_INHERITED = ("max_new_tokens", "max_length", "min_new_tokens", "min_length", "pad_token_id", "eos_token_id")
_TAKEN = {"inputs", "input_ids", "generation_config", "attention_mask"}


def is_paged(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call of `model.generate` asks for paged generation, itself or by the config that counts."""
    config = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None) or model.generation_config
    return kwargs.get("cache_implementation", getattr(config, "cache_implementation", None)) == "paged"


def paged_generate(model: PreTrainedModel, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Generates for a batch of prompts. Arguments as for `model.generate`.

    Returns:
        int64 [rows * num_return_sequences, longest]: each row as given, then its new tokens, filled up on the right.

    Raises:
        NotImplementedError: an argument that the engine has nothing for.
        TypeError: an argument that does not exist.
        ValueError: an argument is wrong, or a row cannot be served.
        RuntimeError: the engine failed.
    """
    import torch

    given = _by_name(model, args, kwargs)
    config = copy.deepcopy(given.pop("generation_config", None) or model.generation_config)
    _refuse(model, config.update(**{name: value for name, value in given.items() if name not in _TAKEN}))
    for name in _INHERITED:
        if getattr(config, name) is None:
            setattr(config, name, getattr(model.generation_config, name))
    rows = _rows(given)
    kept = _kept(rows, given.get("attention_mask"), config)
    _count_new_tokens(config, rows.shape[1])
    prompts = [row[keep].tolist() for row, keep in zip(rows, kept, strict=True)]
    outputs = list(generate_batch(model, prompts, generation_config=config).values())
    _raise_failed(outputs)
    per_row = len(outputs) // len(prompts)
    sequences = [
        torch.cat([rows[index // per_row], rows.new_tensor(output.generated_tokens)])
        for index, output in enumerate(outputs)
    ]
    return torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=_filler(config))


def _by_name(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Every argument of the call that is not None."""
    bound = inspect.signature(type(model).generate).bind(model, *args, **kwargs).arguments
    bound.update(bound.pop("kwargs", {}))
    return {name: value for name, value in bound.items() if value is not None and name != "self"}


def _refuse(model: Any, unused: dict[str, Any]) -> None:
    known = inspect.signature(type(model).generate).parameters.keys() | inspect.signature(model.forward).parameters
    for name, value in unused.items():
        if name == "synced_gpus" and value is False:
            continue
        if isinstance(value, list) and not value:  # an empty list of processors or criteria
            continue
        if name in known or name in ("tokenizer", "assistant_tokenizer", "trust_remote_code"):
            raise NotImplementedError(f"{name} is not supported in paged generation: leave it out")
        raise TypeError(f"generate() takes no argument {name!r}")


def _rows(given: dict[str, Any]) -> torch.Tensor:
    """The prompts, int64 [rows, columns]."""
    import torch

    rows = given.get("inputs", given.get("input_ids"))
    if not isinstance(rows, torch.Tensor) or rows.ndim not in (1, 2) or rows.is_floating_point():
        found = f"a tensor of shape {tuple(rows.shape)}" if isinstance(rows, torch.Tensor) else repr(rows)[:40]
        raise ValueError(f"inputs must be a 1-D or 2-D tensor of token ids; got {found}")
    return rows.reshape(-1, rows.shape[-1]).to(torch.int64)


def _kept(rows: torch.Tensor, mask: Any, config: GenerationConfig) -> torch.Tensor:
    """Which tokens are no padding, bool [rows, columns]: by the mask, else, as in generate(), by the pad token."""
    import torch

    if mask is not None:
        if not isinstance(mask, torch.Tensor) or mask.numel() != rows.numel() or mask.shape[-1] != rows.shape[-1]:
            raise ValueError(f"attention_mask must be a tensor of the inputs' shape, {tuple(rows.shape)}")
        return mask.reshape(rows.shape).to(rows.device).bool()
    if config.pad_token_id is None or config.pad_token_id in _eos_ids(config):
        return torch.ones_like(rows, dtype=torch.bool)
    return rows != config.pad_token_id


def _count_new_tokens(config: GenerationConfig, columns: int) -> None:
    """Turns limits of the whole length, which in generate() count padding, into limits of new tokens."""
    if config.max_new_tokens is None:
        config.max_new_tokens = _DEFAULT_NEW_TOKENS if config.max_length is None else config.max_length - columns
        if config.max_new_tokens < 1:
            raise ValueError(f"max_length is {config.max_length} and the input alone has {columns} columns")
    if config.min_new_tokens is None and config.min_length is not None:
        config.min_new_tokens = max(0, config.min_length - columns)
    config.max_length = config.min_length = None


def _filler(config: GenerationConfig) -> int:
    """What generate() fills rows up with: the pad token, else the first EOS."""
    eos = next((token for token in _eos_ids(config) if token >= 0), 0)
    return eos if config.pad_token_id is None else int(config.pad_token_id)


def _eos_ids(config: GenerationConfig) -> list[int]:
    eos = config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def _raise_failed(outputs: list[GenerationOutput]) -> None:
    for index, output in enumerate(outputs):
        if output.error is not None:
            kind = ValueError if output.error.startswith("ValueError") else RuntimeError
            raise kind(f"row {index} could not be generated: {output.error}")
