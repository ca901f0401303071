"""The rules of docs/spec/audit-log.md, section 8, that one entry can break; written from that page alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from fractions import Fraction
from hashlib import sha256
from typing import Any

from .audit_formats import Agreed
from .numbers import layout_hash
from .transcript import tlv

Entry = dict[str, Any]
Round = tuple[str | None, int | None]


def broken(entry: Entry, agreed: Agreed) -> Iterator[str]:
    """The rules of section 8 that one entry breaks."""
    kind, body, rules = entry["type"], entry["body"], agreed.value
    c, m, n = rules["aggregation"]["colluders"], rules["aggregation"]["least_survivors"], len(rules["roster"])
    rounds, processing = rules["training"]["rounds"], rules["processing"]
    tests: dict[str, list[bool]] = {
        "agent.start": [
            not body.get("insecure"),
            not processing["packages"] or body.get("package") in processing["packages"],
            not processing["schemas"] or body.get("proto") in processing["schemas"],
        ],
        "data.opened": [
            all(body.get(name, "").strip().lower() not in ("", "not stated") for name in ("purpose", "legal_basis")),
            not processing["purposes"] or body.get("purpose") in processing["purposes"],
            not processing["legal_bases"] or body.get("legal_basis") in processing["legal_bases"],
        ],
    }
    of_run = (
        "round.invited",
        "train.done",
        "model.received",
        "aggregate.published",
        "secagg.survivors",
        "secagg.unmasked",
    )
    results = tests.get(kind, [])
    if kind in of_run:
        results = [entry["run"] == rules["run"]]
    if kind == "run.accepted":
        results = [entry["run"] == rules["run"], body["model"] == rules["model"]["initial_file"]]
    if kind == "plugin.loaded":
        pinned = rules["training"].get("plugin", {"sha256": None})["sha256"]
        results = [entry["run"] == rules["run"], body["plugin"] == pinned]
    if kind in ("round.invited", "train.done"):
        results += [body["method"] == rules["training"]["method"], (entry["round"] or 1 << 60) <= 4 * rounds + 16]
    if kind == "round.invited":
        results += [body["config"] in rules["training"]["config_hashes"]]
        results += [entry["ts"] <= rules["expires_at_ms"] + 300_000]
        results += [body["cohort_size"] >= least_cohort(c, m, n if rules["aggregation"]["single_history"] else None)]
        results += [body["cohort_size"] >= max(m, c + 2) * len(groups(rules["aggregation"]["groups"]))]
    elif kind == "secagg.survivors":
        due = threshold(body["count"] + len(body["dropouts"]), c, m)
        results += [body["threshold"] == due, body["count"] >= max(due, body["threshold"])]
    elif kind == "secagg.unmasked":
        listed = {member["id"] for member in rules["roster"]}
        results += [len(set(body["self_mask"]) & listed) >= max(m, c + 2)]
        parts = groups(rules["aggregation"]["groups"])
        results += [len(set(part) & set(body["self_mask"])) >= max(m, c + 2) for part in parts]
        results += [not parts or set(body["self_mask"]) <= {site for part in parts for site in part}]
    elif kind == "aggregate.published":
        results += [body["inputs"] >= m]
    elif kind == "result.voted":
        sizes = rules["aggregation"]
        each = max(m, c + 2) * (sizes["groups"]["count"] if sizes["groups"] else 1)
        smallest = max(each, least_cohort(c, m, n if sizes["single_history"] else None))
        votes, due = body["accepts"] + body["refusals"], body["threshold"]
        results = [rules["audit"]["vote_drop"] is not None, due >= threshold(smallest, c, m), votes >= due]
        results += [body["accepted"] == (body["accepts"] >= due)]
    if kind in ("round.invited", "aggregate.published"):
        table = rules["aggregation"]["groups"]
        lines = "".join("".join(f"{site}\n" for site in part) + "\n" for part in groups(table))
        results += [body["groups"] == (sha256(lines.encode()).hexdigest() if lines else None)]
        results += [table is None or bool(table["secrets"])]
    elif kind == "model.received":
        results += [body["layout"] == layout_hash(rules["aggregation"]["layout"]).hex()]
        results += [body["sender"] in rules["coordinator"]["tls_keys"]]
    elif kind in ("dp.reserved", "dp.committed") and rules["privacy"] and entry["run"] == rules["run"]:
        results = list(_private(body, rules, entry["round"] is not None))
    elif kind == "trainer.isolated":
        results = [not is_open(body) or (body["asked"] == "best" and rules["training"]["isolation"] == "best")]
    if not all(results):
        yield f"a rule for {kind} is broken"


def is_open(told: Entry) -> bool:
    """Whether a process that saw images could read keys, or open a connection other than among several that train."""
    return bool(told["keys"] or (told["connection"] and not told["ranks"]))


def _private(body: Entry, rules: Entry, in_a_round: bool) -> Iterator[bool]:
    due, settings = rules["privacy"], rules["training"]["settings"]
    shared = settings.get("dp.noise") == "shared"
    trained = [item for item in body["mechanisms"] if item["kind"] == ("shared-sgd" if shared else "dp-sgd")]
    yield body["unit"] == due["unit"] and float(body["delta"]) <= float(due["delta"]) * (1 + 1e-9)
    yield bool(trained) or not in_a_round
    for item in trained:
        if shared:
            yield _shared(item, rules)
            continue
        clip = float(item["sensitivity"])
        yield float(item["sigma"]) >= float(due["noise_floor"]) * clip * (1 - 1e-9)
        yield clip <= float(due["clip"]) * (1 + 1e-9)
        if any(name.startswith("dp.") for name in settings):
            rate = min(1 << 24, math.ceil(float(settings.get("dp.rate", "0.05")) * (1 << 24)))
            yield (item["steps"], item["rate"]) == (settings.get("dp.steps", 10), rate)


def _shared(item: Entry, rules: Entry) -> bool:
    """Noise, clip in ring units, honest survivors and numbers, as they follow from the manifest."""
    numbers, due = rules["aggregation"], rules["privacy"]
    layout, c, m, sites = numbers["layout"], numbers["colluders"], numbers["least_survivors"], len(rules["roster"])
    smallest = least_cohort(c, m, sites if numbers["single_history"] else None)
    honest = min(threshold(n, c, m) for n in range(smallest, sites + 1)) - max(c, 1)
    tensors = [block for block in layout["blocks"] if block["kind"] == "mean"]
    quantum = (2 ** (layout["ring_bits"] - 1) - 1) // layout["roster_size"]
    unit = Fraction(2) ** tensors[0]["clip_exponent"] * layout["weight_cap"] / quantum
    reach = Fraction(float(rules["training"]["settings"]["learning_rate"])) * Fraction(float(due["clip"]))
    units = math.floor(reach / unit)
    least = max(3, math.ceil(float(due["noise_floor"]) * units / math.sqrt(honest)))
    size = sum(math.prod(block["shape"]) for block in tensors)
    told = (item["steps"], item["dimensions"], float(item["sensitivity"]))
    return told == (1, size, units) and float(item["sigma"]) >= least and item["honest"] <= honest


def groups(table: Entry | None) -> list[list[str]]:
    """The groups that the secrets of a draw give; none without secrets."""
    if table is None or not table["secrets"]:
        return []
    shown, secrets = bytes.fromhex(table["shown"]), {site: bytes.fromhex(x) for site, x in table["secrets"].items()}
    names = sorted(secrets, key=str.encode)
    listed = len(names).to_bytes(4, "big") + b"".join(tlv(site) + tlv(secrets[site]) for site in names)
    names.sort(key=lambda site: sha256(b"FLSA1/draw-order\0" + shown + listed + tlv(site)).digest())
    return [sorted(names[number :: table["count"]], key=str.encode) for number in range(table["count"])]


def threshold(n: int, c: int, m: int) -> int:
    return max((n + c) // 2 + 1, c + 2, m)


def least_cohort(c: int, m: int, roster: int | None) -> int:
    """The smallest cohort that reaches its threshold; with one history only, more than half of roster and colluders."""
    least = next(n for n in range(max(c + 2, m), 1 << 16) if threshold(n, c, m) <= n)
    return least if roster is None else max(least, (roster + c) // 2 + 1)


def round_faults(entries: list[Entry], in_force: list[Agreed | None], role: str | None) -> Iterator[str]:
    """Steps of a round that are missing, and sums that must not be."""
    steps: dict[Round, dict[str, int]] = {}  # what is in a round, and its first entry
    sets: dict[Round, dict[str, Entry]] = {}
    shares: dict[tuple[Round, str], Any] = {}
    sums: dict[Round, int] = {}
    cohorts: dict[tuple[Round, str], int] = {}
    listed: set[str] = set()  # sites of all manifests that were in force so far
    ended: set[str | None] = set()
    vectors: dict[Round, set[str]] = {}
    answers: dict[Round, int] = {}
    opened_in: list[Round] = []  # the round of each secagg.unmasked so far
    arrived: set[tuple[Round, str]] = set()
    sent: dict[tuple[Round, str], tuple[int, int]] = {}  # the newest upload and Unmask: on which stream, and the entry
    owed: dict[str, int] = {}
    receipted: set[int] = set()
    boot, stream, own = "", 0, entries[0]["origin"].partition(".")[0]
    opened = {entry["run"]: entry["seq"] for entry in reversed(entries) if entry["type"] == "data.opened"}
    loaded = {entry["run"]: entry["seq"] for entry in reversed(entries) if entry["type"] == "plugin.loaded"}
    words = [(entry["seq"], entry["body"]["command"]) for entry in entries if entry["type"] == "operator.action"]
    for entry, agreed in zip(entries, in_force, strict=True):
        kind, body, key = entry["type"], entry["body"], (entry["run"], entry["round"])
        seen, where = steps.setdefault(key, {}), f"entry {entry['seq']}"
        seen.setdefault(kind, entry["seq"])
        listed |= {member["id"] for member in agreed.value["roster"]} if agreed else set()
        names = [*body.get("dropouts", ()), *body.get("self_mask", ()), *body.get("mask_key", ())]
        if listed and not set(names) <= listed:
            yield f"{where}: a site of no manifest"
        if kind == "run.stopped":
            ended.add(entry["run"])
        if kind == "model.received" and entry["run"] in ended:
            yield f"{where}: a round of a run that was ended"
        if kind == "ingress" and body["message"] == "UploadFrame":
            arrived.add((key, body["sender"]))
        if entry["boot"] != boot:
            boot, stream, owed = entry["boot"], stream + 1, {}
        if kind == "receipt" and body["msg_id"] in owed:
            receipted.add(owed[body["msg_id"]])
        if kind == "egress":
            seen.setdefault(body["message"], entry["seq"])
            if body["message"] == "Open":
                stream, owed = stream + 1, {}
            elif body["message"] in ("UploadFrame", "Unmask"):
                sent[key, body["message"]] = (stream, entry["seq"])
                owed[body["msg_id"]] = entry["seq"]
            if body["message"] == "Unmask":
                answers[key] = answers.get(key, 0) + 1
                if 0 < sum(1 for one in opened_in if one == key) < answers[key]:
                    yield f"{where}: shares that were not opened again"
            if body["message"] == "UploadFrame":
                vectors.setdefault(key, set()).add(body["sha256"])
                if len(vectors[key]) > max(1, sum(invited == key for invited, _ in cohorts)):
                    yield f"{where}: another vector without an invitation of its own"
            if body["message"] == "UploadFrame" and agreed and agreed.value["privacy"]:
                seen["private"] = 0
            if body["message"] == "UploadFrame" and agreed and "plugin" in agreed.value["training"]:
                seen["pinned"] = 0
        elif kind == "round.invited":
            cohorts[key, body["context"]] = body["cohort_size"]
        elif kind == "secagg.survivors":
            size = body["count"] + len(set(body["dropouts"]))
            if cohorts.get((key, body["context"]), size) != size:
                yield f"{where}: a cohort that is not accounted for"
            if role == "site" and (key, body["context"]) not in cohorts:
                yield f"{where}: a set of a cohort without an invitation"
            sets.setdefault(key, {})[body["context"]] = body
        elif kind == "secagg.unmasked":
            opened_in.append(key)
            if shares.setdefault((key, body["context"]), body) != body:
                yield f"{where}: shares of two sets"
            alive, gone = set(body["self_mask"]), set(body["mask_key"])
            if any(round_ == key and not alive <= set(other["self_mask"]) for (round_, _), other in shares.items()):
                yield f"{where}: shares of a second set in the round"
            told = sets.get(key, {}).get(body["context"])
            if told is None or len(alive) != told["count"] or gone != set(told["dropouts"]) or alive & gone:
                yield f"{where}: shares of a set that was not agreed"
        elif kind == "aggregate.published":
            sums[key] = sums.get(key, 0) + 1
            counts = [told["count"] for name, told in sets.get(key, {}).items() if (key, name) in shares]
            if sums[key] > 1 or body["inputs"] not in counts:
                yield f"{where}: a sum that was not agreed"
            if agreed and entry["run"] == agreed.value["run"]:
                count = sum(times for (run, _), times in sums.items() if run == entry["run"])
                if count > agreed.value["training"]["rounds"]:
                    yield f"{where}: too many sums"
        blocked = kind == "egress.blocked" and body["message"] in ("UploadFrame", "UploadHeader")
        if blocked and not any(at > entry["seq"] and re.search(rf"\b{where}\b", text) for at, text in words):
            yield f"{where}: a vector was blocked, and nobody explains it"
    for (round_, _), told in shares.items() if role == "coordinator" else ():
        if any((round_, site) not in arrived for site in set(told["self_mask"]) & listed):
            yield f"round {round_[1]}: a sum with a vector that did not come"
    for (run, number), seen in steps.items() if role == "site" else ():
        left, late = seen.get("UploadFrame", 0), 1 << 60
        due = [seen.get(kind, late) for kind in ("model.received", "train.done", "round.invited")]
        due += [opened.get(run, late), loaded.get(run, late) if "pinned" in seen else 0]
        due += [seen.get("dp.committed", late) if "private" in seen else 0]
        booked = "private" not in seen or seen.get("dp.reserved", late) < seen.get("train.done", late)
        if "UploadFrame" in seen and not (max(due) < left and booked):
            yield f"round {number}: a vector left without its steps"
        upload, unmask = sent.get(((run, number), "UploadFrame")), sent.get(((run, number), "Unmask"))
        summed = any(round_ == (run, number) and own in body["self_mask"] for (round_, _), body in shares.items())
        if summed and "UploadFrame" not in seen:
            yield f"round {number}: in a sum without a vector"
        one_stream = summed and upload and unmask and upload[0] == unmask[0] and upload[1] < unmask[1]
        if one_stream and unmask[1] in receipted and upload[1] not in receipted:
            yield f"round {number}: a vector without a receipt"
        if "Unmask" in seen and "secagg.unmasked" not in seen:
            yield f"round {number}: shares left and were not logged"
