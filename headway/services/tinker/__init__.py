"""This package serves the protocol of the ``tinker`` SDK: many tenants' adapters on one frozen base.

It owns the wire (protobuf, JSON, routes), the order of requests and their log; passes and samples are computed behind
the Protocols of ``records/tenants``. It never loads torch. Begin with ``dispatch.py``, and ``ordering.py`` for the
rules.
"""
