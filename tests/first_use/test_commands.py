"""A newcomer's mistakes with the command line: each is refused before anything starts.

Each row is a mistake, the name or value at fault, and a part of the remedy. Both stand in the answer,
which is a few lines without a traceback.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.first_use.answers import OWN_FAILURE, answers, command

pytestmark = pytest.mark.anyone

COMMANDS: list[tuple[str, str, str]] = [
    ("rnu -- true", "'rnu'", "did you mean run?"),
    ("ps", "'ps'", "did you mean list?"),
    ("build .", "'build'", "image load"),
    ("--verbose run", "'--verbose'", "COMMAND [OPTIONS]"),
    ("image rm x", "'rm'", "did you mean remove?"),
    ("image pul x", "'pul'", "did you mean pull?"),
    ("keys add me", "'add'", "did you mean create?"),
    ("session", "VERB", "acquire"),
    ("completion tcsh", "'tcsh'", "bash, zsh, fish"),
    ("cp a b", "'a' and 'b'", "SANDBOX:/tmp"),
    ("rm", "SANDBOX", "ringfence list"),
    ("doctor --backend gvisor", "--backend", "--attack"),
    ("doctor extra", "'extra'", "doctor --help"),
    ("bench nope", "'nope'", "one of create"),
    ("restore nope", "nope", "ringfence backup"),
    ("list --server localhost:7878", "'localhost:7878'", "http://localhost:7878"),
    ("list --server /run/x.sock", "'/run/x.sock'", "unix:/run/x.sock"),
    ("list --server ftp://x", "'ftp://x'", "unix:PATH"),
    ("tree --server unix:/nope.sock", "/nope.sock", "ringfence serve"),
    ("list --key-file nope", "'nope'", "file with an API key"),
    ("exec --memroy 1g box ls", "--memroy", "ringfence exec --help"),
    ("mcp --http 8765", "'8765'", "127.0.0.1:8765"),
    ("mcp --http 0.0.0.0:8765", "0.0.0.0", "127.0.0.1:8765"),
    ("serve --port 8080", "--port", "--listen"),
    ("serve -d", "-d", "--detach"),
    ("serve --listen localhost", "'localhost'", "127.0.0.1:7878"),
    ("serve --listen 0.0.0.0:7878", "0.0.0.0", "--tls-certificate"),
    ("serve --listen http://127.0.0.1:7878", "'http://127.0.0.1:7878'", "127.0.0.1:7878)"),
    ("serve --listen 127.0.0.1:{taken}", "127.0.0.1:{taken}", "another port"),
    ("serve --max-sandboxes many", "'many'", "as 64"),
    ("serve --max-sandboxes 0", "--max-sandboxes", "between 1 and"),
    ("serve --outlive forever", "'forever'", "5s"),
    ("serve --log-level verbose", "'verbose'", "debug, info, warning or error"),
    ("serve --backend dokcer", "'dokcer'", "did you mean docker?"),
    ("serve --allow-origin example.com", "'example.com'", "https://app.example.com"),
    ("serve --allow-origin *", "'*'", "https://app.example.com"),
    ("serve --tls-key nope.pem", "--tls-certificate", "both the certificate"),
    (
        "serve --listen 127.0.0.1:0 --tls-certificate nope.pem --tls-key nope.pem",
        "nope.pem",
        "PEM",
    ),
    (
        "serve --listen 127.0.0.1:0 --tls-certificate plain.txt --tls-key plain.txt",
        "plain.txt",
        "private key",
    ),
    ("serve --config nope.json", "nope.json", "JSON configuration file"),
    ("serve --config broken.json", "broken.json", "double quotes"),
    ("serve --config misspelt.json", "listne", "did you mean listen?"),
    ("serve --config types.json", "manager.max_sandboxes", "as 10"),
    ("serve --config twice.json", "'listen'", "there twice"),
    ("serve --config binary.json", "binary.json", "double quotes"),
    ("serve --stop --take-over", "--stop", "remove"),
    ("serve --cluster-name x", "--cluster-name", "add --cluster"),
    ("serve --allow-public", "--allow-public", "add --listen"),
    ("serve --e2b --domain -x.com", "'-x.com'", "sandboxes.example.com"),
    ("serve --allow-host a@b", "'a@b'", "api.example.com"),
    ("list --server http://", "'http://'", "http://HOST:PORT"),
    ("list --server http://127.0.0.1:abc", ":abc'", "http://HOST:PORT"),
    ("list --server http://127.0.0.1:99999", ":99999'", "http://HOST:PORT"),
    ("list --key-file misspelt.json", "API key", "keys create"),
    ("image load src x:1", "src is empty", "debootstrap"),
    ("image load nope x:1", "nope", "docker save"),
    ("completion bash zsh", "one shell", "bash, zsh, fish"),
    ("pool get", "'get'", "`ringfence pool`"),
    ("pause x", "'pause'", "session suspend ID"),
    ("unpause x", "'unpause'", "session resume ID"),
    ("inspect x", "'inspect'", "session show ID"),
    ("attach x", "'attach'", "ringfence shell"),
    ("stats", "'stats'", "ringfence top"),
    ("status", "'status'", "ringfence doctor"),
    ("test", "'test'", "doctor --attack"),
    ("expose 80", "'expose'", "sandbox.expose(PORT)"),
    ("volume ls", "'volume'", "--mount SRC:DST"),
    ("network ls", "'network'", "--net HOST"),
    ("system prune", "'system'", "image prune"),
    ("events", "'events'", "ringfence logs"),
    ("config", "'config'", "serve --config FILE"),
    ("-- ls", "'--'", "COMMAND [OPTIONS]"),
    ("mcp --port 3", "--port", "--http 127.0.0.1:PORT"),
    ("rm -f x", "-f", "asks nothing"),
    ("cp -r src box:/x", "-r", "copied whole"),
    ("cp box:/a box:/b", "'box:/b'", "SANDBOX:/tmp"),
    ("list --key x", "--key", "--key-file FILE"),
    ("image push x", "'push'", "tool that built the image"),
    ("image inspect x", "'inspect'", "image list --json"),
    ("image pull http://x/y", "'http:'", "without the URL"),
    ("image pull --user me localhost:1/x", "--user", "--password-stdin"),
    ("image load plain.txt x:1", "plain.txt", "plain, gzip, bzip2 or xz"),
    ("template build ds --image x --pip six", "--image", "Template.from_image"),
    ("template build ds --pip ./pkg", "'./pkg'", "find_links=DIRECTORY"),
    ("template build ds --run", "--run", "--run SCRIPT"),
    ("pool set min_warm", "'min_warm'", "NAME=value"),
    ("cluster nodes", "VERB", "up, status, down"),
    ("backup", "DIR", "ringfence backup"),
    ("serve --shards 3", "--shards", "--cluster"),
    ("serve --api-key x", "--api-key", "keys create"),
    ("serve --workers 4", "--workers", "remove the option"),
    ("serve --backend native,gvisor", "'native,gvisor'", "did you mean native?"),
    ("serve --listen 7878", "'7878'", "127.0.0.1:7878"),
    ("serve --config shards.json", "shards", "add --cluster"),
    ("serve --config none.json", "backends", '["native"]'),
    ("serve --config tables.json", "/nope.toml", "no such file"),
    ("serve --config same.json", "'native'", "each one once"),
    ("serve --config store.json", "snapshot_store", "--cluster"),
    ("serve --config most.json", "most.memory", "did you mean memory_bytes?"),
    ("serve --config roots.json", "'srv'", "as /srv"),
    ("serve --config pool.json", "imagee", "did you mean image?"),
    ("serve --config nets.json", "'10.0.0.0/33'", "as 10.0.0.0/8"),
    ("serve --state-dir plain.txt/x", "plain.txt/x", "this user may write"),
]
RUN: list[tuple[str, str, str]] = [
    ("--memroy 256m", "--memroy", "did you mean --memory?"),
    ("--memory 256", "256", "did you mean 256m?"),
    ("--memory -1m", "'-1m'", "256m"),
    ("--memory 1e9", "'1e9'", "256m"),
    ("--memory nan", "'nan'", "256m"),
    ("--cpus 50%", "'50%'", "0.5"),
    ("--cpus inf", "inf", "between 0.001 and"),
    ("--pids unlimited", "'unlimited'", "as 64"),
    ("--pids 0", "0", "between 1 and"),
    ("--timeout 5min", "'5min'", "1m"),
    ("--timeout -5", "'-5'", "5s"),
    ("--mount ./nope:/work", "/nope", "must exist"),
    ("--mount .", "'.'", ".:/work:rw"),
    ("--mount .:/work:wr", "'wr'", ":rw"),
    ("--mount .:work", "'work'", ".:/work"),
    ("--mount /work:.", "'.'", "absolute path in the sandbox"),
    ("--mount .:/", "/", "/work"),
    ("--mount .:/usr", "/usr", "below it"),
    ("--mount .:/work --mount src:/work/", "/work", "its own target"),
    ("--mount type=bind,source=.,target=/work", "type=bind", ".:/work:rw"),
    ("--mount ./src:", "'./src:'", "./src:/work:rw"),
    ("--mount ./src:/work,rw", "'/work,rw'", "./src:/work:rw"),
    ("--mount :/work", "no source", "shell empty"),
    ("--mount ~/x:/work", "~", "$HOME/x:/work"),
    ("--net a.com --net b.com", "--net", "a.com,b.com"),
    ("--memory 1g --memory 2g", "twice", "once"),
    ("--net none,a.com", "none", "or the hosts"),
    ("--mount .:/w:rw --unprotect @git", "'@git'", "--protect"),
    ("--mount .:/w:rw --unprotect gti", "'gti'", "lists the names"),
    ("--image ./Dockerfile", "'./Dockerfile'", "ringfence image load"),
    ("--image https://hub.docker.com/_/alpine", "//hub", "without the URL"),
    ("--ttl 5m", "--ttl", "--timeout"),
    ("--server unix:/x", "--server", "ringfence create"),
    ("--pip -r", "--pip", "pandas>=2"),
    ("--here=write", "'write'", "--here=rw"),
    ("--net *", "'*'", "unrestricted"),
    ("--net all", "'all'", "unrestricted"),
    ("--net https://github.com/x", "'https://github.com/x'", "without the URL: github.com"),
    ("--net github", "'github'", "github.com"),
    ("--net localhost:8000", "localhost:8000", "127.0.0.1:PORT"),
    ("--net github.com:https", "'https'", "1 to 65535"),
    ("--net a.com;b.org", "'a.com;b.org'", "*.example.com"),
    ("--net-policy nope.json", "'nope.json'", "JSON policy file"),
    ("--net-policy misspelt.json", "listne", "allowed_hosts"),
    ("--secret github.com=NO_SUCH_VARIABLE", "NO_SUCH_VARIABLE", "export"),
    ("--env NAME", "'NAME'", "NAME=value"),
    ("--net http://", "'http://'", "as example.com"),
    ("--net *.com", "'*.com'", "*.example.com"),
    ("--net a.com,,b.com", "''", "example.com"),
    ("--net !a.com", "deny rules", "add a rule"),
    ("--net 192.168.1.300", "'192.168.1.300'", "1.2.3.4"),
    ("--net a.com --net-policy open.json", "--net-policy", "to the policy file"),
    ("--net-policy open.json", "rules", "remove rules"),
    ("--net-policy allow.json", "allow: unknown key", 'allowed_hosts=["example.com"]'),
    ("--net-policy path.json", "rules[0].path", "did you mean paths?"),
    ("--net-policy action.json", "'alow'", "did you mean allow?"),
    ("--net-policy .", "'.'", "JSON policy file"),
    ("--unprotect .git/config", "--unprotect", "add --mount SRC:DST:rw"),
    ("--image=", "--image", "as alpine:3.20"),
    ("--image UPPER/Case", "'UPPER/Case'", "lower case"),
    ("--secret github.com=", "'github.com='", "API_TOKEN"),
    ("--user root:root", "'root:root'", "1000"),
    ("--mount src=/work", "'src=/work'", "target is missing"),
    ("--mount src:/etc:rw", "/etc", "below it"),
    ("--disk 10", "10", "did you mean 10m?"),
    ("--cpus 1,5", "'1,5'", "0.5"),
    ("--fork 3", "--fork", "ringfence fork"),
    ("--pool", "--pool", "ringfence create"),
    ("--stdin x", "--stdin", "is passed on"),
    ("--workdir work", "'work'", "/work"),
    ("--user rooot", "'rooot'", "sandbox"),
    ("--profile off", "'off'", "os_hardened"),
    ("--backend dokcer", "'dokcer'", "did you mean docker?"),
    ("--tier high", "'high'", "light or strong"),
    ("--allow-degraded memory", "'memory'", "memory_limit"),
    ("--protect .git", "'.git'", ":rw"),
    ("--mount .:/w:rw --unprotect .gti/hooks", "'.gti/hooks'", "did you mean .git/hooks?"),
    ("--deny etc/passwd", "'etc/passwd'", "/etc/passwd"),
    ("--memory-dir nope", "/nope", "on the host"),
    ("--pull sometimes --image x", "'sometimes'", "missing"),
    ("--template nope", "'nope'", "ringfence template list"),
    ("--template ds --image x", "--template", "--image"),
    ("--pip six --image x", "--pip", "--image"),
    ("-v .:/work", "-v", "--mount SRC:DST"),
    ("-it", "-it", "-t"),
    ("--gpus all", "--gpus", "not supported"),
    ("--rm", "--rm", "ends with its command"),
    ("--cap-drop ALL", "--cap-drop", "remove the option"),
    ("--read-only", "--read-only", "remove the option"),
    ("--ro-bind / /", "--ro-bind", "--mount SRC:DST"),
    ("--unshare-all", "--unshare-all", "remove the option"),
    ("--die-with-parent", "--die-with-parent", "remove the option"),
    ("--tmpfs /x", "--tmpfs", "--disk"),
    ("--private", "--private", "remove the option"),
    ("--whitelist=/x", "--whitelist", "--mount SRC:DST"),
    ("--privileged", "--privileged", "--profile unrestricted"),
]
"""Options of `run`; the command behind them would say that it has started."""
ENDED: list[tuple[str, int, str, str]] = [
    ("-- pyhton3 -c 1", 127, "pyhton3", "did you mean python3?"),
    ("-- hello.py", 127, "hello.py", "python3 hello.py"),
    ("-- 'python3 hello.py'", 127, "python3 hello.py", "do not quote"),
    ("-- cd src", 127, "cd", "sh -c"),
    ("-- ./nope.sh", 127, "./nope.sh", "does not exist on this host"),
    ("-- python3 nope.py", 2, "nope.py", "does not exist on this host"),
    ("-- zzqx", 127, "zzqx", "--image"),
    ("alpine sh", 127, "alpine", "--image alpine -- CMD"),
    ("-- python:3.12 python", 127, "python:3.12", "--image python:3.12"),
    ("-- FOO=1 env", 127, "FOO=1", "--env FOO=1"),
    ("-- 'ls | wc'", 127, "ls | wc", "sh -c 'ls | wc'"),
    ("-- export A=1", 127, "export", "sh -c"),
    ("-- bash nope.sh", 127, "nope.sh", "does not exist on this host"),
    ("-- ./plain.txt", 126, "./plain.txt", "chmod +x"),
    ("-- apt-get install -qqq zzqx", 100, "host's programs", "--image"),
    ("--here . true", 126, ".", "is a directory"),
]
"""Commands that cannot be told to be mistakes before they run."""


@pytest.mark.parametrize(("line", "fault", "remedy"), COMMANDS, ids=lambda value: value[:50])
def test_commands(line: str, fault: str, remedy: str, place: Path, taken: int) -> None:
    words = line.format(taken=taken).split()
    state = place / "serving"
    if "serve" == words[0] and "--state-dir" not in words:
        words += ["--state-dir", str(state)]
    result = command(words, place)

    assert (OWN_FAILURE, "") == (result.returncode, result.stdout)
    answers(result.stderr, fault.format(taken=taken), remedy)
    assert not (state / "ringfence.sock").exists()


@pytest.mark.parametrize(("line", "fault", "remedy"), RUN, ids=lambda value: value[:50])
def test_run(line: str, fault: str, remedy: str, place: Path) -> None:
    result = command(["run", *line.split(), "--", "echo", "started"], place)

    assert (OWN_FAILURE, "") == (result.returncode, result.stdout)
    assert 1 == result.stderr.count("\n")
    answers(result.stderr, fault, remedy)


@pytest.mark.parametrize(("line", "code", "fault", "remedy"), ENDED, ids=str)
def test_commands_that_end(line: str, code: int, fault: str, remedy: str, place: Path) -> None:
    result = command(["run", *shlex.split(line)], place)

    assert code == result.returncode
    assert 6 >= result.stderr.count("\n")
    answers(result.stderr, fault, remedy)


def test_the_control_runs(place: Path) -> None:
    result = command(["run", "--timeout", "60s", "--here", "--", "cat", "plain.txt"], place)

    assert (0, "x\n", "") == (result.returncode, result.stdout, result.stderr)
