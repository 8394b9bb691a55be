"""Packed weights, and the ops that compute with them: linear layers and embeddings.

`PackedWeight` owns the copy of a weight in the order that linear.cpp wants, and knows when it is out of date. The ops
are made once, by whoever builds a tape (the fused layers, `PackedLinear`). Knows nothing of layers or requests.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine.ops.cpu.build import load_library
from engine.ops.cpu.library import Address, Float, Int, Op, Step, Tape

_ACTS = {None: 0, "silu": 1, "gelu_tanh": 2, "gelu": 3}
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class _Weight(ctypes.Structure):
    """`Weight` of linear.cpp."""

    _fields_ = (("panels", Address), ("scales", Address), ("outputs", Int), ("inputs", Int), ("interleaved", Int))


class _Linear(ctypes.Structure):
    """`Linear` of linear.cpp."""

    _fields_ = (
        ("weight", ctypes.POINTER(_Weight)),
        ("x", Address),
        ("x_stride", Int),
        ("out", Address),
        ("out_stride", Int),
        ("out_fp32", Int),
        ("bias", Address),
        ("kept", Int),
        ("add", Int),
        ("act", Int),
        ("softcap", Float),
    )


class _Embedding(ctypes.Structure):
    """`Embedding` of linear.cpp."""

    _fields_ = (("weight", ctypes.POINTER(_Weight)), ("out", Address), ("out_stride", Int), ("scale", Float))


class PackedWeight:
    """A weight [out_features, in_features], packed.

    Attributes:
        out_features: rows of all parts together.
        in_features: columns.
        dtype: of the parts, fp32 or bf16; with `activation_dtype` it tells that of the rows to be multiplied.
        quantized: stored in 8 bits, with one fp32 scale for each output.
        interleaved: panels of the two parts take turns.
        nbytes: memory that the packed form takes.
    """

    def __init__(self, parts: Sequence[Callable[[], Tensor]], quantize: bool = False, interleave: bool = False) -> None:
        """Packs the tensors [N_i, K] that `parts` return now, one below another.

        Args:
            parts: asked again at each `refresh`, so that replaced parameters are followed.
            quantize: to 8 bits, symmetrically, each output by its own largest number.
            interleave: two parts of equal size, gate and up, for the `act` of `linear_op`.

        Raises:
            ValueError: parts that are no matrices of one dtype (fp32 or bf16) and width, or cannot be interleaved.
            BuildError: the library cannot be built here.
        """
        self._parts = list(parts)
        self.quantized, self.interleaved = quantize, interleave
        matrices = self._matrices()
        shapes = [tuple(matrix.shape) for matrix in matrices]
        self.dtype = matrices[0].dtype
        if any(len(shape) != 2 or shape[1] != shapes[0][1] or 0 in shape for shape in shapes):
            raise ValueError(f"weights of shapes {shapes} cannot be packed together")
        if self.dtype not in _NAMES or any(matrix.dtype != self.dtype for matrix in matrices):
            raise ValueError(f"weights cannot be packed: {[matrix.dtype for matrix in matrices]}")
        if interleave and (len(shapes) != 2 or shapes[0] != shapes[1]):
            raise ValueError(f"only two weights of equal size can be interleaved, not {shapes}")
        self.out_features, self.in_features = sum(shape[0] for shape in shapes), shapes[0][1]
        self._shapes = shapes
        self._name = _NAMES[self.dtype] + ("_int8" if quantize else "")
        self._scales = torch.zeros(self.out_features if quantize else 0)
        self.native = _Weight(
            None, self._scales.data_ptr() if quantize else None, self.out_features, self.in_features, interleave
        )
        size = getattr(_library(), f"packed_bytes_{self._name}")(ctypes.byref(self.native))
        self._panels = torch.zeros(size, dtype=torch.uint8)
        self.native.panels = self._panels.data_ptr()
        self._stamp: Any = None
        self.refresh()

    @property
    def nbytes(self) -> int:
        """Of panels and scales."""
        return self._panels.nbytes + self._scales.nbytes

    def refresh(self) -> bool:
        """Packs again, in place, if the parts are not what was packed. Cost: one read of the parts.

        Returns:
            Whether it did.

        Raises:
            ValueError: the parts have other shapes or another dtype now.
        """
        matrices = self._matrices()
        stamp = [_stamp(matrix) for matrix in matrices]
        if stamp == self._stamp:
            return False
        if [tuple(matrix.shape) for matrix in matrices] != self._shapes or {m.dtype for m in matrices} != {self.dtype}:
            raise ValueError("weights that were packed have changed their shapes or dtype")
        pack, first = getattr(_library(), f"pack_{self._name}"), 0
        for matrix in matrices:
            pack(ctypes.byref(self.native), matrix.data_ptr(), matrix.stride(0), first, len(matrix))
            first += len(matrix)
        self._stamp = stamp
        return True

    def unpack(self) -> Tensor:
        """[out_features, in_features] in the parts' dtype: their values, or those that the 8 bits stand for."""
        ids = torch.arange(self.out_features)
        out = torch.empty(self.out_features, self.in_features)
        Tape([embed_op(self, out)]).run(Step(tokens=len(ids), ids=ids.data_ptr()), torch.get_num_threads())
        return out if self.quantized else out.to(self.dtype)

    def _matrices(self) -> list[Tensor]:
        matrices = [part().detach() for part in self._parts]
        return [m if m.dim() != 2 or m.stride(1) == 1 else m.contiguous() for m in matrices]


def linear_op(
    weight: PackedWeight,
    x: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    kept: bool = False,
    add: bool = False,
    act: str | None = None,
    softcap: float | None = None,
) -> Op:
    """out[r] = softcap(act(x[r] W^T + bias)) for the rows r < step.tokens, or step.kept.

    The bits of a row of `out` depend on that row of `x` alone.

    Args:
        weight: W [N, K].
        x: [max_rows, K] in `activation_dtype(weight.dtype)`; rows may lie apart.
        out: [max_rows, N] in that dtype or fp32; [max_rows, N/2] with an interleaved weight.
        bias: fp32 [N], read at each step.
        kept: the rows are those whose logits are wanted, already gathered.
        add: the result is added to `out`, which is fp32.
        act: "silu", "gelu_tanh" or "gelu"; with an interleaved weight act(gate) * up.
        softcap: the result is softcap * tanh(result / softcap).

    Raises:
        ValueError: shapes, strides or dtypes that do not fit.
    """
    width = weight.out_features // (2 if weight.interleaved else 1)
    activation = activation_dtype(weight.dtype)
    _check("x", x, weight.in_features, (activation,))
    _check("out", out, width, (torch.float32,) if add else (activation, torch.float32))
    if bias is not None and (
        bias.shape != (weight.out_features,) or bias.dtype != torch.float32 or not bias.is_contiguous()
    ):
        raise ValueError(f"bias must be fp32 [{weight.out_features}], not {bias.dtype} {list(bias.shape)}")
    arguments = _Linear(
        ctypes.pointer(weight.native),
        x.data_ptr(),
        x.stride(0),
        out.data_ptr(),
        out.stride(0),
        out.dtype == torch.float32,
        None if bias is None else bias.data_ptr(),
        kept,
        add,
        _ACTS[act],
        softcap or 0.0,
    )
    return Op(f"linear_{weight._name}", arguments, (weight, x, out, bias))


def embed_op(weight: PackedWeight, out: Tensor, *, scale: float = 1.0) -> Op:
    """out[t] = scale * W[step.ids[t]] for the tokens t of the step.

    Args:
        weight: W [vocabulary, K].
        out: fp32 [max_tokens, K].
        scale: of the result.

    Raises:
        ValueError: `out` does not fit.
    """
    _check("out", out, weight.in_features, (torch.float32,))
    arguments = _Embedding(ctypes.pointer(weight.native), out.data_ptr(), out.stride(0), scale)
    return Op(f"embed_{weight._name}", arguments, (weight, out))


def activation_dtype(weight_dtype: torch.dtype) -> torch.dtype:
    """In which rows lie in memory between ops, for weights of a dtype. What is bf16 in the model may be fp32 here.

    Raises:
        ValueError: there are no kernels for the dtype.
        BuildError: the library cannot be built here.
    """
    if weight_dtype not in _NAMES:
        raise ValueError(f"there are no CPU kernels for {weight_dtype}")
    narrow = weight_dtype == torch.bfloat16 and _library().bf16_activation_bytes() == 2
    return torch.bfloat16 if narrow else torch.float32


def _check(name: str, tensor: Tensor, width: int, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dim() != 2 or tensor.shape[1] != width or tensor.stride(1) != 1 or tensor.dtype not in dtypes:
        raise ValueError(
            f"{name} must be [rows, {width}] of {' or '.join(map(str, dtypes))} with whole rows, "
            f"not {list(tensor.shape)} of {tensor.dtype}"
        )


def _stamp(weight: Tensor) -> tuple[Any, ...]:
    """Changes with the weight [rows, columns]. Writes through `.data` are no versions, so its bits are summed too."""
    size = 8 // weight.element_size()
    whole = all(n % size == 0 for n in (weight.shape[1], weight.stride(0), weight.storage_offset()))
    words = weight.view(torch.int64 if whole else torch.int16 if weight.dtype == torch.bfloat16 else torch.int32)
    sums = words.sum(dim=1)
    version = None if weight.is_inference() else weight._version
    return weight.data_ptr(), version, int((sums * torch.arange(1, 2 * len(sums), 2)).sum())


@cache
def _library() -> ctypes.CDLL:
    library = load_library()
    for name in ("fp32", "bf16", "fp32_int8", "bf16_int8"):
        size, pack = getattr(library, f"packed_bytes_{name}"), getattr(library, f"pack_{name}")
        size.argtypes, size.restype = (ctypes.POINTER(_Weight),), Int
        pack.argtypes, pack.restype = (ctypes.POINTER(_Weight), Address, Int, Int, Int), None
    return library
