"""This package routes requests to replicas, checks the replicas' health, and limits foreign callers.

It is torch-free and runs in the pool's event loop; the rules of its decisions are in `headway.control.routing`. It may
not import the engines. Begin reading at `router.py`.
"""
