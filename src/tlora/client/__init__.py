"""The client of a `tlora serve`: whom to ask with which key, requests and their retries, uploads, downloads. No torch, no server's code."""
