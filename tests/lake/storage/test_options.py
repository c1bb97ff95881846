"""Addresses and options of object storage, and where credentials come from. No request is made."""

import pickle

import pytest

from headrace.lake.format import LakeError
from headrace.lake.storage import options as module
from headrace.lake.storage.options import complete
from headrace.lake.storage.storage import storage_of
from tests.fakes.s3_server import KEY, SECRET, forget_credentials

KEYS = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
LAKE = "s3://bucket/lake"


@pytest.fixture(autouse=True)
def aws(monkeypatch, tmp_path):
    """Hide the tester's credentials; return a function that writes the files of AWS."""
    forget_credentials(monkeypatch)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))

    def write(credentials="", config=""):
        (tmp_path / "credentials").write_text(credentials)
        (tmp_path / "config").write_text(config)
        module._read_profile.cache_clear()

    return write


def profile(name, key="profile-key", secret="profile-secret"):
    return f"[{name}]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"


@pytest.mark.parametrize(
    ("address", "normal"),
    [
        ("s3://bucket/lake", "s3://bucket/lake"),
        ("s3a://bucket/a//lake/", "s3://bucket/a/lake"),
        ("s3:/bucket/lake", "s3://bucket/lake"),
        ("s3://bucket", "s3://bucket"),
        ("gs://bucket/lake/", "gs://bucket/lake"),
        ("abfs://files@account.dfs.core.windows.net/lake", None),
        ("abfss://files@account.dfs.core.windows.net/lake", None),
    ],
)
def test_an_address_has_one_form(address, normal):
    found = storage_of(address, {})
    expected = normal or "abfss://files@account.dfs.core.windows.net/lake"
    assert found.address == expected
    assert pickle.loads(pickle.dumps(found)) == found
    assert found == storage_of(expected, {})


def test_a_container_of_azure_needs_the_name_of_its_account():
    with pytest.raises(LakeError, match="az://files/lake cannot be opened with these options: "):
        storage_of("az://files/lake", {})
    found = storage_of("az://files/lake", {"AZURE_STORAGE_ACCOUNT_NAME": "account"})
    assert found.address == "az://files/lake"


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("s3://", "s3:// does not name a bucket"),
        ("s3://bucket/a b", "has ' ' in it"),
        ("s3://bucket/a%20b", "has '%' in it"),
        ("s3://bucket/ü", "has 'ü' in it"),
        ("s3://bucket/lake?versionId=1", r"has '\?' in it"),
        ("s3://bucket/../lake", r"has '\.\.' in it"),
        ("ftp://bucket/lake", "unknown scheme ftp"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused(address, sentence):
    with pytest.raises(LakeError, match=sentence):
        storage_of(address, KEYS)


def test_keys_in_an_address_are_refused_and_not_repeated():
    with pytest.raises(LakeError, match="give keys as options") as raised:
        storage_of(f"s3://{KEY}:{SECRET}@bucket/lake", {})
    assert SECRET not in str(raised.value)


def test_an_unknown_option_is_named():
    with pytest.raises(LakeError, match=r"^s3://bucket/lake has no option 'aws_regoin': correct"):
        storage_of(LAKE, {"AWS_REGOIN": "eu-west-1"})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"AWS_ALLOW_HTTP": "maybe"}, "failed to parse … as boolean$"),
        ({"timeout": "soon"}, "failed to parse … as Duration$"),
        ({"max_retries": "many"}, "max_retries is 'many': give a number"),
        ({"AWS_REGION": "a", "region": "b"}, "an option twice: AWS_REGION, region$"),
        ({"AWS_ENDPOINT_URL": "127.0.0.1:9000"}, "is not an address that begins with https://"),
        ({"AWS_ENDPOINT_URL": "http://minio:9000"}, "unencrypted: give an https:// address, or"),
    ],
)
def test_an_option_with_a_wrong_value_is_refused(options, sentence):
    with pytest.raises(LakeError, match=sentence):
        storage_of(LAKE, options)


def test_secrets_are_not_shown():
    token = {"AWS_SESSION_TOKEN": "secret-token"}
    storage = storage_of(LAKE, {**KEYS, **token})
    for shown in (repr(storage), str(storage), repr(complete(LAKE, {**KEYS, **token}))):
        assert SECRET not in shown
        assert "secret-token" not in shown
    with pytest.raises(LakeError) as raised:
        storage_of(LAKE, {**KEYS, "AWS_ALLOW_HTTP": SECRET})
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize("host", ["127.0.0.1:9000", "localhost:9000", "[::1]:9000"])
@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"])
def test_an_endpoint_on_loopback_needs_no_tls(host, variable, monkeypatch):
    monkeypatch.setenv(variable, f"http://{host}")
    found = storage_of(LAKE, KEYS).table_options
    assert found["AWS_ENDPOINT_URL"] == f"http://{host}"
    assert found["AWS_ALLOW_HTTP"] == "true"


def test_an_endpoint_without_tls_can_be_allowed(monkeypatch):
    endpoint = {"AWS_ENDPOINT_URL": "http://minio:9000"}
    assert (
        complete(LAKE, {**KEYS, **endpoint, "allow_http": "true"}).endpoint == "http://minio:9000"
    )
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    found = complete(LAKE, {**KEYS, **endpoint})
    assert found.for_tables()["AWS_ALLOW_HTTP"] == "true"


def test_tables_get_the_same_options_and_conditional_writes():
    found = storage_of(LAKE, {**KEYS, "AWS_REGION": "eu-west-1", "timeout": "5s"}).table_options
    assert (
        found.items()
        >= {
            **KEYS,
            "AWS_REGION": "eu-west-1",
            "timeout": "5s",
            "conditional_put": "etag",
            "max_retries": str(module.RETRIES_MAX),
        }.items()
    )
    assert "conditional_put" not in storage_of("gs://bucket/lake", {}).table_options


def test_a_named_profile_has_credentials_region_and_endpoint(aws, monkeypatch):
    aws(
        profile("default", "other-key"),
        profile("profile lake")
        + "aws_session_token = session-token\nregion = eu-north-1\nendpoint_url = http://127.0.0.1:9",
    )
    expected = {
        "AWS_ACCESS_KEY_ID": "profile-key",
        "AWS_SECRET_ACCESS_KEY": "profile-secret",
        "AWS_SESSION_TOKEN": "session-token",
        "AWS_REGION": "eu-north-1",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
    }
    assert storage_of(LAKE, {"AWS_PROFILE": "lake"}).table_options.items() >= expected.items()
    monkeypatch.setenv("AWS_PROFILE", "lake")
    assert storage_of(LAKE).table_options.items() >= expected.items()
    explicit = {"region": "us-west-2", "AWS_ENDPOINT_URL": "https://store"}
    found = storage_of(LAKE, explicit).table_options
    assert found.items() >= {**expected, **explicit}.items() - {("AWS_REGION", "eu-north-1")}
    assert "AWS_REGION" not in found


def test_a_token_of_the_environment_is_not_sent_with_other_keys(aws, monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "environment-token")
    aws(profile("lake"))
    for options in (KEYS, {"AWS_PROFILE": "lake"}):
        with pytest.raises(LakeError, match="AWS_SESSION_TOKEN in the environment does not belong"):
            storage_of(LAKE, options)
    storage_of(LAKE, {**KEYS, "AWS_SESSION_TOKEN": "token"})
    aws(profile("lake") + "aws_session_token = token")
    storage_of(LAKE, {"AWS_PROFILE": "lake"})


def test_the_default_profile_is_used_if_nothing_else_is_said(aws, monkeypatch):
    assert complete(LAKE, {}).profile is None
    aws(profile("default"))
    assert storage_of(LAKE).table_options["AWS_ACCESS_KEY_ID"] == "profile-key"
    assert storage_of(LAKE, KEYS).table_options["AWS_ACCESS_KEY_ID"] == KEY
    assert complete(LAKE, {"AWS_SKIP_SIGNATURE": "true"}).profile is None
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/token")
    assert complete(LAKE, {}).profile is None
    monkeypatch.delenv("AWS_WEB_IDENTITY_TOKEN_FILE")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "environment-key")
    assert complete(LAKE, {}).profile is None
    assert complete(LAKE, {"AWS_PROFILE": "default"}).profile == "default"


def test_credentials_that_change_are_read_again(aws):
    aws(profile("default", "first-key"))
    storage = storage_of(LAKE)
    assert storage.table_options["AWS_ACCESS_KEY_ID"] == "first-key"
    aws(profile("default", "second-key"))
    assert storage.table_options["AWS_ACCESS_KEY_ID"] == "second-key"


def test_a_profile_that_does_not_exist_is_named(aws):
    with pytest.raises(LakeError, match=r"the AWS profile 'lake' cannot be used: .*lake"):
        storage_of(LAKE, {"AWS_PROFILE": "lake"})


def test_a_profile_without_botocore_is_told_so(aws, monkeypatch):
    aws(profile("default"))
    monkeypatch.setitem(__import__("sys").modules, "botocore.session", None)
    with pytest.raises(
        LakeError, match=r"'default' needs: pip install 'headrace\[s3\]' \(botocore"
    ):
        storage_of(LAKE)
