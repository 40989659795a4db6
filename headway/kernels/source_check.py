"""Walk of a candidate's source that follows tensors and layers, and finds operators of torch that aren't allowed.

Names, attributes, containers, functions and what they return are followed without regard to the order of statements.
Where a name is computed, the walk errs on the side of a finding.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec

from headway.kernels.native_source import native_findings
from headway.kernels.operator_lists import WORDS, canonical
from headway.kernels.source_names import FUNCTIONS, LAYER, TRITON_PATH, SourceFunction, SourceNames, folded, parameters
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
_CLEAN_PATHS = re.compile(r"math|ctypes|typing|triton|torch\.(cuda|utils|device|Size|finfo|iinfo|is_|get_|set_|manual)")
_COMPUTING = frozenset(("sum", "max", "min", "abs", "pow", "divmod", "round", "sorted"))
_CLEAN_BUILTINS = frozenset(("len", "isinstance", "issubclass", "hasattr", "callable", "range", "id", "print", "str"))
MOST_PASSES = 64
_CALLED_BY_TORCH = ("forward", "ModelNew")
_CALLING = re.compile(r"map|filter|sorted|max|min|functools\.\w+|.*\.register_\w*hook\w*")  # their arguments
_IMPLICIT = ("forward", "backward", "setup_context")  # methods that torch calls

Kinds = frozenset[str]  # of "tensor", "layer": what a value may be, or hold
NOTHING: Kinds = frozenset()
TENSOR: Kinds = frozenset(("tensor",))
A_LAYER: Kinds = frozenset(("layer",))


class OperatorFinding(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Use of an operator that the back end doesn't allow, or of a way around the check."""

    line: int
    text: str


class SourceCheck:
    """Walk of a module, repeated until no name's kinds grow, and once more to report.

    ``allowed`` and ``forbidden``: operators of torch by name; the second are those of back end "torch".
    """

    def __init__(
        self, tree: ast.Module, backend: KernelBackend, allowed: Iterable[str], forbidden: Iterable[str]
    ) -> None:
        self._tree = tree
        self._backend = backend
        self._own = backend != "torch"  # kernels of its own are asked for
        self._allowed = {canonical(name) for name in allowed}
        self._forbidden = {canonical(name) for name in forbidden}
        self._source = SourceNames(tree)
        self._names: dict[tuple[int, str], Kinds] = {}  # (scope, name)
        self._attributes: dict[str, Kinds] = defaultdict(lambda: NOTHING)  # of all objects, by name
        self._parameters: dict[tuple[int, str], Kinds] = defaultdict(lambda: NOTHING)
        self._returns: dict[int, Kinds] = defaultdict(lambda: NOTHING)
        self._scopes: list[tuple[int, str]] = [(0, "")]  # function's id and name
        self._grew = True
        self._found: set[OperatorFinding] | None = None

    def findings(self) -> list[OperatorFinding]:
        """All findings of the module, by line."""
        for _ in range(MOST_PASSES):
            if not self._grew:
                break
            self._grew = False
            self._walk(self._tree.body)
        self._found = set()
        if self._grew:
            self._report(1, "names depend on each other in too long a chain to be checked")
        self._walk(self._tree.body)
        if self._own:
            self._report_native()
        return sorted(self._found)

    def _report_native(self) -> None:
        nodes = list(ast.walk(self._tree))
        strings = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        found = [(node.lineno, text) for node in strings for text in native_findings(str(node.value), self._allowed)]
        joined = native_findings("".join(str(node.value) for node in strings), self._allowed)
        seen = {text for _, text in found}
        for line, text in [*found, *((1, text) for text in joined if text not in seen)]:
            self._report(line, text)
        paths = [*self._source.modules.values(), *(self._source.path(node) or "" for node in nodes)]
        made = {
            "cpp": any(isinstance(node, ast.Name) and node.id == "load_cpp" for node in nodes),
            "triton": bool(self._source.kernels),
            "cuda": any(path.startswith("torch.utils.cpp_extension.load") for path in paths),
        }
        if not made[self._backend]:
            self._report(1, f"no kernel of its own for back end {self._backend!r}")

    def _report(self, line: int, text: str) -> None:
        if self._found is not None:
            self._found.add(OperatorFinding(line=line, text=text))

    def _grow(self, table: dict[Any, Kinds], key: object, kinds: Kinds) -> None:
        before = table.get(key)
        if before is None or not kinds <= before:
            table[key] = (before or NOTHING) | kinds
            self._grew = True

    def _declare(self, name: str, kinds: Kinds, line: int) -> None:
        self._refuse_rebinding(name, line)
        if name in _CALLED_BY_TORCH and "layer" in kinds:
            self._report(line, f"{name} is a layer of torch")
        scope = 0 if name in self._source.shared else self._scopes[-1][0]
        self._grow(self._names, (scope, name), kinds)

    def _refuse_rebinding(self, name: str, line: int) -> None:
        if name in self._source.kernels or name in self._source.modules or name == "load_cpp":
            self._report(line, f"{name} is bound to something else")

    # Statements.

    def _walk(self, body: Iterable[ast.AST]) -> None:
        for node in body:
            self._statement(node)

    def _statement(self, node: ast.AST) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for decorator in node.decorator_list:
                    self._kinds(decorator)
                if self._source.kernels.get(node.name) != id(node):  # Triton's compute on their own
                    self._refuse_rebinding(node.name, node.lineno)
                    self._function(node)
            case ast.ClassDef():
                self._class(node)
            case ast.Import() | ast.ImportFrom():
                self._import(node)
            case ast.Assign(targets=targets, value=value):
                known = isinstance(value, ast.Lambda)
                kinds = self._function(value) if known else self._kinds(value)
                for target in targets:
                    if not (known and isinstance(target, ast.Name)):
                        self._bind(target, NOTHING if known else kinds)
            case ast.AugAssign(target=target, op=sign, value=value):
                kinds = self._kinds(target) | self._kinds(value)
                self._arithmetic(node, [sign], kinds)
                self._bind(target, kinds)
            case ast.For(target=target, iter=values) | ast.AsyncFor(target=target, iter=values):
                self._bind_each(target, values)
                self._walk([*node.body, *node.orelse])
            case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
                self._bind(target, self._kinds(value))
            case ast.Return(value=ast.expr() as value):
                self._grow(self._returns, self._scopes[-1][0], self._kinds(value))
            case ast.MatchAs(name=str() as name) | ast.MatchStar(name=str() as name):
                self._declare(name, TENSOR, 1)
                self._walk(ast.iter_child_nodes(node))
            case _:
                if isinstance(node, ast.AnnAssign) and node.value is not None:
                    self._bind(node.target, self._kinds(node.value))
                for child in ast.iter_child_nodes(node):
                    self._kinds(child) if isinstance(child, ast.expr) else self._statement(child)

    def _class(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            path = self._source.path(base)
            if path is not None and re.fullmatch(r"torch\.(Tensor|nn\.(parameter\.)?Parameter)", path):
                self._report(base.lineno, f"a subclass of {path}")
            self._kinds(base)
        for part in [*node.decorator_list, *(keyword.value for keyword in node.keywords)]:
            self._kinds(part)
        self._refuse_rebinding(node.name, node.lineno)
        if any(map(self._is_layer, self._source.layers.get(node.name, ()))):
            self._report(node.lineno, f"{node.name} computes as a layer of torch does")
        self._walk(node.body)
        for name in {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}:  # class attributes
            self._grow(self._attributes, name, self._names.get((self._scopes[-1][0], name), NOTHING))

    def _function(self, node: SourceFunction) -> Kinds:
        """Walk a function's body with its parameters' kinds; the kinds of what it returns."""
        name = getattr(node, "name", "")
        method = id(node) in self._source.methods
        implicit = method and (name in _IMPLICIT or (name.startswith("__") and name != "__init__"))
        for part in ast.iter_child_nodes(node.args):
            if isinstance(part, ast.expr):
                self._kinds(part)  # default
        self._scopes.append((id(node), name))
        for position, parameter in enumerate(parameters(node)):
            if parameter.annotation is not None:
                self._kinds(parameter.annotation)
            given = self._parameters[id(node), parameter.arg]
            self._declare(parameter.arg, TENSOR if implicit and position else given, parameter.lineno)
        if isinstance(node, ast.Lambda):
            self._grow(self._returns, id(node), self._kinds(node.body))
        else:
            self._walk(node.body)
        self._scopes.pop()
        return self._returns[id(node)]

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            path = alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"
            root = path.split(".")[0]
            strange = root not in WORDS["imports"] or (root == "ctypes" and not self._own)
            if strange or alias.name == "*" or (isinstance(node, ast.ImportFrom) and node.level):
                self._report(node.lineno, f"import of {path}")
            elif not _MODULES.fullmatch(path) and not LAYER.fullmatch(path):
                self._reference(node.lineno, path)

    def _bind(self, target: ast.AST, kinds: Kinds) -> None:
        match target:
            case ast.Name(id=name):
                self._declare(name, kinds, target.lineno)
            case ast.Attribute(value=value, attr=name):
                if self._source.path(value) is not None or name.startswith("__") or name in _CALLED_BY_TORCH:
                    self._report(target.lineno, f"assignment to {ast.unparse(target)}")
                self._grow(self._attributes, name, kinds)
            case ast.Subscript(value=value, slice=part):
                self._kinds(part)
                self._kinds(value)
                self._put_into(value, kinds)
            case ast.Tuple() | ast.List() | ast.Starred():
                for part in ast.iter_child_nodes(target):
                    self._bind(part, kinds)

    def _put_into(self, holder: ast.expr, kinds: Kinds) -> None:
        """Add what a container is given to the kinds of the name that holds it."""
        while isinstance(holder, ast.Subscript):
            holder = holder.value
        if isinstance(holder, (ast.Name, ast.Attribute)):
            self._bind(holder, kinds)

    def _bind_each(self, target: ast.expr, values: ast.expr) -> None:
        """Bind a loop's target; that of enumerate() and zip() part by part."""
        match target, values:
            case ast.Tuple(elts=[count, part]), ast.Call(func=ast.Name(id="enumerate")):
                self._bind(count, NOTHING)
                self._bind(part, self._kinds(values))
            case ast.Tuple(elts=parts), ast.Call(func=ast.Name(id="zip"), args=sources) if len(parts) == len(sources):
                for part, source in zip(parts, sources, strict=True):
                    self._bind(part, self._kinds(source))
            case _:
                self._bind(target, self._kinds(values))

    # Expressions.

    def _kinds(self, node: ast.AST) -> Kinds:
        """Kinds of an expression, with findings on the way."""
        path = self._source.path(node)
        if path is not None:
            self._reference(getattr(node, "lineno", 1), path)
            return A_LAYER if self._own and LAYER.fullmatch(path) else NOTHING  # a class: what it makes is one
        match node:
            case ast.Name(id=name):
                return self._name(node, name)
            case ast.Attribute(value=value, attr=name):
                self._hand_on(self._source.functions.get(name, ()))
                return self._attribute(node, self._kinds(value), name)
            case ast.Call():
                return self._call(node)
            case ast.BinOp(op=sign) | ast.UnaryOp(op=sign):
                kinds = self._parts(node)
                self._arithmetic(node, [sign], kinds)
                return kinds
            case ast.Compare(ops=signs):
                self._arithmetic(node, signs, self._parts(node))
                return NOTHING
            case ast.Subscript(value=value, slice=part):
                if isinstance(part, ast.Lambda):  # a grid of Triton's: its argument is the kernel's constants
                    self._function(part)
                elif not (isinstance(part, ast.Name) and part.id in self._source.functions):
                    self._kinds(part)
                return self._kinds(value)
            case ast.Lambda():
                self._hand_on([node])
                return self._function(node)
            case ast.NamedExpr(target=target, value=value):
                kinds = self._kinds(value)
                self._bind(target, kinds)
                return kinds
            case ast.Yield(value=ast.expr() as value) | ast.YieldFrom(value=value):
                self._grow(self._returns, self._scopes[-1][0], self._kinds(value))
                return NOTHING
            case ast.comprehension(target=target, iter=values, ifs=conditions):
                self._bind_each(target, values)
                return NOTHING.union(*map(self._kinds, conditions))
        return self._parts(node)

    def _parts(self, node: ast.AST) -> Kinds:
        return NOTHING.union(*map(self._kinds, ast.iter_child_nodes(node)))

    def _name(self, node: ast.Name, name: str) -> Kinds:
        for scope, _ in reversed(self._scopes):
            if (scope, name) in self._names:
                return self._names[scope, name]
        if name in WORDS["builtins"]:
            self._report(node.lineno, f"use of {name}")
        self._hand_on(function for function in self._source.functions.get(name, ()) if _name_of(function) != "__init__")
        return NOTHING

    def _hand_on(self, functions: Iterable[SourceFunction]) -> None:
        """Functions that are values: whoever calls them may pass tensors."""
        for function in functions:
            self._pass_everything(function, TENSOR)

    def _attribute(self, node: ast.AST, base: Kinds, name: str) -> Kinds:
        line = getattr(node, "lineno", 1)
        dunder = name.startswith("__") and name.endswith("__") and name not in WORDS["dunders"]
        if dunder or name in WORDS["frames"]:
            self._report(line, f"use of .{name}")
        if not self._own:
            itself = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
            if canonical(name) in self._forbidden and not itself and name not in self._source.functions:
                self._report(line, f"the task's own operator: .{name}")
            if "layer" in base and name not in WORDS["layer"] | WORDS["describing"]:
                self._report(line, f"a layer computes: .{name}")
            return TENSOR if "layer" in base and name in WORDS["layer"] else base | self._attributes[name]
        if base and name in WORDS["describing"]:
            return NOTHING
        if "layer" in base and name in WORDS["layer"]:
            return base | TENSOR
        if base and name not in WORDS["moving"] and canonical(name) not in self._allowed:
            self._report(line, f"{'a layer' if 'layer' in base else 'a tensor'} computes: .{name}")
        return base | self._attributes[name] | (TENSOR | A_LAYER if name in WORDS["state"] else NOTHING)

    def _arithmetic(self, node: ast.expr | ast.stmt, signs: Iterable[ast.AST], kinds: Kinds) -> None:
        computing = [sign for sign in signs if not isinstance(sign, (ast.Not, ast.Is, ast.IsNot, ast.In, ast.NotIn))]
        if any(isinstance(sign, ast.MatMult) for sign in computing):
            if self._own or "matmul" in self._forbidden:
                self._report(node.lineno, "a product of matrices by @")
        elif computing and self._own and "tensor" in kinds and self._scopes[-1][1] != "__init__":  # there are no inputs
            self._report(node.lineno, f"arithmetic on a tensor: {type(computing[0]).__name__}")

    def _call(self, node: ast.Call) -> Kinds:
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        given = {id(part): self._kinds(part) for part in arguments if not isinstance(part, ast.Lambda)}
        kinds = NOTHING.union(*given.values())
        path = self._source.path(node.func)
        for part in arguments:
            if isinstance(part, ast.Lambda):  # given to a method, it may be a hook of torch's
                hook = path is None and isinstance(node.func, ast.Attribute)
                self._pass_everything(part, TENSOR if hook else kinds)
                kinds |= self._function(part)
        if _CALLING.fullmatch(path or ast.unparse(node.func)):
            self._no_layer(node, kinds)
        if path is not None:
            if self._own and path.startswith("math.") and "tensor" in kinds:
                self._report(node.lineno, f"arithmetic on a tensor: {path}()")
            if self._own or not LAYER.fullmatch(path):  # a layer may hold parameters, if it isn't called
                self._reference(node.lineno, path)
            return self._result_of(path, kinds)
        match node.func:
            case ast.Name() as called:
                return self._call_name(node, called, given, kinds)
            case ast.Attribute(value=value, attr=name):
                return self._call_method(node, value, name, given, kinds)
            case ast.Lambda() as function:
                self._pass_everything(function, kinds)
                return self._function(function)
        base = self._kinds(node.func)
        self._no_layer(node, base)
        return kinds | base

    def _no_layer(self, node: ast.Call, kinds: Kinds) -> None:
        if "layer" in kinds:
            self._report(node.lineno, f"a layer of torch is called: {ast.unparse(node.func)}")

    def _call_name(self, node: ast.Call, callee: ast.Name, given: dict[int, Kinds], kinds: Kinds) -> Kinds:
        name = callee.id
        if name in ("getattr", "setattr") and len(node.args) >= 2:
            attribute = folded(node.args[1])
            if attribute is None:
                self._report(node.lineno, f"{name} with a computed name")
                return kinds
            part = ast.copy_location(ast.Attribute(value=node.args[0], attr=attribute, ctx=ast.Load()), node)
            if name == "setattr":
                self._bind(part, kinds)
                return NOTHING
            self._hand_on(self._source.functions.get(attribute, ()))
            return self._attribute(part, given.get(id(node.args[0]), NOTHING), attribute)
        if self._own and name in _COMPUTING and "tensor" in kinds:
            self._report(node.lineno, f"arithmetic on a tensor: {name}()")
        if name in _CLEAN_BUILTINS:
            return NOTHING
        layer = A_LAYER if any(map(self._is_layer, self._source.layers.get(name, ()))) else NOTHING
        if name in self._source.functions:
            called = self._source.functions[name]
            self._pass(called, node, given, bound=False)
            return layer.union(*(self._returns[id(function)] for function in called))
        base = self._name(callee, name)
        self._no_layer(node, base)
        return kinds | base | layer

    def _call_method(self, node: ast.Call, value: ast.expr, name: str, given: dict[int, Kinds], kinds: Kinds) -> Kinds:
        match value:
            case ast.Call(func=ast.Name(id="super")) if name not in WORDS["super"]:
                self._report(node.lineno, f"super().{name}()")
            case ast.Name(id=kernel) if kernel in self._source.kernels and name != "warmup":
                self._report(node.lineno, f"a Triton kernel's .{name}")
        base = self._kinds(value)
        if name in ("register_buffer", "register_parameter", "add_module", "register_module") and len(node.args) >= 2:
            self._grow(self._attributes, folded(node.args[0]) or "", kinds)
        if name in ("append", "extend", "insert", "update", "setdefault", "add") and "tensor" in kinds - base:
            self._put_into(value, kinds)
        result = self._attribute(node.func, base, name)
        named = self._source.functions.get(name, []) + self._source.functions.get(ast.unparse(node.func), [])
        if named and not base:
            self._pass(named, node, given, bound=True)
            return NOTHING.union(*(self._returns[id(function)] for function in named))
        self._no_layer(node, NOTHING if base else self._attributes[name])
        return NOTHING if name in WORDS["describing"] and base else result | kinds

    def _pass(
        self, functions: Iterable[SourceFunction], node: ast.Call, given: dict[int, Kinds], *, bound: bool
    ) -> None:
        """Give the kinds of a call's arguments to the parameters of the functions that it may call."""
        for function in functions:
            names = [parameter.arg for parameter in parameters(function)]
            if id(function) in self._source.methods and (bound or _name_of(function) == "__init__"):
                names = names[1:]
            spread = any(isinstance(part, ast.Starred) for part in node.args) or function.args.vararg
            if spread or len(node.args) > len(names) or any(keyword.arg is None for keyword in node.keywords):
                self._pass_everything(function, NOTHING.union(*given.values()))
            for name, part in zip(names, node.args, strict=False):
                self._grow(self._parameters, (id(function), name), given.get(id(part), NOTHING))
            for keyword in node.keywords:
                self._grow(self._parameters, (id(function), keyword.arg), given.get(id(keyword.value), NOTHING))

    def _pass_everything(self, function: SourceFunction, kinds: Kinds) -> None:
        for parameter in list(parameters(function))[id(function) in self._source.methods :]:
            self._grow(self._parameters, (id(function), parameter.arg), kinds)

    # Names that begin at an import.

    def _reference(self, line: int, path: str) -> None:
        name = path.rpartition(".")[2]
        root = path.partition(".")[0]
        if _MODULES.fullmatch(path):
            self._report(line, f"the module {path} as a value")
        elif root == "torch" and self._own:
            if not self._is_allowed(path, name):
                self._report(line, f"an operator of torch: {path}")
        elif root == "torch":
            if _BARRED.match(path):
                self._report(line, f"use of {path}")
            elif canonical(name) in self._forbidden:
                self._report(line, f"the task's own operator: {path}")
        elif root in _PATHS:
            if not _PATHS[root].fullmatch(path):
                self._report(line, f"use of {path}")
        else:  # another module by way of an allowed one
            parts = path.removeprefix("collections.abc").split(".")[1:]
            if any(part.startswith("_") or part in sys.stdlib_module_names for part in parts):
                self._report(line, f"use of {path}")

    def _is_allowed(self, path: str, name: str) -> bool:
        if path == f"torch.{name}" and name in WORDS["torch"]:
            return True
        if _ALLOWED_PATHS.fullmatch(path) or (self._backend == "cuda" and _EXTENSION.fullmatch(path)):
            return True
        known = re.fullmatch(r"torch\.((nn\.functional|special|linalg|Tensor|ops\.aten)\.)?\w+", path)
        return known is not None and canonical(name) in self._allowed

    def _is_layer(self, path: str) -> bool:
        return self._own or canonical(path.rpartition(".")[2]) in self._forbidden

    def _result_of(self, path: str, kinds: Kinds) -> Kinds:
        if _CLEAN_PATHS.match(path):
            return NOTHING
        if LAYER.fullmatch(path):
            return A_LAYER if self._is_layer(path) else kinds & A_LAYER
        return kinds | TENSOR if path.startswith("torch.") else kinds


def _name_of(function: SourceFunction) -> str:
    return function.name if isinstance(function, FUNCTIONS) else ""
