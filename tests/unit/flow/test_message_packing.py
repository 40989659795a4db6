"""Packing: what comes out is what went in, arrays share the block's memory, errors name the culprit."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from flow_peer import digest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.records.errors import ConfigurationError
from headway.runtime.framing import ALIGNMENT, Frame, FrameReader, Kind, encode
from headway.runtime.transport.packing import Arguments, pack, packed_from

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64),
]


def there_and_back(message: Any) -> Any:
    packed = pack(message)
    block = bytearray(packed.size_bytes)
    packed.write(memoryview(block))
    reader = FrameReader()
    frames: list[Frame] = []
    for chunk in encode(Kind.CALL, 1, packed):
        rest = memoryview(chunk)
        while rest:
            target = reader.target()
            taken = min(len(target), len(rest))
            target[:taken] = rest[:taken]
            frames += reader.received(taken)
            rest = rest[taken:]
    through_frame, through_block = frames[0].load().load(), packed_from(memoryview(block)).load()
    assert digest(through_frame) == digest(through_block)
    return through_block


def tensor(dtype: torch.dtype, shape: tuple[int, ...], strided: bool, grad: bool) -> torch.Tensor:
    made = (torch.arange(2 * int(np.prod(shape, dtype=int))) % 2).to(dtype).reshape(*shape, 2)
    made = made[..., 1] if strided else made[..., 0].clone()
    return made.requires_grad_() if grad and dtype.is_floating_point and dtype.itemsize > 1 else made


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
tensors = st.builds(tensor, st.sampled_from(DTYPES), shapes, st.booleans(), st.booleans())
arrays = st.builds(
    lambda kind, shape, step: np.arange(2 * int(np.prod(shape, dtype=int))).astype(kind)[::step],
    st.sampled_from(["f8", "f4", "i2", "u1", "?", "c8", "U3", "M8[s]"]),
    shapes,
    st.sampled_from([1, 2]),
)
leaves = st.one_of(tensors, arrays, st.integers(), st.text(), st.none(), st.binary(), st.floats(allow_nan=False))
messages = st.recursive(
    leaves, lambda child: st.lists(child) | st.dictionaries(st.text(), child) | st.tuples(child, child), max_leaves=12
)


@settings(max_examples=200, deadline=None)
@given(messages)
def test_any_structure_comes_back_equal(message: Any):
    assert digest(there_and_back(message)) == digest(message)


def test_arrays_are_aligned_writable_views_of_the_block():
    message = {"t": torch.arange(10), "a": np.arange(3, dtype=np.int8), "frozen": np.arange(5)}
    message["frozen"].setflags(write=False)
    packed = pack(message)
    whole = np.zeros(packed.size_bytes + ALIGNMENT, np.uint8)
    block = whole[-whole.ctypes.data % ALIGNMENT :][: packed.size_bytes]
    packed.write(block.data)
    found = packed_from(block.data).load()
    assert digest(found) == digest(message)
    assert found["t"].data_ptr() % ALIGNMENT == found["a"].ctypes.data % ALIGNMENT == 0
    found["t"][0] = 77
    assert 77 in block
    assert found["a"].flags.writeable
    assert not found["frozen"].flags.writeable


def test_identity_subclasses_and_other_layouts_survive():
    shared = torch.arange(4.0)
    sparse = torch.eye(3).to_sparse()
    weights = torch.nn.Parameter(torch.ones(2, 2))
    found = there_and_back(
        [shared, shared, OrderedDict(w=weights), sparse, torch.ones(2, dtype=torch.complex64).conj()]
    )
    assert found[0] is found[1]
    assert isinstance(found[2]["w"], torch.nn.Parameter)
    assert torch.equal(found[2]["w"], weights)
    assert torch.equal(found[3].to_dense(), torch.eye(3))
    assert torch.equal(found[4].resolve_conj(), torch.ones(2, dtype=torch.complex64))
    negative = torch.tensor([1 + 2j]).conj().imag  # its bytes have the other sign
    assert negative.is_neg()
    assert torch.equal(there_and_back(negative), torch.tensor([-2.0]))
    assert pack(torch.empty(2, 3, device="meta")).load().shape == (2, 3)


class Holder:
    """An object with a part that can't be pickled."""

    def __init__(self) -> None:
        self.lock = (i for i in ())


@pytest.mark.parametrize(
    ("message", "where"),
    [
        (Arguments((1, {"callback": lambda: 0}), {}), r"arguments\[1\]\['callback'\] = <function"),
        (Arguments((), {"handle": [(i for i in ())]}), r"keywords\['handle'\]\[0\] = generator"),
        ([torch.ones(2), Holder()], r"message\[1\]\.lock = generator"),
        (lambda: 0, r"message = <function"),
    ],
)
def test_an_unpicklable_part_is_named(message: Any, where: str):
    with pytest.raises(ConfigurationError, match=f"call of b.score: {where}"):
        pack(message, "call of b.score")
