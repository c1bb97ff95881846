"""A report as one HTML page that needs no other files: sentences, plots and tables of numbers. Pure.

Everything that a user has chosen, such as the name of a topic, is escaped where it enters the page. The page
contains no scripts, and its policy forbids browsers to fetch anything.
"""

from collections.abc import Iterable, Sequence

from headrace.pipeline.report import figures
from headrace.pipeline.report.data import Bar, Line, ReportData, ServerSeen
from headrace.pipeline.report.figures import Over
from headrace.printing import counted, size

COLOURS = 6
"""Number of lines in a plot with a colour of the style sheet; all others are one grey area."""

_SILENCES = 10
"""Number of silences that are listed with their times."""


def page(report: ReportData) -> str:
    sections = [_heading(report), _tiles(report)]
    if report.messages:
        sections += [_over_time(report), _busiest(report), _sizes(report), _gaps(report)]
    sections += [_server(report.server), _footer(report)]
    return _PAGE.format(style=_STYLE, body="\n".join(sections))


def _heading(report: ReportData) -> str:
    if report.first_ms is None or report.last_ms is None:
        when = "There is not one message."
    else:
        when = (
            f"{figures.moment(report.first_ms)} to {figures.moment(report.last_ms)} UTC, "
            f"{figures.span(report.last_ms - report.first_ms)}."
        )
    lake = f" and the lake <b>{figures.name(report.lake)}</b>" if report.lake else ""
    if report.damaged:
        when += (
            f" {counted(report.damaged, 'part')} of the log could not be counted: "
            "<code>headrace verify</code> says what is damaged."
        )
    return (
        f"<header><h1>What the log has seen</h1><p>{when} "
        f"Read from <b>{figures.name(report.log)}</b>{lake}.</p></header>"
    )


# Key figures


def _tiles(report: ReportData) -> str:
    tiles = [
        ("messages", figures.short(report.messages), f"{report.messages:,}"),
        ("bytes", size(report.bytes), f"{report.bytes:,} bytes of payload"),
        ("topics", figures.short(report.topics_in_all), f"{report.topics_in_all:,}"),
    ]
    if report.messages:
        peak = max(_sums(_lines(report), "messages_over_time"))
        rate = peak * 1000 / report.bucket_ms
        per = f"{peak:,} messages in {figures.bucket(report.bucket_ms)}"
        tiles.append(("at the busiest", f"{figures.short(rate)}/s", per))
        mean = report.bytes / report.messages
        tiles.append(("mean size", size(mean), f"{mean:,.1f} bytes"))
    if report.server is not None:
        server = report.server
        lag = sum(reader.lag_records for reader in server.readers)
        tiles.append(("records not read yet", figures.short(lag), f"{lag:,}"))
        refused = server.duplicates_refused
        tiles.append(("duplicates refused", figures.short(refused), f"{refused:,}"))
    cells = "".join(
        f'<div class="tile" title="{title}"><b>{value}</b><span>{label}</span></div>'
        for label, value, title in tiles
    )
    return f'<div class="tiles">{cells}</div>'


# Over time


def _over_time(report: ReportData) -> str:
    over = _over(report)
    top = _coloured(report)
    legend = [
        f'<span><i class="b{number}"></i>{figures.name(line.name)}</span>'
        for number, line in enumerate(top)
    ]
    if len(report.topics) > COLOURS or report.others is not None:
        left = report.topics_in_all - len(top)
        legend.append(f'<span><i class="brest"></i>{counted(left, "other topic")}</span>')
    lines = _lines(report)
    messages, sizes = _sums(lines, "messages_over_time"), _sums(lines, "bytes_over_time")
    starts = [over.start_ms + point * over.width_ms for point in range(over.points)]
    moments = [figures.moment(ms, over.width_ms) for ms in starts]
    points = list(zip(moments, messages, sizes, strict=True))
    titles = [f"{when}: {counted(count, 'message')}, {size(held)}" for when, count, held in points]
    busiest = max(range(over.points), key=messages.__getitem__)
    bucket = figures.bucket(over.width_ms)
    sentence = (
        f"Each step is {bucket}. The busiest began at {moments[busiest]}, with "
        f"{counted(messages[busiest], 'message')} ({size(sizes[busiest])})."
    )
    plots = ""
    for what, field in (("Messages", "messages_over_time"), ("Bytes", "bytes_over_time")):
        layers, label = _layers(report, field), f"{what} over time"
        plot = figures.stacked(layers, titles, over, binary=what == "Bytes", label=label)
        plots += f"<h3>{what} per {bucket}</h3>{plot}"
    rows = [[when, f"{count:,}", size(held)] for when, count, held in points if count]
    numbers = _table(("from (UTC)", ">messages", ">bytes"), rows)
    return _section(
        "Over time",
        sentence,
        f'<div class="legend">{"".join(legend)}</div>{plots}'
        f"<details><summary>The numbers</summary>{numbers}</details>",
    )


def _over(report: ReportData) -> Over:
    return Over(report.buckets_from_ms, report.bucket_ms, report.buckets)


def _lines(report: ReportData) -> list[Line]:
    """Return the lines of all topics; the last may be that of the topics without their own line."""
    return [*report.topics, report.others] if report.others is not None else report.topics


def _coloured(report: ReportData) -> list[Line]:
    """Return the lines with the largest share of messages and bytes, which have a colour in both plots."""
    return sorted(
        report.topics,
        key=lambda line: -(line.messages / report.messages + line.bytes / max(report.bytes, 1)),
    )[:COLOURS]


def _layers(report: ReportData, field: str) -> list[list[int]]:
    """Return the values of the topics with a colour, and the sum of all others as the last layer."""
    shown = _coloured(report)
    rest = [line for line in _lines(report) if line not in shown]
    layers = [getattr(line, field) for line in shown]
    return [*layers, _sums(rest, field)] if rest else layers


def _sums(lines: Iterable[Line], field: str) -> list[int]:
    return list(map(sum, zip(*(getattr(line, field) for line in lines), strict=True)))


# Topics


def _busiest(report: ReportData) -> str:
    lines = _lines(report)
    most = max(line.messages for line in lines)
    first = report.topics[0]
    sentence = (
        f"<b>{figures.name(first.name)}</b> has {_share(first.messages, report.messages)} of all messages"
        f" and {_share(first.bytes, report.bytes)} of all bytes."
    )
    if report.others is not None:
        sentence += (
            f" Beside the busiest {len(report.topics)} there are "
            f"{counted(report.others_in_all, 'other topic')}, "
            f"with {_share(report.others.messages, report.messages)} of the messages."
        )
    rows = [
        [
            figures.name(line.name) or f"<em>{counted(report.others_in_all, 'other topic')}</em>",
            f"{line.messages:,}{figures.bar(line.messages, most)}",
            size(line.bytes),
            size(line.bytes / max(line.messages, 1)),
            figures.spark(line.messages_over_time, "messages over time"),
            figures.spark(line.bytes_over_time, "bytes over time"),
            figures.moment(line.last_ms),
        ]
        for line in lines
    ]
    heads = ("topic", ">messages", ">bytes", ">mean size", "messages over time", "bytes over time")
    return _section("The busiest topics", sentence, _table((*heads, "last message (UTC)"), rows))


def _share(part: int, whole: int) -> str:
    percent = 100 * part / whole if whole else 0
    if 0 < percent < 0.05:
        return "&lt; 0.1 %"
    return f"{percent:.0f} %" if percent >= 10 or not percent else f"{percent:.1f} %"


# Sizes


def _sizes(report: ReportData) -> str:
    most = max(report.sizes, key=lambda bar: bar.count)
    share = _share(most.count, report.messages)
    sentence = f"The commonest size is {_size_range(most)}: {share} of all messages."
    if report.sizes_are_means:
        sentence += (
            " Messages that were stored together count with their mean size: "
            "the log's index knows no other."
        )
    bars, rows = [], []
    for bar in report.sizes:
        held = _size_range(bar)
        label = figures.bound(bar.least).replace(" ", "\u00a0")
        bars.append((label, bar.count, f"{held}: {counted(bar.count, 'message')}"))
        rows.append([held, f"{bar.count:,}", _share(bar.count, report.messages)])
    return _section(
        "How large messages are",
        sentence,
        f'<div class="two">{figures.columns(bars, "messages by size")}'
        f"{_table(('size', '>messages', '>share'), rows)}</div>",
    )


def _size_range(bar: Bar) -> str:
    if bar.least == 0:
        return "no bytes"
    if bar.below is None or bar.below - bar.least == 1:
        return figures.bound(bar.least)
    return f"{figures.bound(bar.least)} to below {figures.bound(bar.below)}"


# Gaps


def _gaps(report: ReportData) -> str:
    lines = [line for line in report.topics if line.silence_ms]
    plot = figures.strips(report.topics, _over(report), "when each topic had messages")
    if lines:
        worst = max(lines, key=lambda line: line.silence_ms)
        sentence = (
            f"The longest silence among the busiest topics was that of <b>{figures.name(worst.name)}</b>: "
            f"{figures.span(worst.silence_ms)}, from {figures.moment(worst.silent_from_ms)}. "
            "The stronger a colour, the busier; a line through a strip is the longest silence of its topic."
        )
    else:
        sentence = "No topic was ever silent: all of its messages came at once."
    pauses = [
        (_pause(bar), bar.count, f"{_pause(bar)}: {counted(bar.count, 'pause')}")
        for bar in report.pauses_ms
    ]
    silences = [
        [
            figures.name(line.name),
            figures.span(line.silence_ms),
            figures.moment(line.silent_from_ms),
            figures.span((line.last_ms - line.first_ms) / max(line.messages - 1, 1)),
        ]
        for line in sorted(lines, key=lambda line: -line.silence_ms)[:_SILENCES]
    ]
    heads = ("topic", ">longest silence", "from (UTC)", ">mean pause")
    return _section(
        "When nothing came",
        sentence,
        f'{plot}<div class="two"><div><h3>Pauses between two messages of a topic '
        "(ten times as many are one step higher)</h3>"
        f"{figures.columns(pauses, 'pauses between messages', by_digits=True)}</div>"
        f"<div><h3>The longest</h3>{_table(heads, silences)}</div></div>",
    )


def _pause(bar: Bar) -> str:
    if bar.below is None:
        return f"&gt; {figures.span(bar.least)}"
    return f"&lt; {bar.below / 1000:g} s" if bar.below < 1000 else f"&lt; {figures.span(bar.below)}"


# Data of a running server


def _server(server: ServerSeen | None) -> str:
    if server is None:
        return _section(
            "Readers and channels",
            "No server was asked: who reads the log and how far behind they are, what happened to "
            "channels, and how many duplicates were refused is not known. Name a server with "
            "<code>--http</code>.",
        )
    return "\n".join([_readers(server), _channels(server), _duplicates(server)])


def _readers(server: ServerSeen) -> str:
    if not server.readers:
        return _section("How far readers are behind", "No reader keeps a cursor.")
    most = max(reader.lag_records for reader in server.readers)
    behind = [reader for reader in server.readers if reader.lag_records]
    if behind:
        sentence = (
            f"<b>{figures.name(behind[0].name)}</b> is furthest behind: "
            f"{counted(behind[0].lag_records, 'record')}, most of all in "
            f"{figures.name(behind[0].slowest_topic)}."
        )
    else:
        sentence = "All readers have read everything."
    if gone := sum(reader.gone_records for reader in server.readers):
        sentence += (
            f" {counted(gone, 'record')} were gone before those who wanted them came to them."
        )
    rows = [
        [
            figures.name(reader.name),
            f"{reader.lag_records:,}{figures.bar(reader.lag_records, most)}",
            size(reader.lag_bytes),
            f"{reader.topics:,}",
            figures.name(reader.slowest_topic) if reader.lag_records else "",
            f"{reader.gone_records:,}",
            figures.moment(reader.moved_ms),
        ]
        for reader in server.readers
    ]
    heads = ("reader", ">records behind", ">bytes", ">topics", "slowest topic", ">gone")
    table = _table((*heads, "moved (UTC)"), rows)
    more = _more(server.readers_in_all - len(rows), "reader")
    return _section("How far readers are behind", sentence, table + more)


def _channels(server: ServerSeen) -> str:
    seen = server.channels
    tiles = [
        ("times trimmed", server.channels_trimmed, "since the server's start"),
        ("logs destroyed", server.channels_destroyed, "since the server's start"),
        ("channels now", seen.channels, f"{seen.with_log:,} of them have a log"),
        ("to be destroyed", seen.scheduled, "nobody is there any more"),
    ]
    cells = "".join(
        f'<div class="tile"><b>{figures.short(value)}</b><span>{label}</span><small>{title}</small></div>'
        for label, value, title in tiles
    )
    body = f'<div class="tiles">{cells}</div>'
    if not seen.channels:
        return _section("Channels", "There are no channels now.", body)
    sentence = (
        f"{counted(seen.channels, 'channel')} {'is' if seen.channels == 1 else 'are'} known"
        f"{', and others that were not looked at' if seen.more else ''}: "
        f"{seen.trimmed:,} with a log of which the beginning is trimmed, as everyone has it, "
        f"{seen.destroyed:,} whose log is destroyed. What is left are "
        f"{counted(seen.messages, 'message')} ({size(seen.bytes)})."
    )
    slow = [member for member in seen.members if member.lag_messages or member.missed_messages]
    if seen.members and not slow:
        sentence += f" {counted(seen.members_in_all, 'processor')} have everything."
    if slow:
        most = max(member.lag_messages for member in slow)
        rows = [
            [
                figures.name(member.processor),
                figures.name(member.channel),
                "here" if member.present else "away",
                f"{member.lag_messages:,}{figures.bar(member.lag_messages, most)}",
                f"{member.missed_messages:,}",
            ]
            for member in slow
        ]
        heads = ("processor", "channel", "", ">messages behind", ">missed")
        body += f"<h3>The slowest processors</h3>{_table(heads, rows)}"
        body += _more(seen.members_in_all - len(rows), "processor")
    return _section("Channels", sentence, body)


def _duplicates(server: ServerSeen) -> str:
    if not server.duplicates_refused:
        text = "Nothing has come twice since the server's start."
    else:
        text = (
            f"Since the server's start {counted(server.duplicates_refused, 'duplicate')} came and "
            f"{'was' if server.duplicates_refused == 1 else 'were'} not stored again: publishes, events, "
            "messages and batches that were sent again because their sender could not know that they had "
            "arrived."
        )
    return _section("Duplicates refused", text)


def _footer(report: ReportData) -> str:
    return (
        f"<footer>Made {figures.moment(report.made_ms)} UTC by <code>headrace pipeline report</code>. "
        "All times are UTC. Bytes are those of payloads. No payload was read.</footer>"
    )


# Parts of pages


def _section(title: str, sentence: str, body: str = "") -> str:
    return f"<section><h2>{title}</h2><p>{sentence}</p>{body}</section>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Make a table.

    Columns whose head begins with `>` contain numbers. On a narrow screen, each cell shows its own head.
    """
    names = [one.removeprefix(">") for one in heads]
    kinds = [' class="n"' if one.startswith(">") else "" for one in heads]
    cells = [f'<td{kind} data-head="{name}">' for kind, name in zip(kinds, names, strict=True)]
    head = "".join(f"<th{kind}>{name}</th>" for kind, name in zip(kinds, names, strict=True))
    body = "".join(
        f"<tr>{''.join(f'{begin}{cell}</td>' for begin, cell in zip(cells, row, strict=True))}</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _more(left: int, noun: str) -> str:
    return f"<p>And {counted(left, f'other {noun}')}.</p>" if left > 0 else ""


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>What the log has seen</title>
<style>{style}</style></head>
<body><main>
{body}
</main></body></html>
"""


# Style sheet: colours for light and dark mode, and the layout


_STYLE = """
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
.c0{fill:var(--c0)}.c1{fill:var(--c1)}.c2{fill:var(--c2)}.c3{fill:var(--c3)}.c4{fill:var(--c4)}
.c5{fill:var(--c5)}.crest{fill:var(--rest)}
.b0{background:var(--c0)}.b1{background:var(--c1)}.b2{background:var(--c2)}.b3{background:var(--c3)}
.b4{background:var(--c4)}.b5{background:var(--c5)}.brest{background:var(--rest)}
"""
