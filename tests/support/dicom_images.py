"""DICOM files that a test draws and packs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pydicom
from pydicom.dataset import FileMetaDataset
from pydicom.pixels import set_pixel_data
from pydicom.uid import (
    JPEG2000,
    UID,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGExtended12Bit,
    JPEGLossless,
    JPEGLosslessSV1,
    JPEGLSLossless,
    JPEGLSNearLossless,
    RLELossless,
    generate_uid,
)

ROWS, COLUMNS = 32, 40
GREY = (np.arange(ROWS)[:, None] * 50 + np.arange(COLUMNS)[None] * 6).astype(np.uint16)
# The picture GREY in HTJ2K, reversible and in the order RPCL, by another encoder (OpenJPH).
HTJ2K_STREAM = bytes.fromhex(
    "ff4fff5100294000000000280000002000000000000000000000002800000020000000000000000000010f0101ff50000800020000000aff"
    "52000c00020001000504044001ff5c00132088909090909090909090909090888888ff64001700014f70656e4a50482056657220302e3236"
    "2e332eff90000a0000000000c50001ff93c0002a0071fce5fa01423400c00011c00013802773002217f900a23400c0001240001540f52273"
    "00904386fc001080775600c0001510000568b6b5f6d7e00b7500c68d8d8d8de00c463181ecb800c00015900005aaaaaaaaaaefe0a7a7a7c2"
    "7800e06030180c0683c1e0fe843d88407bf62101ecbc00c0002d380005d300922449922449fc7f80a7a7a7a7a7a7a7427d00625114455114"
    "455114455114455114ff7a201081efd84207bf61081efd84207bf61081ecb701ffd9"
)
PLAIN = (ExplicitVRLittleEndian, ImplicitVRLittleEndian, ExplicitVRBigEndian, DeflatedExplicitVRLittleEndian)


def drawn(array, *, modality="MR", photometric="MONOCHROME2", bits=16, frames=1, **more) -> pydicom.Dataset:
    """A file with these stored values; colour by pixel where the last axis has three."""
    header = pydicom.Dataset()
    header.file_meta = FileMetaDataset()
    header.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    header.file_meta.MediaStorageSOPClassUID = UID("1.2.840.10008.5.1.4.1.1.7")
    header.SOPClassUID, header.SOPInstanceUID = header.file_meta.MediaStorageSOPClassUID, generate_uid()
    header.file_meta.MediaStorageSOPInstanceUID = header.SOPInstanceUID
    header.StudyInstanceUID, header.SeriesInstanceUID, header.PatientID = generate_uid(), generate_uid(), "somebody"
    header.Modality = modality
    if modality == "CT":
        header.RescaleSlope, header.RescaleIntercept = 1, 0
    stored = np.stack([array] * frames) if frames > 1 else array
    if frames > 1:
        header.NumberOfFrames = frames
    set_pixel_data(header, stored, "MONOCHROME2" if photometric == "PALETTE COLOR" else photometric, bits)
    header.PhotometricInterpretation = photometric
    for name, value in more.items():
        setattr(header, name, value)
    return header


def packed(header: pydicom.Dataset, syntax: UID) -> pydicom.Dataset:
    """The same image in another transfer syntax."""
    if syntax in (RLELossless, JPEGLSLossless, JPEG2000Lossless):
        header.compress(syntax, generate_instance_uid=False)
    elif syntax == JPEGLSNearLossless:
        header.compress(syntax, jls_error=2, generate_instance_uid=False)
    elif syntax == JPEG2000:
        header.compress(syntax, j2k_psnr=[90], generate_instance_uid=False)
    elif syntax not in PLAIN:
        return by_gdcm(header, syntax)
    else:
        if syntax == ExplicitVRBigEndian and header.BitsAllocated == 16:
            header.PixelData = np.frombuffer(header.PixelData, "<u2").astype(">u2").tobytes()
        header.file_meta.TransferSyntaxUID = syntax
    return header


def by_gdcm(header: pydicom.Dataset, syntax: UID) -> pydicom.Dataset:
    import tempfile

    import gdcm

    kinds = {
        JPEGLossless: gdcm.TransferSyntax.JPEGLosslessProcess14,
        JPEGLosslessSV1: gdcm.TransferSyntax.JPEGLosslessProcess14_1,
        JPEGExtended12Bit: gdcm.TransferSyntax.JPEGExtendedProcess2_4,
    }
    with tempfile.TemporaryDirectory() as folder:
        source, target = f"{folder}/a.dcm", f"{folder}/b.dcm"
        header.save_as(source, enforce_file_format=True)
        reader = gdcm.ImageReader()
        reader.SetFileName(source)
        assert reader.Read()
        change = gdcm.ImageChangeTransferSyntax()
        change.SetTransferSyntax(gdcm.TransferSyntax(kinds[syntax]))
        change.SetInput(reader.GetImage())
        assert change.Change()
        writer = gdcm.ImageWriter()
        writer.SetFile(reader.GetFile())
        writer.SetImage(change.GetOutput())
        writer.SetFileName(target)
        assert writer.Write()
        return pydicom.dcmread(target)


def saved(header: pydicom.Dataset, path: Path) -> Path:
    header.save_as(path, enforce_file_format=True)
    return path
