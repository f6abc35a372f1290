"""OCI images: names, registries, archives, a cache of unpacked root file systems."""
