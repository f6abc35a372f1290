"""Hypothesis strategies for the models: only valid ones, over as much of each range as can be."""

from __future__ import annotations

import string
from ipaddress import ip_network

from hypothesis import strategies as st

from ringfence.model import (
    AcquireOptions,
    AttachRequest,
    BackendReport,
    Capability,
    Check,
    ClientSession,
    Credential,
    ExecRequest,
    ExecResult,
    ExecStatus,
    FileInfo,
    Health,
    Limits,
    ManagerStats,
    Mount,
    NetworkEvent,
    NetworkLimits,
    NetworkPolicy,
    NetworkRule,
    Percentiles,
    Protection,
    RequiredCapabilities,
    ResolvedMount,
    ResourceUsage,
    SandboxCapabilities,
    SandboxSpec,
    SandboxStats,
    Session,
    SessionState,
    SessionTimeouts,
    Snapshot,
    State,
)
from ringfence.model.base.checks import FrozenMap
from ringfence.model.capabilities import MAY_BE_WEAKER
from ringfence.model.limits import _COUNTS, _SECONDS
from ringfence.model.net.rules import _FRAMING
from ringfence.model.spec import TIERS

# What the kernel can be given: no NUL, no surrogate but those of undecodable bytes.
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
undecodable = st.text(st.sampled_from([chr(0xDC80 + i) for i in range(128)]), max_size=3)
any_text = st.builds(lambda a, b: a + b, texts, undecodable)
full_text = any_text.filter(bool)
names = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=20)
ids = names.map(lambda name: f"{name}-{name}"[:63])
variables = st.from_regex(r"\A[A-Za-z_][A-Za-z0-9_]{0,20}\Z")
envs = st.dictionaries(variables, any_text, max_size=4)
labels = st.dictionaries(full_text, any_text, max_size=4)
printed = st.text(st.characters(categories=["L", "N", "P"]), max_size=20)
printed_labels = st.dictionaries(printed.filter(bool), printed, max_size=4)
parts = full_text.filter(lambda t: "/" not in t and t not in (".", ".."))
relative_paths = st.lists(parts, min_size=1, max_size=4).map("/".join)
# A name that begins so is a preset: `@git`.
protected_paths = relative_paths.filter(lambda path: not path.startswith("@"))
absolute_paths = relative_paths.map(lambda path: "/" + path)
targets = relative_paths.map(lambda path: f"/srv/{path}")

labels_of_hosts = st.from_regex(r"\A[a-z]([a-z0-9-]{0,8}[a-z0-9])?\Z")
domains = st.builds(
    lambda a, b: f"{a}.{b}", labels_of_hosts, st.sampled_from(["com", "org", "co.uk"])
)
ports = st.integers(1, 65535)
hosts = st.one_of(
    domains,
    domains.map(lambda name: f"*.{name}"),
    st.builds(lambda name, port: f"{name}:{port}", domains, ports),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
    st.builds(lambda address, port: f"[{address}]:{port}", st.ip_addresses(v=6), ports),
)
networks = st.builds(
    lambda address, bits: str(ip_network((int(address), bits), strict=False)),
    st.ip_addresses(v=4),
    st.integers(0, 32),
)
port_sets = st.lists(
    st.tuples(ports, ports).map(lambda pair: f"{min(pair)}-{max(pair)}") | ports.map(str),
    max_size=3,
).map(",".join)
tokens = st.from_regex(r"\A[A-Za-z][A-Za-z0-9-]{0,10}\Z").filter(
    lambda word: word.upper() != "CONNECT" and word.lower() not in _FRAMING
)
url_paths = st.lists(st.from_regex(r"\A[a-z0-9_~%41-]{1,5}\Z"), max_size=3).map(
    lambda segments: "/" + "/".join(segments).replace("%", "%41")
)
credentials = st.builds(Credential, variables, tokens, st.just("") | tokens)
conditions = st.fixed_dictionaries(
    {},
    optional={
        "methods": st.lists(tokens, max_size=2).map(tuple),
        "paths": st.lists(
            st.builds(lambda path, star: path + star, url_paths, st.sampled_from(["", "*"])),
            max_size=2,
        ).map(tuple),
    },
)
extras = st.fixed_dictionaries({}, optional={"credential": credentials, "inspect": st.booleans()})
name_rules = st.builds(
    lambda host, ports, action, when, more: NetworkRule(
        host, ports, action, **when, **(more if action == "allow" else {})
    ),
    st.one_of(domains, domains.map(lambda name: f"*.{name}")),
    port_sets,
    st.sampled_from(["allow", "deny"]),
    conditions,
    extras,
)
address_rules = st.builds(
    NetworkRule,
    st.one_of(networks, st.ip_addresses().map(str)),
    port_sets,
    st.sampled_from(["allow", "deny"]),
)
rules = name_rules | address_rules
network_limits = st.builds(
    NetworkLimits,
    connections=st.integers(1, 65_536),
    connections_per_s=st.none() | st.floats(0.001, 86_400),
    bytes_per_s=st.none() | st.integers(1, 2**50),
    header_bytes=st.integers(256, 2**20),
    idle_s=st.floats(0.001, 86_400),
)
# One allow at least: a policy that only denies is refused.
policies = st.one_of(
    st.just(NetworkPolicy.unrestricted()),
    st.lists(hosts, max_size=4).map(lambda some: NetworkPolicy(allowed_hosts=tuple(some))),
    st.builds(
        lambda host, denied, some, learn, limits: NetworkPolicy(
            allowed_hosts=(host, *(f"!{each}" for each in denied)),
            rules=tuple(some),
            learn=learn,
            limits=limits,
        ),
        hosts,
        st.lists(hosts, max_size=2),
        st.lists(rules, max_size=3),
        st.booleans(),
        st.just(NetworkLimits()) | network_limits,
    ),
)
mounts = st.builds(
    Mount,
    targets,
    st.one_of(st.just(""), relative_paths, absolute_paths),
    st.sampled_from(["read_only", "read_write"]),
    st.none() | st.lists(protected_paths, max_size=3).map(tuple),
)
limits = st.builds(
    Limits,
    **{name: st.none() | st.floats(low, high) for name, (low, high) in _SECONDS.items()},
    **{name: st.none() | st.integers(low, high) for name, (low, high) in _COUNTS.items()},
)
users = st.one_of(st.none(), names.map(lambda name: "u" + name), st.integers(0, 2**32 - 2).map(str))
specs = st.builds(
    SandboxSpec,
    id=st.none() | ids,
    labels=printed_labels,
    network=policies,
    mounts=st.lists(mounts, max_size=3, unique_by=lambda mount: mount.target).map(tuple),
    limits=limits,
    template=names,
    env=envs,
    secrets=envs,
    tier=st.sampled_from(TIERS),
    profile=names,
    user=users,
    workdir=st.none() | absolute_paths,
    ttl_s=st.none() | st.floats(0.001, 1e6),
    python_env=st.booleans(),
    disk_root=st.booleans(),
    memory_dir=st.none() | absolute_paths,
    protect=st.none() | st.lists(protected_paths | absolute_paths, max_size=3).map(tuple),
    unprotect=st.lists(protected_paths, max_size=3).map(tuple),
    allow_degraded=st.lists(st.sampled_from((*MAY_BE_WEAKER, "*")), max_size=3).map(tuple),
)
stdins = st.one_of(
    st.fixed_dictionaries({"stdin": st.none() | st.binary(max_size=50)}),
    st.just({"stream_stdin": True}),
)
requests = st.builds(
    lambda stdin, **others: ExecRequest(**others, **stdin),
    stdin=stdins,
    argv=st.builds(
        lambda first, rest: (first, *rest),
        full_text.filter(lambda t: bool(t.strip())),
        st.lists(any_text, max_size=4),
    ),
    cwd=st.none() | relative_paths | absolute_paths,
    env=envs,
    user=users,
    timeout_s=st.none() | st.floats(0.001, 1e6),
    max_output_bytes=st.none() | st.integers(0, 2**40),
    pty=st.none() | st.tuples(ports, ports),
)
counts = st.none() | st.integers(0, 2**63 - 1)
seconds = st.floats(0, 1e9)
usages = st.builds(ResourceUsage, *[counts] * 6)
endings = st.one_of(
    st.fixed_dictionaries({"exit_code": st.integers(0, 255)}),
    st.fixed_dictionaries({"signal": st.integers(1, 64)}),
)
_ended = {
    "ending": endings,
    "timed_out": st.booleans(),
    "oom_killed": st.booleans(),
    "killed_by": st.none() | names,
    "duration_s": seconds,
    "resource_usage": usages,
}
statuses = st.builds(lambda ending, **others: ExecStatus(**others, **ending), **_ended)
results = st.builds(
    lambda ending, **others: ExecResult(**others, **ending),
    **_ended,
    stdout=st.binary(max_size=50),
    stderr=texts.map(str.encode),
    stdout_dropped_bytes=st.integers(0, 2**60),
    stderr_dropped_bytes=st.integers(0, 2**60),
)
resolved = st.builds(
    ResolvedMount, targets, st.sampled_from(["read_only", "read_write"]), st.none() | absolute_paths
)
sessions = st.builds(
    Session,
    id=ids,
    backend=names,
    state=st.sampled_from(tuple(State)),
    mounts=st.lists(resolved, max_size=3).map(tuple),
    metadata=labels.map(FrozenMap),
)
snapshots = st.builds(
    Snapshot,
    ids,
    ids,
    names,
    seconds,
    st.integers(0, 2**60),
    st.booleans(),
    labels.map(FrozenMap),
)
capabilities = st.builds(Capability, names, st.booleans(), texts)
protections = st.builds(
    Protection, names, st.sampled_from(["enforced", "degraded", "missing"]), texts, texts
)
reports = st.builds(
    BackendReport,
    names,
    st.booleans(),
    texts,
    st.lists(st.sampled_from(TIERS)).map(tuple),
    st.lists(capabilities, max_size=3).map(tuple),
    st.lists(protections, max_size=3).map(tuple),
)
stats = st.builds(
    SandboxStats,
    st.sampled_from(tuple(State)),
    *[counts] * 8,
    uptime_s=st.none() | seconds,
    execs=st.integers(0, 10**9),
    degraded=st.lists(names, max_size=3).map(tuple),
)
events = st.builds(
    NetworkEvent,
    time=seconds,
    sandbox_id=ids,
    kind=st.sampled_from(["dns", "tcp", "http", "connect", "socks", "udp"]),
    host=any_text,
    address=st.just("") | st.ip_addresses().map(str),
    port=st.integers(0, 65535),
    allowed=st.booleans(),
    reason=any_text,
    method=any_text,
    path=any_text,
    bytes_in=st.integers(0, 2**60),
    bytes_out=st.integers(0, 2**60),
    duration_s=seconds,
    rule=hosts,
)
infos = st.builds(
    FileInfo,
    path=absolute_paths,
    name=parts,
    kind=st.sampled_from(["file", "directory", "symlink", "other"]),
    size_bytes=st.integers(0, 2**60),
    mode=st.integers(0, 0o7777),
    mtime_s=seconds,
    link_target=st.none() | relative_paths,
)

some_seconds = st.none() | st.floats(0.001, 1e6)
session_timeouts = st.builds(
    SessionTimeouts,
    idle_s=some_seconds,
    detach_s=some_seconds,
    suspend_s=some_seconds,
    on_idle=st.sampled_from(["terminate", "suspend", "detach"]),
    on_expiry=st.sampled_from(["terminate", "suspend"]),
)
paths = st.lists(absolute_paths, max_size=3).map(tuple)
required = st.builds(
    RequiredCapabilities,
    network=st.booleans(),
    write_access=st.booleans(),
    minimum_memory_bytes=st.none() | st.integers(1, 2**46),
    readable_paths=paths,
    writable_paths=paths,
)
clients = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=40)
counts = st.integers(0, 2**40)
some_ms = st.none() | st.floats(0, 1e9)
percentiles = st.builds(Percentiles, p50_ms=some_ms, p95_ms=some_ms, p99_ms=some_ms)
session_models = st.one_of(
    session_timeouts,
    required,
    st.builds(
        ClientSession,
        session_id=ids,
        sandbox_id=ids,
        client_id=clients,
        state=st.sampled_from(tuple(SessionState)),
        backend=names,
        created_at=seconds,
        last_active_at=seconds,
        timeouts=session_timeouts,
        metadata=labels,
        expires_in_s=st.none() | seconds,
        reason=names,
    ),
    st.builds(
        AcquireOptions,
        preferred_id=st.none() | ids,
        require_fresh=st.booleans(),
        required=required,
        preferred_backend=st.just("") | names,
        required_labels=printed_labels,
        use_pool=st.booleans(),
        timeouts=st.none() | session_timeouts,
        key=st.text(st.characters(categories=["L", "N", "P"]), max_size=20),
        metadata=labels,
    ),
    st.builds(AttachRequest, sandbox_id=ids, client_id=clients),
    st.builds(
        AttachRequest,
        sandbox_id=ids,
        client_id=clients,
        create_if_missing=st.just(True),
        create_spec=st.none() | st.builds(SandboxSpec, env=envs, limits=limits),
    ),
    st.builds(
        SandboxCapabilities,
        id=ids,
        backend=names,
        profile=names,
        can_write_filesystem=st.booleans(),
        readable_paths=paths,
        writable_paths=paths,
        has_network=st.booleans(),
        allowed_destinations=st.lists(domains, max_size=3).map(tuple),
        limits=limits,
        syscall_filter_active=st.booleans(),
        blocked_syscall_categories=st.lists(names, max_size=3).map(tuple),
        is_persistent=st.booleans(),
        created_at=st.none() | seconds,
        time_remaining_ms=st.none() | counts,
    ),
    percentiles,
    st.builds(
        ManagerStats,
        uptime_s=seconds,
        created=counts,
        pool_hit_rate=st.none() | st.floats(0, 1),
        average_creation_ms=some_ms,
        creation=percentiles,
        pool_claim=percentiles,
    ),
    st.builds(
        Health,
        ok=st.booleans(),
        checks=st.lists(
            st.builds(Check, name=names, ok=st.booleans(), detail=texts), max_size=3
        ).map(tuple),
    ),
)
