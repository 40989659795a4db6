"""This package is the HTTP endpoint for agents: the APIs of OpenAI and Anthropic over recorded sessions.

It owns parsing, validation, streaming and error formats, and the server itself. It samples only through the sessions of
`recording`, and may not import the engines. Begin reading at `app.py`, then `dialect.py`, the base of the APIs.
"""
