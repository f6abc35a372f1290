# Sourced after env.sh: what the tests need of the machine. As root on Debian it is installed, but only what is missing.
# RINGFENCE_TEST_INSTALL=no leaves the machine as it is: the tests then skip what they miss, by name.
# shellcheck shell=bash

# COMMAND-OR-FILE:PACKAGE; of a file, a glob is enough. tests/programs/programs.toml names what its programs need besides.
needs="wget:wget node:nodejs npm:npm javac:default-jdk-headless psql:postgresql-client ssh-keyscan:openssh-client
  busybox:busybox-static docker-registry:docker-registry /usr/sbin/sshd:openssh-server /usr/lib/postgresql/*/bin/initdb:postgresql
  git:git curl:curl ip:iproute2 openssl:openssl gcc:gcc make:make bwrap:bubblewrap lxc-start:lxc strace:strace setpriv:util-linux
  newuidmap:uidmap runsc:runsc dockerd:docker.io qemu-system-x86_64:qemu-system-x86 /usr/include/stdio.h:libc6-dev
  /usr/lib/*/libnss_wrapper.so:libnss-wrapper"

missing_packages() {  # prints them, one a line
  local need python
  for need in $(set -f; echo $needs); do
    case $need in
      /*) compgen -G "${need%:*}" >/dev/null ;;
      *) command -v "${need%:*}" >/dev/null ;;
    esac || echo "${need##*:}"
  done
  python=$(find_python) && "$python" tools/programs.py --missing
}

may_install() { [ "$(id -u)" = 0 ] && [ "${RINGFENCE_TEST_INSTALL:-}" != no ] && command -v apt-get >/dev/null; }

add_packages() {
  local packages
  packages=$(missing_packages | sort -u | grep -v -e / -e '^$') || return 0
  # shellcheck disable=SC2086
  apt_install $packages || tail -n 5 build/apt.log
}

add_needs() {
  may_install || return 0
  mkdir -p build
  open_tmp
  add_packages
  local each jobs=()
  # At once, as each waits for the network. What cannot be had, its tests say.
  # A kernel for the guests of microVMs, where tests look for it and users do not.
  tools/guest_kernel.sh /var/cache/ringfence-tests/kernel & jobs+=($!)
  # A real launcher for the command backend.
  command -v codex >/dev/null || { tools/conformance.sh codex --install & jobs+=($!); }
  add_libraries & jobs+=($!)
  for each in "${jobs[@]}"; do wait "$each" || true; done
}

# The tests of ordinary users need it as Debian makes it; images of machines have been seen with 755.
open_tmp() {  # [DIRECTORY]
  local tmp=${1:-/tmp}
  [ "$(stat -c %a "$tmp")" = 1777 ] || { say "$tmp: mode 1777, so that every user can write to it"; chmod 1777 "$tmp"; }
}

# Where a sandbox sees them, too: launchers of browsers, which are Debian's, and what cells plot with.
add_libraries() {
  local place=/usr/local/lib/ringfence-tests
  make_venv || return 1
  if [ ! -d $place/playwright/playwright ]; then
    say "installing Playwright"
    install_for /usr/bin/python3 --target $place/playwright playwright==1.65.2 || return 1
    rm -f $place/playwright/playwright/driver/node # Debian's serves, and is 80 MB less
  fi
  if [ ! -d $place/science/matplotlib ]; then
    say "installing matplotlib, pandas and ipykernel"
    install_for /usr/bin/python3 --target $place/science matplotlib==3.11.2 pandas==3.1.1 ipykernel==7.4.0 || return 1
  fi
  if [ ! -d $place/puppeteer/node_modules/puppeteer-core ]; then
    say "installing Puppeteer"
    npm install --silent --no-audit --no-fund --prefix $place/puppeteer puppeteer-core@24.43.1 >/dev/null
  fi
}
