"""API keys and mutual TLS: admitted clients, and errors about unusable files."""

from __future__ import annotations

import socket
import ssl
import threading
from pathlib import Path

import pytest

from kvrecall.errors import ConfigError, hidden
from kvrecall.server.access import TlsFiles, read_keys

pytest.importorskip("cryptography")

from server.certificates import Authority


def answer(files: TlsFiles, client: ssl.SSLContext) -> str:
    """What a client reads from a server of these files; raises ssl.SSLError if not let in."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            try:
                with files.context().wrap_socket(connection, server_side=True) as stream:
                    stream.sendall(b"hello")
            except (ssl.SSLError, OSError):
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with (
                socket.create_connection(listener.getsockname()) as raw,
                client.wrap_socket(raw, server_hostname="127.0.0.1") as stream,
            ):
                return stream.recv(5).decode()
        finally:
            thread.join()


def client_of(authority: Authority, *pair: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.path))
    if pair:
        context.load_cert_chain(*pair)
    return context


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ca")


@pytest.fixture
def files(authority: Authority) -> TlsFiles:
    certificate, key, _ = authority.issue("server")
    return TlsFiles(certificate, key, (authority.path,))


def test_only_clients_of_an_authority_get_in(
    tmp_path: Path, authority: Authority, files: TlsFiles
) -> None:
    own, other = authority.issue("client"), Authority(tmp_path, "other").issue("stranger")
    assert answer(files, client_of(authority, *own[:2])) == "hello"
    for client in (client_of(authority), client_of(authority, *other[:2])):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            answer(files, client)


def test_older_tls_does_not(authority: Authority, files: TlsFiles) -> None:
    certificate, key, _ = authority.issue("client")
    client = client_of(authority, certificate, key)
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises((ssl.SSLError, ConnectionError)):
        answer(files, client)


def test_revoked_clients_do_not(authority: Authority, files: TlsFiles) -> None:
    good, good_key, _ = authority.issue("good")
    bad, bad_key, serial = authority.issue("bad")
    strict = TlsFiles(files.certificate, files.key, files.authorities, (authority.revoke(serial),))
    assert answer(strict, client_of(authority, good, good_key)) == "hello"
    with pytest.raises((ssl.SSLError, ConnectionError)):
        answer(strict, client_of(authority, bad, bad_key))


def test_unusable_files(tmp_path: Path, authority: Authority, files: TlsFiles) -> None:
    _, other_key, _ = authority.issue("other")
    locked, locked_key, _ = authority.issue("locked", encrypted=True)
    empty = tmp_path / "empty.pem"
    empty.touch(0o600)
    cases = [
        (TlsFiles(tmp_path / "none", files.key, files.authorities), "there is no file"),
        (TlsFiles(files.certificate, other_key, files.authorities), "not a PEM certificate and"),
        (TlsFiles(locked, locked_key, files.authorities), "encrypted; decrypt it .*tlsPkPwd"),
        (TlsFiles(locked, locked_key, files.authorities, (), empty), "lacks its password in text"),
        (TlsFiles(files.certificate, files.key, (empty,)), "is not a PEM file"),
    ]
    for wrong, said in cases:
        with pytest.raises(ConfigError, match=said):
            wrong.check()
    word = tmp_path / "word"
    word.write_text("open-sesame\n")
    with pytest.raises(ConfigError, match=r"tlsPkPwd: .*word has mode"):
        TlsFiles(locked, locked_key, files.authorities, (), word).check()
    word.chmod(0o600)
    assert TlsFiles(locked, locked_key, files.authorities, (), word).check() == []
    files.key.chmod(0o644)
    assert ["chmod 600" in line for line in files.check()] == [True]


def test_the_file_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of June\na-first-key\n\n a-second-key \n # old: three\n")
    file.chmod(0o600)
    assert read_keys(file, "--api-key-file") == ("a-first-key", "a-second-key")
    assert "key" not in hidden("no error shows a-first-key or a-second-key from now on")
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="has mode 0640"):
        read_keys(file, "--api-key-file")
    file.chmod(0o600)
    file.write_text(" \n#\n")
    with pytest.raises(ConfigError, match="is empty"):
        read_keys(file, "--api-key-file")
