"""A destination that a connection was allowed to, and the judgement of its requests. No I/O."""

from __future__ import annotations

from ..refused import Refused
from .head import Authority
from .onward import Header
from .scrub import Scrubber, Secrets

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ...model.net.network import NetworkLimits
    from ...policy.network import Judge
    from .head import RequestHead

# Frameworks take these for the method or the path; a rule is about what the request line says.
_OVERRIDES = (
    "x-http-method",
    "x-http-method-override",
    "x-method-override",
    "x-original-url",
    "x-rewrite-url",
)


class Site:
    """Destination of a connection, by the name that was authorised.

    Args:
        host: A name, or an address that an IP rule allows; in canonical spelling.
        scheme: `https` where TLS is ended here: only then are credentials added.
        secrets: The sandbox's secrets, name to value; every response is searched for them.

    Attributes:
        judge: Of the current policy: replaced when that changes while the connection lasts.
        request: The request, once it was read; for the record.
        rule: The rule that allowed or refused it, in text form.
        status: Of the response; 0 before there is one.
    """

    def __init__(
        self,
        host: str,
        port: int,
        judge: Judge,
        *,
        scheme: str = "http",
        secrets: Secrets | None = None,
    ) -> None:
        self.host, self.port, self.scheme = host, port, scheme
        self.request: RequestHead | None = None
        self.rule = ""
        self.status = 0
        self.judge, self._secrets = judge, secrets or Secrets()

    def renew(self, judge: Judge, secrets: Secrets) -> None:
        """Go by another policy, and by other secrets where the request is still to come.

        The answer to one that was passed on is searched for the secrets that went with it.
        """
        self.judge = judge
        if self.request is None:
            self._secrets = secrets

    @property
    def limits(self) -> NetworkLimits:
        return self.judge.policy.limits

    @property
    def has_secrets(self) -> bool:
        return bool(self._secrets)

    def scrubber(self) -> Scrubber:
        """Make a filter that removes the sandbox's secrets from a stream."""
        return Scrubber(self._secrets.forms)

    def admit(self, head: RequestHead) -> list[Header]:
        """Judge one request; what to write into it.

        Raises:
            Refused: It is for another host, or no rule allows it.
        """
        self.request = head
        if head.method == "CONNECT":
            raise Refused("CONNECT is only valid at a proxy", status=405)
        if head.authority != Authority(self.host, self.port):
            raise Refused(
                f"the request is for {head.authority},"
                f" and the connection for {Authority(self.host, self.port)}"
            )
        if self.is_literal:
            return []  # rules about addresses allow connections, whatever is said over them
        decision = self.judge.http_allowed(self.host, self.port, head.method, head.target)
        self.rule = decision.rule
        if not decision:
            raise Refused(decision.reason)
        if self.judge.is_conditional(self.host, self.port):
            self._refuse_overrides(head)
        return self._credentials(head) if self.scheme == "https" else []

    @property
    def is_literal(self) -> bool:
        """True if the program named an address, not a name."""
        return ":" in self.host or self.host.rpartition(".")[2].isdigit()

    def _refuse_overrides(self, head: RequestHead) -> None:
        for name, _ in head.fields:
            if name.lower().replace("_", "-") in _OVERRIDES:
                raise Refused(f"{name} may change the method or path that a rule judged")

    def _credentials(self, head: RequestHead) -> list[Header]:
        found = self.judge.credentials(self.host, self.port, head.method, head.target)
        missing = [each.secret for each in found if each.secret not in self._secrets]
        if missing:
            raise Refused(f"the secret {missing[0]} has no value", status=502)
        return [Header(each.header, each.value(self._secrets[each.secret])) for each in found]
