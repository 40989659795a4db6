"""This package runs the HTTP services: `headway serve` (a model's endpoint), `headway serve-kernels`, `headway watch`.

It may import every other package, lazily; only `cli` and `api.py` import it. HTTP itself (parsing, limits, keys) is in
``generator/endpoint``. Begin with ``serve.py``, or ``serve_kernels.py`` for the kernel service.
"""
