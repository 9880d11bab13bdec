"""The signature: of a manifest that holds, by an openssl key, and of these very bytes alone."""

import base64
import json
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from driving import driver
from fuzzing import spoil
from recipe.errors import CheckFailed, Refused
from recipe.files import canonical, tree_digests
from recipe.records import read_json
from recipe.run.evidence import RESULT
from recipe.run.plan import load
from recipe.stages import NAMES
from runs import stage_process
from tampering import REMOVED, edit, flip, reseal, rewrite_attempts
from tools.driver import commands, manifest, signature

pytest.importorskip("securesystemslib")
from cryptography.hazmat.primitives import serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec, ed25519  # noqa: E402

ORDER = 2**252 + 27742317777372353535851937790883648493  # of the group that Ed25519 signs in
WRONG = (Refused, CheckFailed)


@dataclass(frozen=True)
class Pair:
    private: Path
    public: Path


def pair(folder: Path, name: str, key=None, password: bytes | None = None) -> Pair:
    """A key pair in two PEM files, as openssl writes them."""
    key, made = key or ed25519.Ed25519PrivateKey.generate(), Pair(folder / f"{name}.pem", folder / f"{name}.public.pem")
    locked = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    made.private.write_bytes(key.private_bytes(pem, pkcs8, locked))
    made.public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return made


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    pair(folder, "ours")
    pair(folder, "other")
    pair(folder, "curve", ec.generate_private_key(ec.SECP256R1()))
    pair(folder, "locked", password=b"secret")
    (folder / "torn.pem").write_text("-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n")
    (folder / "empty.pem").touch()
    return folder


@pytest.fixture(scope="module")
def signed(run, keys, tmp_path_factory) -> Path:
    """A finished run with a signed manifest. Not to be changed."""
    folder = tmp_path_factory.mktemp("signed") / "run"
    shutil.copytree(run, folder)
    commands.sign(folder, keys / "ours.pem")
    return folder


@pytest.fixture
def copied(signed, tmp_path) -> Path:
    return shutil.copytree(signed, tmp_path / "copy")


@pytest.fixture
def alone(signed, tmp_path) -> Path:
    """Manifest and envelope of the signed run, which are all that the signature itself is about."""
    folder = tmp_path / "alone"
    folder.mkdir()
    for name in (manifest.NAME, signature.NAME):
        shutil.copyfile(signed / name, folder / name)
    return folder


def envelope(run: Path) -> dict:
    return read_json(run / signature.NAME, "it")


# ---- what holds


def test_a_signed_run_holds_and_says_who_signed_it(signed, keys, capsys):
    commands.verify(signed, replayed=False, key=keys / "ours.public.pem")
    holds, last = capsys.readouterr().out.splitlines()[-2:]
    assert holds.startswith(f"{signed / manifest.NAME} holds")
    (found,) = envelope(signed)["signatures"]
    assert last == f"signed by key {found['keyid']}, whose holder vouches for what nothing derives"


def test_it_is_the_envelope_that_dsse_specifies(signed, keys):
    found, payload = envelope(signed), (signed / manifest.NAME).read_bytes()
    assert base64.b64decode(found["payload"]) == payload and found["payloadType"] == "application/vnd.in-toto+json"
    public = serialization.load_pem_public_key((keys / "ours.public.pem").read_bytes())
    encoded = b"DSSEv1 28 application/vnd.in-toto+json %d %b" % (len(payload), payload)
    public.verify(base64.b64decode(found["signatures"][0]["sig"]), encoded)


def test_signing_again_writes_the_same_bytes(copied, keys):
    before = tree_digests(copied)
    commands.sign(copied, keys / "ours.pem")
    assert tree_digests(copied) == before


def test_fetch_takes_it_along(signed, keys, tmp_path):
    commands.fetch(signed, tmp_path / "to")
    commands.verify(tmp_path / "to", replayed=False, key=keys / "ours.public.pem")


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is absent")
def test_the_key_that_the_help_makes_signs(alone, tmp_path):
    told = driver("sign", "--help").stdout
    for command in (signature.MAKE, signature.PUBLISH):
        assert command in told
        subprocess.run(command, shell=True, cwd=tmp_path, check=True, capture_output=True)
    (alone / signature.NAME).unlink()
    signature.write(alone, signature.made(alone, tmp_path / "KEY.pem"))
    assert signature.check(alone, tmp_path / "PUBLIC.pem") == envelope(alone)["signatures"][0]["keyid"]


# ---- what does not


def by(keys: Path, name: str, folder: Path) -> dict:
    """The envelope of a run that another key signs."""
    (folder / signature.NAME).unlink()
    return json.loads(signature.made(folder, keys / f"{name}.pem"))


def another_key(run: Path, keys: Path) -> None:
    (run / signature.NAME).write_bytes(canonical(by(keys, "other", run)))


def another_key_under_this_name(run: Path, keys: Path) -> None:
    name = envelope(run)["signatures"][0]["keyid"]
    another_key(run, keys)
    edit(run / signature.NAME, "signatures/0/keyid", name)


def two_signatures(run: Path, keys: Path) -> None:
    ours = envelope(run)
    ours["signatures"] += by(keys, "other", run)["signatures"]
    (run / signature.NAME).write_bytes(canonical(ours))


def same_signature_otherwise(run: Path, keys: Path) -> None:
    """S + L in place of S, which a careless check of Ed25519 takes too."""
    sig = base64.b64decode(envelope(run)["signatures"][0]["sig"])
    other = sig[:32] + (int.from_bytes(sig[32:], "little") + ORDER).to_bytes(32, "little")
    edit(run / signature.NAME, "signatures/0/sig", base64.b64encode(other).decode())


def other_manifest(run: Path, keys: Path) -> None:
    """The run's manifest is what was signed, but for one value in both."""
    edit(run / manifest.NAME, "predicate/recipe_conclusion/verdict/0", "Protocol: default.")
    edit(run / signature.NAME, "payload", base64.b64encode((run / manifest.NAME).read_bytes()).decode())


def manifest_written_otherwise(run: Path, keys: Path) -> None:
    (run / manifest.NAME).write_text(json.dumps(read_json(run / manifest.NAME, "it"), indent=1))


def envelope_written_otherwise(run: Path, keys: Path) -> None:
    (run / signature.NAME).write_text(json.dumps(envelope(run), indent=1))


def twice(run: Path, keys: Path) -> None:
    text = (run / signature.NAME).read_text()
    (run / signature.NAME).write_text(text.replace("{", '{"payloadType":"x",', 1))


def linked(run: Path, keys: Path) -> None:
    (run / signature.NAME).rename(run.parent / "elsewhere")
    (run / signature.NAME).symlink_to(run.parent / "elsewhere")


def setting(place: str, value):
    return lambda run, keys: edit(run / signature.NAME, place, value)


BAD = {
    "unsigned": (lambda run, keys: (run / signature.NAME).unlink(), Refused, r"the signature \(.*\) is missing"),
    "no manifest": (lambda run, keys: (run / manifest.NAME).unlink(), Refused, r"the manifest .* is missing"),
    "another key": (another_key, CheckFailed, "names key [0-9a-f]{16}, and .*ours.public.pem is key"),
    "another key under this name": (another_key_under_this_name, CheckFailed, "its signature is not by key"),
    "two signatures": (two_signatures, CheckFailed, "has 2 signatures, where one belongs"),
    "no signature": (setting("signatures", []), CheckFailed, "has 0 signatures, where one belongs"),
    "S + L": (same_signature_otherwise, CheckFailed, "its signature is not by key"),
    "other manifest in both": (other_manifest, CheckFailed, "its signature is not by key"),
    "manifest written otherwise": (manifest_written_otherwise, CheckFailed, "its payload is not .*manifest.json, byte"),
    "envelope written otherwise": (envelope_written_otherwise, CheckFailed, "is not written as driver sign writes it"),
    "other type": (setting("payloadType", "text/plain"), CheckFailed, "payloadType must be application/vnd.in-toto"),
    "payload of another kind": (setting("payload", 1), Refused, "payload must be str"),
    "payload no base64": (setting("payload", "ü"), CheckFailed, "its payload is not"),
    "signature too short": (setting("signatures/0/sig", "AAAA"), Refused, r"signatures\[0\].sig must be an Ed25519"),
    "signature no text": (setting("signatures/0/sig", None), Refused, r"signatures\[0\].sig must be"),
    "key id empty": (setting("signatures/0/keyid", ""), Refused, r"signatures\[0\].keyid must be a SHA-256"),
    "more": (setting("more", 1), Refused, "key more is unknown"),
    "less": (setting("payloadType", REMOVED), Refused, "key payloadType is missing"),
    "key twice": (twice, Refused, "payloadType stands in it twice"),
    "no JSON": (lambda run, keys: (run / signature.NAME).write_text("{"), Refused, "not readable JSON"),
    "a link": (linked, Refused, "is a link"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_an_altered_signature_is_refused_by_name(alone, keys, name):
    alter, kind, line = BAD[name]
    alter(alone, keys)
    with pytest.raises(kind, match=line) as refusal:
        signature.check(alone, keys / "ours.public.pem")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", [manifest.NAME, signature.NAME])
def test_no_byte_can_change(alone, keys, name):
    path = alone / name
    size, untouched = path.stat().st_size, path.read_bytes()
    ends = {*range(16), *range(size - 300, size)}  # of an envelope, all that is no payload
    for place in sorted(ends | {*random.Random(name).sample(range(size), 100)}):
        flip(path, place)
        with pytest.raises(WRONG) as refusal:
            signature.check(alone, keys / "ours.public.pem")
        assert "\n" not in str(refusal.value)
        path.write_bytes(untouched)
    for altered in (untouched[:-1], untouched + b"\n", b" " + untouched):
        path.write_bytes(altered)
        with pytest.raises(WRONG):
            signature.check(alone, keys / "ours.public.pem")


def test_a_spoiled_envelope_is_refused_in_one_line(alone, keys):
    path = alone / signature.NAME
    untouched = path.read_bytes()
    for number in range(60):
        restore = spoil(path, random.Random(f"signature/{number}"))
        if path.is_file() and not path.is_symlink() and path.read_bytes() == untouched:
            restore()
            continue
        with pytest.raises(WRONG) as refusal:
            signature.check(alone, keys / "ours.public.pem")
        assert "\n" not in (line := str(refusal.value)) and len(line) < 1_000
        restore()
    assert signature.check(alone, keys / "ours.public.pem")


# ---- keys


UNREAD = {
    "absent.pem": "the {half} key is missing: .*absent.pem",
    "empty.pem": "empty.pem is no {half} key in PEM; make one with: openssl",
    "torn.pem": "torn.pem is no {half} key in PEM; make one with: openssl",
    ".": "the {half} key is no file",
}
PRIVATE = UNREAD | {
    "ours.public.pem": "ours.public.pem is no private key in PEM",
    "curve.pem": "curve.pem is a private key of another kind than Ed25519; make one with: openssl genpkey",
    "locked.pem": "the private key .*locked.pem is encrypted; decrypt it with: openssl pkey",
}
PUBLIC = UNREAD | {
    "ours.pem": "ours.pem is no public key in PEM; make one with: openssl pkey .* -pubout",
    "curve.public.pem": "curve.public.pem is a public key of another kind than Ed25519",
}


@pytest.mark.parametrize("name", PRIVATE)
def test_a_key_that_cannot_sign_is_refused(alone, keys, name):
    with pytest.raises(Refused, match=PRIVATE[name].format(half="private")):
        signature.made(alone, keys / name)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_key_that_cannot_verify_is_refused(alone, keys, name):
    with pytest.raises(Refused, match=PUBLIC[name].format(half="public")):
        signature.check(alone, keys / name)


@pytest.mark.parametrize("library", ["securesystemslib", "cryptography.hazmat.primitives"])
def test_without_the_library_one_line_says_what_to_install(alone, keys, monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    for work, name in ((signature.made, "ours.pem"), (signature.check, "ours.public.pem")):
        with pytest.raises(Refused, match=r"not installed \(.*\): pip install 'securesystemslib\[crypto\]'$"):
            work(alone, keys / name)


# ---- what is signed


def test_what_does_not_hold_is_not_signed(copied, keys):
    (copied / signature.NAME).unlink()
    edit(copied / "report" / "summary" / "summary.json", "verdict/protocol", "default")
    with pytest.raises(WRONG, match="summary"):
        commands.sign(copied, keys / "ours.pem")
    assert not (copied / signature.NAME).exists()


def test_rollouts_are_replayed_before_anything_is_signed(copied, keys, monkeypatch):
    seen = []
    monkeypatch.setattr(manifest, "verify", lambda run, stages, ask, replayed: iter(seen.append(replayed) or ()))
    commands.sign(copied, keys / "ours.pem")
    assert seen == [True]


def test_a_signature_of_something_else_is_kept(copied, keys, monkeypatch):
    monkeypatch.setattr(commands, "verify", lambda *_, **__: pytest.fail("proved in vain"))
    before = (copied / signature.NAME).read_bytes()
    with pytest.raises(Refused, match="signs another manifest, or with another key; move it away"):
        commands.sign(copied, keys / "other.pem")
    assert (copied / signature.NAME).read_bytes() == before


def test_a_manifest_that_changes_while_it_is_proved_is_not_signed(alone, keys, monkeypatch):
    (alone / signature.NAME).unlink()
    monkeypatch.setattr(commands, "verify", lambda *_, **__: flip(alone / manifest.NAME))
    with pytest.raises(Refused, match="changed while it was proved"):
        commands.sign(alone, keys / "ours.pem")
    assert not (alone / signature.NAME).exists()


def test_a_signature_is_checked_before_minutes_of_proving(alone, keys, monkeypatch):
    monkeypatch.setattr(manifest, "verify", lambda *_: pytest.fail("proved in vain"))
    with pytest.raises(CheckFailed, match="names key"):
        commands.verify(alone, replayed=True, key=keys / "other.public.pem")


def test_the_command_line(signed, keys):
    def told(code: int, *arguments) -> str:
        done = driver(*arguments)
        assert done.returncode == code, done.stdout + done.stderr
        return (done.stdout + done.stderr).splitlines()[-1]

    verify = ("verify", "--quick", "--run", signed, "--key")
    assert told(0, *verify, keys / "ours.public.pem").startswith("signed by key ")
    assert told(1, *verify, keys / "other.public.pem").startswith("check failed: ")
    assert told(2, *verify, keys / "ours.pem").startswith("refused: ")
    assert told(2, "sign", "--run", signed, "--key", keys / "other.pem").startswith("refused: ")
    assert told(2, "sign", "--run", signed).endswith("required: --key")


# ---- what an owner could have made up


def test_what_the_line_without_a_signature_names_can_be_made_up(copied, keys, capsys):
    for path in sorted((copied / "grpo" / "steps").iterdir()):
        edit(path, "metrics/loss", lambda loss: loss + 0.125)
        edit(path, "metrics/grad_norm", lambda norm: norm * 2)
    for end in ("min", "max"):
        edit(copied / "grpo" / RESULT, f"metrics/grad_norm_{end}", lambda norm: norm * 2)
    edit(copied / "grpo" / RESULT, "machine/host", "a-larger-one")
    edit(copied / "grpo" / RESULT, "seconds/total", 0.5)
    (copied / "logs" / "grpo.log").write_text("all went well\n")
    reseal(copied / "grpo")
    shutil.rmtree(copied / "report")
    rewrite_attempts(copied, without="report")
    assert (done := stage_process("report", copied)).returncode == 0, done.stderr
    manifest.write(load(copied / "plan.json"), NAMES)
    capsys.readouterr()
    commands.verify(copied, replayed=True)
    holds, last = capsys.readouterr().out.splitlines()[-2:]
    assert holds.startswith(f"{copied / manifest.NAME} holds") and last == signature.UNSIGNED
    with pytest.raises(CheckFailed, match="its payload is not"):
        commands.verify(copied, replayed=True, key=keys / "ours.public.pem")


def test_it_is_one_line_that_names_them():
    assert "\n" not in signature.UNSIGNED and signature.UNSIGNED.startswith("not signed: an owner of this folder could")
    for fact in ("which of several runs and seeds", "times", "machines", "logs", "losses", "gradient norms"):
        assert fact in signature.UNSIGNED
    options = driver("verify", "--help").stdout
    assert all(option in signature.UNSIGNED and option in options for option in ("--sampling", "--rerun"))
