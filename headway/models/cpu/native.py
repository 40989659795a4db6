"""C++ kernels for one CPU core, built at first use; without a compiler, plain torch is used.

A decode step of a small model is hundreds of tiny operations. Torch's overhead between them exceeds their arithmetic,
its attention computes every row at the length of the longest, and its products of few rows copy their matrix at every
call. In a trainer the element-wise parts pass over memory many times. `native.cpp` has the kernels that matter.
Inside ``with using(kernels):`` the functions of `kernels.py` use them; nothing else changes.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("native.cpp")
_SOURCES = (SOURCE, SOURCE.with_name("native_products.h"))
# Sums may be reordered and products fused into them, so that they vectorise; infinities and NaN keep their meaning.
FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-ffp-contract=fast"),
)
MAX_GROUP = 8  # query heads of one KV head in `attention`
MAX_HEAD_DIM = 256  # likewise
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class _Tensor:
    """The ctypes type of a tensor argument: the address of its first element, or null for None."""

    @staticmethod
    def from_param(tensor: Tensor | None) -> ctypes.c_void_p:
        return _POINTER(None if tensor is None else tensor.data_ptr())  # one call only: this runs in every step


_INT, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "rms_norm": (*(_Tensor,) * 4, _INT, _INT, _FLOAT),
    "norm_rotate": (*(_Tensor,) * 6, *(_INT,) * 6, _FLOAT),
    "gated_silu": (*(_Tensor,) * 2, *(_INT,) * 2),
    "attention": (*(_Tensor,) * 9, *(_INT,) * 8, _FLOAT, _INT),
    "sample": (*(_Tensor,) * 4, *(_INT,) * 2),
    "sample_kept": (*(_Tensor,) * 4, *(_INT,) * 2, _Tensor, _INT, *(_Tensor,) * 7),
}
_FLOAT32_SIGNATURES: dict[str, tuple[type, ...]] = {
    "pack": (*(_POINTER,) * 2, *(_INT,) * 2),
    "linear": (*(_Tensor,) * 5, *(_INT,) * 3),
    "decode": (_Tensor, _POINTER, _INT, *(_Tensor,) * 5, _INT, *(_POINTER,) * 2, *(_INT,) * 2),
    "rms_norm_backward": (*(_Tensor,) * 6, *(_INT,) * 2),
    "norm_rotate_backward": (*(_Tensor,) * 9, *(_INT,) * 6),
    "gated_silu_backward": (*(_Tensor,) * 3, *(_INT,) * 2),
}


class LayerPointers(ctypes.Structure):
    """A layer for `Kernels.decode`: addresses of its float32 tensors, 0 for an absent one."""

    _fields_ = (
        *((name, _POINTER) for name in ("input_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "output", "output_bias")),
        *((name, _POINTER) for name in ("post_norm", "gate_up", "gate_up_bias", "down", "down_bias")),
        *((name, _POINTER) for name in ("keys", "values")),  # of the cache, [b, k, t, c]
        ("window", _INT),
        ("scale", ctypes.c_double),
    )


class DecodeSizes(ctypes.Structure):
    """The sizes shared by all layers of a `Kernels.decode` call."""

    _fields_ = (
        *(
            (name, _INT)
            for name in ("width", "heads", "kv_heads", "head_dim", "intermediate", "blocks", "block_tokens")
        ),
        ("epsilon", ctypes.c_double),
    )


class LowRankPointers(ctypes.Structure):
    """An adapter's part of a product, for `Kernels.decode`; zeros: the adapter has none."""

    _fields_ = (*((name, _POINTER) for name in ("a", "b", "spans")), ("rank", _INT))


class RowGroup(ctypes.Structure):
    """Neighbouring rows with one adapter; ``products``: address of its `LowRankPointers`, four per layer."""

    _fields_ = (("first", _INT), ("rows", _INT), ("products", _POINTER))


class Kernels:
    """The functions of `native.cpp` for one dtype. Tensors are on the CPU and contiguous unless stated otherwise.

    Shapes: n rows, d width, h query heads, k KV heads, c head dimension, f intermediate width, v vocabulary.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._functions: dict[str, Callable[..., None]] = {}
        for name, argument_types in (_SIGNATURES | (_FLOAT32_SIGNATURES if dtype == torch.float32 else {})).items():
            function_address = library.function(f"{name}_{_DTYPES[dtype]}".encode())
            self._functions[name] = ctypes.CFUNCTYPE(None, *argument_types)(function_address)
        self.panel_columns = int(library.panel_columns())
        self._panels: dict[int, tuple[Tensor, Tensor]] = {}  # id of a weight -> the weight and its panels
        # id of a weight -> panels of its next value, rows in them, the value's address
        self._staged: dict[int, tuple[Tensor, int, int]] = {}
        self._spare: dict[int, Tensor] = {}  # id of a weight -> panels that staged ones have replaced
        # id of a weight -> (positions in its panels, values) of all changes since the last `pack`; None: unknown
        self._changes: dict[int, list[tuple[Tensor, Tensor]]] | None = None

    def pack(self, weights: Iterable[Tensor], *, staged: bool = False) -> None:
        """Keep copies of these matrices [columns, depth], and of no others, in the order in which `linear` reads them.
        It must be called again when a value changes. ``staged``: `stage` may have been called with the very
        tensors that are the values now, or `stage_changes` with all that has changed in place.
        No-op for bfloat16, whose products are torch's."""
        if self.dtype != torch.float32:
            return
        changes, self._changes = self._changes if staged else None, None
        old_panels, self._panels = self._panels, {}
        staged_by_id, self._staged = self._staged if staged else {}, {}
        spare, self._spare = self._spare, {}
        for weight in weights:
            weight_id = id(weight)
            packed_weight, panels = old_panels.get(weight_id, (None, None))
            panels = panels if packed_weight is weight else None
            next_panels, *staged_as = staged_by_id.get(weight_id, (None,))
            if changes is not None and panels is not None:
                for positions, values in changes.get(weight_id, ()):
                    panels.view(-1).scatter_(0, positions, values)
                self._panels[weight_id] = weight, panels
            elif next_panels is not None and panels is not None and staged_as == [len(weight), weight.data_ptr()]:
                self._panels[weight_id], self._spare[weight_id] = (weight, next_panels), panels
            else:
                self._panels[weight_id] = weight, self.packed(weight, panels)
                if weight_id in spare:
                    self._spare[weight_id] = spare[weight_id]

    def stage(self, weight: Tensor, content: Tensor, rows: int) -> None:
        """Pack the first ``rows`` of the next value of a matrix that the last `pack` included, into other memory; more
        rows at each call, in another thread if need be. No-op for one that it didn't include, and for another dtype."""
        if not self.packs(weight) or content.dtype != weight.dtype:
            return
        weight_id, (row_count, depth) = id(weight), weight.shape
        panels, done_rows, _ = self._staged.get(weight_id) or (self._spare.pop(weight_id, None), 0, 0)
        panels = torch.empty_like(self._panels[weight_id][1]) if panels is None else panels
        first_row = 0 if rows <= done_rows else done_rows  # a fetch begins again
        last_row = rows if rows == row_count else rows // self.panel_columns * self.panel_columns
        if last_row > first_row:
            begin = first_row * depth * weight.element_size()  # in both: panels are whole
            self._functions["pack"](content.data_ptr() + begin, panels.data_ptr() + begin, last_row - first_row, depth)
        self._staged[weight_id] = panels, last_row, content.data_ptr()

    def stage_changes(self, changes: Iterable[tuple[Tensor, Tensor, Tensor]] | None) -> None:
        """Prepare for (matrix, positions in it as a flat tensor, values): all that the next `pack` finds changed in
        place. None: not known."""
        self._changes = None if changes is None else {}
        for weight, positions, values in changes or ():
            if self.packs(weight) and self._changes is not None:
                columns, depths = positions // weight.shape[1], positions % weight.shape[1]
                panels, inside = columns // self.panel_columns, columns % self.panel_columns
                in_panels = (panels * weight.shape[1] + depths) * self.panel_columns + inside
                self._changes.setdefault(id(weight), []).append((in_panels, values))

    def packed(self, weight: Tensor, panels: Tensor | None = None) -> Tensor:
        """The panels of a float32 matrix [columns, depth], written into ``panels`` if given."""
        columns, depth = weight.shape
        if panels is None:
            panels = weight.new_empty(-(-columns // self.panel_columns), depth, self.panel_columns)
        weight = weight.detach().contiguous()
        self._functions["pack"](weight.data_ptr(), panels.data_ptr(), columns, depth)
        return panels

    def packs(self, weight: Tensor) -> bool:
        """Whether `linear` takes this matrix, because the last `pack` included it."""
        return id(weight) in self._panels

    def panels(self, weight: Tensor) -> int:
        """The address of the packed copy of this matrix; it stays as long as each `pack` includes the matrix."""
        return self._panels[id(weight)][1].data_ptr()

    def linear(self, x_nd: Tensor, weight: Tensor, bias: Tensor | None, add: Tensor | None) -> Tensor:
        """`kernels.linear`, [n, columns], for a matrix that the last `pack` included."""
        x_nd = x_nd.contiguous()
        n, columns = len(x_nd), len(weight)
        out = x_nd.new_empty(n, columns)
        add = None if add is None else add.contiguous()
        self._functions["linear"](x_nd, self._panels[id(weight)][1], bias, add, out, n, columns, x_nd.shape[1])
        return out

    def decode(
        self,
        x_nd: Tensor,
        layers: ctypes.Array[LayerPointers],
        cos: Tensor,
        sin: Tensor,
        table: Tensor,
        slot_n: Tensor | None,
        position_n: Tensor,
        sizes: DecodeSizes,
        groups: Sequence[RowGroup] = (),
        most_rank: int = 0,
    ) -> None:
        """Pass the residual stream [n, d] through all ``layers`` in place and store keys and values. Row i is at
        position[i] of row slot[i] of ``table``, int32 [rows, blocks] (of row i if ``slot_n`` is None). cos and sin:
        float32 [n, 1, c / 2]. ``groups``: the rows with adapters; ``most_rank``: the largest rank of their products."""
        group_array, sizes_at = (RowGroup * len(groups))(*groups), ctypes.addressof(sizes)
        tensors, groups_at = (cos, sin, table, slot_n, position_n), ctypes.addressof(group_array)
        layers_at = (ctypes.addressof(layers), len(layers))
        self._functions["decode"](x_nd, *layers_at, *tensors, len(x_nd), sizes_at, groups_at, len(groups), most_rank)

    def rms_norm(self, x_nd: Tensor, weight: Tensor, epsilon: float, inverses_n: Tensor | None = None) -> Tensor:
        """`kernels.rms_norm`, [n, d]. ``inverses_n`` is filled with 1 / rms(x) for `rms_norm_backward`."""
        x_nd = x_nd.contiguous()
        out, d = torch.empty_like(x_nd), x_nd.shape[-1]
        self._functions["rms_norm"](x_nd, weight, out, inverses_n, x_nd.numel() // d, d, epsilon)
        return out

    def rms_norm_backward(
        self, grad_nd: Tensor, x_nd: Tensor, weight: Tensor, inverses_n: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients with respect to x and weight. float32."""
        grad_nd, x_nd = grad_nd.contiguous(), x_nd.contiguous()
        grad_x, grad_weight = torch.empty_like(x_nd), torch.empty_like(weight)
        self._functions["rms_norm_backward"](grad_nd, x_nd, weight, inverses_n, grad_x, grad_weight, *x_nd.shape)
        return grad_x, grad_weight

    def norm_rotate(
        self,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        sizes: tuple[int, int, int, float],
        inverses: Tensor | None = None,
    ) -> None:
        """`kernels.norm_rotate`, which overwrites ``qkv`` [n, (h + 2k) c]. cos and sin are float32 [n, 1, c / 2] and
        share their row stride. ``inverses`` [n, h + k] is filled for `norm_rotate_backward`."""
        heads, kv_heads, dim, epsilon = sizes
        tensors, strides = (qkv, q_norm, k_norm, cos, sin, inverses), (qkv.stride(0), cos.stride(0))
        self._functions["norm_rotate"](*tensors, len(qkv), *strides, heads, kv_heads, dim, epsilon)

    def norm_rotate_backward(
        self, grad: Tensor, norms: Sequence[Tensor], cos: Tensor, sin: Tensor, sizes: tuple[int, int, int]
    ) -> list[Tensor]:
        """Convert the gradient of `norm_rotate`'s output to that of its input in place; returns the gradients of the
        query and key weights. ``norms``: the input, inverses, query and key weight, or nothing. float32."""
        qkv, inverses, q_norm, k_norm = norms or (None,) * 4
        grads = [torch.empty_like(weight) for weight in norms[2:]]
        tensors = (q_norm, k_norm, cos, sin, qkv, inverses, *(grads or (None, None)))
        self._functions["norm_rotate_backward"](grad, *tensors, len(grad), grad.stride(0), cos.stride(0), *sizes)
        return grads

    def gated_silu(self, gate_up: Tensor) -> Tensor:
        """`kernels.gated_silu`, [n, 2f] to [n, f]."""
        n, f = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(n, f)
        self._functions["gated_silu"](gate_up, out, n, f)
        return out

    def gated_silu_backward(self, grad_nf: Tensor, gate_up: Tensor) -> Tensor:
        """Gradient with respect to ``gate_up`` [n, 2f]. float32."""
        grad_nf, out = grad_nf.contiguous(), torch.empty_like(gate_up)
        self._functions["gated_silu_backward"](grad_nf, gate_up, out, *grad_nf.shape)
        return out

    def attention(
        self,
        q_nhc: Tensor,
        k_nkc: Tensor,
        v_nkc: Tensor,
        keys_bktc: Tensor,
        values_bktc: Tensor,
        table: Tensor,
        slot_n: Tensor | None,
        position_n: Tensor,
        scale: float,
        write: bool,
        window: int | None = None,
    ) -> Tensor:
        """Attention of row i to positions 0 .. position[i] of row slot[i] of ``table``, int32 [rows, blocks] (of row i
        if ``slot_n`` is None), or to the last ``window`` of them, [n, h * c].

        ``write``: store the row's key and value at its position first. q, k and v are heads of one projection: a row's
        elements are contiguous and the three share their row stride.
        """
        n, h, c = q_nhc.shape
        (kv_heads, block_tokens), blocks = keys_bktc.shape[1:3], table.shape[1]
        out = q_nhc.new_empty(n, h * c)
        tensors = (q_nhc, k_nkc, v_nkc, keys_bktc, values_bktc, out, table, slot_n, position_n)
        layout = (kv_heads, h // kv_heads, c, blocks, block_tokens, window or blocks * block_tokens)
        sizes = (n, q_nhc.stride(0), *layout)
        self._functions["attention"](*tensors, *sizes, scale, write)
        return out

    def sample(self, logits_nv: Tensor, temperature_n: Tensor | None, uniform_n: Tensor) -> Tensor:
        """`sampling.sample_tokens` for rows that are neither greedy nor truncated, [2, n] float32."""
        logits_nv = logits_nv.contiguous()
        n, v = logits_nv.shape
        out = torch.empty(2, n)
        self._functions["sample"](logits_nv, temperature_n, uniform_n, out, n, v)
        return out

    def sample_kept(
        self,
        logits_nv: Tensor,
        temperature_n: Tensor | None,
        uniform_n: Tensor,
        out: Tensor,
        kept: Sequence[Tensor | None],
    ) -> tuple[Tensor, Tensor]:
        """`sampling.sample_tokens` for the rows of a `sampling.KeptRows`, written to ``out`` [2, n]. Returns sizes and
        ids as in `sampling.Sampled`."""
        row_m, greedy, top_p, top_k, caps, masks = kept
        assert row_m is not None
        assert caps is not None
        (n, v), m = logits_nv.shape, len(row_m)
        ids, sizes = torch.empty(min(int(caps.max()), v) * m, dtype=torch.int32), torch.empty(m, dtype=torch.int64)
        tensors = (masks, greedy, top_p, top_k, caps, ids, sizes)
        self._functions["sample_kept"](logits_nv.contiguous(), temperature_n, uniform_n, out, n, v, row_m, m, *tensors)
        return sizes, ids


def address(tensor: Tensor | None) -> int:
    """The address of the tensor's first element; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


class _Active(threading.local):
    kernels: Kernels | None = None


_active = _Active()


def active(x: Tensor, weight: Tensor | None = None) -> Kernels | None:
    """The kernels for computing ``x`` [n, d] inside `using`; None: plain torch is used, also for inputs that they don't
    take (other dtypes or shapes, non-contiguous tensors)."""
    kernels = _active.kernels
    if kernels is None or x.dtype != kernels.dtype or x.ndim != 2 or not x.is_contiguous():
        return None
    if weight is not None and (weight.dtype != kernels.dtype or not weight.is_contiguous()):
        return None
    return kernels


def chosen() -> Kernels | None:
    """The kernels of `using` in this thread."""
    return _active.kernels


@contextmanager
def using(kernels: Kernels | None) -> Iterator[None]:
    """Make `kernels.py` compute with ``kernels`` (None: plain torch) in this thread, inside the ``with`` block."""
    previous_kernels, _active.kernels = _active.kernels, kernels
    try:
        yield
    finally:
        _active.kernels = previous_kernels


def attention_fits(group: int, head_dim: int) -> bool:
    """Whether `Kernels.attention` supports ``group`` query heads per KV head of dimension ``head_dim``."""
    return group <= MAX_GROUP and head_dim <= MAX_HEAD_DIM and head_dim % 8 == 0


def kernels_for(dtype: torch.dtype, device: torch.device) -> Kernels | None:
    """The kernels for a model of ``dtype`` on ``device``; None on a GPU, on several cores (the kernels use one), for
    other dtypes, or without a C++ compiler (``CXX``, else g++, c++ or clang++)."""
    library_or_reason = _library_for(dtype, device)
    return None if isinstance(library_or_reason, str) else Kernels(library_or_reason, dtype)


def missing_reason(dtype: torch.dtype, device: torch.device) -> str:
    """The reason why `kernels_for` returns None for a CPU; "": it returns kernels, or the device is a GPU."""
    library_or_reason = _library_for(dtype, device)
    return library_or_reason if isinstance(library_or_reason, str) and device.type == "cpu" else ""


def _library_for(dtype: torch.dtype, device: torch.device) -> ctypes.CDLL | str:
    """The loaded library, or the reason why there is none."""
    if device.type != "cpu":
        return f"they are for CPUs, not for {device}"
    if dtype not in _DTYPES:
        return f"they are for {' and '.join(_DTYPES.values())}, not for {dtype}"
    if (thread_count := torch.get_num_threads()) != 1:
        return f"they use one core, but torch has {thread_count} threads here"
    return _library()


@cache
def _library() -> ctypes.CDLL | str:
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "c++", "clang++")), None)
    if compiler is None:
        return "no C++ compiler (CXX is not set; no g++, c++ or clang++)"
    digest_parts = (*(source.read_text() for source in _SOURCES), compiler, *FLAGS, _processor())
    digest = hashlib.sha256("\0".join(digest_parts).encode()).hexdigest()[:16]
    file_name = f"native-{digest}.so"
    refusals: list[str] = []
    for folder in _folders():
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if folder.stat().st_uid != os.getuid():  # another user could put a library there
                refusals.append(f"{folder} belongs to another user")
                continue
            if not (folder / file_name).exists():
                _build(compiler, folder / file_name)
            library = ctypes.CDLL(str(folder / file_name))
            library.function.argtypes, library.function.restype = (ctypes.c_char_p,), _POINTER
            return library
        except OSError as error:  # read-only, full, or mounted noexec: try the next folder
            refusals.append(str(error))
        except subprocess.CalledProcessError as error:  # a compiler that fails: treated like a missing one
            lines = error.stderr.decode(errors="replace").split("\n")
            compiler_error = next((line.strip() for line in reversed(lines) if line.strip()), "it printed no error")
            return f"the compiler {compiler!r} ended with {error.returncode}: {compiler_error}"
        except subprocess.TimeoutExpired as error:
            return f"the compiler {compiler!r} took more than {error.timeout:.0f} s"
    return "; ".join(dict.fromkeys(refusals))  # without duplicates: a missing compiler fails once per folder


def _build(compiler: str, target: Path) -> None:
    """Compile beside ``target`` and rename, so that replicas that start together each find a complete library."""
    scratch_fd, scratch_path = tempfile.mkstemp(dir=target.parent, suffix=".so")
    os.close(scratch_fd)
    try:
        command = [*compiler.split(), *FLAGS, "-o", scratch_path, str(SOURCE)]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        os.replace(scratch_path, target)
    finally:
        Path(scratch_path).unlink(missing_ok=True)


def _folders() -> tuple[Path, ...]:
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return (Path(cache_home) / "headway", Path(tempfile.gettempdir()) / f"headway-{os.getuid()}")


def _processor() -> str:
    """The CPU's features, on which ``-march=native`` depends, since different machines may share a home folder."""

    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
