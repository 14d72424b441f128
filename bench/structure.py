"""Print the size and shape of the source: modules, lines, function lengths, import cycles, repeated names.

python bench/structure.py [FOLDER]     counts all imports, also those inside functions and for typing only
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"


def read_modules(folder: Path) -> dict[str, ast.Module]:
    """Parse every module below a folder, by its dotted name."""
    modules = {}
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(folder).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = ast.parse(file.read_text(encoding="utf-8"))
    return modules


def imports_of(tree: ast.Module, modules: dict[str, ast.Module]) -> set[str]:
    """Return the modules that a module imports anywhere in it."""
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names if alias.name in modules}
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                imported.add(full if full in modules else node.module)
    return imported


def find_cycles(modules: dict[str, ast.Module]) -> list[list[str]]:
    """Return the groups of modules that import each other, by Tarjan's algorithm."""
    edges = {name: imports_of(tree, modules) for name, tree in modules.items()}
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    cycles = []

    def visit(name: str) -> None:
        index[name] = lowest[name] = len(index)
        stack.append(name)
        for target in sorted(edges[name]):
            if target not in index:
                visit(target)
                lowest[name] = min(lowest[name], lowest[target])
            elif target in stack:
                lowest[name] = min(lowest[name], index[target])
        if lowest[name] == index[name]:
            place = stack.index(name)
            group, stack[place:] = stack[place:], []
            if len(group) > 1:
                cycles.append(sorted(group))

    for name in modules:
        if name not in index:
            visit(name)
    return cycles


def find_repeated_classes(modules: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Return class names that several modules define, with those modules."""
    places = defaultdict(list)
    for name, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


def function_lengths(modules: dict[str, ast.Module]) -> list[tuple[int, str]]:
    """Return the number of lines of every function, with its name, shortest first."""
    return sorted(
        ((node.end_lineno or 0) - node.lineno + 1, f"{name}.{node.name}")
        for name, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def main(folder: Path) -> None:
    """Print all of it."""
    modules = read_modules(folder)
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in folder.rglob("*.py"))
    lengths = function_lengths(modules)
    counts = [length for length, _ in lengths]
    print(f"modules {len(modules)}, lines {lines}")
    print(
        f"functions {len(counts)}: median {statistics.median(counts):.0f}, "
        f"p90 {counts[int(0.9 * len(counts))]}, max {counts[-1]} lines"
    )
    for length, name in reversed(lengths[-5:]):
        print(f"  {length:4} {name}")
    for cycle in find_cycles(modules):
        print("import cycle:", ", ".join(cycle))
    for name, where in find_repeated_classes(modules).items():
        print(f"class {name} is defined in {', '.join(where)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE)
