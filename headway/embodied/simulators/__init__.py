"""Simulators of several lanes behind one interface."""
