"""The native backend: namespaces, seccomp, Landlock and cgroups, without Docker, KVM or root."""
