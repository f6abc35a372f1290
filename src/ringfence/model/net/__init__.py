"""The network as models: policies, rules, hosts, paths, limits and the log."""
