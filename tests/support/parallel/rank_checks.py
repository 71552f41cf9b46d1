"""Checks that every rank of a communicator makes in the tests of `cupy_flash.parallel`.

Over MPI this is a program: `mpiexec -n RANKS python rank_checks.py SEED FOLDER` makes each check on
all ranks. It writes the outcome on each rank to FOLDER: a traceback, or an empty text if the check
passed. Over NCCL, `over_nccl` does the same in processes that have a communicator.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from cupy_flash import attention_reference, parallel
from cupy_flash.parallel import calls
from support.calls.modified_calls import DTYPES, ModifiedCall
from support.calls.sequence_support import random_kvcache_case
from support.gpu import cupy
from support.gradients.gradient_calls import GradientCall
from support.gradients.gradient_rule import check_gradients

TIMEOUT = 60.0
# Time limit in seconds of ranks on GPUs, which may have to compile kernels.
_TIMEOUT_OF_NCCL = 15.0
# Time limit in seconds of one check. A rank that exceeds it prints its stack and exits.
_CHECK_SECONDS = 100.0


class Ranks(NamedTuple):
    """Ranks that make a check.

    `anew` makes a group of these ranks with a new communicator and a given time limit.
    """

    group: parallel.Group
    xp: Any  # NumPy or CuPy, whose arrays the ranks exchange
    anew: Callable[[float], parallel.Group]

    def place(self, array: Any) -> Any:
        """Return a host array as an array of `xp`."""
        return None if array is None else self.xp.asarray(array)

    def on_host(self, array: Any) -> np.ndarray:
        found: np.ndarray = array if self.xp is np else array.get()
        return found

    @property
    def short(self) -> float:
        """Time limit in seconds that ranks do not exceed if they make the same call.

        NCCL first connects the ranks, and a rank may compile kernels that another already has.
        """
        return 0.5 if self.xp is np else 3.0


Check = Callable[[Ranks, np.random.Generator], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def random_call(rng: np.random.Generator, dtype: str, *, packed: bool) -> ModifiedCall:
    """Return a call on a whole sequence; the number of ranks need not divide its length."""
    real = DTYPES[dtype]
    heads_kv = int(rng.integers(1, 5))
    heads_q, dim, dim_v = heads_kv * int(rng.integers(1, 3)), *rng.choice([8, 24, 32], 2)
    seqlen_q = int(rng.integers(1, 160))
    seqlen_k = seqlen_q if packed or rng.integers(2) else int(rng.integers(1, 160))
    outer = () if packed else (int(rng.integers(1, 3)),)
    shapes = {"q": (seqlen_q, heads_q, dim)}
    shapes |= {"k": (seqlen_k, heads_kv, dim), "v": (seqlen_k, heads_kv, dim_v)}
    arrays = {n: rng.standard_normal((*outer, *x)).astype(real) for n, x in shapes.items()}
    options: dict[str, Any] = {"causal": bool(rng.integers(2))}
    if rng.integers(2):
        sides = [None if rng.integers(3) == 0 else int(rng.integers(0, 60)) for _ in range(2)]
        options["window_size"] = tuple(sides)
    if rng.integers(3) == 0:
        options["softmax_scale"] = float(rng.choice([-0.2, 0.5]))
    if rng.integers(4) == 0:
        options["softcap"] = 30.0
    # Slopes and sinks have the dtype in which sums are accumulated.
    own = np.float64 if dtype == "float64" else np.float32
    if rng.integers(3) == 0:
        arrays["alibi_slopes"] = rng.uniform(0, 0.5, heads_q).astype(own)
    if rng.integers(2):
        arrays["sinks"] = rng.standard_normal(heads_q).astype(own)
    if packed:
        cuts = np.sort(rng.integers(0, seqlen_q + 1, int(rng.integers(0, 5))))
        cu_seqlens = np.array([0, *cuts, seqlen_q], np.int32)
        arrays["cu_seqlens_q"] = arrays["cu_seqlens_k"] = cu_seqlens
        options["max_seqlen_q"] = options["max_seqlen_k"] = seqlen_q
    return ModifiedCall("varlen" if packed else "dense", dtype, arrays, options)


class Sharded:
    """Sharded version of a call, with conversions between whole arrays and shards."""

    def __init__(self, call: ModifiedCall, ranks: Ranks, rng: np.random.Generator) -> None:
        self.call, self.ranks, self.group = call, ranks, ranks.group
        self.is_packed = call.kind == "varlen"
        self.order = str(rng.choice(["zigzag", "zigzag", "contiguous"]))
        heads_q, heads_kv = (call.arrays[name].shape[-2] for name in "qk")

        def is_possible(h: int) -> bool:
            return not (self.group.size % h or heads_q % h or (heads_kv % h and h % heads_kv))

        self.head_ranks = int(rng.choice([*filter(is_possible, range(1, self.group.size + 1))]))

    def shard(self, array: np.ndarray, axis: int = 1) -> Any:
        batched = array[None] if self.is_packed else array
        own = parallel.shard(batched, self.group.size, self.group.rank, axis=axis, order=self.order)
        return self.ranks.place(own)

    def whole(self, own: Any, seqlen: int, axis: int = 1) -> np.ndarray:
        found = parallel.gather(own, self.group, seqlen=seqlen, axis=axis, order=self.order)
        on_host = self.ranks.on_host(found)
        return on_host[0] if self.is_packed else on_host

    @property
    def qkv(self) -> list[Any]:
        return [self.shard(self.call.arrays[name]) for name in "qkv"]

    @property
    def seqlens(self) -> tuple[int, int]:
        axis = 0 if self.is_packed else 1
        return self.call.arrays["q"].shape[axis], self.call.arrays["k"].shape[axis]

    @property
    def options(self) -> dict[str, Any]:
        arrays = self.call.arrays
        named = {n: x for n, x in self.call.options.items() if not n.startswith("max_")}
        modifiers = ("alibi_slopes", "sinks")
        named |= {n: self.ranks.place(arrays[n]) for n in modifiers if n in arrays}
        if self.is_packed:
            named["cu_seqlens"] = arrays["cu_seqlens_q"].tolist()
        named |= {"order": self.order, "head_ranks": self.head_ranks}
        return named | dict(zip(("seqlen", "seqlen_k"), self.seqlens, strict=True))

    def forward(self) -> tuple[Any, Any]:
        out, lse = parallel.flash_attention(*self.qkv, self.group, **self.options, return_lse=True)
        return out, lse

    def backward(self, call: GradientCall) -> tuple[Any, ...]:
        out, lse = call.results
        own = [self.shard(call.dout), *self.qkv, self.shard(out), self.shard(lse, axis=2)]
        return parallel.flash_attention_backward(*own, self.group, **self.options)


def random_gradient_call(rng: np.random.Generator, forward: ModifiedCall) -> GradientCall:
    wrt = ("q", "k", "v", "sinks")[: 3 + ("sinks" in forward.arrays)]
    rows = (*forward.arrays["q"].shape[:-1], forward.arrays["v"].shape[-1])
    dout = rng.standard_normal(rows).astype(forward.arrays["q"].dtype)
    return GradientCall(forward, dout, wrt=wrt)


def check_forward(ranks: Ranks, rng: np.random.Generator, *, packed: bool) -> None:
    done = []
    for dtype in (*DTYPES, "float32", "bfloat16"):
        call = random_call(rng, dtype, packed=packed)
        sharded = Sharded(call, ranks, rng)
        out, lse = sharded.forward()
        seqlen, _ = sharded.seqlens
        done.append((call, sharded.whole(out, seqlen), sharded.whole(lse, seqlen, axis=2)))
    # Only rank 0 compares, and after all calls, because other ranks wait for a rank that fails.
    for call, out, lse in done if ranks.group.rank == 0 else ():
        call.compare(out, lse)


def check_backward(ranks: Ranks, rng: np.random.Generator, *, packed: bool) -> None:
    done = []
    for dtype in (*DTYPES, "float32", "bfloat16"):
        forward = random_call(rng, dtype, packed=packed)
        sharded = Sharded(forward, ranks, rng)
        call = random_gradient_call(rng, forward)
        dq, dk, dv, *dsinks = sharded.backward(call)
        seqlen_q, seqlen_k = sharded.seqlens
        whole = [sharded.whole(x, n) for x, n in ((dq, seqlen_q), (dk, seqlen_k), (dv, seqlen_k))]
        done.append((call, [*whole, *map(ranks.on_host, dsinks)]))
    for call, found in done if ranks.group.rank == 0 else ():
        check_gradients(call, found)


CHECKS |= {
    "attention": functools.partial(check_forward, packed=False),
    "attention_of_packed_sequences": functools.partial(check_forward, packed=True),
    "gradients": functools.partial(check_backward, packed=False),
    "gradients_of_packed_sequences": functools.partial(check_backward, packed=True),
}


@check
def the_same_bits_again(ranks: Ranks, rng: np.random.Generator) -> None:
    forward = random_call(rng, "float32", packed=False)
    sharded = Sharded(forward, ranks, rng)
    call = random_gradient_call(rng, forward)
    first, second = ([*sharded.forward(), *sharded.backward(call)] for _ in range(2))
    for once, again in zip(first, second, strict=True):
        assert ranks.on_host(once).tobytes() == ranks.on_host(again).tobytes()


@check
def shards_come_together_again(ranks: Ranks, rng: np.random.Generator) -> None:
    group = ranks.group
    for order in ("zigzag", "contiguous"):
        array = rng.standard_normal((2, int(rng.integers(0, 40)), 3))
        own = ranks.place(parallel.shard(array, group.size, group.rank, order=order))
        found = parallel.gather(own, group, seqlen=array.shape[1], order=order)
        np.testing.assert_array_equal(ranks.on_host(found), array)


@check
def generation(ranks: Ranks, rng: np.random.Generator) -> None:
    group, done = ranks.group, []
    for dtype in DTYPES:
        new, stripe = int(rng.integers(0, 20)), int(rng.integers(1, 17))
        causal = bool(rng.integers(2))
        most = max(1, new) if causal else 5
        sizes = {"batch": 3, "seqlen_new": new, "seqlen_q": int(rng.integers(1, most + 1))}
        problem = random_kvcache_case(rng, dtype=dtype, causal=causal, **sizes).problem()
        given = problem.arguments()
        wholes = given["k_cache"], given["v_cache"]
        caches = [ranks.place(_rows_of_rank(group, whole, stripe)) for whole in wholes]
        out, lse = parallel.flash_attention_with_kvcache(
            ranks.place(given["q"]),
            *caches,
            *map(ranks.place, (given["k"], given["v"])),
            group=group,
            cache_seqlens=ranks.place(given["cache_seqlens"]),
            stripe=stripe,
            causal=causal,
            return_lse=True,
        )
        together = [_together(ranks, cache, wholes[0], stripe) for cache in caches]
        done.append((problem, out, lse, together))
    for problem, out, lse, together in done:
        problem.check(out, lse)
        if problem.case.seqlen_new:
            problem.check_caches(*together)


def _rows_of_rank(group: parallel.Group, whole: np.ndarray, stripe: int) -> np.ndarray:
    """Return a rank's rows of a cache, padded with NaN to the length of the longest shard."""
    rows = parallel.cache_shard(whole, group.size, group.rank, stripe=stripe)
    length = parallel.cache_shard_length(whole.shape[1], group.size, 0, stripe=stripe)
    cache = np.full((len(whole), length, *whole.shape[2:]), np.nan, whole.dtype)
    cache[:, : rows.shape[1]] = rows
    return cache


def _together(ranks: Ranks, cache: Any, like: np.ndarray, stripe: int) -> np.ndarray:
    """Return the whole cache, of which each rank holds some rows."""
    (gathered,) = ranks.group.gather(cache)
    of_all, size = ranks.on_host(gathered), ranks.group.size
    positions = np.arange(like.shape[1])
    rows = positions // (stripe * size) * stripe + positions % stripe
    found: np.ndarray = of_all[positions // stripe % size, :, rows].swapaxes(0, 1)
    return np.ascontiguousarray(found)


def _tokens(ranks: Ranks, seqlen: int, head_dim: int = 8) -> Any:
    own = parallel.shard_length(seqlen, ranks.group.size, ranks.group.rank)
    return ranks.xp.ones((1, own, ranks.group.size, head_dim), np.float32)


@check
def an_error_of_one_rank_is_raised_on_all(ranks: Ranks, rng: np.random.Generator) -> None:
    x, group = _tokens(ranks, 50), ranks.group
    if group.rank == 1:
        with pytest.raises(ValueError, match=r"q has \d+ tokens on rank 1"):
            parallel.flash_attention(x[:, :-1], x, x, group, seqlen=50)
    else:
        with pytest.raises(parallel.ParallelError, match="rank 1 raised ValueError: q has"):
            parallel.flash_attention(x, x, x, group, seqlen=50)


@check
def what_all_ranks_refuse_leaves_nothing_behind(ranks: Ranks, rng: np.random.Generator) -> None:
    group, array = ranks.group, rng.standard_normal((1, 50, 2, 600)).astype(np.float32)
    own = ranks.place(parallel.shard(array, group.size, group.rank))
    with pytest.raises(ValueError, match="head_dim of q and k is 600"):
        parallel.flash_attention(own, own, own, group, seqlen=50, head_ranks=1)
    q = k = v = own[..., :8]
    out = parallel.flash_attention(q, k, v, group, seqlen=50, head_ranks=1)
    found = ranks.on_host(parallel.gather(out, group, seqlen=50))
    expected = attention_reference(*(array[..., :8],) * 3)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@check
def ranks_that_call_differently_raise(ranks: Ranks, rng: np.random.Generator) -> None:
    x, group = _tokens(ranks, 50), ranks.group
    with pytest.raises(parallel.ParallelError, match="makes another call than rank"):
        parallel.flash_attention(x, x, x, group, seqlen=50, causal=group.rank == 1)


@check
def a_communicator_between_two_groups_is_refused(ranks: Ranks, rng: np.random.Generator) -> None:
    if ranks.xp is not np:
        return
    from mpi4py import MPI

    is_first = ranks.group.rank == 0
    own = MPI.COMM_WORLD.Split(int(is_first))
    between = own.Create_intercomm(0, MPI.COMM_WORLD, int(is_first))
    with pytest.raises(ValueError, match="comm is an intercommunicator; expected"):
        parallel.Group(between)


@check
def an_array_that_no_rank_can_take_is_refused_before_anything_is_said(
    ranks: Ranks, rng: np.random.Generator
) -> None:
    group, own = ranks.group, ranks.xp.ones(1)
    size = group.size
    objects = np.ones(1, object)
    with pytest.raises(TypeError, match="own "):
        parallel.gather(objects, group, seqlen=size, axis=0, order="contiguous")
    found = parallel.gather(own, group, seqlen=size, axis=0, order="contiguous")
    assert ranks.on_host(found).tolist() == [1.0] * size


@check
def shards_of_another_number_of_ranks_are_refused(ranks: Ranks, rng: np.random.Generator) -> None:
    group = ranks.group
    length = parallel.shard_length(64, group.size + 1, group.rank)
    x = ranks.xp.ones((1, length, 2, 8), np.float32)
    with pytest.raises(ValueError, match=f"of {group.size}; expected"):
        parallel.flash_attention(x, x, x, group, seqlen=64)


@check
def integers_of_numpy_are_integers(ranks: Ranks, rng: np.random.Generator) -> None:
    group, x = ranks.group, _tokens(ranks, 50)
    kind = np.int64 if group.rank else int
    parallel.flash_attention(x, x, x, group, seqlen=kind(50), head_ranks=kind(1))
    parallel.gather(x, group, seqlen=kind(50), axis=kind(-3))
    q, cache = ranks.xp.ones((1, 1, 2, 8), np.float32), ranks.xp.ones((1, 64, 2, 8), np.float32)
    parallel.flash_attention_with_kvcache(
        q, cache, cache, group=group, cache_seqlens=kind(9), stripe=kind(4)
    )


@check
def whether_a_log_sum_exp_is_wanted_is_part_of_a_call(
    ranks: Ranks, rng: np.random.Generator
) -> None:
    x, group = _tokens(ranks, 50), ranks.group
    with pytest.raises(parallel.ParallelError, match="makes another call than rank"):
        parallel.flash_attention(x, x, x, group, seqlen=50, return_lse=group.rank == 1)


@check
def known_calls_that_differ_are_found_by_their_messages(
    ranks: Ranks, rng: np.random.Generator
) -> None:
    """Only MPI reports the sizes of messages; another check covers the time limit of NCCL."""
    if ranks.xp is not np:
        return
    impatient = ranks.anew(2.0)
    lengths = (50, 80)
    arrays = [_tokens(ranks, length) for length in lengths]
    for x, length in zip(arrays, lengths, strict=True):
        parallel.flash_attention(x, x, x, impatient, seqlen=length, head_ranks=1)
    mine = int(impatient.rank == 0)

    def call_twice() -> None:
        # Ranks with the same call may complete it; then the next exchange raises.
        for _ in range(2):
            x = arrays[mine]
            parallel.flash_attention(x, x, x, impatient, seqlen=lengths[mine], head_ranks=1)

    with pytest.raises(parallel.ParallelError, match=r"makes another call|truncated"):
        call_twice()


@check
def a_rank_that_does_not_call_is_not_waited_for(ranks: Ranks, rng: np.random.Generator) -> None:
    impatient, x = ranks.anew(ranks.short), _tokens(ranks, 50)

    def call() -> None:
        out = parallel.flash_attention(x, x, x, impatient, seqlen=50, head_ranks=1)
        # On a GPU the call does not wait; the operations after it find that the exchange failed.
        ranks.on_host(out)
        parallel.gather(x, impatient, seqlen=50)

    # Ranks do not negotiate a known call again, so the exchange itself detects a missing rank.
    call()
    start = time.monotonic()
    for _ in range(2 if impatient.rank else 0):
        with pytest.raises(parallel.ParallelError, match=f"waited {ranks.short:g} s for"):
            call()
    # A rank that waits for another waiting rank gives up after that one, at its own time limit.
    assert time.monotonic() - start < ranks.short * impatient.size + 5


@check
def a_rank_that_calls_once_the_others_gave_up_raises_as_they_do(
    ranks: Ranks, rng: np.random.Generator
) -> None:
    """This check is for MPI, which sends messages of 64 KB or more only when they are received."""
    if ranks.xp is not np:
        return
    impatient, x = ranks.anew(ranks.short), _tokens(ranks, 1000, 64)
    parallel.flash_attention(x, x, x, impatient, seqlen=1000)
    if impatient.rank == 1:
        time.sleep(2 * ranks.short)
    with pytest.raises(parallel.ParallelError, match=f"waited {ranks.short:g} s for"):
        parallel.flash_attention(x, x, x, impatient, seqlen=1000)


@check
def a_rank_that_fails_in_the_middle_of_a_call_makes_no_other(
    ranks: Ranks, rng: np.random.Generator
) -> None:
    """Other ranks would mistake messages of its next call for messages of this one."""
    impatient, x = ranks.anew(2 * ranks.short), _tokens(ranks, 50)

    def call() -> None:
        out = parallel.flash_attention(x, x, x, impatient, seqlen=50, head_ranks=1)
        ranks.on_host(out)
        ranks.on_host(parallel.gather(x, impatient, seqlen=50))
        # On a GPU no operation raises if the exchange fails at the end, so `check` asks for it.
        impatient.check()

    def out_of_memory(*_: Any, **__: Any) -> None:
        raise MemoryError

    call()
    # NCCL may notice that a rank has stopped before the time limit.
    waited = f"waited {2 * ranks.short:g} s for|NCCL reports"
    if impatient.rank == 1:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(calls, "attend", out_of_memory)
            with pytest.raises(MemoryError):
                call()
    else:
        # Rank 1 may have sent all messages of this call, but it sends none of the next.
        with pytest.raises(parallel.ParallelError, match=waited):
            call()
    text = "raised MemoryError in the middle" if impatient.rank == 1 else waited
    with pytest.raises(parallel.ParallelError, match=text):
        call()


@check
def a_rank_that_raises_in_a_call_that_the_others_know_makes_no_other(
    ranks: Ranks, rng: np.random.Generator
) -> None:
    """The other ranks do not negotiate, so they receive the error message instead of keys."""
    impatient, x = ranks.anew(2 * ranks.short), _tokens(ranks, 50)

    def call(q: Any) -> None:
        out = parallel.flash_attention(q, x, x, impatient, seqlen=50, head_ranks=1)
        ranks.on_host(out)
        ranks.on_host(parallel.gather(x, impatient, seqlen=50))
        impatient.check()

    call(x)
    if impatient.rank == 1:
        with pytest.raises(ValueError, match=r"q has \d+ tokens on rank 1"):
            call(x[:, :-1])
    else:
        with pytest.raises(parallel.ParallelError):
            call(x)
    with pytest.raises(parallel.ParallelError, match="rank"):
        call(x)


# Checks that also work with one rank; all others need several ranks.
_OF_ONE_RANK = (
    *("attention", "attention_of_packed_sequences", "gradients", "gradients_of_packed_sequences"),
    *("the_same_bits_again", "shards_come_together_again", "generation"),
    *("what_all_ranks_refuse_leaves_nothing_behind", "integers_of_numpy_are_integers"),
)


def checks_of(ranks: int) -> dict[str, Check]:
    """Return the checks for this number of ranks, by name."""
    return {name: f for name, f in CHECKS.items() if ranks > 1 or name in _OF_ONE_RANK}


# Function of a unique name and a time limit that makes a group with a new communicator.
Groups = Callable[[str, float], parallel.Group]
# Function that records the outcome of a check on this rank: a traceback, or an empty text.
Told = Callable[[str, str], None]


def checked(groups: Groups, size: int, xp: Any, timeout: float, seed: int, told: Told) -> None:
    """Make each check, those about failures last, and report a traceback or an empty text.

    Each check has a separate communicator, so that a failed check does not affect the next one.
    """
    for number, (name, function) in enumerate(checks_of(size).items()):
        try:
            anew = functools.partial(groups, f"{name} anew")
            ranks = Ranks(groups(name, timeout), xp, anew)
            function(ranks, np.random.default_rng([seed, number]))
            told(name, "")
        except BaseException:
            told(name, traceback.format_exc())


def appear(places: list[Path], *, seconds: float) -> bool:
    """Wait for files; return whether all of them exist within the time limit."""
    give_up = time.monotonic() + seconds
    while not all(place.exists() for place in places):
        if time.monotonic() > give_up:
            return False
        time.sleep(0.01)
    return True


def over_nccl(communicator: Any, seed: int, folder: Path) -> None:
    """Make all checks on the current GPU, and write the outcome of each to the folder."""
    from cupy.cuda import nccl

    rank, size = communicator.rank_id(), communicator.size()
    made = []

    def groups(name: str, timeout: float) -> parallel.Group:
        """Make a communicator; its id goes through a file, as a failed check may break others."""
        place = folder / f"{name}.place"
        if rank == 0:
            place.with_suffix(".part").write_bytes(pickle.dumps(nccl.get_unique_id()))
            place.with_suffix(".part").rename(place)
        assert appear([place], seconds=_TIMEOUT_OF_NCCL), f"rank 0 has not come to {name}"
        found = nccl.NcclCommunicator(size, pickle.loads(place.read_bytes()), rank)
        # Destroying a communicator waits for the other ranks, unless it is aborted.
        made.append(found)
        return parallel.Group(found, timeout=timeout)

    def told(name: str, text: str) -> None:
        if not text:
            cupy.cuda.Device().synchronize()
        (folder / f"{name}.{rank}").write_text(text)
        print(f"rank {rank}: {name}: {text or 'passed'}", file=sys.stderr, flush=True)
        # Other ranks may still receive messages of this rank.
        appear([folder / f"{name}.{other}" for other in range(size)], seconds=_TIMEOUT_OF_NCCL)
        for found in made:
            found.abort()
        made.clear()
        faulthandler.dump_traceback_later(_CHECK_SECONDS, exit=True)

    faulthandler.dump_traceback_later(_CHECK_SECONDS, exit=True)
    checked(groups, size, cupy, _TIMEOUT_OF_NCCL, seed, told)
    faulthandler.cancel_dump_traceback_later()


def over_mpi(seed: int) -> dict[str, str]:
    """Make all checks with the processes of an MPI program; return the outcomes on this rank."""
    from mpi4py import MPI

    said: dict[str, str] = {}

    def groups(name: str, timeout: float) -> parallel.Group:
        return parallel.Group(MPI.COMM_WORLD.Dup(), timeout=timeout)

    size = MPI.COMM_WORLD.Get_size()
    checked(groups, size, np, TIMEOUT, seed, said.__setitem__)
    return said


def main(seed: int, folder: Path) -> None:
    from mpi4py import MPI

    said = over_mpi(seed)
    (folder / f"{MPI.COMM_WORLD.Get_rank()}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
