"""The schema is what the message types say, the stubs are what the schema says, and there is no place to hide data."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from lazaret.errors import LocalProtocolError
from protos import federation_pb2 as pb
from protos.schema import schema, schema_digest
from security.log.egress import permitted
from security.secagg import fields, messages, relay
from security.secagg.fields import DataClass, kinds
from security.secagg.registry import REGISTRY

ROOT = Path(__file__).parents[3]
FIELD = re.compile(r"^  (repeated )?(\w+) (\w+) = (\d+);  // ([\w-]+|see \w+); (.+)$")
STUBS = ("federation_pb2.py", "federation_pb2.pyi", "federation_pb2_grpc.py")


def test_the_committed_schema_is_what_the_types_say() -> None:
    assert (ROOT / "protos" / "federation.proto").read_text() == schema(), "run scripts/generate-protos"


def test_the_committed_stubs_are_what_the_schema_says(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}"]
    outputs = [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    subprocess.run([*command, *outputs, "protos/federation.proto"], cwd=ROOT, check=True, timeout=120)
    for name in STUBS:
        made, committed = tmp_path / "protos" / name, ROOT / "protos" / name
        assert made.read_text() == committed.read_text(), f"{name}: run scripts/generate-protos"


def test_every_field_states_its_class_and_its_bound() -> None:
    inside, fields = "", 0
    for line in schema().splitlines():
        if line.startswith("message "):
            inside = line.split()[1]
        elif line.startswith("  ") and " = " in line and inside not in ("FromSite", "FromCoordinator"):
            found = FIELD.match(line)
            assert found, f"{inside}: {line}"
            fields += 1
    assert fields > 150


def all_messages(start: Descriptor) -> dict[str, Descriptor]:
    found: dict[str, Descriptor] = {}
    waiting = [start]
    while waiting:
        message = waiting.pop()
        if message.name not in found:
            found[message.name] = message
            waiting += [field.message_type for field in message.fields if field.message_type]
    return found


def test_only_plain_types_travel() -> None:
    """No map, no Any, no float, no enum that grows: nothing whose size or meaning is open."""
    allowed = {
        FieldDescriptor.TYPE_BYTES,
        FieldDescriptor.TYPE_STRING,
        FieldDescriptor.TYPE_FIXED32,
        FieldDescriptor.TYPE_FIXED64,
        FieldDescriptor.TYPE_MESSAGE,
    }
    for start in (pb.FromSite.DESCRIPTOR, pb.FromCoordinator.DESCRIPTOR):
        for message in all_messages(start).values():
            assert not message.is_extendable
            for field in message.fields:
                assert field.type in allowed, f"{message.name}.{field.name}"
                assert field.is_repeated or field.has_presence, f"{message.name}.{field.name}"


def test_every_message_travels_in_its_direction_under_its_number() -> None:
    for envelope, allowed in ((pb.FromSite, relay.FROM_SITE), (pb.FromCoordinator, relay.FROM_COORDINATOR)):
        oneof = envelope.DESCRIPTOR.oneofs_by_name["message"]
        carried = {field.number: field.message_type.name for field in oneof.fields}
        assert carried == {entry.number: entry.name for entry in REGISTRY if entry.cls in allowed}
        assert len(envelope.DESCRIPTOR.fields) == len(carried) + 2
    assert {entry.cls for entry in REGISTRY} == relay.FROM_SITE | relay.FROM_COORDINATOR


def test_field_numbers_follow_the_types() -> None:
    for cls in (entry.cls for entry in REGISTRY):
        descriptor = pb.DESCRIPTOR.message_types_by_name[cls.__name__]
        assert [field.name for field in descriptor.fields] == [name for name, _ in kinds(cls)]
        assert [field.number for field in descriptor.fields] == list(range(1, len(descriptor.fields) + 1))


def classes_from_a_site() -> dict[str, set[str]]:
    reachable = all_messages(pb.FromSite.DESCRIPTOR)
    classes: dict[str, set[str]] = {}
    inside = ""
    for line in schema().splitlines():
        if line.startswith("message "):
            inside = line.split()[1]
        found = FIELD.match(line)
        if found and inside in reachable and found[2] == "bytes":
            classes.setdefault(found[5], set()).add(f"{inside}.{found[3]}")
    return classes


def test_no_field_can_carry_a_plaintext_update() -> None:
    """The only bytes of a site that are not digests, keys, signatures or shares are the masked vector and a bitmap."""
    classes = classes_from_a_site()
    assert classes.pop("masked-vector") == {"UploadFrame.data"}
    assert classes.pop("control") == {"Ack.bitmap"}
    assert classes.pop("sealed-share") == {"DealtShare.box", "DealtShare.pair"}
    assert set(classes) == {"digest", "signature", "public-key", "mask-share", "checkpoint"}


def test_the_digest_is_the_committed_files() -> None:
    assert schema_digest() == hashlib.sha256((ROOT / "protos" / "federation.proto").read_bytes()).hexdigest()


def test_bytes_without_a_class_have_no_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new field that holds free bytes does not slip into the schema unseen."""
    kinds(messages.UploadFrame)
    monkeypatch.delitem(fields._STATED[messages.UploadFrame], "data")
    with pytest.raises(LocalProtocolError, match=r"UploadFrame\.data: needs a class of data"):
        schema()


def test_the_header_explains_every_class_of_data() -> None:
    explained = schema().split("// Classes:")[1].split("There is no field")[0]
    assert all(re.search(rf"\b{name.value}\b", explained) for name in DataClass)


def test_one_service_one_stream() -> None:
    service = pb.DESCRIPTOR.services_by_name["Federation"]
    (method,) = service.methods
    assert (method.name, method.client_streaming, method.server_streaming) == ("Converse", True, True)


def test_the_egress_door_knows_every_message_of_a_site() -> None:
    assert {cls.__name__ for cls in relay.FROM_SITE} == set(permitted())


def test_what_a_site_may_send_is_frozen() -> None:
    """The list of the privacy promise, by hand: a message that a site gains, or that changes its class, shows here."""
    assert dict(permitted()) == {
        "Open": "control",
        "Hello": "control",
        "ModelRequest": "control",
        "Pong": "control",
        "Decline": "control",
        "Rollback": "control",
        "Ready": "control",
        "Refusal": "control",
        "Accusation": "control",
        "Abort": "control",
        "Agree": "control",
        "Ack": "control",
        "ChunkRequest": "control",
        "UploadHeader": "control",
        "Advert": "public-key",
        "Shares": "sealed-share",
        "Unmask": "mask-share",
        "Disclosure": "mask-share",
        "UploadFrame": "masked-vector",
        "Head": "checkpoint",
        "Cosignature": "checkpoint",
        "Held": "checkpoint",
    }
