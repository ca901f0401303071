"""The words and the style of the report, apart from its facts."""

from __future__ import annotations

from typing import Final

VERDICTS: Final = {
    0: ("Clean", "Every check that these logs allow was made, and each one passed."),
    1: ("Findings", "At least one check failed. Do not rely on these logs until the findings below are explained."),
    3: ("Cannot decide", "Nothing was found to be wrong, but parts or keys are missing, so this is not a pass."),
}

NEVER_SHOWN: Final = (
    "that a modified agent logged all it sent: this rests on the kernel's counters and on the coordinator's log",
    "that a site, the coordinator and every witness did not act together",
)

CLASSES: Final = (
    "Masked vectors are uniform noise to everybody but the sum. Sealed shares open only at the site they are for. Mask "
    "shares open the sum and never one site's update. Public keys, control messages and heads carry no patient data."
)
NO_PRIVACY: Final = (
    "No site claims differential privacy in these logs. Secure aggregation hides each update inside the sum; it does "
    "not bound what the sum itself says about a patient."
)
EPSILON_CAPTION: Final = (
    "Epsilon after each round, recomputed from the recorded mechanisms, and the cap that stops the site."
)
COHORT_CAPTION: Final = "Filled: the site's vector is in the round's sum. Outlined: it dropped out."
WITNESS_CAPTION: Final = (
    "Each dot is a cosignature: an outside party saw a head of this log that extended the one before."
)

SP_800_226: Final = (
    (
        "Guarantee",
        "(epsilon, delta)-differential privacy of a site's contributions, by a Renyi filter at one order.",
    ),
    ("Unit of privacy", "What one epsilon protects is named in the table: a patient, a lesion, a study or an image."),
    (
        "Mechanism",
        "Gaussian noise on clipped gradients, one per unit, under Poisson sampling; other releases as listed.",
    ),
    (
        "Trust model",
        "Noise is added at the site, so the bound holds against coordinator, other sites and model readers.",
    ),
    ("What it does not cover", "Data collection, access inside the hospital, and sites that do not claim it."),
)

MEANING: Final = (
    "A log shows that what was recorded has not been changed, dropped, reordered or backdated since somebody outside "
    "the machine saw a head of it; that both ends recorded the same bytes; that all sites worked on the same model "
    "with the same cohort; and that epsilon follows from what was recorded.",
    "That prototypes, personal heads, class counts and images stayed inside rests on six things together:",
)
LEGS: Final = (
    ("Schema", "the wire has no field that could carry them; the schema's digest is in every agent.start"),
    ("One door", "one module holds the channel, and it logs before it sends"),
    ("Size equation", "each message has exactly the length that its type, cohort and dimension give"),
    ("Uniformity", "a vector that does not look like noise is stopped before it leaves"),
    ("Second ledger", "the kernel counted no more bytes, over all connections, than the log and TLS explain"),
    ("Matching", "each message that left is the one that arrived, and none arrived that did not leave"),
)
BROKEN_RECORD: Final = (
    "The record itself has findings or cannot be decided. Until they are explained, what holds above holds only for "
    "the entries as they are here now."
)

REGULATION_NOTE: Final = (
    "A reading aid, not legal advice: counsel confirms which rules apply. The tool makes no legal determination."
)
REGULATIONS: Final = (
    (
        "HIPAA 45 CFR 164.312(b), (c)(1)",
        "record and examine activity in systems with health information; integrity",
        "the logs, this verification, and an operator.action entry for each examination",
    ),
    ("HIPAA 45 CFR 164.316(b)(2)(i)", "keep required documentation for six years", "log retention; heads never expire"),
    (
        "HIPAA 45 CFR 164.514(b)(1)",
        "an expert finds a very small risk of re-identification and documents it",
        "what leaves, masking, cohort sizes and epsilon above; the expert's document by digest in policy.changed",
    ),
    (
        "GDPR Art. 5(2), 30, 32, 35",
        "accountability; records of processing; security; impact assessment",
        "purpose and legal basis in data.opened; recipients and categories in the egress ledger",
    ),
    (
        "EU AI Act Art. 12, 19, 26(6)",
        "automatic logs over a system's lifetime, kept for at least six months",
        "the same logs; check which dates apply to the device class",
    ),
    (
        "NIST SP 800-226",
        "judge a differential-privacy claim with everything it depends on",
        "the section on differential privacy, or the statement that none is claimed",
    ),
    (
        "ISO/IEC 27001:2022 A.8.15, A.8.17",
        "protected logs that administrators cannot alter; synchronised clocks",
        "witnesses outside the administrator's reach; clock.adjusted and cosignature times",
    ),
)

REPEAT: Final = (
    "On copies of the same folders, each under its party's name, offline; keys pinned by the consortium's root:"
)
REPEAT_UNPINNED: Final = (
    "On copies of the same folders, each under its party's name, offline. Ask the consortium for its root certificate "
    "to pin the keys:"
)
