"""The records and Protocols between a service of many tenants' adapters and what trains and samples them.

The package owns the shape of a pass, a sample and their outcomes, and when each is durable. Begin with
``protocols.py``: `TenantTrainer` and `TenantSampler`.
"""
