"""Client certificates: which facts they state, and which grants these give."""

import pytest

from headrace.access.certificates import (
    CertificateRule,
    PeerCertificate,
    grants_of,
    principal_of,
)
from headrace.access.operations import Operation
from headrace.errors import BadGrantError

TOLD = {
    "subject": (
        (("countryName", "DE"),),
        (("organizationName", "Example"),),
        (("organizationalUnitName", "a"), ("organizationalUnitName", "b")),
        (("commonName", "billing"),),
    ),
    "subjectAltName": (
        ("DNS", "billing.example.com"),
        ("URI", "spiffe://example.com/prod/billing"),
        ("IP Address", "192.0.2.1"),
        ("email", "billing@example.com"),
        ("DirName", "something else"),
    ),
    "notAfter": "Jan  5 09:34:43 2028 GMT",
}


def certificate() -> PeerCertificate:
    found = PeerCertificate.parse(TOLD)
    assert found is not None
    return found


def matches(text: str) -> bool:
    return CertificateRule.parse(text, ["subscribe:*"]).matches(certificate())


def test_a_certificate_states_facts_of_its_subject_and_its_names() -> None:
    assert certificate() == PeerCertificate(
        "billing",
        (
            *(("O", "Example"), ("OU", "a"), ("OU", "b"), ("CN", "billing")),
            *(("DNS", "billing.example.com"), ("URI", "spiffe://example.com/prod/billing")),
            *(("IP", "192.0.2.1"), ("EMAIL", "billing@example.com")),
        ),
        1_830_677_683_000,
    )


def test_without_a_common_name_the_first_other_fact_is_the_name() -> None:
    found = PeerCertificate.parse(TOLD | {"subject": ()})
    assert found is not None
    assert found.name == "billing.example.com"
    assert PeerCertificate.parse({"subject": (), "notAfter": TOLD["notAfter"]}) is None


@pytest.mark.parametrize(
    "text",
    [
        *("CN:billing", "CN:*", "CN:bill*", "O:Example", "OU:b", "DNS:*.example.com"),
        *("URI:spiffe://example.com/prod/*", "IP:192.0.2.1", "EMAIL:*@example.com"),
    ],
)
def test_a_rule_matches_a_fact_of_its_kind(text: str) -> None:
    assert matches(text)


@pytest.mark.parametrize(
    "text",
    [
        *("CN:billing2", "CN:illing", "CN:Billing", "O:billing", "DNS:billing", "OU:a*b"),
        *("URI:spiffe://example.com/test/*", "CN:billing.example.com", "IP:192.0.2.10"),
    ],
)
def test_a_rule_matches_nothing_else(text: str) -> None:
    assert not matches(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("billing", '"billing" is not KIND:PATTERN, such as CN:billing'),
        ("CN:", '"CN:" is not KIND:PATTERN'),
        ("cn:billing", "with one of the kinds CN, O, OU, DNS, URI, IP, EMAIL"),
        ("C:DE", "is not KIND:PATTERN"),
        ("CN:a\\", "a backslash may only precede"),
    ],
)
def test_a_mistake_in_a_rule_is_refused(text: str, reason: str) -> None:
    with pytest.raises(BadGrantError) as refused:
        CertificateRule.parse(text, ["subscribe:*"])
    assert reason in str(refused.value)


def test_a_rule_without_grants_is_refused() -> None:
    with pytest.raises(BadGrantError, match="has no grants, so it has no effect"):
        CertificateRule.parse("CN:a", [])


def test_the_grants_of_all_rules_that_match_count() -> None:
    rules = [
        CertificateRule.parse("CN:billing", ["publish:orders/*"]),
        CertificateRule.parse("O:*", ["subscribe:news", "publish:orders/*"]),
        CertificateRule.parse("CN:other", ["admin:*"]),
    ]
    found = grants_of(certificate(), rules)
    assert list(map(str, found)) == ["publish:orders/*", "subscribe:news"]
    principal = principal_of(certificate(), found)
    assert str(principal) == "cert:billing"
    assert principal.allows(Operation.PUBLISH, "orders/1")
    assert not principal.allows(Operation.ADMIN, "")
    assert not principal.is_expired(1_830_677_682_999)
    assert principal.is_expired(1_830_677_683_000)
