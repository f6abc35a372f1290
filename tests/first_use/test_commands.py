"""A newcomer's mistakes with the command line: each is refused before anything starts.

Each row is a mistake, the name or value at fault, and a part of the remedy. Both stand in the answer,
which is a few lines without a traceback.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.first_use.answers import OWN_FAILURE, answers, command

pytestmark = [pytest.mark.anyone, pytest.mark.full]

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
    ("list --key-file empty.txt", "'empty.txt' is empty", "keys create"),
    ("list --key-file binary.json", "'binary.json': is not text", "file with an API key"),
    ("list --server http://h:1?x=1", "query", "remove it: http://h:1"),
    ("list --server unix:/{long}", "107 bytes", "ringfence serve"),
    ("list --server unix:/run", "it is a directory", "unix:/run/ringfence.sock"),
    ("keys create me -i", "-i", "ringfence keys --help"),
    ("cluster join", "VERB", "up, status, down"),
    ("bench create --runs 0", "--runs", "before the measures"),
    ("serve --listen unix:/x", "'unix:/x'", "in --state-dir"),
    ("serve --socket /x", "--socket", "in --state-dir"),
    ("serve --outlive -5", "'-5'", "5s"),
    ("serve --state-dir {long}", "too long", "shorter path"),
    ("serve --state-dir plain.txt/x", "plain.txt/x", "this user may write"),
    ("serve --state-dir plain.txt", "plain.txt", "this user may write"),
    ("serve --listen 127.0.0.1:70000", "'70000' is not a port", "as 127.0.0.1:7878"),
    ("serve --listen :8080", "':8080'", "0.0.0.0:7878"),
    ("serve --listen *:8080", "'*:8080'", "0.0.0.0:7878"),
    ("serve --config .", "directory", "JSON configuration file"),
    ("mcp --http 127.0.0.1:99999", "99999", "127.0.0.1:8765"),
    ("backup plain.txt", "state.sqlite3", "--state-dir"),
    ("restore .", "is not a complete backup", "ringfence backup"),
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
    ("--allow https://pypi.example/simple", "--allow", "--net HOST"),
    ("--privileged", "--privileged", "--profile unrestricted"),
    ("--memory 12MBs", "'12MBs'", "256m"),
    ("--disk -1g", "'-1g'", "256m"),
    ("--timeout 1e3", "'1e3'", "5s"),
    ("--timeout 10y", "'10y'", "2h"),
    ("--cpus 1/2", "'1/2'", "0.5"),
    ("--pids 1.5", "'1.5'", "as 64"),
    ("--mount /:/host", "every file of this host", "the directory that is needed"),
    ("--mount .:/work:ro:rw", "'ro' is followed by another access", ".:/work:ro"),
    ("--mount .:/work:RW", "'RW' must be in lower case", ".:/work:rw"),
    ("--mount .:/work:z", "'z' is neither", ".:/work:rw"),
    ("--mount .:/../work", "'..'", "without it"),
    ("--mount plain.txt:/tmp", "/tmp", "a file cannot be mounted on a directory"),
    ("--mount .:/dev", "/dev", "as /work"),
    ("--mount C:/Users/me:/work", "C:/Users/me", "/mnt/c/Users"),
    ("--net 10.0.0.5/8", "'10.0.0.5/8'", "for the network write 10.0.0.0/8"),
    ("--net 2001:db8::1/32", "'2001:db8::1/32'", "2001:db8::/32"),
    ("--net user@example.com", "'user@example.com'", "example.com"),
    ("--net example.com/path", "'example.com/path'", "without the URL: example.com"),
    ("--net [::1", "'[::1'", "[address]:port"),
    ("--net {huge}", "is not a host name", "example.com"),
    ("--secret https://github.com=HOME", "'https://github.com'", "without the URL: github.com"),
    ("--env =x", "empty name", "NAME=value"),
    ("--image docker://alpine", "'docker:'", "without the URL"),
    ("--image alpine:", "the tag ''", "NAME[:TAG]"),
    ("--image python@sha256:abc", "digest", "64 hexadecimal"),
    ("--backend firecracker", "'firecracker'", "use microvm"),
    ("--backend bwrap", "'bwrap'", "use bubblewrap"),
    ("--tier 2", "'2'", "light or strong"),
    ("-i", "-i", "standard input is passed on"),
    ("-p 80:80", "-p", "expose(PORT)"),
    ("--timeout 0", "--timeout", "between 0.001 and"),
    ("--memory 512Mi", "'512Mi'", "256m"),
    ("--memory 1,5g", "'1,5g'", "256m"),
    ("--memory 99999999g", "--memory", "between 1048576 and"),
    ("--env MY-VAR=1", "'MY-VAR'", "as MY_VAR"),
    ("--env 1A=1", "'1A'", "as _1A"),
    ("--env A=1 --env A=2", "'A' is given twice", "each name once"),
    ("--env-file .env", "--env-file", "--env NAME=VALUE"),
    ("--here=rw --here", "--here: is given twice", "once"),
    ("--here=/tmp", "'/tmp'", "--here=rw"),
    (r"--mount C:\Users\me:/work", r"C:\Users\me", "/mnt/c/Users"),
    (r"--mount .:C:\work", "a path of Windows", ".:/work"),
    (r"--workdir C:\work", "not an absolute path", "as /"),
    ("--mount *.py:/work", "*.py", "only a shell expands patterns"),
    ("--mount $NOPE/x:/work", "$NOPE/x", "only a shell expands variables"),
    ("--mount .:/work:", "'.:/work:'", "remove the colon at the end: .:/work"),
    ("--mount plain.txt/x:/work", "Not a directory", "must exist"),
    ("--memory-dir plain.txt", "plain.txt", "must be a directory"),
    ("--workdir /etc/passwd", "/etc/passwd: Not a directory", "existing directory"),
    ("--net example.com:-1", "'-1' is not a port", "1 to 65535"),
    ("--net example.com:70000", "'70000' is not a port", "1 to 65535"),
    ("--net ssh://git@github.com", "ssh://", "without the URL: github.com"),
    ("--net git@github.com:me/x.git", "'git@github.com'", "without the user: github.com"),
    ("--net ftp://example.com", "ftp://", "without the URL: example.com"),
    ("--net 0.0.0.0", "where servers listen", "127.0.0.1:PORT"),
    ("--net [::]:80", "where servers listen", "127.0.0.1:PORT"),
    ("--net 443", "'443'", "as example.com:443"),
    ("--net-log nope/x", "'nope/x'", "choose a path"),
    ("--net unrestricted --secret github.com=HOME", "--secret", "--net HOST"),
    ("--secret github.com=ghp_0aB1cD2eF3", "'github.com=...'", "not the secret"),
    ("--secret HOME", "'HOME'", "as api.test=API_TOKEN"),
    ("--image alpine.tar", "the name of a file", "image load PATH NAME"),
    (r"--image C:\img.tar", "a path is not an image", "image load PATH NAME"),
    ("--image alpine@latest", "sha256", "NAME[:TAG]"),
    ("--pip requirements.txt", "the name of a file", "each package"),
    ("--verbose", "--verbose", "ringfence doctor"),
    ("--debug", "--debug", "--profile debug"),
    ("--shell", "--shell", "sh -c SCRIPT"),
    ("--no-net", "--no-net", "without --net there is none"),
    ("--output x", "--output", "> FILE"),
    ("-c echo", "-c", "sh -c SCRIPT"),
    ("--backend native --tier strong", "tier light", "omit the backend"),
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
    ("-- src", 127, "src", "is a directory, not a command"),
    ("-- notepad.exe", 127, "notepad.exe", "those of Linux"),
    (r"-- 'C:\Python\python.exe' x.py", 127, "python.exe", "those of Linux"),
]
"""Commands that cannot be told to be mistakes before they run."""


@pytest.mark.parametrize(("line", "fault", "remedy"), COMMANDS, ids=lambda value: value[:50])
def test_commands(line: str, fault: str, remedy: str, place: Path, taken: int) -> None:
    words = line.format(taken=taken, long="a" * 120).split()
    state = place / "serving"
    if "serve" == words[0] and "--state-dir" not in words:
        words += ["--state-dir", str(state)]
    result = command(words, place)

    assert (OWN_FAILURE, "") == (result.returncode, result.stdout)
    answers(result.stderr, fault.format(taken=taken), remedy)
    assert not (state / "ringfence.sock").exists()


@pytest.mark.parametrize(("line", "fault", "remedy"), RUN, ids=lambda value: value[:50])
def test_run(line: str, fault: str, remedy: str, place: Path) -> None:
    words = line.format(huge="a" * 5000).split()
    result = command(["run", *words, "--", "echo", "started"], place)

    assert (OWN_FAILURE, "") == (result.returncode, result.stdout)
    assert 1 == result.stderr.count("\n")
    answers(result.stderr, fault, remedy)


@pytest.mark.full
@pytest.mark.parametrize(("line", "code", "fault", "remedy"), ENDED, ids=str)
def test_commands_that_end(line: str, code: int, fault: str, remedy: str, place: Path) -> None:
    result = command(["run", *shlex.split(line)], place)

    assert code == result.returncode
    assert 6 >= result.stderr.count("\n")
    answers(result.stderr, fault, remedy)


@pytest.mark.parametrize(
    ("value", "fault", "remedy"),
    [
        ("", "TOKEN is empty", "export TOKEN="),
        ("a\n", "no HTTP header", "line break"),
        (" a", "starts or ends with a space", "do not preserve"),
    ],
)
def test_secrets_that_no_header_can_have(
    value: str, fault: str, remedy: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", value)

    result = command(["run", "--secret", "api.test=TOKEN", "--", "echo", "started"], place)

    assert (OWN_FAILURE, "") == (result.returncode, result.stdout)
    answers(result.stderr, fault, remedy)


def test_a_terminal_and_separate_streams_exclude_each_other(place: Path) -> None:
    result = command(["run", "--json", "--tty", "--", "echo", "started"], place)

    assert OWN_FAILURE == result.returncode
    assert "started" not in result.stdout
    answers(result.stderr, "--tty: cannot be combined with --json", "remove one")


def test_a_secret_in_place_of_its_variable_is_not_printed(place: Path) -> None:
    result = command(["run", "--secret", "api.test=ghp_0aB1cD2eF3", "--", "true"], place)

    assert OWN_FAILURE == result.returncode
    assert "ghp_" not in result.stderr


def test_the_control_runs(place: Path) -> None:
    result = command(["run", "--timeout", "60s", "--here", "--", "cat", "plain.txt"], place)

    assert (0, "x\n", "") == (result.returncode, result.stdout, result.stderr)
