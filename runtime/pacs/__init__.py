"""The runtime in a PACS: radiographs arrive from any number of sources and results are sent back, without any loss.

::

    StorageScp (C-STORE) ─┐                                             ┌─ StoreScu (C-STORE)
    OrthancChanges ───────┼─> Intake ─> DurableQueue ─> Workers ─> Destination ── DicomWeb (STOW-RS)
    QidoPolling ──────────┘              (on disk)                      └─ Folder

`service` runs all of it together until a signal ends it (docs/pacs.md). For research, not for diagnosis.
"""
