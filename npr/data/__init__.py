"""Data sets: from files of a hospital or a benchmark to batches of tensors (docs/data.md).

It opens local files only. An error names a file, a row or a column.

Imported by: coordinator, npr, npr.dp, npr.lab, npr.methods, site_agent.

    sources     `open_dataset`: from a name to one fold of a data set
    catalogue   every image with label, unit, site and splits, before a fold is chosen
    sides       which patients train, test and validate: by key under differential privacy, else even and kept
    dataset     the images of one site, its sides, and all sites together
    manifest    a CSV manifest, or one folder for each class
    npz         a data set in one npz file
    columns     tables: the arrays of an npz file, and CSV files; columns that name DICOM files
    dicom       DICOM files in tables or folders, rows by identifier, and the layout of RSNA-ICH
    dicom_pixels  from one DICOM file to pixels: frame, rescale, window, colour
    dicom_decoding  the stored values of one frame, by one decoder for each compression; look-up tables
    fed_isic    Fed-ISIC2019
    generated   lesions that are drawn, as a data set for tests and the demo; class counts of the benchmark
    store       decoded images in memory or memory-mapped
    loader      batches, augmented and prepared in the background
"""
