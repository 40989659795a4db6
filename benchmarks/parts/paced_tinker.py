"""`headway serve-tinker` whose engines take at least so many seconds for a decode step, whatever its rows:
``python paced_tinker.py SECONDS serve-tinker FILE``.

A GPU's decode step is bound by the memory of the weights: rows of other tenants are free there. On a core each row
costs time, and the core is the clients' as well.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from headway.generator.service import GeneratorService

_VARIABLE = "HEADWAY_BENCHMARK_STEP_S"


class PacedGenerator(GeneratorService):
    """Waits after each step until its time is over."""

    def __init__(self, context: Any, **settings: Any) -> None:
        super().__init__(context, **settings)
        engine: Any = self._engine
        step, step_s = engine.step, float(os.environ[_VARIABLE])

        def paced() -> bool:
            began_s = time.perf_counter()
            worked = step()
            if worked:
                time.sleep(max(0.0, began_s + step_s - time.perf_counter()))
            return worked

        engine.step = paced


if __name__ == "__main__":
    from headway.cli.main import main
    from headway.generator.routing import replica

    os.environ[_VARIABLE] = sys.argv[1]
    replica._FACTORY = "paced_tinker:PacedGenerator"
    sys.exit(main(sys.argv[2:]))
