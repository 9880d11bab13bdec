"""Signature of a manifest, ``RUN/manifest.dsse.json``: who vouches for what no check can derive.

A DSSE envelope (https://github.com/secure-systems-lab/dsse) of the manifest's exact bytes with one Ed25519 signature.
That scheme draws nothing at random, so the envelope is a function of manifest and key: signing again writes the same
bytes, and none of them can change unseen.

The library is optional: whoever neither signs nor checks a signature needs none.
"""

import base64
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from recipe.errors import CheckFailed, Refused, one_line
from recipe.files import canonical, write_bytes
from recipe.records import Form, Sha256, content, read
from tools.driver import manifest

NAME = "manifest.dsse.json"
PAYLOAD = "application/vnd.in-toto+json"
EXTRA = "securesystemslib[crypto]"
MAKE = "openssl genpkey -algorithm ed25519 -out KEY.pem"
PUBLISH = "openssl pkey -in KEY.pem -pubout -out PUBLIC.pem"
UNSIGNED = (
    "not signed: an owner of this folder could have made up, all of it to fit, what nothing derives: which of several "
    "runs and seeds it shows, times, machines, logs, losses and gradient norms; rollouts and adapter too, unless its "
    "checkpoints sample the same again (--sampling) and its training makes the same again (--rerun)"
)

_Signed = Annotated[str, Form("an Ed25519 signature, 64 bytes in base64", "[A-Za-z0-9+/]{85}[AQgw]==")]


@dataclass(frozen=True)
class Signature:
    keyid: Sha256
    sig: _Signed


@dataclass(frozen=True)
class Envelope:
    payload: str  # base64
    payloadType: str
    signatures: list[Signature]


def made(run: Path, key: Path) -> bytes:
    """The envelope of the run's manifest as it is now, signed with a private ``key``. Writes nothing.

    Raises:
        Refused: no library, no such key or manifest, or an envelope of other bytes in the run folder.
    """
    dsse, signer, pem = _library()
    private = _key(key, "private", lambda content: pem.load_pem_private_key(content, None))
    envelope = dsse.Envelope(_manifest(run), PAYLOAD, {})
    envelope.sign(signer.CryptoSigner(private))
    signed, path = canonical(envelope.to_dict()), run / NAME
    if path.is_symlink() or path.exists():
        if content(path, "the signature", own=True) != signed:
            raise Refused(f"{path} signs another manifest, or with another key; move it away to sign this one")
    return signed


def write(run: Path, envelope: bytes) -> Path:
    """Write what :func:`made` made."""
    write_bytes(run / NAME, envelope)
    return run / NAME


def check(run: Path, key: Path) -> str:
    """The id of the public ``key``, once it is sure that it signed the run's manifest as it is now.

    Raises:
        Refused: no library, no such key, manifest or envelope, or one that is no record.
        CheckFailed: an envelope of something else, by another key, altered, or written in another way.
    """
    dsse, signer, pem = _library()
    public = signer.SSlibKey.from_crypto(_key(key, "public", pem.load_pem_public_key))
    path = run / NAME
    found = read(Envelope, path, "the signature (driver sign writes it)")
    if found.payloadType != PAYLOAD:
        raise CheckFailed(f"{path}: payloadType must be {PAYLOAD}")
    if found.payload != base64.b64encode(_manifest(run)).decode():
        raise CheckFailed(f"{path}: its payload is not {run / manifest.NAME}, byte for byte")
    if len(found.signatures) != 1:
        raise CheckFailed(f"{path} has {len(found.signatures)} signatures, where one belongs")
    if (keyid := found.signatures[0].keyid) != public.keyid:
        raise CheckFailed(f"{path} names key {keyid[:16]}, and {key} is key {public.keyid[:16]}")
    try:
        dsse.Envelope.from_dict(asdict(found)).verify([public], threshold=1)
    except _unverified():
        raise CheckFailed(f"{path}: its signature is not by key {public.keyid[:16]} ({key}) of this manifest") from None
    if content(path, "the signature", own=True) != canonical(asdict(found)):
        raise CheckFailed(f"{path} is not written as driver sign writes it")
    return public.keyid


def _manifest(run: Path) -> bytes:
    return content(run / manifest.NAME, "the manifest (driver run writes it)", own=True)


def _library():
    """securesystemslib's two modules, and the one of cryptography that reads PEM files."""
    try:
        from cryptography.hazmat.primitives import serialization
        from securesystemslib import dsse, signer
    except ImportError as error:
        why = f"signatures need a library that is not installed ({one_line(error)})"
        raise Refused(f"{why}: pip install '{EXTRA}'") from None
    return dsse, signer, serialization


def _unverified() -> type[Exception]:
    from securesystemslib.exceptions import UnverifiedSignatureError

    return UnverifiedSignatureError


def _key(path: Path, half: str, load):
    """One half of an Ed25519 key pair, of an unencrypted PEM file as openssl writes it."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

    pem, remedy = content(path, f"the {half} key"), MAKE if half == "private" else PUBLISH
    try:
        key = load(pem)
    except TypeError:  # a password was not given
        remedy = f"openssl pkey -in {path} -out KEY.pem"
        raise Refused(f"the private key {path} is encrypted; decrypt it with: {remedy}") from None
    except (ValueError, UnsupportedAlgorithm):
        raise Refused(f"{path} is no {half} key in PEM; make one with: {remedy}") from None
    if not isinstance(key, Ed25519PrivateKey | Ed25519PublicKey):
        raise Refused(f"{path} is a {half} key of another kind than Ed25519; make one with: {remedy}")
    return key
