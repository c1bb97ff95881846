"""Style sheet of a report: its colours, for light and dark mode, and its layout."""

from collections.abc import Iterator

COLOURS = 6
"""Number of lines in a plot with their own colour; all others are one grey area."""


def _rules(prefix: str, what: str) -> Iterator[str]:
    for number in range(COLOURS):
        yield f".{prefix}{number}{{{what}:var(--c{number})}}"
    yield f".{prefix}rest{{{what}:var(--rest)}}"


_SHEET = """
:root{color-scheme:light dark;--page:#f4f4f1;--card:#fff;--ink:#1b1b19;--soft:#5f5e58;--line:#e4e3dd;
--hover:#0000000f;--track:#f0efea;--mark:#c2352f;--c0:#2a78d6;--c1:#eb6834;--c2:#1baf7a;--c3:#eda100;
--c4:#e87ba4;--c5:#4a3aa7;--rest:#b9b8b0}
@media(prefers-color-scheme:dark){:root{--page:#121211;--card:#1c1c1a;--ink:#f2f1ec;--soft:#a9a79e;
--line:#32312d;--hover:#ffffff14;--track:#262522;--mark:#ff8a80;--c0:#3987e5;--c1:#d95926;--c2:#199e70;
--c3:#c98500;--c4:#d55181;--c5:#9085e9;--rest:#65645d}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1120px;margin:0 auto;padding:28px 20px 40px}
h1{font-size:30px;line-height:1.2;margin:0 0 4px;letter-spacing:-.02em}
h2{font-size:19px;margin:0 0 4px}
h3{font-size:13px;margin:16px 0 6px;color:var(--soft);font-weight:600}
p{margin:0 0 12px;max-width:100ch;overflow-wrap:anywhere}
header p,footer,small{color:var(--soft)}
header b{color:var(--ink);font-weight:600}
section{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:18px 20px;
margin-top:16px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(136px,1fr));gap:10px;margin-top:16px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:12px 16px}
.tile b{display:block;font-size:25px;line-height:1.25;font-weight:650;letter-spacing:-.02em}
.tile span,.tile small{display:block;font-size:13px;color:var(--soft)}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:13px;overflow-wrap:anywhere}
.legend i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr));gap:8px 32px;
align-items:start}
.plot{display:block;width:100%;height:auto;overflow:visible}
.over{min-width:560px}
.grid{stroke:var(--line);stroke-width:1;fill:none}
.axis,.name,.value{font-size:12px;fill:var(--soft);font-variant-numeric:tabular-nums}
.name,.value{fill:var(--ink)}
.end{text-anchor:end}.mid{text-anchor:middle}
.hit{fill:transparent}.hit:hover{fill:var(--hover)}
.track{fill:var(--track)}.silence{fill:var(--mark)}
.bar{display:block;width:100%;min-width:90px;height:5px;margin-top:3px}
.spark{display:block;width:150px;height:30px}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
th{font-weight:600;color:var(--soft);text-align:left}
th,td{padding:6px 14px 6px 0;border-bottom:1px solid var(--line);vertical-align:top}
th:last-child,td:last-child{padding-right:0}
td{overflow-wrap:anywhere}
td:first-child{min-width:110px}
.n{text-align:right;overflow-wrap:normal}
td.n{white-space:nowrap}
tr:last-child td{border-bottom:0}
@media(max-width:760px){table,tbody,tr,td{display:block}thead{display:none}
tr{padding:8px 0;border-bottom:1px solid var(--line)}tr:last-child{border-bottom:0}
td,td.n{padding:1px 0;border:0;text-align:left;white-space:normal}
td::before{content:attr(data-head);display:inline-block;min-width:9em;margin-right:8px;color:var(--soft)}
td:first-child{font-weight:600}td:first-child::before{font-weight:400}}
details{margin-top:10px}summary{cursor:pointer;color:var(--soft);font-size:13px}
details .wide{max-height:320px;overflow:auto}
footer{margin-top:20px;font-size:13px}
code{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
@media print{body{background:#fff}section,.tile{break-inside:avoid}}
"""

STYLE = _SHEET + "".join([*_rules("c", "fill"), *_rules("b", "background")])
