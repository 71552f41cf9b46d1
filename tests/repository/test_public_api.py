"""The public names, their parameters and the options of the command line, compared with a snapshot.

Record an intended change by `python tests/repository/test_public_api.py`, and note it in
CHANGELOG.md if users see it.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import cupy_flash
from cupy_flash import parallel
from cupy_flash.cli.main import main

SNAPSHOT = Path(__file__).with_name("public_api.txt")
# Other libraries need not be installed, so the modules that import them are parsed instead.
PARSED = (
    *("torch", "jax", "flash_attn/flash_attn_interface", "flash_attn/bert_padding", "onnx"),
    "transformers",
)


class Named:
    """A default value that a signature shows as text."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)


def parameters(function: Any) -> str:
    """Return the parameters with their kinds and defaults, without annotations."""
    signature = inspect.signature(function)
    plain = [
        # A module or class as a default is shown by its name, because its repr holds a path.
        p.replace(annotation=p.empty, default=Named(getattr(p.default, "__name__", p.default)))
        if p.default is not p.empty
        else p.replace(annotation=p.empty)
        for p in signature.parameters.values()
    ]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


def lines_of(name: str, value: Any) -> Iterator[str]:
    if not inspect.isclass(value):
        yield f"{name}{parameters(value)}" if callable(value) else f"{name}: {type(value).__name__}"
        return
    bases = ", ".join(base.__name__ for base in value.__bases__)
    yield f"class {name}({bases})"
    if value.__init__ is not object.__init__ and not issubclass(value, (dict, Exception)):
        yield f"{name}.__init__{parameters(value.__init__)}"
    fields = {f.name for f in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else ()
    own = [c for c in value.__mro__ if c.__module__.startswith("cupy_flash")]
    names = {name for c in own for name in (*vars(c), *getattr(c, "__annotations__", ()))}
    for member in sorted({*names, *fields}):
        if member.startswith("_"):
            continue
        found = inspect.getattr_static(value, member, None)
        if isinstance(found, (classmethod, staticmethod)):
            found = found.__func__
        yield f"{name}.{member}{parameters(found) if inspect.isfunction(found) else ''}"


def parsed_lines(module: str) -> Iterator[str]:
    """Yield the functions in `__all__` of a module, or of a package, that is not imported."""
    path = Path(cupy_flash.__file__).parent / module
    # In a package, `__all__` is that of `__init__.py`.
    files = sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    nodes = [node for file in files for node in ast.parse(file.read_text("utf-8")).body]
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    (names,) = (
        ast.literal_eval(node.value)
        for node in nodes
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    for name in sorted(names):
        if name not in functions:
            yield f"class {module}.{name}"
            continue
        arguments = functions[name].args
        every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        for argument in (*every, arguments.vararg, arguments.kwarg):
            if argument is not None:
                argument.annotation = None
        yield f"{module.replace('/', '.')}.{name}({ast.unparse(arguments)})"


def command_lines(command: click.Command, name: str) -> Iterator[str]:
    """Yield a command's arguments and options, without their help."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for sub in command.list_commands(context):
            found = command.get_command(context, sub)
            assert found is not None
            yield from command_lines(found, f"{name} {sub}")
        return
    yield name
    for parameter in command.params:
        kind = parameter.type
        choices = f" {{{','.join(map(str, kind.choices))}}}" if hasattr(kind, "choices") else ""
        more = " (several)" if parameter.multiple or parameter.nargs != 1 else ""
        yield f"  {'/'.join(parameter.opts)} {kind.name}{choices}{more}"


def public_api() -> list[str]:
    lines = []
    for module, prefix in ((cupy_flash, ""), (parallel, "parallel.")):
        for name in sorted(module.__all__):
            lines += [prefix + line for line in lines_of(name, getattr(module, name))]
    for module_name in PARSED:
        lines += parsed_lines(module_name)
    return [*lines, *command_lines(main, "cupy-flash")]


def test_public_api_is_as_recorded() -> None:
    assert public_api() == SNAPSHOT.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    SNAPSHOT.write_text("\n".join(public_api()) + "\n", encoding="utf-8")
