"""An application with some of the server's endpoints, behind a gate without access control."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import BaseRoute

from headrace.config.settings import Config
from headrace.server.access import Access
from headrace.server.audit import Actor
from headrace.server.http.gate import AccessGate
from headrace.server.metrics.metrics import Metrics


class _NoAudit:
    """Audit trail of an application without a store."""

    def record(self, action: str, who: Actor, **facts: object) -> None:
        pass


NO_AUDIT = _NoAudit()


def no_access_control() -> Access:
    return Access(Config(), Path("/nowhere/tokens.json"), lambda: 0, Metrics())


def gated(routes: Sequence[BaseRoute], **more: Any) -> Starlette:
    gate = Middleware(AccessGate, access=no_access_control(), audit=NO_AUDIT)
    return Starlette(routes=list(routes), middleware=[gate], **more)
