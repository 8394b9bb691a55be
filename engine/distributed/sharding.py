"""What the engine must know of a model that transformers has sharded over processes.

Called when an engine is built: is the model sharded and how, how much of the KV cache lies here, and what a copy of its
modules needs. Knows nothing of requests, steps or communication between engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_OTHER_SIZES = ("pp_size", "fsdp_size", "dp_replicate_size", "ep_size")
# Projections whose output holds the keys, alone or with queries and values.
_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")
_SHARDED_OUTPUT = "colwise"


def tensor_parallel_mesh(model: nn.Module) -> DeviceMesh | None:
    """The one-dimensional mesh of the processes that share `model`; None when this process has all of it.

    Raises:
        NotImplementedError: it is distributed in another way than by tensor parallelism.
    """
    mesh: DeviceMesh | None = getattr(model, "_device_mesh", None)
    if mesh is None or mesh.size() == 1:
        if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
            raise NotImplementedError(
                f"the parameters of {type(model).__name__} are distributed, but not by tensor parallelism of "
                "transformers: load the model with DistributedConfig(tp_size=...)"
            )
        return None
    config = getattr(model.config, "distributed_config", None)
    sizes = {name: getattr(config, name, None) or 1 for name in _OTHER_SIZES}
    sizes |= {name: mesh[name].size() for name in mesh.mesh_dim_names or () if name != "tp"}
    sizes["enable_expert_parallel"] = getattr(config, "enable_expert_parallel", False)
    others = {name: size for name, size in sizes.items() if size > 1 or size is True}
    if others:
        found = ", ".join(f"{name}={size}" for name, size in others.items())
        raise NotImplementedError(f"the model is distributed with {found}: only tp_size is supported")
    return mesh["tp"] if mesh.mesh_dim_names else mesh


def local_kv_heads(model: nn.Module, num_kv_heads: int) -> int:
    """How many of the model's KV heads this process computes and caches.

    Raises:
        ValueError: the processes cannot share them evenly.
        NotImplementedError: as `tensor_parallel_mesh`.
    """
    mesh = tensor_parallel_mesh(model)
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    sharded = any(
        style == _SHARDED_OUTPUT and name.rpartition(".")[2] in _KEY_PROJECTIONS for name, style in plan.items()
    )
    if mesh is None or not sharded:
        return num_kv_heads
    if num_kv_heads % mesh.size():
        fitting = ", ".join(str(size) for size in range(1, num_kv_heads + 1) if num_kv_heads % size == 0)
        raise ValueError(
            f"the model has {num_kv_heads} KV heads, which {mesh.size()} tensor parallel processes cannot share "
            f"evenly: set tp_size, and the number of processes with it, to one of {fitting}"
        )
    return num_kv_heads // mesh.size()


def shared_parts(model: nn.Module) -> list[Any]:
    """What a copy of a sharded model must have in common with it, beside its tensors."""
    parts = (getattr(model, name, None) for name in ("_device_mesh", "_mesh_manager"))
    return [part for part in parts if part is not None]


def rebind_forwards(copied: nn.Module, copies: dict[int, Any]) -> None:
    """Makes the forwards that were set on single modules work on the copies of these modules.

    Tensor parallelism wraps a module's `forward` in a function that keeps the module itself; a deep copy keeps that
    function, so that calling the copy would run the original.

    Args:
        copies: the memo of the deep copy that made `copied`.
    """
    for module in copied.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, FunctionType):
            module.forward = _rebound(forward, copies)


def _rebound(value: Any, copies: dict[int, Any]) -> Any:
    """`value` with every module in it, or in the closures of its functions, replaced by its copy."""
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _rebound(value.__self__, copies))
    if not isinstance(value, FunctionType) or not value.__closure__:
        return value
    cells = tuple(CellType() for _ in value.__closure__)
    function = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    function.__kwdefaults__ = value.__kwdefaults__
    function.__dict__.update(value.__dict__)
    copies[id(value)] = function  # before its cells: a function may refer to itself
    for cell, original in zip(cells, value.__closure__, strict=True):
        with suppress(ValueError):  # an empty cell stays empty
            cell.cell_contents = _rebound(original.cell_contents, copies)
    return function
