"""Calls of the problem class of a tuned tile, with ragged lengths, computed by this tile."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cupy_flash.cli.build.kernel_sets import case_of_class, problem_of_class
from cupy_flash.cli.cases import cases
from cupy_flash.families import FAMILIES
from cupy_flash.planning.planner import Plan, make_plan
from cupy_flash.planning.tuning import Entry
from cupy_flash.problem.device import Device
from cupy_flash.problem.tile import Tile
from support.calls import float8_support, quantized_support
from support.calls.float8_support import Float8Case
from support.calls.latent_support import check_latent
from support.calls.modified_calls import ModifiedCall
from support.calls.quantized_support import QuantizedCase
from support.calls.sequence_support import KVCacheCase, VarlenCase
from support.gpu import cupy
from support.gpu.gpu_sequences import Target, check_kvcache, check_varlen
from support.gpu.gpu_support import DTYPES, Case, check, current_device, random_values
from support.gradients.gradient_calls import ROWS, GradientCall
from support.gradients.gradient_rule import check_gradients


class _Sizes(NamedTuple):
    """Sizes of a call; `lengths` are those of packed sequences, or of the keys in caches."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    lengths: tuple[int, ...]
    q_offset: int | None = None


# Classes with at most this many queries per sequence are for decoding; their calls keep the number.
_FEW_QUERIES = 16
# Sizes with few query tiles, and with many. Reference gradients take ten times as long to compute.
_SIZES = {
    "forward": (
        _Sizes(2, 799, 513, 4, 2, (799, 1, 0, 513), q_offset=-150),
        _Sizes(4, 333, 513, 36, 12, (333, 65, 7, 128)),
    ),
    "backward": (
        _Sizes(2, 299, 213, 4, 2, (299, 1, 0, 213), q_offset=-50),
        _Sizes(4, 133, 173, 12, 4, (133, 65, 7, 128)),
    ),
}


@dataclass(frozen=True)
class TunedCall:
    """Call, as a case of the command line, and the tile that computes it."""

    case: cases.Case
    family: str
    tile: Tile
    alignment: int

    def __str__(self) -> str:
        return f"{self.family} {cases.describe([self.case])[0]} {self.tile}"

    def plan(self) -> Plan:
        """Return the plan of the call on this GPU; raise as a call does if the tile is illegal."""
        problem = self.case.problem().aligned(self.alignment)
        return make_plan(problem, current_device(), **self._choice)

    @property
    def _choice(self) -> dict[str, Any]:
        return {"family": self.family, "tile": self.tile}

    def check(self) -> None:
        """Fail unless the call is computed right."""
        case = self.case
        if case.is_backward:
            call = self._gradients()
            check_gradients(call, call.run(cupy, **self._choice))
        elif case.kind == "varlen":
            packed = VarlenCase(case.query_lengths, case.key_lengths, **self._fields(VarlenCase))
            check_varlen(Target(self.family), packed, self.alignment, tile=self.tile)
        elif case.is_cached:
            self._check_cached(KVCacheCase(**self._fields(KVCacheCase)))
        elif case.cache_dtype:
            of_float8 = Float8Case(out_dtype=case.dtype, **self._fields(Float8Case))
            float8_support.check_on_gpu(of_float8, **self._choice)
        else:
            dense = Case(
                self.family, tile=self.tile, alignment=self.alignment, **self._fields(Case)
            )
            check(dense, random_values(dense))

    def _check_cached(self, base: KVCacheCase) -> None:
        case = self.case
        if case.values_in_keys:
            check_latent(base, case.cache_dtype, "head", **self._choice)
        elif case.cache_dtype:
            quantized = QuantizedCase(base, case.cache_dtype, "head")
            quantized_support.check_on_gpu(quantized, **self._choice)
        else:
            check_kvcache(Target(self.family), base, self.alignment, tile=self.tile)

    def _fields(self, kind: type) -> dict[str, Any]:
        """Return the fields that the case has in common with a dataclass of the tests."""
        names = {field.name for field in dataclasses.fields(kind)}
        return {name: value for name, value in vars(self.case).items() if name in names}

    def _gradients(self) -> GradientCall:
        case, rng = self.case, np.random.default_rng(0)
        shapes = dict(zip(ROWS, case.bshd_shapes, strict=True))
        shapes["dout"] = (*shapes["q"][:3], case.head_dim_v)
        arrays = {n: rng.standard_normal(x).astype(DTYPES[case.dtype]) for n, x in shapes.items()}
        options: dict[str, Any] = {"causal": case.causal}
        kind = "dense"
        if case.kind == "varlen":
            kind = "varlen"
            arrays = {name: x[0] for name, x in arrays.items()}
            ends = np.cumsum((0, *case.key_lengths), dtype=np.int32)
            arrays |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
            options |= {"max_seqlen_q": case.seqlen_q, "max_seqlen_k": case.seqlen_k}
        else:
            options["q_offset"] = case.q_offset
        dout = arrays.pop("dout")
        return GradientCall(ModifiedCall(kind, case.dtype, arrays, options), dout)


def calls_of(entry: Entry, device: Device) -> list[TunedCall]:
    """Return calls for an entry's tile to compute on a device; empty if it does not apply."""
    own, problem = case_of_class(entry.problem_class), problem_of_class(entry.problem_class)
    family = FAMILIES[entry.direction][entry.family]
    if own is None or problem is None or family.why_not(problem, device):
        return []
    tile = family.tile_type(**entry.tile)
    if family.why_not_tile(problem, device, tile):
        return []
    resized = (_resized(own, sizes) for sizes in _SIZES[entry.direction])
    return [TunedCall(case, entry.family, tile, problem.alignment) for case in resized]


def _resized(case: cases.Case, sizes: _Sizes) -> cases.Case:
    lengths = sizes.lengths
    sized = dataclasses.replace(
        case,
        batch=sizes.batch if case.is_dense else len(lengths),
        seqlen_q=case.seqlen_q if case.seqlen_q <= _FEW_QUERIES else sizes.seqlen_q,
        seqlen_k=sizes.seqlen_k if case.is_dense else max(lengths),
        heads_q=sizes.heads_q,
        heads_kv=1 if case.values_in_keys else sizes.heads_kv,
        q_offset=sizes.q_offset if case.is_dense and case.causal else None,
        lengths=None if case.is_dense else lengths,
    )
    return sized if case.kind != "varlen" else dataclasses.replace(sized, seqlen_q=max(lengths))
