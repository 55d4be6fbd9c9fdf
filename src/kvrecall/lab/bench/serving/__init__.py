"""Conversations and replayed traces against live servers, with and without each kind of pool."""
