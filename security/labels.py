"""Every domain-separation string of the project, each used for one purpose only.

A test greps for string literals handed to hashes, KDFs and signatures elsewhere. All end in a NUL byte, so that no
label is a prefix of another one plus data.
"""

from __future__ import annotations

from typing import Final

PROTOCOL: Final = b"FLSA1"


def _label(purpose: str) -> bytes:
    return PROTOCOL + b"/" + purpose.encode("ascii") + b"\0"


# Hashes (docs/spec/secure-aggregation.md, "What the keys are bound to").
CONTEXT: Final = _label("ctx")
KEYS: Final = _label("keys")
DEALS: Final = _label("deals")
SURVIVORS: Final = _label("surv")
RESULT: Final = _label("result")
VOTED: Final = _label("voted")
SELF_MASK_COMMITMENT: Final = _label("com")
PAIR: Final = _label("pair")
SHARE_LEAF: Final = _label("leaf")
SHARE: Final = _label("sh")
LAYOUT: Final = _label("layout")
STATE: Final = _label("state")

# Key derivation.
KDF_MASK: Final = _label("mask/aes256ctr")
KDF_SEED_X25519: Final = _label("seed/x25519")
KDF_SEED_MLKEM: Final = _label("seed/mlkem768")
KDF_PAIR: Final = _label("seed/pair")
KDF_PAIR_BOX: Final = _label("pair-box")
KDF_SHARE: Final = _label("share")
KDF_SELF: Final = _label("self/aes256ctr")

# Which chunks of a sum a site looks at in a sampled audit.
SPOT_CHECK: Final = _label("spot-check")

# A hospital's own seed of training, from its data key.
TRAINING_SEED: Final = _label("training-seed")

# The draw of groups: a site's secret, its commitment, and the order that all secrets together give.
DRAW_SECRET: Final = _label("draw-secret")
DRAW_COMMITMENT: Final = _label("draw-com")
DRAW_ORDER: Final = _label("draw-order")

# Signatures: one tag for each kind of statement. The result's hash has the plain name, so its signature has another.
SIGN_PLAN: Final = _label("plan")
SIGN_ADVERT: Final = _label("advert")
SIGN_DEAL: Final = _label("deal")
SIGN_ACCUSE: Final = _label("accuse")
SIGN_DISCLOSE: Final = _label("disclose")
SIGN_UPLOAD: Final = _label("up")
SIGN_AGREE: Final = _label("agree")
SIGN_UNMASK: Final = _label("unmask")
SIGN_ABORT: Final = _label("abort")
SIGN_ABORT_REQUEST: Final = _label("abortreq")
SIGN_RUN_STOP: Final = _label("runstop")
SIGN_RESULT: Final = _label("result-sig")
SIGN_ACK: Final = _label("ack")
SIGN_VOTE: Final = _label("vote")

# The consortium's documents (docs/consortium.md).
MANIFEST: Final = _label("manifest")
SIGN_MANIFEST: Final = _label("manifest-sig")
ENROLMENT: Final = _label("enrolment")
SIGN_ENROLMENT: Final = _label("enrolment-sig")
SIGN_RENEWAL: Final = _label("renewal-sig")

# A member's signature on a copy of itself (docs/hospitals.md, Backup).
SIGN_COPY: Final = _label("copy-sig")

# Privacy ledger: its hash chain, the salted commitment to its newest line for the advert, the salt.
DP_LEDGER: Final = _label("dp-ledger")
DP_LEDGER_COMMITMENT: Final = _label("dp-ledger-head")
DP_LEDGER_SALT: Final = _label("dp-ledger-salt")

# Noise: the key of the next draw.
DP_NOISE: Final = _label("dp-noise")

# Sides of patients: the keyed hash that gives them, and the digest that names its key in the ledger.
SIDES: Final = _label("sides")
SIDES_KEY: Final = _label("sides-key")

# Names of messages in the privacy logs.
MESSAGE_ID: Final = _label("msgid")

# Updates at rest in a site's state directory.
PENDING_UPDATE: Final = _label("pending")
