"""Put the modules that a model is made of into one file, so that an exported folder needs neither this package nor fairseq.

The text of every class and function stays as it is: what is left out are imports between the modules, and what is added are
imports of other packages at the top. A test compares the code with the modules.
"""

import ast
import importlib.util
from pathlib import Path

from fairseq_tupe.errors import TupeError

PACKAGE = "fairseq_tupe"
# what stays a file of its own in the folder: module -> its name there
SEPARATE = {"fairseq_tupe.interop.hf.configuration_tupe": "configuration_tupe"}
# not in an exported folder: the operator that is compiled from C++ (the other attention backends compute the same)
REPLACED = {
    "fairseq_tupe.modules.attention_backends.cpu_fused": '''
class cpu_fused:
    """Stands for the compiled operator, which is not part of an exported model."""

    @staticmethod
    def unavailable():
        return "it is not part of an exported model"

    @staticmethod
    def computes(dtype):
        return False


def fused_attention(*args, **kwargs):
    raise NotImplementedError(cpu_fused.unavailable())


def draw_seed():
    raise NotImplementedError(cpu_fused.unavailable())
''',
}


def bundle(module: str) -> str:
    """Source of one file that holds ``module`` and every module of this package that it needs, directly or not.

    Raises:
        TupeError: two of them define the same name differently.
    """
    ordered: dict[str, str] = {}
    _collect(module, ordered)
    imports, bodies, names = set(), [], {}
    for name, source in ordered.items():
        kept = _without_imports(name, source, imports)
        for node in ast.parse(kept).body:
            for defined in _defined(node):
                if names.setdefault(defined, ast.dump(node)) != ast.dump(node):
                    raise TupeError(f"{name} defines {defined}, which another module of the bundle for {module} defines too")
        bodies.append(f"# --- {name.replace('.', '/')}.py ---\n\n{kept.strip()}\n")
    head = '"""Written by `python -m fairseq_tupe export-hf` from the modules named below; change those, not this file."""\n'
    return head + "\n" + "\n".join(sorted(imports)) + "\n\n\n" + "\n\n".join(bodies)


def source_of(module: str) -> str:
    """Text of a module's file, without importing it."""
    if module in REPLACED:
        return REPLACED[module]
    spec = importlib.util.find_spec(module)
    return Path(spec.origin).read_text("utf-8")


def _collect(module: str, ordered: dict[str, str]) -> None:
    if module in ordered or module in SEPARATE:
        return
    source = source_of(module)
    for node in ast.parse(source).body:
        for needed in _internal(node):
            _collect(needed, ordered)
    ordered[module] = source


def _internal(node: ast.stmt) -> list[str]:
    """Modules of this package that an import statement names."""
    if isinstance(node, ast.Import) and any(alias.name.split(".")[0] == PACKAGE for alias in node.names):
        raise TupeError(f"'{ast.unparse(node)}' can't be bundled: write from {PACKAGE}... import NAME")
    if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != PACKAGE:
        return []
    if any(alias.asname for alias in node.names):
        raise TupeError(f"'{ast.unparse(node)}' can't be bundled: import under the same name")
    if f"{node.module}.{node.names[0].name}" in REPLACED:  # a module, not a name in one
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [node.module]


def _without_imports(name: str, source: str, imports: set[str]) -> str:
    """The source without top-level imports, which go into ``imports`` where they are of other packages."""
    lines = source.splitlines(keepends=True)
    for node in reversed(ast.parse(source).body):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        needed = _internal(node)
        if not needed:
            imports.add(ast.unparse(node))
        for module in needed:
            if module in SEPARATE:
                imports.add(f"from .{SEPARATE[module]} import {', '.join(alias.name for alias in node.names)}")
        del lines[node.lineno - 1 : node.end_lineno]
    return "".join(lines)


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]
