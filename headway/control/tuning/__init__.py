"""The models that match production and consumption: forecast before a run, diagnosis after it, control during it.

Pure computation on step records; setting knobs and moving devices belongs to the orchestrator. Begin with
``queue_model.py``, then ``ledger_model.py`` (its estimate from a run) and ``controller.py`` (decisions during a run).
"""
