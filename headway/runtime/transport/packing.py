"""Packs messages (nested structures of arrays and tensors) as a pickle, and buffers whose bytes stay outside of it.

The buffers are copied once: into shared memory, or into a frame of a link (`runtime/framing.py`). Between two processes
of one GPU, tensors aren't copied: the pickle has handles of their memory (CUDA IPC). Packing uses torch where it is
loaded, and never imports it.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import pickle
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from headway.records.errors import ConfigurationError
from headway.runtime.framing import ALIGNMENT

_HEADER = struct.Struct("<QQ")  # header of a flat message: bytes of its pickle, number of its buffers
_MAX_DEPTH = 32  # levels of nesting that are searched for an unpicklable part


class Arguments(NamedTuple):
    """The arguments of a call, as a message."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


class Packed(NamedTuple):
    """A message as its pickle and out-of-band buffers, which share the message's memory until they are copied."""

    pickled: bytes
    buffers: Sequence[Any]

    def __reduce__(self) -> Any:
        return Packed, (self.pickled, [pickle.PickleBuffer(buffer) for buffer in self.buffers])

    @property
    def size_bytes(self) -> int:
        """Bytes that ``write`` fills."""
        return self._first_offset + sum([_aligned(len(buffer)) for buffer in self.buffers])

    @property
    def _first_offset(self) -> int:
        """The offset of the first buffer in a flat message."""
        return _aligned(_HEADER.size + 8 * len(self.buffers) + len(self.pickled))

    def write(self, target: memoryview) -> None:
        """Write the message into ``target``, in the format that `packed_from` reads."""
        packed_sizes = np.fromiter(map(len, self.buffers), np.uint64).tobytes()
        head_bytes = _HEADER.pack(len(self.pickled), len(self.buffers)) + packed_sizes + self.pickled
        target[: len(head_bytes)] = head_bytes
        offset, array = self._first_offset, np.asarray(target)
        for buffer in self.buffers:
            np.copyto(array[offset : offset + len(buffer)], np.asarray(buffer))  # releases the interpreter's lock
            offset += _aligned(len(buffer))

    def written(self) -> bytearray:
        """Return a copy of the message in new memory, in the format that `packed_from` reads."""
        block = bytearray(self.size_bytes)
        self.write(memoryview(block))
        return block

    def load(self) -> Any:
        """Rebuild the message, whose arrays share the memory of the buffers."""
        return pickle.loads(self.pickled, buffers=self.buffers)


def packed_from(content: memoryview) -> Packed:
    """Read the message that ``Packed.write`` has written, without a copy of its buffers."""
    pickle_bytes, buffer_count = _HEADER.unpack_from(content)
    sizes_end = _HEADER.size + 8 * buffer_count
    sizes = np.frombuffer(content[_HEADER.size : sizes_end], np.uint64).tolist()
    buffers, offset = list[memoryview](), _aligned(sizes_end + pickle_bytes)
    for size in sizes:
        buffers.append(content[offset : offset + size])
        offset += _aligned(size)
    return Packed(bytes(content[sizes_end : sizes_end + pickle_bytes]), buffers)


def _aligned(size: int) -> int:
    return size + -size % ALIGNMENT


def pack(message: Any, label: str = "", *, one_gpu: bool = False) -> Packed:
    """Pack ``message``, for any reader or, with ``one_gpu``, for one on this process's GPU. Raises ConfigurationError
    that names the part that can't be pickled, and ``label``, the call or channel."""
    file = io.BytesIO()
    pickler = _Pickler(file, one_gpu)
    try:
        pickler.dump(message)
    except Exception as error:  # the boundary of pickling, which runs the objects' own code
        path, unpicklable = _unpicklable_part(message, "")
        path = path.removeprefix(".") if path.startswith(".") else f"message{path}"
        raise ConfigurationError(
            f"{label or 'message'}: {path} = {_short_repr(unpicklable)} can't be sent to another process "
            f"({type(error).__name__}: {error}); valid: data, and functions and classes of modules, as pickle requires"
        ) from error
    return Packed(file.getvalue(), [buffer.raw() for buffer in pickler.buffers])


class _Pickler(pickle.Pickler):
    """Pickles with all arrays and tensors out of band."""

    def __init__(self, file: io.BytesIO, one_gpu: bool = False) -> None:
        self.buffers: list[pickle.PickleBuffer] = []
        self._one_gpu = one_gpu
        self._torch: Any = sys.modules.get("torch")
        self._tensor_type: Any = getattr(self._torch, "Tensor", None)
        super().__init__(file, protocol=5, buffer_callback=self.buffers.append)

    def reducer_override(self, obj: Any, /) -> Any:
        object_type = cast("type[Any]", type(obj))
        if object_type is self._tensor_type:
            is_dense = obj.layout is self._torch.strided and not (obj.is_quantized or obj.is_complex())
            if not is_dense or not (obj.is_cpu or obj.is_cuda):
                return NotImplemented  # torch's own way
            if obj.is_cuda and self._one_gpu:
                return importlib.import_module("torch.multiprocessing.reductions").reduce_tensor(obj)
            is_plain = obj.is_cpu and obj.is_contiguous() and not obj.is_neg()
            tensor = obj if is_plain else obj.detach().cpu().resolve_neg().contiguous()
            memory: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())  # quicker than by NumPy
            memory.owner = tensor
            gpu = obj.get_device() if obj.is_cuda else None
            return _rebuild_tensor, (pickle.PickleBuffer(memory), obj.dtype, tuple(obj.shape), obj.requires_grad, gpu)
        if object_type is np.ndarray and not obj.flags.forc and not obj.dtype.hasobject:
            return np.ascontiguousarray(obj).__reduce_ex__(5)  # else NumPy copies it into the pickle
        return NotImplemented


def _rebuild_tensor(content: Any, dtype: Any, shape: tuple[int, ...], grad: bool, gpu: int | None) -> Any:
    """Rebuild a tensor on the memory of ``content``; a GPU's tensor is copied to this machine's GPU of that number, if
    there is one."""
    torch: Any = sys.modules.get("torch") or importlib.import_module("torch")
    tensor = torch.frombuffer(content, dtype=dtype) if len(content) else torch.empty(shape, dtype=dtype)
    tensor = tensor if len(shape) == 1 else tensor.view(shape)
    tensor = tensor.to(f"cuda:{gpu}") if gpu is not None and gpu < torch.cuda.device_count() else tensor
    return tensor.requires_grad_() if grad else tensor


def _unpicklable_part(value: Any, path: str, depth: int = 0) -> tuple[str, Any]:
    """Return the path and the innermost part of ``value`` that can't be pickled."""
    if depth < _MAX_DEPTH:
        for path_step, child in _children(value):
            if not _is_picklable(child):
                return _unpicklable_part(child, path + path_step, depth + 1)
    return path, value


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    tuple_fields = getattr(value, "_fields", None)  # of a named tuple
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", child) for key, child in cast("Mapping[Any, Any]", value).items())
    elif isinstance(value, list | tuple) and tuple_fields is None:
        yield from ((f"[{index}]", child) for index, child in enumerate(cast("Sequence[Any]", value)))
    elif not isinstance(value, type) and not callable(value):
        names: Sequence[str] = tuple_fields or getattr(value, "__struct_fields__", ()) or getattr(value, "__dict__", ())
        yield from ((f".{name}", getattr(value, name, None)) for name in names)


def _is_picklable(value: Any) -> bool:
    try:
        _Pickler(io.BytesIO()).dump(value)
    except Exception:  # the boundary of pickling, which runs the objects' own code
        return False
    return True


def _short_repr(value: Any) -> str:
    text = f"{type(value).__name__} {value!r}" if not isinstance(value, Callable) else repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
