"""Bad input to attention over shards: errors that name the argument."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_flash import parallel
from cupy_flash.parallel import calls


@pytest.fixture(scope="module")
def mpi() -> Any:
    return pytest.importorskip("mpi4py.MPI", exc_type=ImportError)


def rows(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"q": [[1.0]]}, TypeError, "q is a list; an MPI communicator exchanges NumPy arrays"),
        ({"q": rows(1, 9, 8)}, ValueError, "q has 3 axes"),
        ({"seqlen": 8}, ValueError, "q has 9 tokens on rank 0 of 1; expected 8"),
        ({"seqlen_k": 8}, ValueError, "k has 9 tokens"),
        ({"seqlen": 9.5}, TypeError, "seqlen is 9.5"),
        ({"k": rows(1, 9, 2, 8, dtype=np.float64)}, TypeError, "k has dtype float64"),
        ({"k": rows(2, 9, 2, 8)}, ValueError, "batch"),
        ({"k": rows(1, 9, 2, 7)}, ValueError, "k has head_dim 7, but q has 8"),
        ({"v": rows(1, 9, 3, 8)}, ValueError, "heads"),
        ({"causal": 1}, TypeError, "causal is 1"),
        ({"order": "striped"}, ValueError, "order is 'striped'"),
        ({"window_size": 3}, TypeError, "window_size is 3"),
        ({"softcap": -1}, ValueError, "softcap is -1"),
        ({"sinks": rows(3)}, ValueError, "sinks has shape"),
        ({"alibi_slopes": rows(1, 4)}, ValueError, "alibi_slopes has shape"),
        ({"head_ranks": 2}, ValueError, "head_ranks is 2, which does not divide the 1 ranks"),
        ({"backend": "tpu"}, ValueError, "backend"),
        ({"cu_seqlens": []}, ValueError, "cu_seqlens goes from"),
        ({"cu_seqlens": [0, 5]}, ValueError, "to 9, the number of tokens"),
        ({"cu_seqlens": [0, 7, 5, 9]}, ValueError, "do not decrease"),
        ({"cu_seqlens": [0, 2.5, 9]}, TypeError, "cu_seqlens"),
        ({"cu_seqlens": 9}, TypeError, "cu_seqlens is 9; expected a sequence"),
        ({"q": rows(1, 9, 4, 0), "k": rows(1, 9, 2, 0)}, ValueError, "q has 0; .* at least 1"),
        ({"return_lse": 1}, TypeError, "return_lse is 1"),
        ({"sinks": rows(4, dtype=np.float64)}, TypeError, "sinks has dtype float64"),
        ({"alibi_slopes": rows(4, dtype=np.float64)}, TypeError, "alibi_slopes has dtype"),
        ({"q": rows(1, 9, 4, 8, dtype=np.int32)}, TypeError, "q has dtype int32"),
        ({"q": rows(1, 9, 4, 8, dtype=">f4")}, TypeError, "q has dtype >f4, in another byte order"),
        ({"v": np.ma.ones((1, 9, 2, 8), np.float32)}, TypeError, "v is a masked array"),
        ({"group": None}, TypeError, "group is None; expected a cupy_flash.parallel.Group"),
    ],
)
def test_wrong_arguments_are_named(
    group: parallel.Group, changed: dict[str, Any], error: type, text: str
) -> None:
    arrays = {"q": rows(1, 9, 4, 8), "k": rows(1, 9, 2, 8), "v": rows(1, 9, 2, 8)}
    given: dict[str, Any] = {"group": group, "seqlen": 9, **arrays, **changed}
    with pytest.raises(error, match=text):
        parallel.flash_attention(**given)
    # The refused call has started nothing that other ranks would wait for.
    x = rows(1, 9, 2, 8)
    parallel.flash_attention(x, x, x, group, seqlen=9)


def test_packed_sequences_are_a_batch_of_one(group: parallel.Group) -> None:
    x = rows(2, 9, 2, 8)
    message = "for a batch of 1 with as many queries as keys; the batch is 2"
    with pytest.raises(ValueError, match=message):
        parallel.flash_attention(x, x, x, group, seqlen=9, cu_seqlens=[0, 9])


def test_gradients_take_what_forward_gave(group: parallel.Group) -> None:
    x = rows(1, 9, 2, 8)
    out, lse = parallel.flash_attention(x, x, x, group, seqlen=9, return_lse=True)
    with pytest.raises(ValueError, match="lse has shape"):
        parallel.flash_attention_backward(x, x, x, x, out, lse[:, :, 1:], group, seqlen=9)
    with pytest.raises(ValueError, match="dout has shape"):
        parallel.flash_attention_backward(x[..., 1:], x, x, x, out, lse, group, seqlen=9)
    arrays = {"dout": x, "out": out, "lse": lse}
    for name, array in arrays.items():
        wrong = arrays | {name: array.astype(np.float64)}
        with pytest.raises(TypeError, match=f"{name} has dtype float64"):
            parallel.flash_attention_backward(**wrong, q=x, k=x, v=x, group=group, seqlen=9)
    parallel.flash_attention_backward(x, x, x, x, out, lse, group, seqlen=9)


def test_a_call_that_raises_in_the_middle_ends_the_group(
    mpi: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: Any, **__: Any) -> None:
        raise MemoryError

    x, group = rows(1, 9, 2, 8), parallel.Group(mpi.COMM_SELF)
    parallel.flash_attention(x, x, x, group, seqlen=9)
    with monkeypatch.context() as patched:
        patched.setattr(calls, "attend", out_of_memory)
        with pytest.raises(MemoryError):
            parallel.flash_attention(x, x, x, group, seqlen=9)
    with pytest.raises(parallel.ParallelError, match="rank 0 raised MemoryError in the middle"):
        parallel.flash_attention(x, x, x, group, seqlen=9)


@pytest.mark.parametrize("axis", [2, -3])
def test_an_axis_that_there_is_not_is_refused(group: parallel.Group, axis: int) -> None:
    own = rows(3, 4)
    for call in (
        lambda: parallel.gather(own, group, seqlen=3, axis=axis),
        lambda: parallel.shard(own, 1, 0, axis=axis),
        lambda: parallel.cache_shard(own, 1, 0, axis=axis),
    ):
        with pytest.raises(ValueError, match=f"axis is {axis}; expected one of the 2 axes"):
            call()


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ([1.0, 2.0], "own is a list; an MPI communicator exchanges NumPy arrays"),
        (np.ma.ones(3), r"own is a masked array, whose mask would be lost; pass own\.filled"),
        (rows(3, dtype=object), "own has dtype object; expected a numeric dtype, or bool"),
        (rows(3, dtype="U3"), "own has dtype <U3; expected a numeric dtype, or bool"),
        (rows(3, dtype=[("real", "f4")]), r"own has dtype \[\('real'.*; expected a numeric dtype"),
        (rows(3, dtype=">f8"), r"own has dtype >f8, in another .*; pass own\.astype\('float64'\)"),
    ],
)
def test_what_cannot_be_gathered_is_refused(group: parallel.Group, own: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        parallel.gather(own, group, seqlen=3, axis=0)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.int64, np.bool_, np.complex64])
def test_numbers_and_bools_are_gathered(group: parallel.Group, dtype: Any) -> None:
    own = np.array([0, 1, 1], dtype)
    found = parallel.gather(own, group, seqlen=3, axis=0)
    assert found.dtype == dtype
    assert found.tolist() == own.tolist()


@pytest.mark.parametrize(
    ("array", "text"),
    [
        ([1, 2, 3], "array is a list; expected a NumPy or CuPy array"),
        (3.5, "array is a float; expected a NumPy or CuPy array"),
        (np.ma.ones(3), r"array is a masked array, whose mask would be lost; pass array\.filled"),
    ],
)
def test_what_is_no_array_is_not_shared_out(array: Any, text: str) -> None:
    for function in (parallel.shard, parallel.cache_shard):
        with pytest.raises(TypeError, match=text):
            function(array, 2, 0, axis=0)


@pytest.mark.parametrize(
    ("ranks", "rank", "error", "text"),
    [
        (0, 0, ValueError, "ranks is 0; expected at least 1"),
        (-1, 0, ValueError, "ranks is -1; expected at least 1"),
        (2, 2, ValueError, "rank is 2 of 2; expected 0 to 1"),
        (2, -1, ValueError, "rank is -1 of 2; expected 0 to 1"),
        (2.0, 0, TypeError, "ranks is 2.0; expected an integer"),
        (2, None, TypeError, "rank is None; expected an integer"),
    ],
)
def test_a_rank_that_there_is_not_is_refused(ranks: Any, rank: Any, error: type, text: str) -> None:
    for call in (
        lambda: parallel.shard(rows(3), ranks, rank, axis=0),
        lambda: parallel.shard_length(3, ranks, rank),
        lambda: parallel.cache_shard(rows(3), ranks, rank, axis=0),
        lambda: parallel.cache_shard_length(3, ranks, rank),
    ):
        with pytest.raises(error, match=text):
            call()


@pytest.mark.parametrize(
    ("timeout", "text"), [(0, "timeout is 0 s"), (float("inf"), "timeout is inf")]
)
def test_a_group_has_a_time_limit(mpi: Any, timeout: float, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parallel.Group(mpi.COMM_SELF, timeout=timeout)


def test_what_is_no_communicator_is_refused(mpi: Any) -> None:
    with pytest.raises(TypeError, match="comm is an int; expected a communicator of mpi4py"):
        parallel.Group(3)


def test_no_group_is_of_a_null_communicator(mpi: Any) -> None:
    freed = mpi.COMM_SELF.Dup()
    freed.Free()
    for comm in (mpi.COMM_NULL, freed):
        with pytest.raises(ValueError, match=r"comm is MPI\.COMM_NULL; expected a communicator"):
            parallel.Group(comm)
