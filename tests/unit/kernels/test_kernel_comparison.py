"""Comparison of outputs, and the classes of faults that texts name."""

from __future__ import annotations

import numpy as np
import pytest

from headway.kernels.cases import variant_inputs
from headway.kernels.comparison import Tensor, TensorShape, compare
from headway.kernels.faults import fault_in, fault_of_end, fault_of_error, first_line
from headway.kernels.isolation import GuestEnded, GuestError
from headway.records.sandbox import ExecResult

TOLERANCE = {"float32": (1e-4, 1e-4)}


def tensor(values, dtype: str = "float32") -> Tensor:
    made = np.asarray(values, np.uint16 if dtype == "bfloat16" else dtype)
    return Tensor(TensorShape(dtype, made.shape), np.frombuffer(made.tobytes(), np.uint8))


def test_values_within_the_tolerance_are_equal_and_the_first_beyond_is_named():
    assert compare(tensor([1.0, 2.0]), tensor([1.00005, 2.0001]), TOLERANCE).text == ""
    found = compare(tensor([[1.0, 2.0], [3.0, 4.0]]), tensor([[1.0, 2.0], [3.1, 5.0]]), TOLERANCE)
    assert found.text == "2 of 4 values differ; first at [1, 0]: 3.1, expected 3"


def test_infinite_values_and_nans_have_to_be_in_the_same_places():
    nan, inf = float("nan"), float("inf")
    assert compare(tensor([nan, inf, 1.0]), tensor([nan, inf, 1.0]), TOLERANCE).text == ""
    for other in ([0.0, inf, 1.0], [nan, -inf, 1.0], [nan, inf, nan], [nan, 1e30, 1.0]):
        assert compare(tensor([nan, inf, 1.0]), tensor(other), TOLERANCE).text


def test_type_and_shape_have_to_be_equal():
    assert "float64" in compare(tensor([1.0]), tensor([1.0], "float64"), TOLERANCE).text
    assert "[1, 1]" in compare(tensor([1.0]), tensor([[1.0]]), TOLERANCE).text
    assert compare(tensor([1, 2], "int64"), tensor([1, 3], "int64"), TOLERANCE).text
    assert compare(tensor([], "float32"), tensor([], "float32"), TOLERANCE).text == ""


def test_bfloat16_is_compared_by_value():
    one, next_one, two = 0x3F80, 0x3F81, 0x4000
    tolerance = {"bfloat16": (1e-2, 1e-2)}
    assert compare(tensor([one], "bfloat16"), tensor([next_one], "bfloat16"), tolerance).text == ""
    assert compare(tensor([one], "bfloat16"), tensor([two], "bfloat16"), tolerance).text


def test_the_absolute_tolerance_grows_with_the_values_where_asked():
    large, other = tensor([1000.0, 0.0]), tensor([1000.0, 0.05])
    assert compare(large, other, TOLERANCE).text
    assert compare(large, other, TOLERANCE, scaled=True).text == ""


def test_a_relative_error_of_half_is_hollow_and_less_is_not():
    tolerance = {"float32": (1.0, 0.0)}
    for output, is_hollow in ((1.0, True), (1.125, False)):
        comparison = compare(tensor([2.0]), tensor([output]), tolerance)
        assert comparison.text.startswith("within the absolute tolerance, but") == is_hollow
        assert compare(tensor([2.0]), tensor([output]), tolerance, hollow=True).text == ""


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_variants_keep_zeros_in_their_places(dtype):
    given = tensor([0.0, 2.0, -3.0], dtype)
    (ones,), (negated,) = variant_inputs([given], None), variant_inputs([given], -1.0)
    assert ones.raw.tolist() == [0, 1, 1]
    assert negated.raw.tolist() == [0, -2, 3]


DEVICE_TEXTS = {  # as the drivers of CUDA and ROCm and Triton have them
    "shared_memory_exceeded": "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 262144, "
    "Hardware limit: 232448. Reducing block sizes or `num_stages` may help.",
    "illegal_memory_access": "RuntimeError: CUDA error: an illegal memory access was encountered",
    "memory_fault": "Memory access fault by GPU node-2 (Agent handle: 0x5581) on address 0x7f2. Reason: Unknown.",
    "unsupported_architecture": "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    "triton_compilation_error": "triton.compiler.errors.CompilationError: at 5:11: incompatible types",
    "triton_jit_error": "RuntimeError: triton JITFunction kernel can't be called without a grid",
}


@pytest.mark.parametrize("fault", DEVICE_TEXTS)
def test_texts_of_drivers_are_classed(fault):
    assert fault_in(DEVICE_TEXTS[fault]) == fault
    assert fault_of_error(GuestError(DEVICE_TEXTS[fault], "raised", "")) == fault


def test_ends_of_processes_are_classed():
    ended = GuestEnded("its process has ended")
    assert fault_of_end(ended, ExecResult(exit_code=None, signal=11))[0] == "segmentation_fault"
    assert fault_of_end(ended, ExecResult(exit_code=None, signal=6)) == ("process_error", "ended by SIGABRT")
    assert fault_of_end(ended, ExecResult(exit_code=None, signal=9, oom=True)) == ("process_error", "out of memory")
    assert fault_of_end(GuestEnded("", late=True), None)[0] == "timeout"
    assert fault_of_end(ended, None)[0] == "unknown"


def test_the_first_useful_line_is_the_compilers_error():
    said = (
        "kernel.cpp: In function 'void run()':\nkernel.cpp:3:5: error: 'y' was not declared\n    3 | y = 1;\n      | ^"
    )
    assert first_line(said) == "kernel.cpp:3:5: error: 'y' was not declared"
    assert first_line("\n  ^^^\nTraceback (most recent call last):\nValueError: x") == "ValueError: x"
