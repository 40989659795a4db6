"""This package summarises runs from their files: report, doctor, trace, costs, live view and the data of `watch`.

It imports records, config, runtime, telemetry and control, and never torch. It needs no live process of the run, whose
ledger, trace and rollouts it never changes. Begin with ``run_view.py`` (the state of a run), then ``verdict.py``.
"""
