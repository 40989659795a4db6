"""Simulators in lanes behind one protocol: gymnasium's, EnvPool's and users' own. Begin with ``opening.py``."""
