"""Code that uses positions of fields finds the fields of these names."""

from __future__ import annotations

import pytest

from cupy_flash.calls.arguments import FIELDS, Arguments, GradientArguments, in_field_order, span
from cupy_flash.calls.gpu import torch_autograd
from cupy_flash.calls.options import Options

# Each field holds its own name.
NAMES = Arguments(*Arguments._fields)
DENSE = ("q", "k", "v", "out")
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")
PACKED = (*DENSE, "qkv", "block_table", *LENGTHS, "k_scale", "v_scale")
CACHED = (
    *PACKED,
    *("k_cache", "v_cache", "cache_seqlens", "cache_batch_idx"),
    *("rotary_cos", "rotary_sin", "rotary_seqlens", "cu_seqlens_k_new"),
)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("dense", DENSE),
        ("qkvpacked", ("out", "qkv")),
        ("varlen", PACKED),
        ("kvcache", CACHED),
        ("scaled", (*CACHED, "q_scale")),
    ],
)
def test_calls_of_a_kind_have_these_arrays(kind: str, names: tuple[str, ...]) -> None:
    assert FIELDS.keys() == {"dense", "qkvpacked", "varlen", "kvcache", "scaled"}
    assert NAMES.key_arrays(Options(kind)) == names


def test_a_record_of_torch_is_read_by_name() -> None:
    assert NAMES[torch_autograd._ROWS] == ("q", "k", "v")
    assert NAMES[torch_autograd._LENGTHS] == LENGTHS
    # A dense call has no lengths; code that reads them gets none.
    assert NAMES.key_arrays(Options())[torch_autograd._LENGTHS] == ()


def test_arrays_of_a_backward_call_are_in_the_order_of_its_record() -> None:
    arrays = in_field_order(("q", "k", "v"), ("out", "lse"), ("dout", "dlse"), LENGTHS, "absent")
    expected = {name: name for name in GradientArguments._fields}
    expected |= dict.fromkeys(("dq", "dk", "dv"), "absent")
    assert GradientArguments(*arrays)._asdict() == expected


def test_a_span_has_both_ends() -> None:
    assert NAMES[span(Arguments, "out", "block_table")] == ("out", "qkv", "block_table")
