"""Lists Python files of more than 400 lines, and functions of more than 40 lines, so that someone looks at them again.

The check only warns, because a long function is better than one idea that is cut into two functions.

A function's lines are counted from its first decorator to its last statement, including its docstring and nested
functions.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 400
FUNCTION_LINES = 40


def too_large(path: Path) -> Iterator[str]:
    """Yield a message for each limit that a file or one of its functions exceeds."""
    source = path.read_text(encoding="utf-8")
    lines = len(source.splitlines())
    if lines > FILE_LINES:
        yield f"{path}: {lines} lines, more than {FILE_LINES}"
    for node in ast.walk(ast.parse(source, str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            lines = (node.end_lineno or node.lineno) - first + 1
            if lines > FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {lines} lines, more than {FUNCTION_LINES}"


def main(folders: list[str]) -> int:
    files = sorted(path for folder in folders for path in Path(folder).rglob("*.py"))
    if not files:
        print(f"no Python files in {' '.join(folders) or 'no folder'}: nothing was checked")
        return 1
    for path in files:
        for message in too_large(path):
            print(f"warning: {message}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
