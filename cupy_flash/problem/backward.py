"""Derivation of a backward problem, and of a problem of tangents, from a forward problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from cupy_flash.problem.arrays import ArraySpec, Shape, Tensors, check_no_self_overlap, tensor_of
from cupy_flash.problem.gradient import GradientSpec, tangent_of
from cupy_flash.problem.problem import Problem


def with_gradient(
    problem: Problem, spec: GradientSpec, dout: ArraySpec, gradients: Mapping[str, ArraySpec]
) -> Problem:
    """Return the backward problem of a forward problem, whose out the backward pass reads.

    `spec` names the gradients to compute. `gradients` holds the specs of the requested gradients of
    q, k and v, keyed by the name of the input.

    Raises
    ------
    TypeError, ValueError
        If an array has a wrong dtype or shape, or a gradient overlaps itself.
    """
    is_packed = problem.layout.packed_q
    tensors = dict(problem.tensors)
    rows = {"dout": (dout, problem.shape_of("out"), problem.dtype)}
    rows |= {f"d{n}": (s, problem.shape_of(n), spec.dtype) for n, s in gradients.items()}
    for name, (result, shape, dtype) in rows.items():
        _check(name, result, shape, dtype, is_packed=is_packed)
        if name != "dout":
            check_no_self_overlap(name, result)
        tensors[name] = tensor_of(result, is_packed=is_packed)
    return dataclasses.replace(problem, tensors=Tensors(**tensors), gradient=spec)


def with_tangents(
    problem: Problem, tangents: Mapping[str, ArraySpec], out_tangent: ArraySpec
) -> Problem:
    """Return the problem of the tangent of out, given the forward problem.

    A call for this problem reads out. `tangents` holds the specs of the given tangents, keyed by
    the name of the input.

    Raises
    ------
    TypeError, ValueError
        If the dtype or shape of a tangent differs from that of its input.
    """
    is_packed = problem.layout.packed_q
    tensors = dict(problem.tensors)
    for name, spec in {**tangents, "out": out_tangent}.items():
        _check(tangent_of(name), spec, problem.shape_of(name), problem.dtype, is_packed=is_packed)
        tensors[tangent_of(name)] = tensor_of(spec, is_packed=is_packed)
    return dataclasses.replace(problem, tensors=Tensors(**tensors), moves=tuple(tangents))


def _check(name: str, spec: ArraySpec, shape: Shape, dtype: str, *, is_packed: bool) -> None:
    if spec.dtype != dtype:
        raise TypeError(f"{name} has dtype {spec.dtype}; expected {dtype}")
    if spec.shape != shape:
        shown = (spec.shape[1:], shape[1:]) if is_packed else (spec.shape, shape)
        raise ValueError(f"{name} has shape {shown[0]}; expected {shown[1]}")
