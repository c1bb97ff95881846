"""Opening of the log that the options name: a data directory or a running server."""

from headrace.reader.files import FileLog
from headrace.reader.selection import LogLocation
from headrace.reader.view import LogView


def open_log(place: LogLocation) -> LogView:
    if place.path:
        return FileLog(place.path)
    from headrace.reader.server import ServerLog

    return ServerLog(place)
