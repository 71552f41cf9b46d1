"""Conversion of C++ sources to the tokens that a compiler sees, without comments and file names."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path

_SKIPPED = r"//[^\\\n]*(?:\\.[^\\\n]*)* | /\*.*?\*/ | \\\n"
_STRING = r'"(?:[^"\\\n]|\\.)*"'
# Frequent tokens come first, which halves the time. Names that begin with a letter of a string
# prefix (u, L, R) come after the strings.
_TOKEN = rf"""
    [(){{}}\[\];,]
  | [A-KM-QSTV-Z_a-tv-z]\w*
  | \.?\d(?:[eEpP][+-]|'\w|[\w.])*
  | <=> | <<= | >>= | ->\* | \.\.\.
  | :: | -> | \.\* | \+\+ | -- | << | >> | && | \|\| | \#\# | [-+*/%&|^=!<>]=
  | (?:u8|[uUL])?{_STRING}\w*
  | (?:u8|[uUL])?'(?:[^'\\\n]|\\.)*'\w*
  | (?:u8|[uUL])?R"(?P<delimiter>[^()\\\s"]*)\(.*?\)(?P=delimiter)"\w*
  | \w+
"""
# A `#` outside of literals and comments begins a directive, which ends with its line.
_DIRECTIVE = rf"\#(?: {_SKIPPED} | {_STRING} | \\. | [^\\\n])*"
# The group is empty for white space, comments and continued lines.
_TOKENS = re.compile(
    rf"\s*(?: {_SKIPPED} | ({_TOKEN} | {_DIRECTIVE} | \S))", re.DOTALL | re.VERBOSE
)
# A macro has parameters if a parenthesis directly follows its name: `define NAME(` is one token.
_TOKENS_OF_DIRECTIVE = re.compile(
    rf"\s*(?: {_SKIPPED} | (define\s+\w+\(? | {_TOKEN} | \S))", re.DOTALL | re.VERBOSE
)

# In a stream, each token ends with a null byte. An include is the file name between two marks.
_DIRECTIVE_TOKEN = re.compile("(?<=\0)#([^\0]*)\0")
_MARK = "\1"


def token_stream(text: str, folder: Path) -> str:
    """Return the tokens of a C++ text, with every include replaced once by the file's tokens.

    The stream stays the same if comments, white space or names of files change, or if code moves
    to a file that is included where the code was. White space in an argument that a macro
    stringizes (``#name``) matters to the compiler, but not here.

    Parameters
    ----------
    text
        C++ whose ``#include "name"`` directives are replaced; ``#include <name>`` stays.
    folder
        Folder of the files that the text and these files include.
    """
    seen = set[str]()

    def expand(parts: Sequence[str]) -> Iterator[str]:
        for index, part in enumerate(parts):
            if index % 2 == 0:
                yield part
            elif part not in seen:
                seen.add(part)
                yield from expand(_parts_of_file(folder / part))

    return "".join(expand(_parts(text)))


@functools.cache
def _parts_of_file(path: Path) -> Sequence[str]:
    return _parts(path.read_text(encoding="utf-8"))


def _parts(text: str) -> Sequence[str]:
    """Return tokens and names of included files alternately; the first and last part are tokens."""
    # The look-behind of `_DIRECTIVE_TOKEN` needs a null byte before the first token.
    stream = "\0".join(["", *_found(_TOKENS, text), ""])
    return _DIRECTIVE_TOKEN.sub(_directive, stream)[1:].split(_MARK)


def _directive(match: re.Match[str]) -> str:
    tokens = list(_found(_TOKENS_OF_DIRECTIVE, match[1]))
    if tokens[:1] == ["include"] and tokens[1].startswith('"'):
        return _MARK + tokens[1].strip('"') + _MARK
    if tokens == ["pragma", "once"]:
        return ""
    # Normalize the white space inside `define NAME(`.
    tokens[:1] = [" ".join(token.split()) for token in tokens[:1]]
    return "\0".join(["\n#", *tokens, "\n", ""])


def _found(pattern: re.Pattern[str], text: str) -> Iterator[str]:
    """Return the nonempty matches of the first group of a pattern in a text."""
    return filter(None, map(itemgetter(0), pattern.findall(text)))
