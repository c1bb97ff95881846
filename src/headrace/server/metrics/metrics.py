"""The counts of one server: plain integers, because they change in the hot path. Elsewhere: showing them."""

from itertools import product

from headrace.log.store import CommitTimes
from headrace.model import Refusal
from headrace.server.metrics.declarations import COUNTERS, HISTOGRAMS, LABELLED_COUNTERS
from headrace.server.metrics.histogram import Histogram


class Metrics:
    def __init__(self) -> None:
        self.counts = dict.fromkeys(COUNTERS, 0)
        self.labelled = {
            name: dict.fromkeys(product(*one.labels.values()), 0)
            for name, one in LABELLED_COUNTERS.items()
        }
        self.histograms = {name: Histogram(one.bounds) for name, one in HISTOGRAMS.items()}
        self._commit = self.histograms["commit_seconds"].observe
        self._fsync = self.histograms["fsync_seconds"].observe
        self._ack = self.histograms["publish_to_ack_seconds"].observe
        self._delivery = self.histograms["publish_to_delivery_seconds"].observe
        self._records = self.histograms["commit_records"].observe
        self._bytes = self.histograms["commit_bytes"].observe

    def count(self, name: str, amount: int = 1) -> None:
        self.counts[name] += amount

    def count_refusal(self, protocol: str, why: Refusal) -> None:
        self.labelled["refusals_total"][protocol, why.value] += 1

    def count_decision(self, operation: str, *, is_allowed: bool) -> None:
        """Count a decision of access control."""
        decision = "allowed" if is_allowed else "refused"
        self.labelled["access_decisions_total"][operation, decision] += 1

    def count_credentials(self, protocol: str) -> None:
        """Count a peer or a request whose credentials were refused."""
        self.labelled["credentials_refused_total"][(protocol,)] += 1

    # Once per commit

    def committed(self, times: CommitTimes, now_s: float, *, delivered: bool) -> None:
        """Count a commit whose records are visible now, and `delivered` to live subscriptions."""
        self.counts["commits_total"] += 1
        if times.write_s is not None:
            self._commit(times.write_s)
        if times.flush_s is not None:
            self._fsync(times.flush_s)
        if times.records:
            self._records(times.records)
            self._bytes(times.bytes)
        if delivered:
            self._delivery(now_s - times.asked_s)

    def acknowledged(self, times: CommitTimes, now_s: float) -> None:
        """Count a commit whose acknowledgements are written."""
        if times.records:
            self._ack(now_s - times.asked_s)

    def flushed(self, seconds: float) -> None:
        """Count a flush that belongs to no commit."""
        self._fsync(seconds)
