"""Simulation of a run by the real orchestrator in virtual time, plans of runs on devices, and costs.

The package owns scenario, pool and catalogue files, profiles of a machine, and estimates of a scenario from a run's
ledger. It imports records, config, control, runtime, telemetry, the orchestrator, ``models.sizes`` and the fake actors,
and never torch. Begin with ``simulate.py`` for simulations and ``run_plan.py`` for plans.
"""
