"""Opens the log that options name: files, or a running server."""

from headrace.spark.log_files import FileLog
from headrace.spark.log_view import LogView
from headrace.spark.options import Place


def open_log(place: Place) -> LogView:
    if place.path:
        return FileLog(place.path)
    from headrace.spark.log_server import ServerLog

    return ServerLog(place)
