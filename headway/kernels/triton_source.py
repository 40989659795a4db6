"""Triton kernels of a candidate's source: findings in their bodies, and a module of only the kernels, which a compiler
may import although the source is hostile."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from headway.kernels.operator_lists import WORDS
from headway.kernels.source_check import OperatorFinding
from headway.kernels.source_names import MODULES, TRITON_PATH, SourceNames

_PLAIN = (
    *(ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.UnaryOp, ast.BinOp, ast.Compare, ast.BoolOp, ast.IfExp),
    *(ast.Name, ast.Attribute, ast.Call, ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.expr_context),
)
_CALLED = re.compile(r"triton\.(cdiv|next_power_of_2|language\.constexpr)|math\.\w+|float|int|max|min")


def kernel_findings(tree: ast.Module) -> Iterator[OperatorFinding]:
    """Findings in the kernels of a module: names that no kernel needs. They matter because interpreter and compiler
    follow any attribute of a module."""
    names = SourceNames(tree)
    for kernel in ast.walk(tree):
        if isinstance(kernel, ast.FunctionDef) and names.is_jit(kernel):
            yield from _body_findings(kernel, names)


def _body_findings(kernel: ast.FunctionDef, names: SourceNames) -> Iterator[OperatorFinding]:
    for node in (inner for statement in kernel.body for inner in ast.walk(statement)):
        if finding := _forbidden_use(node, names):
            yield OperatorFinding(getattr(node, "lineno", kernel.lineno), f"in a kernel: {finding}")


def _forbidden_use(node: ast.AST, names: SourceNames) -> str:
    match node:
        case ast.Import() | ast.ImportFrom():
            return "an import"
        case ast.Attribute(attr=name) if name in MODULES or name.startswith("_"):
            return f"use of .{name}"
        case ast.Name(id=name) if name in WORDS["builtins"] or name in ("getattr", "hasattr"):
            return f"use of {name}"
        case ast.Name() if (names.path(node) or "triton").split(".")[0] not in ("triton", "math"):
            return f"use of {names.path(node)}"
    return ""


def kernel_module(source: str) -> str:
    """A module with only a source's kernels, their imports of triton and the constants at its top, so that importing or
    compiling it runs nothing else of the source."""
    tree = ast.parse(source)
    source_names, known_names, kept_statements = SourceNames(tree), set[str](), list[ast.stmt]()

    def is_allowed_path(path: str) -> bool:
        return path in ("math", "triton") or path.startswith("math.") or TRITON_PATH.fullmatch(path) is not None

    def is_plain(value: ast.AST | None) -> bool:
        for node in ast.walk(value) if value is not None else ():
            path = source_names.path(node) if isinstance(node, (ast.Name, ast.Attribute)) else None
            passes = isinstance(node, _PLAIN) and not (isinstance(node, ast.Attribute) and path is None)
            if isinstance(node, ast.Call):
                callee_path = source_names.path(node.func) or (node.func.id if isinstance(node.func, ast.Name) else "")
                passes = _CALLED.fullmatch(callee_path) is not None
            elif path is not None:
                passes = is_allowed_path(path)
            elif isinstance(node, ast.Name):
                passes = node.id in known_names or _CALLED.fullmatch(node.id) is not None
            if not passes:
                return False
        return True

    for node in tree.body:
        match node:
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases, level=0):
                module_prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                node.names = [alias for alias in aliases if is_allowed_path(module_prefix + alias.name)]
                kept_statements += [node] if node.names else []
            case ast.FunctionDef() if source_names.is_jit(node):
                defaults = ast.Tuple(elts=[*node.args.defaults, *filter(None, node.args.kw_defaults)])
                if is_plain(defaults) and not any(_body_findings(node, source_names)):
                    _strip(node, source_names, is_plain)
                    kept_statements.append(node)
                    known_names.add(node.name)
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ) if is_plain(value):
                if isinstance(node, ast.AnnAssign) and not is_plain(node.annotation):
                    node.annotation = ast.Constant(value=None)
                kept_statements.append(node)
                known_names.add(name)
    return ast.unparse(ast.fix_missing_locations(ast.Module(body=kept_statements, type_ignores=[])))


def _strip(node: ast.FunctionDef, names: SourceNames, is_plain: Callable[[ast.AST | None], bool]) -> None:
    """Remove a kernel's decorators other than triton.jit, and annotations that aren't plain."""
    node.decorator_list = [decorator for decorator in node.decorator_list if names.is_triton_jit(decorator)]
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call):
            decorator.args, decorator.keywords = [], [kw for kw in decorator.keywords if kw.arg and is_plain(kw.value)]
    for parameter in (argument for argument in ast.walk(node.args) if isinstance(argument, ast.arg)):
        parameter.annotation = parameter.annotation if is_plain(parameter.annotation) else None
    node.returns = None
