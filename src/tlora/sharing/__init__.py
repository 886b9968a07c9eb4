"""A frozen base whose decoder layers lie in pieces on several ranks of one host, and are fetched when they run."""
