"""A receiver that others can reach needs TLS or keys, unless its operator says otherwise."""

from __future__ import annotations

import ipaddress

from quiver.errors import InvalidConfig
from quiver.pipeline.settings.options import ReceiverOptions


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on that host.

    ``localhost`` is one by its standard (RFC 6761). Other names can mean anything tomorrow.
    """
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def check_exposure(name: str, options: ReceiverOptions) -> None:
    """``InvalidConfig`` when anybody in the network could send to it."""
    if options.tls or options.auth or options.insecure_ok or is_loopback(options.host):
        return
    raise InvalidConfig(
        f"{name} would listen on {options.listening_addr} for everybody in the network; give it "
        "'tls' (best with client_ca_file) or 'auth' (API keys), listen on 127.0.0.1, or set "
        "'insecure_ok: true' if something else protects it"
    )
