"""The tenants' trainer: many adapters on one frozen base, each as if it were trained alone.

The package owns an adapter's state (weights, moments, version, accumulated gradients), its durable slots, and passes
over data with free targets. Begin with ``service.py``.
"""
