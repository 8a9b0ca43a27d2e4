"""The runtime inside a PACS: radiographs come in from any number of sources, results go back, and none is lost.

::

    StorageScp (C-STORE) ─┐                                             ┌─ StoreScu (C-STORE)
    OrthancChanges ───────┼─> Intake ─> DurableQueue ─> Workers ─> Destination ── DicomWeb (STOW-RS)
    QidoPolling ──────────┘              (on disk)                      └─ Folder

    storage_scp, polling   the sources; dicomweb is what the latter read a server by
    intake                 reads the header, leaves cbmir's own results alone, queues the rest
    queue, jobs            what is acknowledged is on disk until it is answered, refused or given up
    worker                 waits for a study to be quiet, analyses, keeps the results, hands them on, tries again
    destinations           where results go, besides dicomweb
    service                all of it together, with its signals: stop, and a new model or gallery

For research, not for diagnosis. docs/pacs.md says how to run it.
"""
