"""This package owns the record of a run's rollouts in Arrow segments: its writer, lock-free reader and export.
A failure to record may not affect the run. Begin with `recorder.py` for writing and `reader.py` for reading.
"""
