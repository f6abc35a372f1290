"""Facts of the host and what sandboxes take of it: ids, cgroups, accounts, mounts as the kernel lists them."""
