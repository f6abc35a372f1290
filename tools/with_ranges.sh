#!/usr/bin/env bash
# tools/with_ranges.sh UID COMMAND...: as root, run a command as an ordinary user who may map ids: UID has an account and
# the ids 200000 to 265535 in a view of /etc of its own, which ends with the command. The host's files stay as they are.
set -euo pipefail
uid=$1; shift
export RANGED_UID=$uid
exec unshare --mount --propagation private -- bash -euc '
  mount -t tmpfs -o size=4m,mode=755 ringfence-etc /mnt
  for name in passwd group subuid subgid; do cp "/etc/$name" "/mnt/$name"; done
  echo "ringfence-ranged:x:$RANGED_UID:$RANGED_UID::/nonexistent:/bin/false" >>/mnt/passwd
  echo "ringfence-ranged:x:$RANGED_UID:" >>/mnt/group
  for name in subuid subgid; do echo "$RANGED_UID:200000:65536" >>"/mnt/$name"; done
  for name in passwd group subuid subgid; do mount --bind "/mnt/$name" "/etc/$name"; done
  umount --lazy /mnt
  uid=$RANGED_UID
  unset RANGED_UID
  exec setpriv "--reuid=$uid" "--regid=$uid" --clear-groups --inh-caps=-all -- "$@"
' with_ranges "$@"
