"""Files of a sandbox decided on the host: mounts, protected and denied paths, the template, images."""
