"""``make chaos``: real engines on a real pool service, killed and damaged while they answer."""
