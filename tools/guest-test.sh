#!/usr/bin/env bash
# Test on another kernel: boots one in QEMU, with cgroup v2 only, over this machine's own file system (read-only).
#
#   tools/guest-test.sh [--kernel DIR] [SCRIPT]
#
# DIR holds boot/vmlinuz-* and lib/modules/* (default: /). A kernel package unpacked beside will do:
#   apt-get download linux-image-6.1.0-NN-amd64 && dpkg -x linux-image-*.deb DIR    (its "cloud" kin have no 9p)
# SCRIPT runs in the guest as root, with these at hand; without one, the backend conformance suite runs in each way:
#   as_root COMMAND...        in the root cgroup
#   as_user COMMAND...        an ordinary user, nothing delegated
#   as_delegated COMMAND...   the same user, in a cgroup of its own (as in `systemd-run --user --scope -p Delegate=yes`)
# COMMAND starts in $TREE, a copy of this source tree, with the test tools of build/site (made by tools/test.sh).
# Uses /dev/kvm where it may, else (or with GUEST_ACCEL=tcg) emulates: then allow 10 to 30 times the usual time.
# Installs nothing.
set -euo pipefail

kernel_dir=/ script=
while [ $# -gt 0 ]; do
  case $1 in
    --kernel) kernel_dir=$(realpath "${2:?"--kernel needs a directory"}"); shift 2 ;;
    -h | --help) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    *) script=$(realpath "$1"); shift ;;
  esac
done
cd "$(dirname "$0")/.."

missing=()
have() { command -v "$1" >/dev/null || [ -x "/usr/sbin/$1" ] || missing+=("$1 ($2)"); }
have qemu-system-x86_64 "Debian package qemu-system-x86"
have mkfs.ext4 "e2fsprogs"
have setpriv "util-linux"
busybox=${BUSYBOX:-$(command -v busybox || true)}
if [ -z "$busybox" ] || ! "$busybox" --list | grep -qx depmod; then
  missing+=("a static busybox with depmod and cpio (Debian package busybox-static), or its path in BUSYBOX")
fi
image=$(ls -1v "$kernel_dir"/boot/vmlinuz-* 2>/dev/null | tail -n 1)
version=${image##*/vmlinuz-}
modules=$kernel_dir/lib/modules/$version
[ -n "$image" ] || missing+=("a kernel in $kernel_dir/boot (--kernel)")
[ -z "$image" ] || [ -n "$(find "$modules" -name '9p.ko*' 2>/dev/null)" ] || missing+=("the 9p module of kernel $version")
python=/usr/bin/python3
$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || missing+=("/usr/bin/python3 of at least 3.11")
[ -d build/site ] || missing+=("build/site (run tools/test.sh as root once, or pip install --target build/site -r requirements-dev.lock)")
if [ ${#missing[@]} -gt 0 ]; then
  printf 'missing: %s\n' "${missing[@]}" >&2
  exit 2
fi

work=$(mktemp -d "${TMPDIR:-/tmp}/ringfence-guest.XXXXXX")
trap 'rm -rf "$work"' EXIT

# The first user space: enough drivers to reach the two disks, then over to the host's root.
early=$work/early
mkdir -p "$early"/{bin,dev,proc,root} "$early/lib/modules/$version/kernel"
cp "$busybox" "$early/bin/busybox"
for part in fs/9p fs/netfs fs/fscache fs/ext4 fs/jbd2 fs/mbcache.ko net/9p lib crypto \
  drivers/virtio drivers/block/virtio_blk.ko; do
  for found in "$modules/kernel/$part"*; do
    [ -e "$found" ] || continue
    mkdir -p "$early/lib/modules/$version/kernel/$(dirname "$part")"
    cp -R "$found" "$early/lib/modules/$version/kernel/$(dirname "$part")/"
  done
done
cp "$modules"/modules.{builtin,order} "$early/lib/modules/$version/" 2>/dev/null || true
"$busybox" depmod -b "$early" "$version"
cat > "$early/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t devtmpfs dev /dev
for module in virtio_pci virtio_blk 9pnet_virtio 9p crc32c_generic ext4; do modprobe $module || echo "no $module"; done
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=512000,cache=loose host /root
mount -t ext4 /dev/vda /root/mnt
mount --move /dev /root/dev
umount /proc
exec switch_root /root /bin/sh /mnt/boot.sh
INIT
chmod 755 "$early/init"
(cd "$early" && find . | "$busybox" cpio -o -H newc 2>/dev/null) | gzip -1 > "$work/initrd"

# The writable disk: a copy of the tree and the tools, and what runs them.
stage=$work/stage
mkdir -p "$stage"/{tree,site,tmp,home,bin}
{ git -c safe.directory='*' ls-files -z --cached --others --exclude-standard |
    tar --null --ignore-failed-read -T - -cf - 2>/dev/null || tar --exclude=./build --exclude=./.venv --exclude=./.git -cf - .; } |
  tar -C "$stage/tree" -xf -
for name in build/site/*; do
  case $name in *mypy* | *ruff* | */bin) ;; *) cp -R "$name" "$stage/site/" ;; esac
done
printf '#!/bin/sh\nexec %s -m ringfence "$@"\n' "$python" > "$stage/bin/ringfence"
chmod 755 "$stage/bin/ringfence"
if [ -n "$script" ]; then
  cp "$script" "$stage/script.sh"
else
  cat > "$stage/script.sh" <<'SCRIPT'
for way in as_root as_user as_delegated; do
  echo "== conformance $way"
  $way python3 -m pytest -q -p no:cacheprovider tests/conformance/test_native.py || failed=1
done
exit ${failed:-0}
SCRIPT
fi
cat > "$stage/boot.sh" <<'BOOT'
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t securityfs securityfs /sys/kernel/security
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir -p /dev/pts /dev/shm
mount -t devpts -o gid=5,mode=620,ptmxmode=666 devpts /dev/pts
for place in /dev/shm /run; do mount -t tmpfs -o mode=1777 tmpfs $place; done
chmod 1777 /mnt/tmp
for place in /tmp /var/tmp; do mount --bind /mnt/tmp $place; done
mount --bind /mnt/home /home
ln -sf /proc/self/fd /dev/fd
ip link set lo up 2>/dev/null
hostname guest
TREE=/mnt/tree USER_ID=23456
mkdir -p /home/tester /run/tester /home/root
chown $USER_ID:$USER_ID /home/tester /run/tester
chmod 700 /run/tester
inside() {  # HOME RUN COMMAND...; replaces the shell
  home=$1 run=$2; shift 2
  cd $TREE && exec env -i HOME=$home XDG_RUNTIME_DIR=$run LANG=C.UTF-8 PATH=/mnt/bin:/usr/bin:/usr/sbin:/bin \
    PYTHONPATH=$TREE/src:/mnt/site PYTHONDONTWRITEBYTECODE=1 RINGFENCE_TEST_BOTH=1 "$@" </dev/null
}
inside_as_user() {
  inside /home/tester /run/tester setpriv --reuid=$USER_ID --regid=$USER_ID --clear-groups --no-new-privs \
    --inh-caps=-all "$@"
}
as_root() { (inside /home/root /run "$@"); }
as_user() { (inside_as_user "$@"); }
as_delegated() {
  scopes=$((${scopes:-0} + 1))
  scope=/sys/fs/cgroup/user.slice/tester-$scopes.scope
  echo "+cpu +memory +pids" > /sys/fs/cgroup/cgroup.subtree_control
  mkdir -p $scope
  echo "+cpu +memory +pids" > /sys/fs/cgroup/user.slice/cgroup.subtree_control
  chown $USER_ID:$USER_ID $scope $scope/cgroup.procs $scope/cgroup.subtree_control $scope/cgroup.threads
  python3 -c "import os; os.setxattr('$scope', 'user.delegate', b'1')"
  (sh -c 'echo $PPID' > $scope/cgroup.procs; inside_as_user "$@")
}
echo "guest: Linux $(uname -r)"
(. /mnt/script.sh)
echo "guest: status $?"
sync
echo o > /proc/sysrq-trigger
while :; do :; done  # until the power is off; the disks are gone already
BOOT
PATH=$PATH:/usr/sbin mkfs.ext4 -q -d "$stage" -F "$work/disk" "${GUEST_DISK:-2G}"

accel=${GUEST_ACCEL:-}
[ -n "$accel" ] || { [ -r /dev/kvm ] && [ -w /dev/kvm ] && accel=kvm; } || accel=tcg,thread=multi
qemu-system-x86_64 -M q35 -accel "$accel" -cpu max -smp 2 -m "${GUEST_MEMORY:-2500}" -nographic -no-reboot -net none \
  -kernel "$image" -initrd "$work/initrd" -append "console=ttyS0 quiet panic=-1 loglevel=3 ${GUEST_APPEND:-}" \
  -drive "file=$work/disk,format=raw,if=virtio,cache=unsafe" \
  -virtfs "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap" </dev/null |
  sed -u 's/\r//g' | tee "$work/log"
grep -q '^guest: status 0$' "$work/log"
