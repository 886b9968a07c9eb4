"""The page's style sheet: one set of names for colours, given twice, so that light and dark differ nowhere else."""

STYLE = """
:root{color-scheme:light dark;--ground:#f6f7f9;--card:#fff;--ink:#1b2129;--faint:#66707c;--line:#dfe3e8;--grid:#e9ecf0;--accent:#2563eb;
--good:#0b7a55;--bad:#c02636;--warn:#955b00;--good-ground:#dcf5ea;--bad-ground:#fde4e6;--warn-ground:#fdf0d5;--row:#f3f6fa}
@media(prefers-color-scheme:dark){:root{--ground:#0f1216;--card:#171b21;--ink:#e4e8ed;--faint:#98a2ae;--line:#2b323b;--grid:#262c34;
--accent:#6ea0ff;--good:#4fd1a1;--bad:#ff8088;--warn:#f0b95a;--good-ground:#12352a;--bad-ground:#42191e;--warn-ground:#3a2c10;--row:#1d222a}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:15px/1.45 system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1440px;margin:0 auto;padding:1.5rem clamp(.75rem,2vw,2rem) 4rem}
h1{font-size:1.6rem;line-height:1.2;margin:.25rem 0 1.25rem;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:2.25rem 0 .75rem}
h3{font-size:1rem;margin:0}
section:first-of-type h2{margin-top:0}
.faint,.versions,figcaption{color:var(--faint);font-size:.84rem}
.versions{margin:.75rem 0;overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(165px,1fr));gap:.75rem}
.tile,figure,.scroll,.legend{background:var(--card);border:1px solid var(--line);border-radius:10px}
.tile{padding:.7rem .9rem;min-width:0;overflow-wrap:anywhere}
.tile .label{color:var(--faint);font-size:.78rem;text-transform:uppercase;letter-spacing:.05em}
.tile .value{font-size:1.3rem;font-weight:600;line-height:1.3;font-variant-numeric:tabular-nums}
details{margin:.5rem 0}summary{cursor:pointer;color:var(--faint);font-size:.9rem}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1.25rem;margin:.5rem 0;font-size:.88rem}
dt{color:var(--faint)}dd{margin:0;overflow-wrap:anywhere}
.scroll{overflow-x:auto}
table{border-collapse:separate;border-spacing:0;width:100%;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{padding:.42rem .7rem;text-align:left;vertical-align:top;border-bottom:1px solid var(--line);white-space:nowrap}
tbody tr:last-child>*{border-bottom:0}
thead th{background:var(--card);color:var(--faint);font-weight:500;vertical-align:bottom}
tbody th{font-weight:600;position:sticky;left:0;background:var(--card);z-index:1;min-width:13rem;max-width:20rem;
white-space:normal;overflow-wrap:anywhere}
tbody tr:hover>*{background:var(--row)}
.winner>*{background:var(--good-ground)!important}
.number{text-align:right}
.sortable thead th{cursor:pointer;user-select:none}
.sortable thead th[aria-sort]{color:var(--accent)}
.sortable thead th[aria-sort=ascending]::after{content:" \\2191"}
.sortable thead th[aria-sort=descending]::after{content:" \\2193"}
.reason{font-weight:400;font-size:.82rem;color:var(--bad);white-space:pre-wrap;overflow-wrap:anywhere}
.mark{margin-right:.45em;vertical-align:middle;flex:none}
.verdict{margin:.3rem 0}.verdict:last-of-type{margin-bottom:.8rem}
.text{white-space:normal;min-width:14rem}
.key{display:flex;flex-wrap:wrap;gap:.2rem .9rem;margin:0 0 .6rem;font-size:.86rem;overflow-wrap:anywhere}
.key span{display:inline-flex;align-items:center}
@media screen{.folded tbody tr:nth-child(n+41){display:none!important}}
.unfold{margin:.5rem 0}.wider{margin:.3rem 0}
.unshown{color:var(--warn);font-size:.84rem;margin:.1rem 0}
.dot{display:inline-block;width:.72em;height:.72em;border-radius:50%;margin-right:.5em;flex:none}
.status{display:inline-block;border-radius:99px;padding:0 .6em;font-size:.82rem;background:var(--row);color:var(--faint)}
.status.done{background:var(--good-ground);color:var(--good)}
.status.failed{background:var(--bad-ground);color:var(--bad)}
.status.stopped,.status.training,.status.evaluating{background:var(--warn-ground);color:var(--warn)}
.change{display:inline-block;min-width:3.2em;font-size:.82rem}.good{color:var(--good)}.bad{color:var(--bad)}
.spark{display:block}
.charts{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:.9rem}
figure{margin:0;padding:.8rem .9rem .4rem;min-width:0}
figure.wide{grid-column:1/-1}
.head{display:flex;justify-content:space-between;align-items:center;min-height:1.7rem}
figcaption{margin-top:.1rem;overflow-wrap:anywhere}
.charts:has(>:only-child:not(.wide)){grid-template-columns:minmax(0,46rem)}
.scroll+.charts{margin-top:.9rem}
.legend{position:sticky;top:0;z-index:5;padding:.55rem .7rem;margin:0 0 .9rem;box-shadow:0 2px 8px #0002}
.controls{display:flex;flex-wrap:wrap;gap:.5rem;align-items:center;margin-bottom:.4rem;font-size:.85rem;color:var(--faint)}
.controls label[hidden]{display:none}
.chips{display:flex;flex-wrap:wrap;gap:.3rem;margin-top:.3rem}.legend details{margin:0}
@media(max-width:700px),(max-height:600px){.legend{position:static!important}}
button,select,input{
font:inherit;font-size:.82rem;color:inherit;background:var(--row);border:1px solid var(--line);border-radius:6px;padding:.12rem .55rem}
button{cursor:pointer}
button:focus-visible,select:focus-visible,input:focus-visible{outline:2px solid var(--accent);outline-offset:1px}
.chip{display:inline-flex;align-items:center;border-radius:99px;color:var(--ink);overflow:hidden;white-space:nowrap}
.chip[aria-pressed=false]{opacity:.42;text-decoration:line-through}
.scales{display:flex}.scales button{border-radius:0}.scales button:first-child{border-radius:6px 0 0 6px}
.scales button:last-child{border-radius:0 6px 6px 0;border-left:0}
.scales [aria-pressed=true]{background:var(--accent);color:var(--card);border-color:var(--accent)}
.chip[hidden]{display:none}
.message{display:grid;place-items:center;height:100%;color:var(--faint)}
@media(max-width:900px){.charts{grid-template-columns:minmax(0,1fr)}h1{font-size:1.3rem}}
@media(max-width:640px){.tiles{grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));gap:.5rem}.tile{padding:.45rem .6rem}
.tile .value{font-size:1.05rem}}
@media(max-width:900px),print{
.blocks,.blocks tbody{display:block}.blocks thead{display:none}
[data-script] .blocks thead{display:block;border-bottom:1px solid var(--line)}
.blocks thead tr{display:flex;flex-wrap:wrap;align-items:baseline;padding:.3rem .6rem}
.blocks thead tr::before{content:"sort by";color:var(--faint)}
.blocks thead th{border:0;padding:.1rem .35rem;text-decoration:underline dotted}.blocks thead th:empty{display:none}
.blocks tbody tr{display:flex;flex-wrap:wrap;align-items:center;gap:.1rem .9rem;padding:.5rem .7rem;
border-bottom:1px solid var(--line)}
.blocks tbody tr>*{display:block;border:0;padding:0;text-align:left;white-space:normal;overflow-wrap:anywhere;background:none}
.blocks tbody th{flex:1 1 60%;order:-2;position:static;min-width:0;max-width:none}
.blocks td:empty,.blocks td[data-label=place]{display:none!important}
.blocks td[data-label=status]{order:-1}.blocks td:is([data-label=status],[data-label=trend])::before{content:none}
.blocks .spark{width:84px;height:21px}
.blocks td::before{content:attr(data-label) " ";color:var(--faint);font-size:.76rem}
.blocks tbody tr.winner{background:var(--good-ground)}.blocks .winner>*{background:none!important}}
@media print{.legend,.scales,.unfold,.wider,.blocks thead{display:none!important}.folded tbody tr{display:table-row}
.folded.blocks tbody tr{display:flex}.scroll{overflow:visible}.charts{grid-template-columns:minmax(0,1fr)}figure,tr{break-inside:avoid}}
"""
