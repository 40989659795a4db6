"""The records that are stored or sent between processes, and the Protocols between orchestrator and actors.

The package owns immutable structs (rollouts, groups, batches, reports, ledger and trace lines), token arrays and the
typed errors with their exit codes. It imports no other package of Headway, and never torch. Begin with ``rollout.py``
for the life of a rollout, and ``clients.py`` for the interfaces of generator, trainer and verifier.
"""
