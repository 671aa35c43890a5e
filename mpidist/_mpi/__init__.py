"""MPI: communicators, messages, headers, and what ranks give back together."""
