"""The gVisor backend: a kernel of the guest's own, written in Go, between it and the host's."""
