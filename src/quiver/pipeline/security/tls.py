"""Certificates for the two kinds of servers: the standard library's, and gRPC's."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from quiver.errors import InvalidConfig
from quiver.pipeline.settings.options import TlsOptions


def server_context(options: TlsOptions) -> ssl.SSLContext:
    """For asyncio. With a client CA, clients without a certificate of it are not let in."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(options.cert_file, options.key_file)
    except OSError as error:  # SSLError is one
        raise InvalidConfig(
            f"tls: {options.cert_file} and {options.key_file} cannot be used: {error}"
        ) from error
    if options.client_ca_file is not None:
        try:
            context.load_verify_locations(options.client_ca_file)
        except OSError as error:
            raise InvalidConfig(
                f"tls: client_ca_file {options.client_ca_file} cannot be used: {error}"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def server_credentials(options: TlsOptions) -> grpc.ServerCredentials:
    """For gRPC, which tells nobody what is wrong with a certificate: so it is checked before."""
    server_context(options)
    root = None if options.client_ca_file is None else _read(options.client_ca_file)
    return grpc.ssl_server_credentials(
        [(_read(options.key_file), _read(options.cert_file))],
        root_certificates=root,
        require_client_auth=root is not None,
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidConfig(f"tls: {path} cannot be read: {error.strerror}") from error
