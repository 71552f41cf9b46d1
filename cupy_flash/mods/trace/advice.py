"""Advice for functions of NumPy that cannot be traced: what to write instead."""

from __future__ import annotations

_INSTEAD = {
    ("round", "around"): "np.rint(x), or np.rint(x * 100) / 100 for two decimals",
    ("fix",): "np.trunc(x)",
    ("max", "amax", "nanmax", "fmax"): "np.maximum(x, y), which takes two values and gives NaN "
    "for NaN",
    ("min", "amin", "nanmin", "fmin"): "np.minimum(x, y), which takes two values and gives NaN "
    "for NaN",
    ("any",): "p | q",
    ("all",): "p & q",
    ("sum", "nansum"): "x + y",
    ("prod", "nanprod", "cumsum", "cumprod"): "x * y and x + y of the values",
    ("mean", "average", "nanmean"): "(x + y) / 2",
    ("dot", "vdot", "inner", "matmul", "vecdot", "einsum", "tensordot"): "x * y + z * w, the sum "
    "of products",
    ("fmod",): "x - y * np.trunc(x / y), whose sign is that of x, or x % y, whose sign is that of "
    "y",
    ("divmod",): "x // y and x % y",
    ("modf",): "x - np.trunc(x) and np.trunc(x)",
    ("hypot",): "np.sqrt(x * x + y * y)",
    ("cbrt",): "np.sign(x) * np.exp2(np.log2(np.abs(x)) / 3)",
    ("tan",): "np.sin(x) / np.cos(x)",
    ("sinh",): "(np.exp(x) - np.exp(-x)) / 2",
    ("cosh",): "(np.exp(x) + np.exp(-x)) / 2",
    ("arctanh", "atanh"): "np.log1p(2 * x / (1 - x)) / 2",
    ("arcsinh", "asinh"): "np.sign(x) * np.log(np.abs(x) + np.sqrt(x * x + 1))",
    ("arccosh", "acosh"): "np.log(x + np.sqrt(x * x - 1))",
    ("logaddexp",): "np.maximum(x, y) + np.log1p(np.exp(-np.abs(x - y)))",
    ("logaddexp2",): "np.maximum(x, y) + np.log2(1 + np.exp2(-np.abs(x - y)))",
    ("sinc",): "np.where(x == 0, 1.0, np.sin(np.pi * x) / (np.pi * x))",
    ("deg2rad", "radians"): "x * (np.pi / 180)",
    ("rad2deg", "degrees"): "x * (180 / np.pi)",
    ("ldexp",): "x * np.exp2(n)",
    ("heaviside",): "np.where(x > 0, 1.0, np.where(x < 0, 0.0, y))",
    ("copysign",): "np.where(y < 0, -np.abs(x), np.abs(x))",
    ("signbit",): "x < 0",
    ("nan_to_num",): "np.where(np.isnan(x), 0.0, x)",
    ("isneginf",): "x == -np.inf",
    ("isposinf",): "x == np.inf",
    ("isclose", "allclose"): "np.abs(x - y) <= tolerance",
    ("array_equal", "array_equiv"): "x == y",
    ("isin", "in1d"): "(x == 1) | (x == 2), or an array of bools that is indexed: is_in[x]",
    ("select", "piecewise", "choose"): "np.where(p, x, np.where(q, y, z))",
    ("take", "take_along_axis"): "table[index]",
    ("digitize", "searchsorted"): "(x >= 8).astype(np.int32) + (x >= 16).astype(np.int32), a "
    "comparison for each bound",
    ("interp",): "an array of the values that is indexed, as table[np.clip(x, 0, n - 1)]",
    ("gcd", "lcm"): "an array of the values that is indexed: table[i, j]",
    ("diff", "ediff1d"): "x - y",
    ("array", "asarray", "stack", "concatenate", "append", "hstack", "vstack"): "the values one "
    "by one, each in a variable",
    ("copy", "squeeze", "ravel", "reshape", "real", "expand_dims", "broadcast_to"): "x itself, "
    "which is one number",
    ("zeros_like",): "0.0",
    ("ones_like",): "1.0",
    ("full_like",): "the number itself",
    ("astype", "to", "type", "float", "double", "half", "bfloat16"): "x.astype(np.float32)",
    ("int", "long", "short"): "x.astype(np.int32)",
    ("bool",): "x != 0",
    ("item", "detach", "numpy", "cpu", "get"): "x itself, which is one number",
    ("clamp",): "np.clip(x, low, high)",
    ("sigmoid", "expit"): "1 / (1 + np.exp(-x))",
}
_BY_NAME = {name: advice for names, advice in _INSTEAD.items() for name in names}


def instead_of(name: str) -> str | None:
    """Return what to write instead of a function of NumPy, or None if there is no advice."""
    return _BY_NAME.get(name)
