"""Extension of Griffe that keeps the types of docstrings as they are written.

Griffe reads a type such as `array, shape (batch, seqlen, heads, head_dim)` as Python, which it is
not, and shows a tuple with a call.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Alias, Class, ExprTuple, Extension, Function, Module

TYPE = re.compile(r"^(\w.*?) : (.+)$", re.MULTILINE)


class DocstringTypes(Extension):
    """Extension that applies to the public names of a package and of its modules."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Restore the types in the docstrings of all names in `__all__`."""
        modules = [pkg]
        for module in modules:
            # Imported modules are aliases, which lead back to modules that have been seen.
            modules += [x for x in module.modules.values() if isinstance(x, Module)]
            for name in module.exports or ():
                _restore(module[str(name)])


def _restore(object_: Any) -> None:
    target = object_.final_target if isinstance(object_, Alias) else object_
    if isinstance(target, Class):
        for member in target.members.values():
            if isinstance(member, Function) and member.is_public:
                _restore(member)
    if target.docstring is None:
        return
    types = {
        name.strip("*"): text.removesuffix(", optional")
        for names, text in TYPE.findall(target.docstring.value)
        for name in names.split(", ")
    }
    sections = target.docstring.parse("numpy")
    for section in sections:
        items = section.value if isinstance(section.value, list) else ()
        # The items of a section of examples are tuples.
        for item in (x for x in items if hasattr(x, "annotation")):
            name = getattr(item, "name", "")
            if written := types.get(name.strip("*")):
                item.annotation = written
            elif str(item.annotation) == "Any":
                item.annotation = None
            elif isinstance(item.annotation, ExprTuple):
                # Several exceptions.
                item.annotation.implicit = True
            if name.startswith("*"):
                # Griffe states an empty tuple or dictionary as the default.
                item.value = None
    # A cached property.
    target.docstring.parsed = sections
