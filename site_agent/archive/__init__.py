"""The hospital's own image archive (PACS): images from it, reports to it, over DICOMweb (docs/hospitals.md).

The process that does this has a network and none of the federation's files: `site_agent.command_process` closes keys,
state and ledger before the first connection. It decodes nothing: it moves bytes between the archive and one folder,
which the trainer reads. No error, log line or progress names a study, an image or a patient; rows of a table are named
by number.

Imported by: site_agent.

    source      `dicomweb:URL?...`, and the local source that it becomes
    access      addresses, TLS and secrets of the archive
    dicomweb    the client: search, retrieve and store, with bounds
    cache       the folder of fetched files: private, bounded, complete or not listed
    transfer    from a source to a full cache; reports of a folder to the archive, each once
    commands    `archive-fetch`, `archive-send` and `archive-erase`
"""
