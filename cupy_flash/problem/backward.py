"""The backward problem of a forward one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from cupy_flash.problem.arrays import ArraySpec, Tensors, check_no_self_overlap, tensor_of
from cupy_flash.problem.gradient import GradientSpec
from cupy_flash.problem.problem import Problem


def with_gradient(
    problem: Problem, spec: GradientSpec, dout: ArraySpec, gradients: Mapping[str, ArraySpec]
) -> Problem:
    """The backward problem of a forward one.

    Parameters
    ----------
    problem
        Of forward; its out is read.
    spec
        What is wanted.
    dout
        Of the same shape as out.
    gradients
        How those of q, k and v lie that are wanted, by the input's name.

    Raises
    ------
    TypeError, ValueError
        For arrays of other dtypes or shapes, and for gradients that overlap themselves.
    """
    is_packed = problem.layout.packed_q
    tensors = dict(problem.tensors)
    rows = {"dout": (dout, problem.shape_of("out"), problem.dtype)}
    rows |= {f"d{n}": (s, problem.shape_of(n), spec.dtype) for n, s in gradients.items()}
    for name, (found, shape, dtype) in rows.items():
        if found.dtype != dtype:
            raise TypeError(f"{name} has dtype {found.dtype}; expected {dtype}")
        if found.shape != shape:
            shown = (found.shape[1:], shape[1:]) if is_packed else (found.shape, shape)
            raise ValueError(f"{name} has shape {shown[0]}; expected {shown[1]}")
        if name != "dout":
            check_no_self_overlap(name, found)
        tensors[name] = tensor_of(found, is_packed=is_packed)
    return dataclasses.replace(problem, tensors=Tensors(**tensors), gradient=spec)
