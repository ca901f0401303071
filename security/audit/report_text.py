"""The words and the style of the report, apart from its facts."""

from __future__ import annotations

from typing import Final

# ----------------------------------------
# How the report looks, on a screen, on a telephone and on paper.

STYLE: Final = """
:root{
 --ink:#1c2430;--soft:#5a6675;--line:#d9dee5;--paper:#fff;--back:#f4f5f2;--good:#1e6b45;--bad:#9f2a2a;
 --open:#8a5a00;--accent:#274b73}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{
 margin:0;background:var(--back);color:var(--ink);
 font:16px/1.55 "Iowan Old Style","Palatino Linotype",Palatino,"Book Antiqua",Georgia,serif}
main{max-width:1000px;margin:0 auto;padding:48px 56px 72px;background:var(--paper)}
h1{font-size:2.05rem;line-height:1.2;margin:.1em 0 .8em;font-weight:600;letter-spacing:-.01em}
h2{font-size:1.28rem;margin:2.4em 0 .7em;padding-top:.9em;border-top:1px solid var(--line);font-weight:600}
h3{font-size:1rem;margin:.2em 0 .4em;font-weight:600}
p{margin:.4em 0 .8em;max-width:46em}
.kicker,.small,th,figcaption,.badge,svg text,dt{
 font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
.kicker{margin:0;color:var(--soft);font-size:.8rem;letter-spacing:.08em;text-transform:uppercase}
.small{font-size:.86rem;color:var(--soft)}
.verdict{border:1px solid var(--line);border-left:8px solid;padding:18px 26px 12px;border-radius:3px}
.verdict .word{font-size:1.7rem;font-weight:600;margin:0}
.good{border-left-color:var(--good)}
.good .word{color:var(--good)}
.bad{border-left-color:var(--bad)}
.bad .word,.alarm{color:var(--bad)}
.open{border-left-color:var(--open)}
.open .word{color:var(--open)}
.two{display:grid;grid-template-columns:1fr 1fr;gap:8px 44px}
ul,ol{padding-left:1.15em;margin:.3em 0 1em}
li{margin:.32em 0}
.ticks{list-style:none;padding-left:1.5em}
.ticks li::before{float:left;margin-left:-1.5em;font-weight:700}
.ticks .pass::before{content:"\\2713";color:var(--good)}
.ticks .fault::before{content:"\\2717";color:var(--bad)}
.ticks .unsure::before{content:"?";color:var(--open)}
.whole{white-space:nowrap}
.mark{font:600 .8rem/1.4 system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif;white-space:nowrap}
.mark.pass{color:var(--good)}
.mark.fault{color:var(--bad)}
.mark.unsure{color:var(--open)}
.mark.pass::before{content:"\\2713\\00a0"}
.mark.fault::before{content:"\\2717\\00a0"}
.mark.unsure::before{content:"?\\00a0"}
.verdict ul{margin:.2em 0 .8em}
.about{margin:1.2em 0 0;gap:.1em 1.4em}
.about dd{font-size:.86rem;color:var(--soft)}
.scroll{overflow-x:auto;margin:.6em 0 1.2em}
table{border-collapse:collapse;width:100%;font-size:.88rem;font-variant-numeric:tabular-nums}
th{
 text-align:left;font-size:.74rem;font-weight:600;color:var(--soft);border-bottom:1.5px solid var(--ink);
 padding:6px 12px 6px 0;vertical-align:bottom}
td{border-bottom:1px solid var(--line);padding:7px 12px 7px 0;vertical-align:top}
.n{text-align:right}
td.n{white-space:nowrap}
.n{padding-right:22px}
code,pre{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:.86em}
td code{white-space:nowrap}
td code.long{white-space:normal;overflow-wrap:anywhere}
pre{background:var(--back);padding:14px 18px;overflow-x:auto;border-radius:3px;line-height:1.7}
.finding{border-left:4px solid;padding:8px 0 4px 18px;margin:0 0 1.1em;break-inside:avoid}
.finding.bad{border-left-color:var(--bad)}
.finding.open{border-left-color:var(--open)}
.finding p{margin:.15em 0 .35em}
.badge{
 display:inline-block;font-size:.7rem;font-weight:600;text-transform:uppercase;letter-spacing:.05em;
 padding:2px 8px;border-radius:2px;border:1px solid;vertical-align:2px;color:var(--soft)}
.bad .badge{color:var(--bad)}
.open .badge{color:var(--open)}
figure{margin:1em 0 1.6em;break-inside:avoid}
figcaption{font-size:.8rem;color:var(--soft);margin-top:.4em}
.chart{width:100%;height:auto;display:block}
svg text{font-size:12px;fill:var(--soft)}
svg .strong{fill:var(--ink);font-weight:600}
.grid{stroke:var(--line);stroke-width:1}
.cap{stroke:var(--bad);stroke-width:1.5;stroke-dasharray:6 4}
.curve{fill:none;stroke:var(--accent);stroke-width:2.5;stroke-linejoin:round}
rect.in{fill:var(--accent)}
rect.out{fill:var(--paper);stroke:var(--bad);stroke-width:1.5}
.dot{fill:var(--accent);fill-opacity:.75}
dl{display:grid;grid-template-columns:minmax(9em,auto) 1fr;gap:.4em 1.4em;margin:1em 0}
dt{font-size:.82rem;font-weight:600}
dd{margin:0;font-size:.93rem}
.sign{display:grid;grid-template-columns:2fr 1fr 2fr;gap:28px;margin-top:64px}
.sign p{border-top:1px solid var(--ink);padding-top:6px;font-size:.82rem;color:var(--soft)}
@media (max-width:640px){
  main{padding:26px 18px 48px}
  h1{font-size:1.55rem}
  .two,dl,.sign{grid-template-columns:1fr}
  dl{gap:.1em}
  dd{margin-bottom:.7em}
  .verdict{padding:14px 16px 8px}
  .chart{min-width:560px}
  figure{overflow-x:auto}
  .many table{min-width:640px}
  .scroll:not(.many) thead{display:none}
  .scroll:not(.many) :is(table,tbody,tr){display:block}
  .scroll:not(.many) tr{border:1px solid var(--line);border-radius:3px;padding:6px 12px;margin:0 0 10px}
  .scroll:not(.many) td{
   display:grid;grid-template-columns:7.5em 1fr;gap:10px;border:0;padding:3px 0;text-align:left;white-space:normal;
   overflow-wrap:anywhere}
  .scroll:not(.many) td::before{
   content:attr(data-label);font:600 .74rem/1.9 system-ui,sans-serif;color:var(--soft)}
  .scroll:not(.many) td[data-label=""]{grid-template-columns:1fr}
  .scroll:not(.many) td[data-label=""]::before{content:none}
  .scroll:not(.many) td code{white-space:normal;overflow-wrap:anywhere}
}
@page{
 margin:16mm 14mm 18mm;
 @bottom-left{content:"Lazaret privacy audit";font:8pt system-ui,sans-serif;color:#5a6675}
 @bottom-right{content:counter(page) " / " counter(pages);font:8pt system-ui,sans-serif;color:#5a6675}}
@media print{
  html{font-size:9.5pt}
  body{background:none;font-size:1rem}
  main{max-width:none;padding:0}
  h2{break-after:avoid}
  tr{break-inside:avoid}
  thead{display:table-header-group}
  .scroll{overflow:visible}
  table{font-size:.84rem}
  .verdict,.badge,rect,.dot,.curve{-webkit-print-color-adjust:exact;print-color-adjust:exact}
}
"""


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
