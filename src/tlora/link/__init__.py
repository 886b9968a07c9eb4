"""The line between a worker and its controller: sockets, numbered reports, and processes that are known for sure."""
