"""Messages as one header and one block: nested structures of many arrays and tensors, pickled out of band.

NumPy arrays and torch tensors of any size leave the pickle. The header says their sizes, shapes and dtypes, and holds
the pickle of the rest; the block holds their bytes, each aligned. So a message of 1,000 tensors costs little more than
one tensor of as many bytes. torch is used where it is loaded, and never imported by packing.
"""

from __future__ import annotations

import ctypes
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
_HEAD = struct.Struct("<QQ")  # of a flat message: bytes of its header, of its block
_DEEPEST = 32  # levels down to which an unpicklable part is looked for

Tensors = Literal["copy", "ipc", "cpu", "cuda"]
"""Ways of tensors: *copy* them as bytes, those of a GPU too; send *ipc* handles of those of a GPU; leave those of the
*cpu* or of a *cuda* device aside, to travel by themselves."""


class Arguments(NamedTuple):
    """The arguments of a call, as a message."""

    arguments: tuple[Any, ...]
    named: dict[str, Any]


@dataclass(frozen=True)
class Packed:
    """A message as a header and the parts of its block, which are the message's own memory."""

    header: bytes
    buffers: list[memoryview]
    tensors: list[Any]  # contiguous
    aside: bool  # the tensors travel by themselves
    sizes: list[int]  # bytes of the parts: buffers, then tensors

    @property
    def flat_bytes(self) -> int:
        """Bytes that ``write`` fills."""
        return aligned_bytes([_HEAD.size + len(self.header), *self.sizes])

    def write(self, target: memoryview) -> None:
        """Write header and block into ``target``, as ``split`` reads them."""
        at = aligned_bytes([_HEAD.size + len(self.header)])
        _HEAD.pack_into(target, 0, len(self.header), self.flat_bytes - at)
        target[_HEAD.size : _HEAD.size + len(self.header)] = self.header
        at += np.asarray(target).ctypes.data
        sources = [np.asarray(buffer).ctypes.data for buffer in self.buffers]
        sources += [tensor.data_ptr() for tensor in self.tensors]
        copy = ctypes.memmove  # releases the interpreter's lock
        for source, size in zip(sources, self.sizes, strict=True):
            copy(at, source, size)
            at += size + -size % ALIGNMENT

    def memory(self) -> list[memoryview]:
        """The parts as memory, without the tensors where they travel by themselves."""
        if self.aside:
            return self.buffers
        return [*self.buffers, *(as_bytes(tensor).numpy().data for tensor in self.tensors)]


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
    found, aside = pickler.tensors, tensors in ("cpu", "cuda")
    grads = [tensor.requires_grad for tensor in found]
    devices = [] if aside or all(tensor.is_cpu for tensor in found) else [str(tensor.device) for tensor in found]
    parts = [one if one.is_contiguous() and not one.is_neg() else one.resolve_neg().contiguous() for one in found]
    parts = [tensor.detach() for tensor in parts] if any(grads) else parts
    parts = [tensor.cpu() for tensor in parts] if devices else parts
    buffers = [buffer.raw() for buffer in pickler.buffers]
    sizes = [part.nbytes for part in (*buffers, *parts)]
    dtypes, shapes = [tensor.dtype for tensor in parts], [tuple(tensor.shape) for tensor in parts]
    facts = pickle.dumps((sizes, dtypes, shapes, grads if any(grads) else [], devices), protocol=5)
    return Packed(facts + file.getvalue(), buffers, parts, aside, sizes)


def load(header: bytes | memoryview, content: Sequence[Any]) -> Any:
    """Rebuild a message, whose arrays share the memory of ``content``: its block, or a list of its parts, with tensors
    of bytes for those that travelled by themselves."""
    file = io.BytesIO(header)
    sizes, dtypes, shapes, grads, devices = pickle.load(file)
    parts = content if isinstance(content, list) else slices(sizes, content)
    first = len(sizes) - len(dtypes)
    found: list[Any] = []
    if dtypes:
        torch: Any = importlib.import_module("torch")
        for part, dtype, shape in zip(parts[first:], dtypes, shapes, strict=True):
            if isinstance(part, torch.Tensor):
                tensor = part.view(dtype)
            else:
                tensor = torch.frombuffer(part, dtype=dtype) if part else torch.empty(shape, dtype=dtype)
            found.append(tensor if len(shape) == 1 else tensor.view(shape))
        if devices and torch.cuda.is_available():
            found = [tensor.to(device) for tensor, device in zip(found, devices, strict=True)]
        for tensor, grad in zip(found, grads, strict=False):
            tensor.requires_grad_(grad)
    return _Unpickler(file, parts[:first], iter(found)).load()


def split(flat: memoryview) -> tuple[memoryview, memoryview]:
    """Header and block of what ``Packed.write`` has written."""
    header_bytes, block_bytes = _HEAD.unpack_from(flat)
    first = aligned_bytes([_HEAD.size + header_bytes])
    return flat[_HEAD.size : _HEAD.size + header_bytes], flat[first : first + block_bytes]


def slices(sizes: Sequence[int], block: Any) -> list[Any]:
    """The parts of a block: of memory, or a tensor of bytes."""
    found: list[Any] = []
    at = 0
    for size in sizes:
        found.append(block[at : at + size])
        at += size + -size % ALIGNMENT
    return found


def as_bytes(tensor: Any) -> Any:
    """A contiguous tensor's memory as a tensor of bytes."""
    torch: Any = importlib.import_module("torch")
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # strides of single elements are arbitrary


def aligned_bytes(sizes: Sequence[int]) -> int:
    """Bytes of a block of parts of these sizes."""
    return sum([size + -size % ALIGNMENT for size in sizes])


class _Pickler(pickle.Pickler):
    """Pickles with all arrays and tensors out of band: of a tensor the pickle says only that it is the next one."""

    def __init__(self, file: io.BytesIO, tensors: Tensors) -> None:
        self.buffers: list[pickle.PickleBuffer] = []
        self.tensors: list[Any] = []
        self._way: Tensors = tensors
        self._torch: Any = sys.modules.get("torch")
        self._tensor_type: Any = getattr(self._torch, "Tensor", None)
        super().__init__(file, protocol=5, buffer_callback=self.buffers.append)

    def reducer_override(self, obj: Any, /) -> Any:
        kind = cast("type[Any]", type(obj))
        if kind is self._tensor_type:
            if obj.layout is not self._torch.strided or obj.is_quantized or obj.is_complex():
                return NotImplemented  # torch's own way
            if obj.is_cuda and self._way == "ipc":
                return importlib.import_module("torch.multiprocessing.reductions").reduce_tensor(obj)
            if (obj.is_cpu and self._way != "cuda") or (obj.is_cuda and self._way != "cpu"):
                self.tensors.append(obj)
                return _NEXT
        elif kind is np.ndarray and not obj.flags.forc and not obj.dtype.hasobject:
            return np.ascontiguousarray(obj).__reduce_ex__(5)  # else NumPy copies it into the pickle
        return NotImplemented


def _next_tensor() -> Any:
    """The next tensor of a message; `_Unpickler` puts its own in this place."""
    raise pickle.UnpicklingError("a message of a flow is read by headway.flow.packing alone")


_NEXT = (_next_tensor, ())


class _Unpickler(pickle.Unpickler):
    """Reads what `_Pickler` wrote."""

    def __init__(self, file: io.BytesIO, buffers: Sequence[Any], tensors: Iterator[Any]) -> None:
        super().__init__(file, buffers=buffers)
        self._next = tensors.__next__

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name == __name__ and global_name == _next_tensor.__name__:
            return self._next
        return super().find_class(module_name, global_name)


def _culprit(value: Any, path: str, depth: int = 0) -> tuple[str, Any]:
    """The innermost part of ``value`` that can't be pickled, and where it is."""
    if depth < _DEEPEST:
        for step, child in _children(value):
            if not _pickles(child):
                return _culprit(child, path + step, depth + 1)
    return path, value


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    fields = getattr(value, "_fields", None)  # of a named tuple
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", child) for key, child in cast("Mapping[Any, Any]", value).items())
    elif isinstance(value, list | tuple) and fields is None:
        yield from ((f"[{index}]", child) for index, child in enumerate(cast("Sequence[Any]", value)))
    elif not isinstance(value, type) and not callable(value):
        names: Sequence[str] = fields or getattr(value, "__struct_fields__", ()) or getattr(value, "__dict__", ())
        yield from ((f".{name}", getattr(value, name, None)) for name in names)


def _pickles(value: Any) -> bool:
    try:
        _Pickler(io.BytesIO(), "copy").dump(value)
    except Exception:  # the boundary of pickling, which runs the objects' own code
        return False
    return True


def _short(value: Any) -> str:
    text = f"{type(value).__name__} {value!r}" if not isinstance(value, Callable) else repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
