"""Tool servers that speak the Model Context Protocol (`environment.mcp`), over stdio or HTTP.

This package limits the size of messages, restarts servers and makes `rollout/tools.py:Tool` objects of their tools. It
imports the package mcp only where a server is configured. Begin with `servers.py`.
"""
