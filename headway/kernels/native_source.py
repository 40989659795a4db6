"""Check of a candidate's C++ and CUDA sources for libraries that would compute in its place."""

from __future__ import annotations

import re
from collections.abc import Collection

_INCLUDES = re.compile(
    r"#\s*(?:include|import)\s*[<\"]((?:Python\.h|dlfcn|link\.h|mkl|cblas|oneapi|dnnl|Eigen|cublas|cudnn|cutlass|cufft|cusparse)"
    r"[^>\"]*)"
)
_CALLS = re.compile(
    r"\b(dlopen|dlsym|dlmopen|dl_iterate_phdr|cblas_\w+|mkl_\w+|dnnl_\w+|cublas\w+|cudnn\w+|[sd]gem[mv]_|syscall|system|"
    r"popen|v?fork|exec[lv]p?e?|Py[A-Z]\w+)\s*\("
)
_TORCH = re.compile(r"\b(?:at|torch)\s*::\s*(?:\w+\s*::\s*)*([a-z]\w*)\s*\(")
_HEADERS = re.compile(r"#\s*include\s*[<\"](?:torch|ATen|c10)/")
_METHODS = re.compile(
    r"(?:\.|->)\s*(matmul|mm|bmm|addmm|mv|dot|softmax|log_softmax|einsum|sum|mean|var|std|cumsum|conv\w*)\s*\("
)


def native_findings(text: str, allowed: Collection[str]) -> list[str]:
    """Calls in C++ or CUDA text that leave the computation to a library. ``allowed``: operators of torch without
    underscores. A linker that refuses undefined symbols finds the rest."""
    findings = [f"an include of {match[1]}" for match in _INCLUDES.finditer(text)]
    findings += [f"a call of {match[1]}" for match in _CALLS.finditer(text)]
    ops = [match[1] for match in _TORCH.finditer(text)]
    findings += [f"an operator of torch in C++: {name}" for name in ops if name.replace("_", "").lower() not in allowed]
    if ops or _HEADERS.search(text):
        findings += [f"a tensor computes in C++: .{match[1]}" for match in _METHODS.finditer(text)]
    return findings
