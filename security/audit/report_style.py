"""How the report looks, on a screen, on a telephone and on paper."""

from __future__ import annotations

from typing import Final

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
