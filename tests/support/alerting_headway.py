"""`headway` whose alert watch looks often: ``python alerting_headway.py JOURNAL STALL train CONFIG ...``, like
stalled_headway.py. With ALERT_DISK_BYTES in the environment a disk is nearly full below so many bytes."""

from __future__ import annotations

import os
import sys

import faulty_headway
import stalled_headway

from headway.cli.main import main
from headway.orchestrator import train
from headway.orchestrator.stalls.alert_watch import AlertSettings

if __name__ == "__main__":
    journal, wanted, *command = sys.argv[1:]
    faulty_headway.note_workers(journal)
    train.STALLS = stalled_headway.SHORT
    train.ALERTS = AlertSettings(tick_s=0.2, disk_bytes=int(os.environ.get("ALERT_DISK_BYTES", "0")))
    stalled_headway.install(wanted)
    sys.exit(main(command))
