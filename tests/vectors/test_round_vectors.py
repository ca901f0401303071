"""Whole attempts with our primitives and hashes, step by step against the recorded ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_vectors import Case, Replay, refuses, secret, topic, unhex

from security.crypto import key_agreement, masking, merkle, shamir
from security.crypto.key_agreement import HybridPair, KeyPair
from security.crypto.masking import Accumulator, OpenedMasks, SiteMasks
from security.crypto.ring import Ring
from security.log import egress
from security.secagg import certificate_checks, fixed_point
from security.secagg import context as contexts
from security.secagg.certificates import Advert, Opened
from security.secagg.context import CohortMember, EarlierSum, RepeatOf, RoundContext, share_hash
from security.secagg.coordinator.unmasking import OpenedByQuorum
from security.secagg.layout import Layout
from security.secagg.published import opened_masks
from security.secagg.state import next_state, state_hash

ROUNDS = topic("rounds")


def context_of(case: Case) -> RoundContext:
    told = dict(case["context"])
    told["members"] = tuple(CohortMember(site=m["site"], cert=unhex(m["cert"])) for m in told["members"])
    told["repeats"] = tuple(
        RepeatOf(ctx=unhex(r["ctx"]), survivors=unhex(r["survivors"])) for r in told["repeats"]
    )
    told["sums"] = tuple(EarlierSum(round=s["round"], sites=tuple(s["sites"])) for s in told["sums"])
    for name, value in told.items():
        if isinstance(value, str) and name not in ("federation", "run", "suite"):
            told[name] = unhex(value)
    return RoundContext(**told)


def advert_of(party: Case) -> Advert:
    told = {
        name: unhex(value) if isinstance(value, str) and name != "site" else value
        for name, value in party["advert"].items()
    }
    told["pair_hashes"] = tuple(unhex(value) for value in told["pair_hashes"])
    return Advert(**told, signature=bytes(64))


def mask_pair(case: Case, party: Case) -> HybridPair:
    return HybridPair.from_seed(secret(party["mask_seed"]), ctx=unhex(case["ctx"]), site=party["site"])


def pair_of(case: Case, one: Case, other: Case) -> Any:
    """r_ij as the later of the two gets it: from the box that the earlier one sealed."""
    first, second = sorted((one, other), key=lambda party: party["site"].encode())
    box = unhex(first["deal"]["pairs"][second["site"]])
    ends = {"source": first["site"], "destination": second["site"]}
    return key_agreement.open_pair(mask_pair(case, second), box, kx=unhex(case["kx"]), **ends)


def pair_keys(case: Case, party: Case) -> dict[str, Any]:
    own = mask_pair(case, party)
    return {
        peer["site"]: key_agreement.mask_key(
            own,
            unhex(peer["advert"]["mask_key"]),
            pair_of(case, party, peer),
            kx=unhex(case["kx"]),
            own_id=party["site"],
            peer_id=peer["site"],
        )
        for peer in case["parties"]
        if peer is not party
    }


def self_key(case: Case, party: Case) -> Any:
    return key_agreement.self_mask_key(secret(party["seed"]), kx=unhex(case["kx"]), site=party["site"])


@pytest.mark.parametrize("case", ROUNDS)
def test_context_and_keys(case: Case) -> None:
    context = context_of(case)
    assert RoundContext.from_bytes(context.to_bytes()) == context
    ctx = context.ctx()
    assert ctx.hex() == case["ctx"]
    adverts = [advert_of(party) for party in case["parties"]]
    for party, advert in zip(case["parties"], adverts, strict=True):
        assert certificate_checks.opens(context, Opened.MASK_KEY, secret(party["mask_seed"]), advert)
        assert certificate_checks.opens(context, Opened.SEED, secret(party["seed"]), advert)
        assert share_pair(party).kem_public == advert.share_kem
        assert contexts.commitment(ctx, party["site"], unhex(party["seed"])) == advert.commitment
    assert contexts.key_transcript(ctx, [advert.body() for advert in adverts]).hex() == case["kx"]


@pytest.mark.parametrize("case", ROUNDS)
def test_deals(case: Case) -> None:
    kx, t = unhex(case["kx"]), case["context"]["t"]
    roots = []
    for dealer in case["parties"]:
        shares = {}
        for kind, secret_name in (("b", "seed"), ("s", "mask_seed")):
            drawn = Replay(unhex("".join(dealer["deal"]["coefficients"][kind])))
            holders = len(case["parties"])
            shares[kind] = shamir.split(secret(dealer[secret_name]), threshold=t, holders=holders, randomness=drawn)
        leaves = []
        for index, holder in enumerate(case["parties"]):
            ends = {"kx": kx, "dealer": dealer["site"], "holder": holder["site"]}
            hashes = {f"{kind}_hash": share_hash(shares[kind][index], **ends, kind=kind) for kind in ("b", "s")}
            box = unhex(dealer["deal"]["boxes"][holder["site"]])
            sealed = {"pair": unhex(dealer["deal"]["pairs"][holder["site"]])}
            sealed["kem_key"] = unhex(holder["advert"]["mask_kem"])
            leaves.append(merkle.leaf_hash(contexts.share_leaf(**ends, **hashes, box=box, **sealed)))
            if holder is not dealer:
                both = shares["b"][index].reveal() + shares["s"][index].reveal()
                assert open_box(case, dealer, holder) == both
        root = merkle.root(leaves)
        assert root.hex() == dealer["deal"]["root"]
        roots.append((dealer["site"], root))
    assert contexts.deals_digest(kx, roots).hex() == case["deals"]


def open_box(case: Case, dealer: Case, holder: Case) -> bytes:
    kx = unhex(case["kx"])
    ends = {"source": dealer["site"], "destination": holder["site"]}
    box = unhex(dealer["deal"]["boxes"][holder["site"]])
    return key_agreement.open_shares(
        share_pair(holder), unhex(dealer["advert"]["share_key"]), box, kx=kx, **ends
    ).reveal()


def share_pair(party: Case) -> HybridPair:
    return HybridPair(secret(party["share_scalar"]), secret(party["share_kem_seed"]))


def masked(case: Case, layout: Layout, party: Case) -> Any:
    update = np.frombuffer(unhex(party["update"]), dtype="<f4")
    words = fixed_point.encode(layout, update, weight=party["weight"], loss=3.5, hits=7).words
    masking.mask(words, SiteMasks.of(party["site"], self_key(case, party), pair_keys(case, party)))
    return words


@pytest.mark.parametrize("case", ROUNDS)
def test_masks_sum_and_result(case: Case) -> None:
    layout = Layout.from_dict(case["layout"])
    kx, deals = unhex(case["kx"]), unhex(case["deals"])
    ring = layout.ring
    total = Accumulator(layout.words, ring)
    alive = [party for party in case["parties"] if party["site"] not in case["dropped"]]
    roots = []
    for party in case["parties"]:
        vector = ring.pack(masked(case, layout, party))
        assert vector.tobytes().hex() == party["upload"]
        assert masking.vector_root(vector).hex() == party["upload_root"]
        if party in alive:
            total.add(0, vector.tobytes())
            roots.append((party["site"], masking.vector_root(vector)))
    survivors = contexts.survivors_digest(kx, deals, roots)
    assert survivors.hex() == case["survivors"]
    gone = [party for party in case["parties"] if party not in alive]
    dropped = {
        (party["site"], other["site"]): pair_keys(case, other)[party["site"]] for other in gone for party in alive
    }
    total.unmask(OpenedMasks.of([self_key(case, party) for party in alive], dropped))
    assert ring.pack(total.total).tobytes().hex() == case["sum"]
    state = np.frombuffer(unhex(case["state"]), dtype="<f4")
    outcome = next_state(layout, state, total.total, survivors=len(alive))
    assert (outcome.verdict, state_hash(outcome.state).hex()) == (case["verdict"], case["next_hash"])
    made = contexts.result_digest(
        kx=kx,
        survivors=survivors,
        verdict=outcome.verdict,
        sum_root=masking.vector_root(ring.pack(total.total)),
        seeds=[unhex(party["seed"]) for party in alive],
        keys=[unhex(party["mask_seed"]) for party in gone],
        pairs=[unhex(pair) for pair in case["opened_pairs"]],
        state_hash=state_hash(outcome.state),
    )
    assert made.hex() == case["result"]


@pytest.mark.parametrize("case", ROUNDS)
def test_masks_of_the_lost_follow_from_opened_secrets(case: Case) -> None:
    """What sites and coordinator take off a sum is what the lost had put on: from seeds and the secrets of pairs."""
    gone = set(case["dropped"])
    adverts = tuple(advert_of(party) for party in case["parties"])
    opened = OpenedByQuorum(
        adverts=adverts,
        seeds=tuple(unhex(party["seed"]) for party in case["parties"] if party["site"] not in gone),
        keys=tuple(unhex(party["mask_seed"]) for party in case["parties"] if party["site"] in gone),
        pairs=tuple(unhex(pair) for pair in case["opened_pairs"]),
    )
    alive = [party["site"] for party in case["parties"] if party["site"] not in gone]
    layout = Layout.from_dict(case["layout"])
    total = Accumulator(layout.words, layout.ring)
    for party in case["parties"]:
        if party["site"] not in gone:
            total.add(0, unhex(party["upload"]))
    total.unmask(opened_masks(context_of(case), unhex(case["kx"]), alive, opened))
    assert layout.ring.pack(total.total).tobytes().hex() == case["sum"]


@pytest.mark.parametrize("case", topic("contexts"))
def test_reading_contexts(case: Case) -> None:
    data = unhex(case["bytes"])
    if case["expect"] != "ok":
        refuses(case, lambda: RoundContext.from_bytes(data))
        return
    context = RoundContext.from_bytes(data)
    assert context.to_bytes() == data
    assert context.ctx().hex() == case["ctx"]


@pytest.mark.parametrize("same_model", [True, False])
def test_two_model_hashes_give_noise(same_model: bool) -> None:
    """One site that was shown another model derives another KX: its masks do not cancel, and the sum is noise."""
    words = 100_000
    names = ["a", "b", "c"]
    pairs = {name: KeyPair(secret(f"{number:02x}" * 32)) for number, name in enumerate(names, start=1)}
    total = np.zeros(words, dtype="<u4")
    for name in names:
        kx = b"\1" * 32 if same_model or name != "c" else b"\2" * 32
        keys = {
            peer: key_agreement.mask_key(
                pairs[name], pairs[peer].public, secret("bb" * 32), kx=kx, own_id=name, peer_id=peer
            )
            for peer in names
            if peer != name
        }
        upload = np.full(words, 7, dtype="<u4")
        own = key_agreement.self_mask_key(secret("aa" * 32), kx=kx, site=name)
        masking.mask(upload, SiteMasks.of(name, own, keys))
        total += upload
        masking.unmask_chunk(total, OpenedMasks.of([own], {}), Ring(32), index=0)
    if same_model:
        assert (total == 21).all()
    else:
        assert egress.p_value(total.tobytes()) > 1e-6
