"""Immutable wire records and the Protocols between actors."""
