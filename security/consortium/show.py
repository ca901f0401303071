"""A manifest and an authority as people and programs read them. No value here is secret."""

from __future__ import annotations

import datetime as dt
import hashlib
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from lazaret.errors import ConfigError
from security.consortium.authority import Authority
from security.consortium.records import MemberRecord
from security.dp.accountant import rdp_epsilon
from security.dp.planner import Schedule, begun_epsilon, both_figures, propose_multiplier
from security.identity import pki
from security.identity.manifest import Manifest, Privacy
from security.identity.pki import Purpose, grouped, phrase
from security.identity.rules import least_noise
from security.secagg import thresholds
from security.secagg.groups import least_sites

EXPIRY_WARNING_DAYS: Final = 30


def manifest_summary(manifest: Manifest, now_ms: int) -> dict[str, Any]:
    """What matters of a manifest, without the long tables."""
    layout, numbers = manifest.aggregation.layout, manifest.aggregation
    sites = len(manifest.roster)
    quorum = thresholds.derive(n=sites, c=numbers.colluders, m=numbers.least_survivors)
    return {
        "federation": manifest.federation,
        "version": manifest.version,
        "digest": manifest.digest.hex(),
        "previous": manifest.previous,
        "run": manifest.run,
        "expires": f"{dt.datetime.fromtimestamp(manifest.expires_at_ms / 1000, dt.UTC):%Y-%m-%d}",
        "days_left": manifest.days_left(now_ms),
        "coordinator": manifest.coordinator.id,
        "sites": [
            {
                "id": member.id,
                "certificate": member.signing_sha256,
                "days_left": pki.days_left(member.certificate, now_ms),
            }
            for member in manifest.roster
        ],
        "colluders": numbers.colluders,
        "quorum_of_all": quorum.t,
        "least_cohort": manifest.least_cohort,
        "architecture": manifest.model.architecture,
        "classes": list(manifest.model.classes),
        "initial_state": manifest.model.initial_state,
        "initial_file": manifest.model.initial_file,
        "method": manifest.training.method,
        "plugin": manifest.training.plugin.model_dump() if manifest.training.plugin else None,
        "rounds": manifest.training.rounds,
        "settings": dict(manifest.training.settings),
        "values": layout.state_words,
        "vector_bytes": layout.byte_length,
        "ring_bits": layout.ring_bits,
        "weight_cap": layout.weight_cap,
        "layout": layout.layout_hash.hex(),
        "audit": manifest.audit.mode,
        "root_ml_dsa": _second_key(manifest),
        "privacy": manifest.privacy.model_dump() if manifest.privacy else None,
        "revoked": [revocation.model_dump() for revocation in manifest.revocations],
        "warnings": warnings(manifest) + expiring(manifest, now_ms),
    }


def _second_key(manifest: Manifest) -> str | None:
    """SHA-256 of the root's ML-DSA key, which people compare; None without one."""
    if manifest.root_ml_dsa is None:
        return None
    return hashlib.sha256(bytes.fromhex(manifest.root_ml_dsa)).hexdigest()


def expiring(manifest: Manifest, now_ms: int) -> list[str]:
    """Members who will soon be left out of rounds, or are already; and a manifest under which there will be none."""
    notes = []
    left = manifest.days_left(now_ms)
    if left < EXPIRY_WARNING_DAYS:
        state = f"expires in {left} days" if left >= 0 else "has expired"
        notes.append(f"manifest version {manifest.version} {state}: publish again, or sites send nothing")
    for member in manifest.members:
        left = pki.days_left(member.certificate, now_ms)
        if left < EXPIRY_WARNING_DAYS:
            state = f"expires in {left} days" if left >= 0 else "has expired"
            notes.append(
                f"the signing certificate of {member.id} {state}: renew it, or {member.id} is left out of rounds"
            )
    return notes


def member_summary(record: MemberRecord, now_ms: int) -> dict[str, Any]:
    tls, signing = record.unrevoked(Purpose.TLS), record.unrevoked(Purpose.SIGNING)
    return {
        "id": record.member,
        "role": record.role,
        "state": "enrolled" if record.active else "revoked",
        "hosts": list(record.hosts),
        "tls_certificates": [_certificate(entry.parsed, now_ms) for entry in tls],
        "signing_certificates": [_certificate(entry.parsed, now_ms) for entry in signing],
    }


def _certificate(certificate: Any, now_ms: int) -> dict[str, Any]:
    return {
        "sha256": pki.fingerprint(certificate),
        "until": f"{certificate.not_valid_after_utc:%Y-%m-%d}",
        "days_left": pki.days_left(certificate, now_ms),
    }


def authority_summary(authority: Authority, now_ms: int) -> dict[str, Any]:
    manifest = authority.latest(now_ms=now_ms)
    return {
        "federation": authority.federation,
        "root_fingerprint": pki.fingerprint(authority.root),
        "root_days_left": pki.days_left(authority.root, now_ms),
        "members": [member_summary(record, now_ms) for record in authority.members()],
        "manifest": manifest_summary(manifest, now_ms) if manifest else None,
    }


def print_manifest(console: Console, summary: dict[str, Any], blocks: list[dict[str, Any]] | None = None) -> None:
    facts = _facts(
        ("federation", f"{summary['federation']}, run {summary['run']}, manifest version {summary['version']}"),
        ("digest", grouped(summary["digest"])),
        ("expires", f"{summary['expires']}, in {summary['days_left']} days"),
        ("trains", f"{summary['method']} on {summary['architecture']}, {summary['rounds']} rounds"),
        ("settings", ", ".join(f"{name} = {value}" for name, value in summary["settings"].items())),
        ("vector", f"{summary['values']:,} values, {summary['vector_bytes']:,} bytes, ring 2^{summary['ring_bits']}"),
        ("a round needs", f"{summary['least_cohort']} sites; {summary['colluders']} may collude with the coordinator"),
        ("the sum is", "checked in full" if summary["audit"] == "covered" else "spot-checked only"),
        ("privacy", _privacy(summary["privacy"])),
        *([("ML-DSA-65", f"signed too, with the key {grouped(second)}")] if (second := summary["root_ml_dsa"]) else []),
    )
    console.print(facts)
    roster = Table("site", "signing certificate", "days left", box=None, pad_edge=False)
    for site in summary["sites"]:
        roster.add_row(site["id"], grouped(site["certificate"][:16]), str(site["days_left"]))
    console.print(f"\ncoordinator {summary['coordinator']}, {len(summary['sites'])} sites", highlight=False)
    console.print(roster)
    _print_revoked(console, summary["revoked"])
    if blocks is not None:
        _print_blocks(console, blocks)
    for warning in summary["warnings"]:
        console.print(f"\nnote: {warning}", highlight=False, soft_wrap=True)


def _facts(*rows: tuple[str, str]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _privacy(privacy: dict[str, str] | None) -> str:
    if privacy is None:
        return "no differential privacy"
    return f"epsilon {privacy['epsilon']}, delta {privacy['delta']} for each {privacy['unit']}"


def _print_revoked(console: Console, revoked: list[dict[str, Any]]) -> None:
    if not revoked:
        return
    table = Table("revoked", "certificate", "reason", box=None, pad_edge=False)
    for entry in revoked:
        table.add_row(entry["member"], grouped(entry["certificate"][:16]), entry["reason"])
    console.print()
    console.print(table)


def _print_blocks(console: Console, blocks: list[dict[str, Any]]) -> None:
    table = Table("tensor", "shape", "kind", "clip", "movement", box=None, pad_edge=False)
    for block in blocks:
        clip, movement = block.get("clip_exponent"), block.get("movement_exponent")
        table.add_row(
            block["name"],
            "x".join(map(str, block["shape"])) or "1",
            block["kind"],
            f"0..{block['maximum']}" if clip is None else f"2^{clip}",
            "" if movement is None else f"2^{movement}",
        )
    console.print()
    console.print(table)


def print_authority(console: Console, summary: dict[str, Any]) -> None:
    console.print(
        _facts(
            ("federation", summary["federation"]),
            ("root fingerprint", grouped(summary["root_fingerprint"])),
            ("root phrase", phrase(summary["root_fingerprint"])),
            ("root days left", str(summary["root_days_left"])),
        )
    )
    table = Table("member", "role", "state", "certificates until", "days left", box=None, pad_edge=False)
    for member in summary["members"]:
        newest = (member["signing_certificates"] or [None])[-1]
        until, left = (newest["until"], str(newest["days_left"])) if newest else ("", "")
        table.add_row(member["id"], member["role"], member["state"], until, left)
    console.print()
    console.print(table)
    console.print()
    if summary["manifest"] is None:
        console.print("no manifest published yet", highlight=False)
    else:
        print_manifest(console, summary["manifest"])


# What the consortium should know before it sends out a manifest.


def warnings(manifest: Manifest) -> list[str]:
    """What the consortium should know before it sends out the manifest."""
    notes = []
    if manifest.audit.mode == "sampled":
        chunks = manifest.audit.chunks_per_site
        notes.append(
            f"audit = sampled: each site checks {chunks} chunk(s) of a sum. A sum that is wrong everywhere is always "
            "found, one changed chunk often is not, and a dishonest coordinator that one site has found can continue "
            "with the other sites. Only audit = covered stops a dishonest coordinator"
        )
    if len(manifest.roster) == 2:
        notes.append("two sites: each site learns the other's noisy update; only differential privacy protects it")
    if manifest.privacy is None:
        notes.append(
            "no differential privacy: the sum itself is not protected, and whoever sees it may infer from it whether a "
            "patient took part"
        )
    else:
        notes += _private_notes(manifest, manifest.privacy)
    notes += _group_notes(manifest) + _colluder_notes(manifest)
    if not manifest.aggregation.single_history:
        notes.append("single_history = false: a coordinator may run two disjoint groups of sites with two histories")
    return notes


def _group_notes(manifest: Manifest) -> list[str]:
    table, sites = manifest.aggregation.groups, len(manifest.roster)
    if table is None:
        return []
    c, least = manifest.aggregation.colluders, sites // table.count
    cost = (
        f"groups = {table.count}: every group's sum is published. A site hides among the {least} sites of its group, "
        f"of which {c} may collude, instead of among {sites}; and a round needs all groups, each with at least "
        f"{least_sites(c=c, m=manifest.aggregation.least_survivors)} sites"
    )
    if table.secrets:
        return [cost]
    return [cost, "groups are not drawn yet: no site trains until [aggregation.secrets] has the secret of every site"]


def _colluder_notes(manifest: Manifest) -> list[str]:
    sites, c = len(manifest.roster), manifest.aggregation.colluders
    free = thresholds.free_colluders(sites)
    if c >= free:
        return []
    return [
        f"colluders = {c}: {sites} sites have the same quorum with colluders = {free}. The promise would be stronger; "
        f"but then {free} silent sites stop every attempt, and each chunk of a sum is checked by {free + 1} sites"
    ]


def _private_notes(manifest: Manifest, privacy: Privacy) -> list[str]:
    floor, epsilon, delta = float(privacy.noise_floor), float(privacy.epsilon), float(privacy.delta)
    schedule = least_noise(manifest)
    if schedule is None:
        return ["[privacy] without dp. settings: agents refuse to train; export the model with `npr-lab model --dp`"]
    cost = begun_epsilon(schedule.events(), epsilon=epsilon, delta=delta)
    if cost <= epsilon:
        return _shared_notes(schedule, cost, delta)
    try:
        proposed = propose_multiplier(schedule, epsilon=epsilon, delta=delta)
        wanted = f"with noise_floor = {proposed:g} all rounds fit"
    except ConfigError as error:
        wanted = str(error.hint)
    costs = f"at noise_floor {floor:g} the run costs epsilon {cost:.2f}, above {epsilon:g}: sites will stop early"
    return [f"{costs}; {wanted}"]


def _shared_notes(schedule: Schedule, cost: float, delta: float) -> list[str]:
    if schedule.shared is None:
        return []
    alone = rdp_epsilon([event.alone for event in schedule.events()], delta)[0]
    return [f"noise is shared: {both_figures(cost, alone, schedule.shared.honest)}"]
