"""URLs of tiers on the network: addresses, secrets, options, and that every option is documented."""

import re
from pathlib import Path

import pytest

from kvcellar.config import load_settings
from kvcellar.errors import ConfigError, EngineError
from kvcellar.tiers.mooncake import open_mooncake
from kvcellar.tiers.redis import open_redis
from kvcellar.tiers.registry import parse_spec
from kvcellar.tiers.remote import Address, Options, addresses
from kvcellar.tiers.s3 import open_s3

PAGE = (Path(__file__).parents[2] / "docs" / "tiers.md").read_text()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("h", [("h", 7)]),
        ("h:1", [("h", 1)]),
        ("h:1,i:2,127.0.0.1", [("h", 1), ("i", 2), ("127.0.0.1", 7)]),
        ("[::1]:5", [("::1", 5)]),
        ("[::1]", [("::1", 7)]),
    ],
)
def test_addresses(text, found):
    assert addresses(text, 7) == found


@pytest.mark.parametrize("text", ["", "h:", "h:0", "h:65536", "h:x", "h:1,", "a b", "::1", "[h:1"])
def test_what_is_no_address(text):
    with pytest.raises(ConfigError, match="should be HOST:PORT"):
        addresses(text, 7)


def test_an_address_can_be_read_again():
    for address in (Address("h", 1), Address("::1", 5)):
        assert addresses(str(address), 7) == [address]


def test_a_secret_is_read_when_it_is_used(tmp_path, monkeypatch):
    file = tmp_path / "secret"
    file.write_text("first\n")
    secret = Options("x://h", {"password_file": str(file)}).secret("password")
    assert secret is not None
    assert secret.read() == "first"
    file.write_text("second\n")
    assert secret.read() == "second"
    assert "second" not in repr(secret)
    file.unlink()
    with pytest.raises(EngineError, match="cannot read"):
        secret.read()


@pytest.mark.parametrize(
    ("url", "label"),
    [
        ("redis://h:1/0?ttl=5", "redis://h:1/0"),
        ("redis://user:pass@h:1", "redis://h:1"),
        ("redis://:pa/ss@h:1", "redis://h:1"),
        ("redis://:p@/s@h:1", "redis://h:1"),
        ("redis://:p?s@h:1", "redis://h:1"),
        ("redis://:p=s?s@h:1", "redis://h:1"),
        ("redis://:p@s?s@h:1", "redis://h:1"),
        ("redis://h?password_file=/a@b", "redis://h"),
        ("redis://u:p@h?password_file=/a@b", "redis://h"),
        ("disk:///mnt/a@b/c", "disk:///mnt/a@b/c"),
    ],
)
def test_a_label_holds_no_password_whatever_is_in_it(url, label):
    assert parse_spec(url).label == label


@pytest.mark.parametrize("url", ["redis://u:tops3cret@h", "redis://u:tops?3cret@h"])
def test_a_password_in_a_url_is_refused_and_not_shown(url):
    with pytest.raises(ConfigError, match="it holds no user and password") as caught:
        parse_spec(url).open()
    assert "tops" not in str(caught.value)


@pytest.mark.parametrize(
    "mistyped", ["redis:/u:tops3cret@h", "redis:u:tops3cret@h", "redis//u:tops3cret@h", "u:tops3cret@h"]
)
def test_a_password_in_what_is_no_url_is_not_shown_either(mistyped):
    with pytest.raises(ConfigError, match="expected URLs such as") as first:
        load_settings({"tier": mistyped})
    with pytest.raises(ConfigError, match="expected a URL such as") as second:
        parse_spec(mistyped)
    assert "tops" not in f"{first.value} {second.value}"


@pytest.mark.parametrize(("written", "path"), [("/etc/a+b", "/etc/a+b"), ("/etc/a%20b", "/etc/a b")])
def test_an_option_is_what_was_written(written, path):
    assert parse_spec(f"redis://h?password_file={written}").options == {"password_file": path}


LONG = "x" * 300


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("redis://[::1", "is no URL: Invalid IPv6 URL"),
        ("redis://a\u2100b", "is no URL: .* invalid characters"),
        ("redis://a..b", "'a..b' cannot be the name of a host"),
        (f"mooncake://{LONG}", "cannot be the name of a host"),
        (f"redis://h/{LONG.replace('x', '9')}", "the number of a database"),
        (f"redis://h?ttl={'9' * 5000}", "should be a whole number"),
        (f"redis://h?password_file=/{LONG}", "File name too long"),
        (f"rediss://h?ca_file={__file__}", "ca_file=.* should hold certificates in PEM"),
        (f"rediss://h?cert_file={__file__}", "should hold a certificate and its key"),
        (f"rediss://h?key_file={__file__}", "should hold a certificate and its key"),
        (f"s3://bucket?ca_file=/{LONG}", "File name too long"),
        (f"s3://bucket?ca_file={__file__}", "ca_file=.* should hold certificates in PEM"),
        ("s3://bucket?endpoint=http://h:99999", "endpoint='http://h:99999': .* should be HOST:PORT"),
        ("s3://bucket?endpoint=http://[::1", "endpoint=.* should be HOST:PORT"),
        ("s3://bucket/a//b", "contained empty path segment"),
        ("disk:///a%00b", "expected a path"),
        ("disk:///a%FFb", "expected a path"),
        ("memory://?delay=-1", "delay='-1' should match"),
        ("memory://?delay=nan", "delay='nan' should match"),
        ("memory://?dealy=1", "unknown option 'dealy'"),
    ],
)
def test_what_can_never_work_is_said(url, problem):
    with pytest.raises(ConfigError, match=problem):
        parse_spec(url).open()


@pytest.mark.parametrize(
    ("section", "open_engine", "url"),
    [
        ("Valkey and Redis", open_redis, "redis://h"),
        ("S3", open_s3, "s3://bucket"),
        ("Mooncake Store", open_mooncake, "mooncake://h"),
    ],
)
def test_every_option_is_documented_and_no_other(section, open_engine, url):
    with pytest.raises(ConfigError) as caught:
        open_engine(url, {"surely-unknown": ""})
    known = str(caught.value).partition("known are ")[2].split(", ")
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    documented = [
        name for row in re.findall(r"^\| (`.*?) \|", text, re.M) for name in re.findall(r"`(\w+)`", row)
    ]
    assert sorted(documented) == sorted(known)
