"""Which manifests a site believes. Each rule is tested, and tested again with that one rule off: then it passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

from lazaret import errors
from lazaret.errors import CertificateError, ManifestRejected, PolicyViolation, ToolkitError
from security.identity import acceptance, pki, rules
from security.identity.acceptance import seal
from security.identity.manifest import Manifest, Privacy, Revocation
from security.identity.pki import Purpose, Role
from tests.support.consortium_world import DAY, NOW, World, subject

Forge = Callable[[World, Manifest], bytes]


def with_(document: Any, **changes: Any) -> Any:
    return document.model_copy(update=changes)


def change_member(manifest: Manifest, index: int, **changes: Any) -> Manifest:
    roster = list(manifest.roster)
    roster[index] = roster[index].model_copy(update=changes)
    return with_(manifest, roster=tuple(roster))


def issued(world: World, member: str, purpose: Purpose, role: Role = Role.SITE) -> str:
    key = pki.new_signing_key() if purpose is Purpose.SIGNING else pki.new_tls_key()
    certificate = pki.issue(
        world.key, world.authority.root, subject(member, role), purpose, key.public_key(), now_ms=NOW
    )
    return pki.to_pem(certificate)


def tampered(world: World, manifest: Manifest) -> bytes:
    weaker = with_(manifest.aggregation, colluders=0, least_survivors=3, single_history=False)
    signature = acceptance.sign(manifest, world.key)
    return seal(with_(manifest, aggregation=weaker), signature)


def other_federation(world: World, manifest: Manifest) -> bytes:
    return world.signed(with_(manifest, federation="ct-scans"))


def from_the_future(world: World, manifest: Manifest) -> bytes:
    return world.signed(with_(manifest, issued_at_ms=NOW + 3 * DAY))


def tls_certificate_for_signing(world: World, manifest: Manifest) -> bytes:
    """With an Ed25519 key in it, so that nothing but its stated purpose tells it apart."""
    key = pki.new_signing_key().public_key()
    certificate = pki.issue(world.key, world.authority.root, subject("graz"), Purpose.TLS, key, now_ms=NOW)
    return world.signed(change_member(manifest, 0, signing_certificate=pki.to_pem(certificate)))


def certificate_of_another(world: World, manifest: Manifest) -> bytes:
    return world.signed(change_member(manifest, 0, signing_certificate=issued(world, "salzburg", Purpose.SIGNING)))


def coordinators_certificate(world: World, manifest: Manifest) -> bytes:
    pem = issued(world, "graz", Purpose.SIGNING, Role.COORDINATOR)
    return world.signed(change_member(manifest, 0, signing_certificate=pem))


def revoked_member(world: World, manifest: Manifest) -> bytes:
    entry = Revocation(certificate=manifest.roster[0].signing_sha256, member="graz", reason="lost", at_ms=NOW)
    return world.signed(with_(manifest, revocations=(entry,)))


def one_member_twice(world: World, manifest: Manifest) -> bytes:
    return world.signed(with_(manifest, roster=(*manifest.roster[:2], manifest.roster[1])))


def coordinator_in_the_roster(world: World, manifest: Manifest) -> bytes:
    pem = issued(world, "hub", Purpose.SIGNING)
    double = manifest.roster[1].model_copy(update={"id": "hub", "signing_certificate": pem})
    return world.signed(with_(manifest, roster=(manifest.roster[0], double, manifest.roster[2])))


def unsorted_roster(world: World, manifest: Manifest) -> bytes:
    return world.signed(with_(manifest, roster=tuple(reversed(manifest.roster))))


def layout_too_small(world: World, manifest: Manifest) -> bytes:
    layout = replace(manifest.aggregation.layout, roster_size=2)
    return world.signed(with_(manifest, aggregation=with_(manifest.aggregation, layout=layout)))


def one_tls_key_for_two(world: World, manifest: Manifest) -> bytes:
    return world.signed(change_member(manifest, 0, tls_keys=manifest.roster[1].tls_keys))


def one_log_key_for_two(world: World, manifest: Manifest) -> bytes:
    return world.signed(change_member(manifest, 0, audit_root=manifest.roster[1].audit_root))


def mixed_up_log_keys(world: World, manifest: Manifest) -> bytes:
    member = manifest.roster[0]
    return world.signed(change_member(manifest, 0, audit_root=member.cosigner, cosigner=member.audit_root))


def two_sites(world: World, manifest: Manifest) -> bytes:
    aggregation = with_(manifest.aggregation, least_survivors=2, colluders=0)
    return world.signed(with_(manifest, roster=manifest.roster[:2], aggregation=aggregation))


def two_sites_without_privacy(world: World, manifest: Manifest) -> bytes:
    aggregation = with_(manifest.aggregation, least_survivors=2, allow_two_sites=True, colluders=0)
    return world.signed(with_(manifest, roster=manifest.roster[:2], aggregation=aggregation))


def two_survivors(world: World, manifest: Manifest) -> bytes:
    return world.signed(with_(manifest, aggregation=with_(manifest.aggregation, least_survivors=2)))


def impossible_thresholds(world: World, manifest: Manifest) -> bytes:
    return world.signed(with_(manifest, aggregation=with_(manifest.aggregation, colluders=2)))


def shrinking_caps(world: World, manifest: Manifest) -> bytes:
    return world.signed(with_(manifest, aggregation=with_(manifest.aggregation, movement_factor="0.5")))


def valid_for_ever(world: World, manifest: Manifest) -> bytes:
    return world.signed(with_(manifest, expires_at_ms=NOW + 400 * DAY))


def expired_when_issued(world: World, manifest: Manifest) -> bytes:
    return world.signed(with_(manifest, expires_at_ms=manifest.issued_at_ms))


def audit_of_nothing(world: World, manifest: Manifest) -> bytes:
    return world.signed(with_(manifest, audit=with_(manifest.audit, mode="sampled", chunks_per_site=0)))


def orphan_version(world: World, manifest: Manifest) -> bytes:
    return world.signed(with_(manifest, version=7))


def repeated_config(world: World, manifest: Manifest) -> bytes:
    training = with_(manifest.training, config_hashes=("cd" * 32, "cd" * 32))
    return world.signed(with_(manifest, training=training))


def several_labels_under_privacy(world: World, manifest: Manifest) -> bytes:
    told = Privacy(epsilon="8", delta="0.00001", clip="1", noise_floor="0.8", unit="patient", least_patients=None)
    training = with_(manifest.training, settings={**manifest.training.settings, "labels": "many"})
    return world.signed(with_(manifest, training=training, privacy=told))


BAD: list[tuple[Forge, type[ToolkitError], str]] = [
    (tampered, ManifestRejected, "acceptance.check_signature"),
    (other_federation, ManifestRejected, "rules.check_federation"),
    (from_the_future, ManifestRejected, "rules.check_clock"),
    (tls_certificate_for_signing, errors.CertificatePurposeMismatch, "pki.check_purpose"),
    (certificate_of_another, errors.CertificateNameMismatch, "pki.check_subject"),
    (coordinators_certificate, errors.CertificateNameMismatch, "pki.check_subject"),
    (revoked_member, errors.CertificateRevoked, "pki.check_revoked"),
    (one_member_twice, ManifestRejected, "rules.check_roster"),
    (coordinator_in_the_roster, ManifestRejected, "rules.check_roster"),
    (unsorted_roster, ManifestRejected, "rules.check_roster"),
    (layout_too_small, ManifestRejected, "rules.check_roster"),
    (one_tls_key_for_two, ManifestRejected, "rules.check_distinct_keys"),
    (one_log_key_for_two, ManifestRejected, "rules.check_distinct_keys"),
    (mixed_up_log_keys, ManifestRejected, "rules.check_distinct_keys"),
    (two_sites, PolicyViolation, "rules.check_two_sites"),
    (two_sites_without_privacy, PolicyViolation, "rules.check_two_sites"),
    (two_survivors, PolicyViolation, "rules.check_two_sites"),
    (impossible_thresholds, PolicyViolation, "rules.check_thresholds"),
    (audit_of_nothing, ManifestRejected, "rules.check_audit"),
    (shrinking_caps, ManifestRejected, "rules.check_movement"),
    (valid_for_ever, ManifestRejected, "rules.check_expiry"),
    (expired_when_issued, ManifestRejected, "rules.check_expiry"),
    (orphan_version, ManifestRejected, "rules.check_version_one"),
    (repeated_config, ManifestRejected, "rules.check_configs"),
    (several_labels_under_privacy, PolicyViolation, "rules.check_labels"),
]
IDS = [row[0].__name__ for row in BAD]


def off(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Disable checks by name, also where they stand in the list of consistency checks."""
    for name in names:
        module, function = name.split(".")
        original = getattr({"acceptance": acceptance, "rules": rules, "pki": pki}[module], function)
        for holder in (acceptance, rules, pki):
            if vars(holder).get(function) is original:
                monkeypatch.setattr(holder, function, lambda *args, **kwargs: None)
        monkeypatch.setattr(rules, "CONSISTENCY", tuple(c for c in rules.CONSISTENCY if c is not original))


def test_the_real_one_is_believed(world: World, manifest: Manifest) -> None:
    assert acceptance.open_manifest(world.signed(manifest), world.authority.root, now_ms=NOW).digest == manifest.digest


@pytest.mark.parametrize(("forge", "error", "check"), BAD, ids=IDS)
def test_each_bad_manifest_is_refused(
    world: World, manifest: Manifest, forge: Forge, error: type[ToolkitError], check: str
) -> None:
    with pytest.raises(error):
        acceptance.open_manifest(forge(world, manifest), world.authority.root, now_ms=NOW)


@pytest.mark.parametrize(("forge", "error", "check"), BAD, ids=IDS)
def test_each_bad_manifest_is_refused_twin(
    world: World,
    manifest: Manifest,
    forge: Forge,
    error: type[ToolkitError],
    check: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = {
        # A member listed twice necessarily brings its keys twice.
        "one_member_twice": ["rules.check_distinct_keys"],
        "coordinator_in_the_roster": ["rules.check_distinct_keys"],
        # A manifest of another federation has certificates that name that one.
        "other_federation": ["pki.check_subject"],
    }.get(forge.__name__, [])
    data = forge(world, manifest)
    off(monkeypatch, check, *others)
    acceptance.open_manifest(data, world.authority.root, now_ms=NOW)


def test_another_consortiums_manifest_is_refused(world: World, foreign: World) -> None:
    with pytest.raises(ManifestRejected, match="not this consortium's"):
        acceptance.open_manifest(foreign.published(), world.authority.root, now_ms=NOW)


def test_another_consortiums_manifest_is_refused_twin(
    world: World, foreign: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    off(monkeypatch, "acceptance.check_signature")
    with pytest.raises(errors.CertificateUntrusted):
        acceptance.open_manifest(foreign.published(), world.authority.root, now_ms=NOW)
    off(monkeypatch, "pki.check_issuer")
    acceptance.open_manifest(foreign.published(), world.authority.root, now_ms=NOW)


def test_a_root_of_another_kind_signs_nothing(world: World, manifest: Manifest) -> None:
    with pytest.raises(ManifestRejected, match="no ECDSA key"):
        acceptance.open_manifest(world.signed(manifest), manifest.roster[0].certificate, now_ms=NOW)


def test_a_member_without_a_signing_key_has_none(world: World, manifest: Manifest) -> None:
    member = manifest.roster[0].model_copy(update={"signing_certificate": issued(world, "graz", Purpose.TLS)})
    with pytest.raises(ManifestRejected, match="Ed25519"):
        _ = member.signing_key


def other_form(world: World, manifest: Manifest) -> bytes:
    """Anybody can turn a signature into the other one that verifies; the root key is not needed."""
    r, s = decode_dss_signature(acceptance.sign(manifest, world.key))
    return seal(manifest, encode_dss_signature(r, acceptance.P256_ORDER - s))


def test_a_manifest_has_one_file(world: World, manifest: Manifest) -> None:
    with pytest.raises(ManifestRejected, match="signature"):
        acceptance.open_manifest(other_form(world, manifest), world.authority.root, now_ms=NOW)
    with pytest.raises(ManifestRejected, match="signature"):
        acceptance.open_manifest(seal(manifest, b"\x00" * 70), world.authority.root, now_ms=NOW)


def test_a_manifest_has_one_file_twin(world: World, manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "check_one_form", lambda signature: None)
    acceptance.open_manifest(other_form(world, manifest), world.authority.root, now_ms=NOW)


def test_a_clock_that_is_days_behind_is_told_so(world: World, manifest: Manifest) -> None:
    with pytest.raises(CertificateError) as caught:
        acceptance.open_manifest(world.signed(manifest), world.authority.root, now_ms=NOW - 3 * DAY)
    assert "clock" in str(caught.value.hint)


def test_two_sites_are_allowed_with_privacy(world: World, manifest: Manifest) -> None:
    privacy = Privacy(epsilon="8", delta="0.00001", clip="1", noise_floor="0.8", unit="patient", least_patients=None)
    numbers = with_(manifest.aggregation, least_survivors=2, allow_two_sites=True, colluders=0)
    pair = with_(manifest, roster=manifest.roster[:2], aggregation=numbers, privacy=privacy)
    acceptance.open_manifest(world.signed(pair), world.authority.root, now_ms=NOW)


# One after another.


def next_version(manifest: Manifest, **changes: Any) -> Manifest:
    return with_(manifest, version=manifest.version + 1, previous=manifest.digest.hex(), **changes)


def older(manifest: Manifest) -> tuple[Manifest, Manifest]:
    return next_version(next_version(manifest)), next_version(manifest)


def same_version(manifest: Manifest) -> tuple[Manifest, Manifest]:
    return manifest, with_(manifest, run="run-2")


def broken_chain(manifest: Manifest) -> tuple[Manifest, Manifest]:
    return manifest, with_(next_version(manifest), previous="00" * 32)


def other_model(manifest: Manifest) -> tuple[Manifest, Manifest]:
    return manifest, next_version(manifest, model=with_(manifest.model, initial_state="11" * 32))


def other_method(manifest: Manifest) -> tuple[Manifest, Manifest]:
    return manifest, next_version(manifest, training=with_(manifest.training, method="fedavg"))


def other_labels(manifest: Manifest) -> tuple[Manifest, Manifest]:
    settings = {**manifest.training.settings, "labels": "many"}
    return manifest, next_version(manifest, training=with_(manifest.training, settings=settings))


def less_privacy(manifest: Manifest) -> tuple[Manifest, Manifest]:
    told = Privacy(epsilon="8", delta="0.00001", clip="1", noise_floor="0.8", unit="patient", least_patients=None)
    private = with_(manifest, privacy=told)
    return private, next_version(private, privacy=with_(told, noise_floor="0.1"))


def other_private_rounds(manifest: Manifest) -> tuple[Manifest, Manifest]:
    settings = {**manifest.training.settings, "dp.steps": 99}
    return manifest, next_version(manifest, training=with_(manifest.training, settings=settings))


def other_window(manifest: Manifest) -> tuple[Manifest, Manifest]:
    numbers = manifest.aggregation
    longer = with_(numbers, movement_window=numbers.movement_window + 1)
    return manifest, next_version(manifest, aggregation=longer)


def other_federation_later(manifest: Manifest) -> tuple[Manifest, Manifest]:
    return manifest, next_version(manifest, federation="ct-scans")


STEPS: list[tuple[Callable[[Manifest], tuple[Manifest, Manifest]], str]] = [
    (older, "check_not_older"),
    (same_version, "check_not_older"),
    (broken_chain, "check_chain"),
    (other_model, "check_run"),
    (other_method, "check_run"),
    (other_labels, "check_run"),
    (less_privacy, "check_run"),
    (other_private_rounds, "check_run"),
    (other_window, "check_run"),
    (other_federation_later, "check_same_federation"),
]
STEP_IDS = [row[0].__name__ for row in STEPS]


@pytest.mark.parametrize(("step", "check"), STEPS, ids=STEP_IDS)
def test_each_bad_step_is_refused(manifest: Manifest, step: Any, check: str) -> None:
    current, offered = step(manifest)
    with pytest.raises(ManifestRejected):
        acceptance.accept_newer(current, offered)


@pytest.mark.parametrize(("step", "check"), STEPS, ids=STEP_IDS)
def test_each_bad_step_is_refused_twin(
    manifest: Manifest, step: Any, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, check, lambda current, offered: None)
    current, offered = step(manifest)
    assert acceptance.accept_newer(current, offered) is offered


def test_history_goes_forward(manifest: Manifest) -> None:
    assert acceptance.accept_newer(None, manifest) is manifest
    again = Manifest.from_dict(manifest.to_dict())
    assert acceptance.accept_newer(manifest, again) is manifest
    second = next_version(manifest)
    assert acceptance.accept_newer(manifest, second) is second
    after_a_gap = next_version(next_version(second))
    assert acceptance.accept_newer(second, after_a_gap) is after_a_gap
    new_run = next_version(manifest, run="run-2", model=with_(manifest.model, initial_state="11" * 32))
    assert acceptance.accept_newer(manifest, new_run) is new_run
