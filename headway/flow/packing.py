"""Messages as one header and one block: nested structures of many arrays and tensors, pickled out of band.

NumPy arrays and torch tensors of any size leave the pickle; what is left of them there is their shape and dtype. The
header holds the pickle and the buffers' sizes, the block their bytes, each aligned. So a message of 1,000 tensors costs
little more than one tensor of as many bytes. torch is used where it is loaded, and never imported by packing.
"""

from __future__ import annotations

import importlib
import io
import pickle
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from headway.records.errors import ConfigurationError

ALIGNMENT = 64  # bytes, of each buffer in its block: enough for any dtype
_COUNT = struct.Struct("<Q")
_HEAD = struct.Struct("<QQ")  # of a flat message: bytes of its header, of its block
_DEEPEST = 32  # levels down to which an unpicklable part is looked for
_COPIED_BY_NUMPY_BYTES = 1 << 16  # from here on its copies, which release the interpreter's lock, cost no more

Tensors = Literal["copy", "ipc", "cpu", "cuda"]
"""Ways of tensors: *copy* them as bytes, those of a GPU too; send *ipc* handles of those of a GPU; leave those of the
*cpu* or of a *cuda* device aside, to travel by themselves."""


class Arguments(NamedTuple):
    """The arguments of a call, as a message."""

    arguments: tuple[Any, ...]
    named: dict[str, Any]


@dataclass(frozen=True)
class Packed:
    """A message as a header and the buffers of its block, which are views of the message's own memory."""

    header: bytes
    buffers: list[Any]  # memoryviews; a tensor where it was left aside

    @property
    def sizes(self) -> list[int]:
        """Bytes of the buffers."""
        return _sizes(self.header)[0]

    @property
    def size_bytes(self) -> int:
        """Bytes of header and block together."""
        return len(self.header) + sum(self.sizes)

    @property
    def flat_bytes(self) -> int:
        """Bytes that ``write`` fills."""
        return _aligned(_HEAD.size + len(self.header)) + sum(map(_aligned, self.sizes))

    def write(self, target: memoryview) -> None:
        """Write header and block into ``target``, as ``split`` reads them."""
        at = _aligned(_HEAD.size + len(self.header))
        _HEAD.pack_into(target, 0, len(self.header), len(target) - at)
        target[_HEAD.size : _HEAD.size + len(self.header)] = self.header
        for buffer in self.buffers:
            end = at + buffer.nbytes
            if buffer.nbytes < _COPIED_BY_NUMPY_BYTES:
                target[at:end] = buffer
            else:
                np.copyto(np.frombuffer(target[at:end], np.uint8), np.frombuffer(buffer, np.uint8))
            at = _aligned(end)


def pack(message: Any, label: str = "", tensors: Tensors = "copy") -> Packed:
    """Pack ``message``. Raises ConfigurationError that names what can't be pickled in it; ``label`` says of which call
    or channel."""
    file = io.BytesIO()
    pickler = _Pickler(file, tensors)
    try:
        pickler.dump(message)
    except Exception as error:  # the boundary of pickling, which runs the objects' own code
        where, value = _culprit(message, "")
        where = where.removeprefix(".") if where.startswith(".") else f"message{where}"
        raise ConfigurationError(
            f"{label or 'message'}: {where} = {_short(value)} can't be sent to another process "
            f"({type(error).__name__}: {error}); valid is what pickle takes: data, and functions and classes of modules"
        ) from error
    aside = pickler.aside
    buffers = [aside[id(buffer)] if id(buffer) in aside else buffer.raw() for buffer in pickler.buffers]
    sizes = np.array([buffer.nbytes for buffer in buffers], dtype="<u8").tobytes()
    return Packed(_COUNT.pack(len(buffers)) + sizes + file.getvalue(), buffers)


def unpack(header: bytes | memoryview, block: memoryview) -> Any:
    """Rebuild a message whose arrays are views of ``block``. Writable blocks give writable arrays."""
    return load(header, slices(_sizes(header)[0], block))


def load(header: bytes | memoryview, buffers: Sequence[Any]) -> Any:
    """Rebuild a message from its buffers: memory, or tensors of bytes for those that were left aside."""
    return pickle.loads(_sizes(header)[1], buffers=buffers)


def split(flat: memoryview) -> tuple[memoryview, list[memoryview]]:
    """Header and buffers of what ``Packed.write`` has written."""
    header_bytes, block_bytes = _HEAD.unpack_from(flat)
    header = flat[_HEAD.size : _HEAD.size + header_bytes]
    first = _aligned(_HEAD.size + header_bytes)
    return header, slices(_sizes(header)[0], flat[first : first + block_bytes])


def slices(sizes: Sequence[int], block: Any) -> list[Any]:
    """The buffers in a block: of memory, or a tensor of bytes."""
    found: list[Any] = []
    at = 0
    for size in sizes:
        found.append(block[at : at + size])
        at += _aligned(size)
    return found


def block_bytes(sizes: Sequence[int]) -> int:
    """Bytes of a block of buffers of these sizes."""
    return sum(map(_aligned, sizes))


def _aligned(size: int) -> int:
    return size + -size % ALIGNMENT


def _sizes(header: bytes | memoryview) -> tuple[list[int], memoryview]:
    """The buffers' sizes, and the pickle behind them."""
    view = memoryview(header)
    (count,) = _COUNT.unpack_from(view)
    first = _COUNT.size * (count + 1)
    return np.frombuffer(view, "<u8", count, _COUNT.size).tolist(), view[first:]


class _Pickler(pickle.Pickler):
    """Pickles with all arrays and tensors out of band."""

    def __init__(self, file: io.BytesIO, tensors: Tensors) -> None:
        self.buffers: list[pickle.PickleBuffer] = []
        self.aside: dict[int, Any] = {}  # tensors, by the id of the buffer in their place
        self._tensors: Tensors = tensors
        self._torch: Any = sys.modules.get("torch")
        self._tensor_type: Any = getattr(self._torch, "Tensor", None)
        super().__init__(file, protocol=5, buffer_callback=self.buffers.append)

    def reducer_override(self, obj: Any, /) -> Any:
        kind = cast("type[Any]", type(obj))
        if kind is np.ndarray:
            if obj.flags.forc or obj.dtype.hasobject:
                return NotImplemented
            return np.ascontiguousarray(obj).__reduce_ex__(5)  # else NumPy copies it into the pickle
        if kind is self._tensor_type:
            return self._reduce_tensor(obj)
        return NotImplemented

    def _reduce_tensor(self, tensor: Any) -> Any:
        """Reduce a tensor to its bytes. Those of CUDA are not yet run on a GPU."""
        torch = self._torch
        kind = tensor.device.type
        if tensor.layout is not torch.strided or tensor.is_quantized or kind not in ("cpu", "cuda"):
            return NotImplemented
        grad, device = tensor.requires_grad, ""
        if grad:
            tensor = tensor.detach()
        if kind == "cuda" and self._tensors == "ipc":
            return torch.multiprocessing.reductions.reduce_tensor(tensor.requires_grad_(grad))
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        shape, dtype = tuple(tensor.shape), tensor.dtype
        if kind == self._tensors:
            place = pickle.PickleBuffer(bytearray())
            self.aside[id(place)] = tensor.contiguous().reshape(-1).view(torch.uint8)
            return _tensor, (place, dtype, shape, grad, "")
        if kind == "cuda":
            tensor, device = tensor.cpu(), str(tensor.device)
        tensor = tensor.contiguous()
        try:
            memory = tensor.numpy()
        except TypeError:  # a dtype that NumPy hasn't got
            memory = tensor.reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(memory), dtype, shape, grad, device)


def _tensor(buffer: Any, dtype: Any, shape: tuple[int, ...], requires_grad: bool, device: str) -> Any:
    """Rebuild a tensor on its bytes."""
    torch: Any = sys.modules.get("torch") or importlib.import_module("torch")
    if isinstance(buffer, torch.Tensor):
        tensor = buffer.view(dtype).view(shape)
    elif memoryview(buffer).nbytes:
        tensor = torch.frombuffer(buffer, dtype=dtype).view(shape)
    else:
        tensor = torch.empty(shape, dtype=dtype)
    if device:
        tensor = tensor.to(device if torch.cuda.is_available() else "cpu")
    return tensor.requires_grad_() if requires_grad else tensor


def _culprit(value: Any, path: str, depth: int = 0) -> tuple[str, Any]:
    """The innermost part of ``value`` that can't be pickled, and where it is."""
    if depth < _DEEPEST:
        for step, child in _children(value):
            if not _pickles(child):
                return _culprit(child, path + step, depth + 1)
    return path, value


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, child in cast("Mapping[Any, Any]", value).items():
            yield f"[{key!r}]", child
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name, child in zip(cast(Any, value)._fields, cast("tuple[Any, ...]", value), strict=True):
            yield f".{name}", child
    elif isinstance(value, list | tuple):
        for index, child in enumerate(cast("Sequence[Any]", value)):
            yield f"[{index}]", child
    elif not isinstance(value, type) and not callable(value):
        names: Sequence[str] = getattr(value, "__struct_fields__", None) or list(getattr(value, "__dict__", ()))
        for name in names:
            yield f".{name}", getattr(value, name, None)


def _pickles(value: Any) -> bool:
    try:
        _Pickler(io.BytesIO(), "copy").dump(value)
    except Exception:  # the boundary of pickling, which runs the objects' own code
        return False
    return True


def _short(value: Any) -> str:
    text = f"{type(value).__name__} {value!r}" if not isinstance(value, Callable) else repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
