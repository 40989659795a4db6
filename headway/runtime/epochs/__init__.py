"""The epoch of a run: a numbered lease, without which nothing is committed. `lease.py` decides from records and times
alone; `register.py` takes and renews the lease in the run's folder. Begin there."""
