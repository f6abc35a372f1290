#!/usr/bin/env bash
# A kernel for the guests of the microVM backend, from Debian's package: only the image and the modules that
# machines need, unpacked where DIRECTORY says. Needs apt-get and dpkg; run by root, everybody may read it.
#   tools/guest_kernel.sh [DIRECTORY]
set -euo pipefail
into=${1:-/var/lib/ringfence/kernel}
compgen -G "$into/boot/vmlinuz-*" >/dev/null && [ -n "$(find "$into" -name 'nft_redir.ko*')" ] &&
  [ -n "$(find "$into" -name 'fuse.ko*')" ] && exit 0
package=$(apt-cache depends linux-image-amd64 | sed -n 's/^ *Depends: \(linux-image-[0-9].*-amd64\)$/\1/p' | head -n 1)
[ -n "$package" ] || { echo "no kernel package is known here: apt-get update?" >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
(cd "$work" && apt-get -q download "$package")
mkdir "$work/new"
dpkg --fsys-tarfile "$work"/*.deb | tar -x -C "$work/new" --wildcards \
  './boot/vmlinuz-*' '*/modules.builtin' '*/virtio*.ko*' '*/fuse.ko*' '*/overlay.ko*' \
  '*/crc32c_generic.ko*' '*/libcrc32c.ko*' '*/nfnetlink.ko*' '*/nf_tables.ko*' '*/nf_nat.ko*' '*/nf_conntrack.ko*' \
  '*/nf_defrag_ipv[46].ko*' '*/nft_chain_nat.ko*' '*/nft_redir.ko*' '*/nft_ct.ko*'
chmod -R a+rX "$work/new"
mkdir -p "$(dirname "$into")"
rm -rf "$into"
mv "$work/new" "$into"
