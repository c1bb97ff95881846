"""The counts of one server: plain integers, because they change in the hot path. Elsewhere: showing them."""

from itertools import compress, product

from headrace.log.store import CommitFacts
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
        self._commits: list[CommitFacts] = []
        """Commits that are not counted yet. Their number is bounded by how often `fold` is called."""
        self.committed = self._commits.append
        """Called with each commit, which is counted later, together with others."""
        self.flushed = self.histograms["fsync_seconds"].observe
        """Called with the duration of a flush that belongs to no commit."""

    def count(self, name: str, amount: int = 1) -> None:
        self.counts[name] += amount

    def count_refusal(self, protocol: str, why: Refusal) -> None:
        self.labelled["refusals_total"][protocol, why.value] += 1

    def count_limit(self, limit: str, of: str = "server") -> None:
        """Count that a limit applied."""
        self.labelled["limits_applied_total"][limit, of] += 1

    def count_decision(self, operation: str, *, is_allowed: bool) -> None:
        """Count a decision of access control."""
        decision = "allowed" if is_allowed else "refused"
        self.labelled["access_decisions_total"][operation, decision] += 1

    def count_credentials(self, protocol: str) -> None:
        """Count a peer or a request whose credentials were refused."""
        self.labelled["credentials_refused_total"][(protocol,)] += 1

    def fold(self) -> None:
        """Count the commits since the last call. Called several times a second, and before a scrape."""
        if self._commits:
            asked, shown, write, flush, records, sizes, delivered = zip(*self._commits, strict=True)
            self._commits.clear()
            waits = [late - early for early, late in zip(asked, shown, strict=True)]
            found = {
                "commit_seconds": [one for one in write if one is not None],
                "fsync_seconds": [one for one in flush if one is not None],
                "publish_to_ack_seconds": list(compress(waits, records)),
                "publish_to_delivery_seconds": list(compress(waits, delivered)),
                "commit_records": list(filter(None, records)),
                "commit_bytes": list(compress(sizes, records)),
            }
            for name, values in found.items():
                self.histograms[name].count(values)
