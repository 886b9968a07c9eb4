"""A cluster that is computed: traces, what really happens to their jobs under a policy, and what is measured of it."""
