"""Measures a running server from the outside: load over HTTP, times by the client's clock, a report and a picture."""
