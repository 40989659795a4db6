"""Static check of a candidate's source by names: operators of torch that its back end doesn't allow, and ways around
the check at run time.

The check at run time finds arithmetic on tensors and layers that are called by another name. This one finds names that
would undo or avoid it: modules, private parts, frames, threads, code made of text, names that are computed.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from headway.kernels.native_source import native_findings
from headway.kernels.operator_lists import FAMILIES, WORDS, canonical
from headway.kernels.source_names import LAYER, TRITON_PATH, SourceNames, folded
from headway.records.kernels import KernelBackend

_ALLOWED_PATHS = re.compile(
    r"torch\.(autograd\.Function|nn\.(parameter\.Parameter|init\.\w+|[A-Z]\w+)|"
    r"cuda\.(current_stream|synchronize|device|is_available|current_device|get_device_properties|Stream|"
    r"get_device_capability|device_count))"
)
_MODULES = re.compile(r"torch(\.(nn(\.(functional|init|parameter))?|autograd|cuda))?|triton(\.language)?|ctypes")
_EXTENSION = re.compile(r"torch\.utils\.cpp_extension(\.(load_inline|load|CUDA_HOME))?")
_BARRED = re.compile(
    r"torch\.(compile|compiler|jit|ops\.(?!aten\b)\w+|utils|library|fx|overrides|multiprocessing|distributed|package|hub|"
    r"load|save|serialization|classes|export|onnx|func|sys|os|inspect|ctypes|importlib|builtins|types|storage)\b"
    r"|torch\.(?:\w+\.)*_\w+"
)
_PATHS = {
    "ctypes": re.compile(r"ctypes\.(c_\w+|POINTER|pointer|byref|cast|sizeof|Structure|Union|Array)"),
    "triton": TRITON_PATH,
}
_TENSOR = re.compile(r"torch\.(Tensor|nn\.(parameter\.)?Parameter)")
_LOOPS = (ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_COMPUTING = {canonical(name) for of, also in FAMILIES for name in of + also} | set(map(canonical, WORDS["computing"]))


class OperatorFinding(NamedTuple):
    """A use of an operator that the back end doesn't allow, or of a way around the check."""

    line: int
    text: str


class SourceCheck:
    """Checks each name of a module, except in the bodies of its Triton kernels.

    ``allowed`` and ``forbidden``: operators of torch by name; ``forbidden`` applies to back end "torch".
    """

    def __init__(
        self, tree: ast.Module, backend: KernelBackend, allowed: Iterable[str], forbidden: Iterable[str]
    ) -> None:
        self._tree = tree
        self._backend = backend
        self._needs_kernels = backend != "torch"  # kernels of its own are asked for
        self._allowed = {canonical(name) for name in allowed}
        self._forbidden = {canonical(name) for name in forbidden}
        self._names = SourceNames(tree)
        self._parts: set[int] = set()  # ids of expressions within a path

    def findings(self) -> list[OperatorFinding]:
        """All findings of the module, by line."""
        nodes = self._nodes()
        findings = {OperatorFinding(getattr(node, "lineno", 1), text) for node in nodes for text in self._check(node)}
        return sorted(findings.union(self._native_findings()) if self._needs_kernels else findings)

    def _nodes(self) -> Iterator[ast.AST]:
        """All nodes, outer ones first, without the bodies of Triton kernels, which compute on their own."""
        pending_nodes: list[ast.AST] = [self._tree]
        while pending_nodes:
            node = pending_nodes.pop()
            yield node
            if isinstance(node, ast.FunctionDef) and self._names.kernels.get(node.name) == id(node):
                pending_nodes += [*node.decorator_list, node.args]
            else:
                pending_nodes += ast.iter_child_nodes(node)

    def _native_findings(self) -> Iterator[OperatorFinding]:
        nodes = list(ast.walk(self._tree))
        strings = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        line_of = {text: node.lineno for node in strings for text in native_findings(str(node.value), self._allowed)}
        joined_findings = native_findings("".join(str(node.value) for node in strings), self._allowed)
        yield from (OperatorFinding(line_of.get(text, 1), text) for text in {*line_of, *joined_findings})
        paths = [*self._names.modules.values(), *(self._names.path(node) or "" for node in nodes)]
        has_kernels = {
            "cpp": any(isinstance(node, ast.Name) and node.id == "load_cpp" for node in nodes),
            "triton": bool(self._names.kernels),
            "cuda": any(path.startswith("torch.utils.cpp_extension.load") for path in paths),
        }
        if not has_kernels[self._backend]:
            yield OperatorFinding(1, f"no kernel of its own for back end {self._backend!r}")

    def _check(self, node: ast.AST) -> Iterator[str]:
        """Findings at a node itself."""
        path = None if id(node) in self._parts else self._names.path(node)
        if path is not None:
            inner_node = node
            while isinstance(inner_node, (ast.Attribute, ast.Call)):
                inner_node = inner_node.value if isinstance(inner_node, ast.Attribute) else inner_node.args[0]
                self._parts.add(id(inner_node))
            yield from self._reference(path)
        match node:
            case ast.Import(names=aliases):
                yield from (text for alias in aliases for text in self._import(alias.name))
            case ast.ImportFrom(module=module, names=aliases, level=level):
                for alias in aliases:
                    yield from self._import(f"{'.' * level}{module}.{alias.name}")
            case (
                ast.FunctionDef(name=str() as name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ExceptHandler(name=str() as name)
                | ast.MatchAs(name=str() as name)
                | ast.MatchStar(name=str() as name)
                | ast.arg(arg=name)
                | ast.Name(id=name, ctx=ast.Store() | ast.Del())
            ):
                yield from self._binding(node, name)
            case ast.ClassDef(name=name, bases=bases):
                yield from self._binding(node, name)
                for base in bases:
                    if _TENSOR.fullmatch(self._names.path(base) or ""):
                        yield f"a subclass of {self._names.path(base)}"
            case ast.Name(id=name) if name in WORDS["builtins"]:
                yield f"use of {name}"
            case ast.Attribute(value=owner, attr=name, ctx=ast.Load()) if self._names.path(node) is None:
                yield from self._attribute(owner, name)
            case ast.Attribute(value=owner, attr=name, ctx=ast.Store() | ast.Del()):
                if name.startswith("__") or self._names.path(owner) is not None:
                    yield f"assignment to {ast.unparse(node)}"
            case ast.BinOp(op=ast.MatMult()) | ast.AugAssign(op=ast.MatMult()):
                if self._needs_kernels or "matmul" in self._forbidden:
                    yield "a product of matrices by @"
            case ast.Call(func=ast.Name(id="getattr" | "setattr" | "hasattr"), args=[owner, name_node, *_]):
                name = folded(name_node)
                if name is None:
                    yield "an attribute by a computed name"
                elif path is None:
                    yield from self._attribute(owner, name)
            case ast.Call(func=callee):
                yield from self._call(callee)
        if self._needs_kernels and isinstance(node, _LOOPS):
            yield from ("a tensor's values are read in a loop" for inner in ast.walk(node) if _is_reading(inner))

    def _binding(self, node: ast.AST, name: str) -> Iterator[str]:
        rebinds_kernel = self._names.kernels.get(name, id(node)) != id(node)
        if rebinds_kernel or name in self._names.modules or name == "load_cpp":
            yield f"{name} is bound to something else"

    def _import(self, path: str) -> Iterator[str]:
        root = path.split(".")[0]
        if root not in WORDS["imports"] or path.endswith(".*") or (root == "ctypes" and not self._needs_kernels):
            yield f"import of {path}"
        elif not _MODULES.fullmatch(path):
            yield from self._reference(path)

    def _call(self, called: ast.expr) -> Iterator[str]:
        """Findings at the call of a layer of torch that is made in the call, or bound to the called name."""
        if isinstance(called, ast.Attribute) and called.attr == "forward":
            called = called.value
        made_path = self._names.path(called.func) if isinstance(called, ast.Call) else None
        layer_path = self._names.layers.get(ast.unparse(called), "") if self._names.layers else ""
        layer_path = made_path if made_path and LAYER.fullmatch(made_path) else layer_path
        if layer_path and (self._needs_kernels or canonical(layer_path.rpartition(".")[2]) in self._forbidden):
            yield f"a layer of torch is called: {ast.unparse(called)}"

    def _attribute(self, value: ast.expr, name: str) -> Iterator[str]:
        """Findings at an attribute whose path doesn't begin at an import."""
        is_dunder = name.startswith("__") and name.endswith("__") and name not in WORDS["dunders"]
        if is_dunder or name in WORDS["frames"]:
            yield f"use of .{name}"
        elif isinstance(value, ast.Name) and value.id in self._names.kernels and name != "warmup":
            yield f"a Triton kernel's .{name}"
        elif (isinstance(value, ast.Name) and value.id == "self") or name in self._names.defined:
            return
        elif not self._needs_kernels:
            if canonical(name) in self._forbidden:
                yield f"the task's own operator: .{name}"
        elif canonical(name) not in self._allowed and (canonical(name) in _COMPUTING or _is_in_place(name)):
            yield f"a tensor computes: .{name}"

    def _reference(self, path: str) -> Iterator[str]:
        """Findings at a dotted path that begins at an import."""
        name, root = path.rpartition(".")[2], path.partition(".")[0]
        if _MODULES.fullmatch(path):
            yield f"the module {path} as a value"
        elif root == "torch" and self._needs_kernels:
            if not self._is_allowed(path, name):
                yield f"an operator of torch: {path}"
        elif root == "torch":
            if _BARRED.match(path):
                yield f"use of {path}"
            elif canonical(name) in self._forbidden and not LAYER.fullmatch(path):  # a layer may hold parameters
                yield f"the task's own operator: {path}"
        elif root in _PATHS:
            if not _PATHS[root].fullmatch(path):
                yield f"use of {path}"
        else:  # another module by way of an allowed one
            path_parts = path.removeprefix("collections.abc").split(".")[1:]
            if any(part.startswith("_") or part in sys.stdlib_module_names for part in path_parts):
                yield f"use of {path}"

    def _is_allowed(self, path: str, name: str) -> bool:
        if path == f"torch.{name}" and name in WORDS["torch"]:
            return True
        if _ALLOWED_PATHS.fullmatch(path) or LAYER.fullmatch(path):
            return True
        if self._backend == "cuda" and _EXTENSION.fullmatch(path):
            return True
        operator_match = re.fullmatch(r"torch\.((nn\.functional|special|linalg|Tensor|ops\.aten)\.)?\w+", path)
        return operator_match is not None and canonical(name) in self._allowed


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") and name != "requires_grad_"


def _is_reading(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "item"
