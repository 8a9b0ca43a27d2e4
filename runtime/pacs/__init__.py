"""The runtime inside a PACS: radiographs come in from any number of sources, results go back, and none is lost.

::

    StorageScp (C-STORE) ─┐                                             ┌─ StoreScu (C-STORE)
    OrthancChanges ───────┼─> Intake ─> DurableQueue ─> Workers ─> Destination ── DicomWeb (STOW-RS)
    QidoPolling ──────────┘              (on disk)                      └─ Folder

`service` runs all of it together until a signal ends it (docs/pacs.md). For research, not for diagnosis.
"""
