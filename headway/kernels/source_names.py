"""Names that a candidate's source defines and imports, and dotted paths that begin at an import."""

from __future__ import annotations

import ast
import re
import sys

from headway.kernels.operator_lists import WORDS

# Modules that no candidate needs, though Triton's have them as attributes.
MODULES = (sys.stdlib_module_names - {"math", "random"}) | WORDS["triton_modules"]
TRITON_PATH = re.compile(rf"triton(\.(?!(?:{'|'.join(sorted(MODULES))})\b|_)\w+)+")
LAYER = re.compile(r"torch\.nn\.(modules\.\w+\.)?(?!Module$|Parameter$)[A-Z]\w+")
_CALLED = re.compile(r"\b([A-Za-z]\w*)\s*\(")


class SourceNames:
    """Imports, Triton kernels and other names of a module, at any depth."""

    def __init__(self, tree: ast.Module) -> None:
        self.modules: dict[str, str] = {}  # local name -> dotted path
        self.kernels: dict[str, int] = {}  # Triton's -> the id of the last definition
        self.defined: set[str] = set()  # names of functions, attributes, and functions in C++
        self.layers: dict[str, str] = {}  # "self.linear", where such a name is made a layer of torch -> its path
        nodes = list(ast.walk(tree))
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    root = alias.name.split(".")[0]
                    self.modules[alias.asname or root] = alias.name if alias.asname else root
            elif isinstance(node, ast.ImportFrom):
                self.modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        for node in nodes:
            self._define(node)

    def _define(self, node: ast.AST) -> None:
        match node:
            case ast.FunctionDef() if self.is_jit(node):
                self.kernels[node.name] = id(node)
            case ast.FunctionDef(name=name) | ast.Attribute(attr=name, ctx=ast.Store()):
                self.defined.add(name)
            case ast.Constant(value=str() as text):
                self.defined.update(_CALLED.findall(text))
            case ast.Assign(targets=targets, value=ast.Call(func=maker)) if LAYER.fullmatch(self.path(maker) or ""):
                self.layers |= {ast.unparse(target): self.path(maker) or "" for target in targets}

    def is_jit(self, node: ast.FunctionDef) -> bool:
        """Whether a function is a Triton kernel."""
        return any(map(self.is_triton_jit, node.decorator_list))

    def is_triton_jit(self, decorator: ast.expr) -> bool:
        return self.path(decorator.func if isinstance(decorator, ast.Call) else decorator) == "triton.jit"

    def path(self, node: ast.AST) -> str | None:
        """The dotted path of an expression that begins at an import: "torch.nn.functional.relu" for ``F.relu``."""
        match node:
            case ast.Name(id=name):
                return self.modules.get(name)
            case ast.Attribute(value=owner, attr=name):
                base_path = self.path(owner)
                return None if base_path is None else f"{base_path}.{name}"
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, name_node, *_]):
                base_path, name = self.path(owner), folded(name_node)
                return None if base_path is None or name is None else f"{base_path}.{name}"
        return None


def folded(node: ast.AST) -> str | None:
    """The text of string literals joined by +; None: another expression."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.BinOp(left=left_node, op=ast.Add(), right=right_node):
            texts = folded(left_node), folded(right_node)
            return None if None in texts else "".join(part or "" for part in texts)
    return None
