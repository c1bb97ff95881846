"""The samples of one scrape, as Prometheus' own parser reads them."""

from typing import NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

from headrace.testing import ServerProcess

Labels = tuple[tuple[str, str], ...]


class Scraped(NamedTuple):
    values: dict[tuple[str, Labels], float]
    """The value of each sample, by its name and its labels."""

    def __getitem__(self, name: str) -> float:  # type: ignore[override]
        """Return the value of the sample without labels."""
        return self.values[name, ()]

    def by_label(self, name: str, label: str) -> dict[str, float]:
        return {
            dict(labels)[label]: value
            for (one, labels), value in self.values.items()
            if one == name
        }


def scraped(server: ServerProcess) -> Scraped:
    text = httpx.get(server.http_url + "/metrics").text
    return Scraped(
        {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    )
